"""The board: facts as node_exporter's fixtures have them, and files with anything in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, ToolMissing
from pitools.node.gather import platform
from pitools.node.gather.collectors import read_facts
from pitools.node.gather.read import Query
from pitools.node.types import Row
from tests.node.gather.conftest import Check, Write
from tests.node.gather.pci_files import pci


def test_frequencies_and_throttling_are_of_each_cpu(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """In the order of their numbers; without cpufreq, as in a virtual machine, the frequency is /proc/cpuinfo's."""
    cpu = "devices/system/cpu"
    write_tree(
        tmp_path / "sys",
        {
            f"{cpu}/cpu10/uevent": "",
            f"{cpu}/cpu2/cpufreq/scaling_cur_freq": "1219917\n",
            f"{cpu}/cpu2/cpufreq/scaling_governor": "powersave\n",
            f"{cpu}/cpu2/cpufreq/cpuinfo_max_freq": "3700000\n",
            f"{cpu}/cpu2/cpufreq/scaling_max_freq": "2400000\n",
            f"{cpu}/cpu2/thermal_throttle/core_throttle_count": "5\n",
            f"{cpu}/cpu2/thermal_throttle/package_throttle_count": "30\n",
            f"{cpu}/cpufreq/uevent": "",
            f"{cpu}/online": "0-1\n",
        },
    )
    write_tree(
        tmp_path / "proc", {"cpuinfo": "processor\t: 10\ncpu MHz\t\t: 2596.144\n\nprocessor\t: x\ncpu MHz\t: 1\n"}
    )
    rows = last_rows("cpus", platform.read_cpus(Query(root=tmp_path)))
    assert list(rows) == [2, 10]
    assert (rows[2]["mhz"], rows[2]["max_mhz"], rows[2]["limit_mhz"]) == (1219.917, 3700.0, 2400.0)
    assert (rows[2]["governor"], rows[2]["throttled"], rows[2]["package_throttled"]) == ("powersave", 5, 30)
    assert (rows[10]["mhz"], rows[10]["governor"], rows[10]["throttled"]) == (2596.144, None, None)


def test_memory_errors_are_of_each_module(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """By slots or ranks; errors of no known slot are a row of their own, if there are any."""
    mc = "devices/system/edac/mc"
    write_tree(
        tmp_path / "sys",
        {
            "class/uevent": "",
            f"{mc}/mc0/dimm0/dimm_label": "CPU_SrcID#0_MC#0_Chan#0_DIMM#0\n",
            f"{mc}/mc0/dimm0/size": "65536\n",
            f"{mc}/mc0/dimm0/dimm_ce_count": "12\n",
            f"{mc}/mc0/dimm0/dimm_ue_count": "0\n",
            f"{mc}/mc0/ce_noinfo_count": "0\n",
            f"{mc}/mc0/ue_noinfo_count": "0\n",
            f"{mc}/mc1/csrow0/ce_count": "12\n",
            f"{mc}/mc1/rank0/dimm_ce_count": "3\n",
            f"{mc}/mc1/rank0/dimm_ue_count": "4\n",
            f"{mc}/mc1/rank0/size": "8192\n",
            f"{mc}/mc1/ce_noinfo_count": "2\n",
            f"{mc}/mc1/ue_noinfo_count": "6\n",
            f"{mc}/uevent": "",
        },
    )
    rows = last_rows("dimms", platform.read_dimms(Query(root=tmp_path)))
    assert list(rows) == ["mc0/dimm0", "mc1/rank0", "mc1/unknown"]
    assert (rows["mc0/dimm0"]["size_bytes"], rows["mc0/dimm0"]["corrected"]) == (64 << 30, 12)
    assert (rows["mc1/rank0"]["uncorrected"], rows["mc1/rank0"]["label"]) == (4, None)
    assert (rows["mc1/unknown"]["corrected"], rows["mc1/unknown"]["uncorrected"]) == (2, 6)


def test_sensors_have_names_that_stay(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """Chips of one name are numbered by their devices' paths, not by hwmonN; a label that comes twice counts once."""
    write_tree(
        tmp_path / "sys",
        {
            "devices/platform/coretemp.0/hwmon/hwmon9/name": "coretemp\n",
            "devices/platform/coretemp.0/hwmon/hwmon9/temp1_input": "55000\n",
            "devices/platform/coretemp.0/hwmon/hwmon9/temp1_label": "Physical id 0\n",
            "devices/platform/coretemp.0/hwmon/hwmon9/temp1_crit": "84000\n",
            "devices/platform/coretemp.0/hwmon/hwmon9/temp1_crit_alarm": "0\n",
            "devices/platform/coretemp.1/hwmon/hwmon1/name": "coretemp\n",
            "devices/platform/coretemp.1/hwmon/hwmon1/temp1_input": "oops\n",
            "devices/platform/coretemp.1/hwmon/hwmon1/temp1_label": "Physical id 1\n",
            "devices/virtual/hwmon/hwmon4/temp10_input": "54000\n",
            "devices/virtual/hwmon/hwmon4/temp10_label": "foosensor\n",
            "devices/virtual/hwmon/hwmon4/temp2_input": "53000\n",
            "devices/virtual/hwmon/hwmon4/temp2_label": "foosensor\n",
            "devices/virtual/hwmon/hwmon4/temp2_max_alarm": "1\n",
            "devices/virtual/hwmon/hwmon4/temp2_crit_alarm": "0\n",
            "devices/virtual/hwmon/hwmon4/in0_input": "792\n",
            "devices/virtual/hwmon/hwmon4/fan2_input": "1098\n",
            "devices/virtual/hwmon/hwmon4/power1_average": "21000000\n",
            "devices/virtual/hwmon/hwmon4/freq1_input": "214000000\n",
            "class/hwmon/hwmon9": "->../../devices/platform/coretemp.0/hwmon/hwmon9",
            "class/hwmon/hwmon1": "->../../devices/platform/coretemp.1/hwmon/hwmon1",
            "class/hwmon/hwmon4": "->../../devices/virtual/hwmon/hwmon4",
            "class/hwmon/hwmon5": "->../../devices/platform/bogus.0/hwmon/hwmon5",
        },
    )
    rows = last_rows("sensors", platform.read_sensors(Query(root=tmp_path)))
    assert {name: (row["value"], row["kind"], row["has_alarm"]) for name, row in rows.items()} == {
        "coretemp-0/Physical id 0": (55.0, "temperature", False),
        "coretemp-1/Physical id 1": (None, "temperature", None),
        "hwmon4-0/fan2": (1098, "fan", None),
        "hwmon4-0/in0": (0.792, "voltage", None),
        "hwmon4-0/power1": (21.0, "power", None),
        "hwmon4-0/foosensor": (53.0, "temperature", True),
        "hwmon4-0/temp10": (54.0, "temperature", None),
    }
    assert rows["coretemp-0/Physical id 0"]["critical"] == 84.0


def test_pci_devices_have_their_link_and_their_errors(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """A device that fell off the bus answers all ones; a port without a device has a width of 0."""
    write_tree(
        tmp_path / "sys",
        pci(
            "0000:b5:00.0",
            "10DE:2330",
            "30200",
            "nvidia",
            current_link_speed="16.0 GT/s PCIe\n",
            max_link_speed="32.0 GT/s PCIe\n",
            current_link_width="8\n",
            max_link_width="16\n",
            aer_dev_fatal="Undefined 0\nDLP 0\nSDES 2\nTOTAL_ERR_FATAL 2\n",
            aer_dev_nonfatal="TLP 1\nTOTAL_ERR_NONFATAL 1\n",
            aer_dev_correctable="RxErr 3\nTOTAL_ERR_COR 7\n",
        )
        | pci("0000:00:01.1", "8086:0998", "60400", "", current_link_speed="Unknown\n", current_link_width="0\n")
        | pci("0000:c5:00.0", "15B3:1021", "20700", "mlx5_core", config=b"\xff" * 64, aer_dev_fatal="\n"),
    )
    rows = last_rows("pci_devices", platform.read_pci_devices(Query(root=tmp_path)))
    gpu = rows["0000:b5:00.0"]
    assert (gpu["vendor"], gpu["device"], gpu["kind"], gpu["driver"]) == ("0x10de", "0x2330", "0x030200", "nvidia")
    assert (gpu["link_gts"], gpu["max_link_gts"], gpu["link_width"], gpu["max_link_width"]) == (16.0, 32.0, 8, 16)
    assert (gpu["fatal_errors"], gpu["nonfatal_errors"], gpu["corrected_errors"]) == (2, 1, 7)
    assert (rows["0000:00:01.1"]["link_gts"], rows["0000:00:01.1"]["link_width"]) == (None, None)
    assert [row["responds"] for row in rows.values()] == [True, True, False]
    assert (rows["0000:c5:00.0"]["kind"], rows["0000:c5:00.0"]["fatal_errors"]) == ("0x020700", None)


def test_dmi_and_modules_are_text(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """What is no text of DMI is kept as far as it can be; a module without a version has none."""
    write_tree(
        tmp_path / "sys",
        {
            "class/dmi/id/bios_version": "2.2.4\n",
            "class/dmi/id/product_version": b"\xef\xbf[\xef\n",
            "class/dmi/id/modalias": "dmi:bvn\n",
            "module/nvidia/version": "570.86.15\n",
        },
    )
    write_tree(tmp_path / "proc", {"modules": "nvidia 11591680 80 nvidia_uvm, Live 0x0000000000000000 (POE)\nxfs 1\n"})
    dmi = last_rows("dmi", platform.read_dmi(Query(root=tmp_path)))
    assert {key: row["value"] for key, row in dmi.items()} == {
        "bios_version": "2.2.4",
        "product_version": "\ufffd[\ufffd",
    }
    modules = last_rows("modules", platform.read_modules(Query(root=tmp_path)))
    assert {key: row["version"] for key, row in modules.items()} == {"nvidia": "570.86.15", "xfs": None}


@pytest.mark.parametrize(
    "read", [platform.read_sensors, platform.read_dimms, platform.read_pci_devices, platform.read_cpus]
)
def test_a_missing_sys_is_not_an_empty_one(tmp_path: Path, read: Callable[..., Iterator[Row]]) -> None:
    """Where /sys is not mounted the table is unknown: no check may count 0 devices."""
    with pytest.raises(OSError):
        list(read(Query(root=tmp_path)))


SEL = """\
   1 | 03/13/2023 | 09:12:49 | Event Logging Disabled SEL | Log area reset/cleared | Asserted
  1a | 07/17/26 | 15:50:36 UTC | Power Supply #0x75 | Failure detected | Asserted
  1b | Pre-Init  |0000000023| Memory #0x02 | Uncorrectable ECC | Asserted
  1c | 2021/07/12 | 01\u65f620\u520605\u79d2 CST | Memory #0x01 | Correctable ECC | Asserted
Get SEL Entry 1d command failed
"""


def test_events_of_the_bmc() -> None:
    """In the forms of several versions of ipmitool; a time that was not set, or not understood, is unknown."""
    rows = list(platform.parse_ipmi_events(SEL))
    assert [(row["event"], row["at"], row["sensor"], row["text"]) for row in rows] == [
        (1, "2023-03-13T09:12:49.000Z", "Event Logging Disabled SEL", "Log area reset/cleared | Asserted"),
        (26, "2026-07-17T15:50:36.000Z", "Power Supply #0x75", "Failure detected | Asserted"),
        (27, None, "Memory #0x02", "Uncorrectable ECC | Asserted"),
        (28, None, "Memory #0x01", "Correctable ECC | Asserted"),
    ]


def test_a_bmc_that_cannot_be_asked_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a missing ipmitool; an empty log has no events."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def read(script: str) -> list[object]:
        (tmp_path / "ipmitool").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ipmitool").chmod(0o755)
        return list(platform.read_ipmi_events(Query()))

    with pytest.raises(ToolMissing):
        list(platform.read_ipmi_events(Query()))
    with pytest.raises(ClusterError, match="Could not open device"):
        read("echo 'Could not open device at /dev/ipmi0' >&2; exit 1")
    assert read("echo 'SEL has no entries'") == []
    assert len(read("echo ' 1 | 03/13/2023 | 09:12:49 | Fan | Lower Critical going low | Asserted'")) == 1


@given(text=st.text())
def test_any_text_of_ipmitool_is_read(text: str) -> None:
    """Without an error, whatever it is."""
    list(platform.parse_ipmi_events(text))
    list(platform.parse_ipmi_events(" 1 | " + text.replace("\n", " ") + " | x | y | z"))


@settings(max_examples=40)
@given(contents=st.lists(st.binary(max_size=80), min_size=1, max_size=4))
def test_any_bytes_of_sys_are_read(
    tmp_path_factory: pytest.TempPathFactory, write_tree: Write, last_rows: Check, contents: list[bytes]
) -> None:
    """Every file holds anything: rows have values or None, and there is no other error than of an unreadable table."""
    root = tmp_path_factory.mktemp("sys")
    names = [
        "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq",
        "devices/system/cpu/cpu0/cpufreq/scaling_governor",
        "devices/system/edac/mc/mc0/dimm0/size",
        "devices/system/edac/mc/mc0/ce_noinfo_count",
        "class/hwmon/hwmon0/name",
        "class/hwmon/hwmon0/temp1_input",
        "class/hwmon/hwmon0/temp1_crit",
        "class/hwmon/hwmon0/temp1_alarm",
        *(
            f"bus/pci/devices/0000:b5:00.0/{name}"
            for name in ("uevent", "config", "current_link_speed", "max_link_width", "aer_dev_fatal")
        ),
        "class/dmi/id/bios_version",
        "../proc/cpuinfo",
        "../proc/modules",
    ]
    write_tree(root / "sys", {name: contents[number % len(contents)] for number, name in enumerate(names)})
    for read, table in (
        (platform.read_cpus, "cpus"),
        (platform.read_dimms, "dimms"),
        (platform.read_sensors, "sensors"),
        (platform.read_pci_devices, "pci_devices"),
        (platform.read_dmi, "dmi"),
        (platform.read_modules, "modules"),
    ):
        with contextlib.suppress(OSError):
            last_rows(table, read(Query(root=root)))


def test_the_hardware_of_this_machine() -> None:
    """Its tables are read by the runner; one that is unknown says which file or program is missing."""
    tables = (
        "cpus",
        "dimms",
        "sensors",
        "pci_devices",
        "dmi",
        "modules",
        "interfaces",
        "rdma_ports",
        "gpus",
        "ipmi_events",
    )
    facts = read_facts(tables, Query())
    assert set(facts.tables) == set(tables)
    assert facts.tables["cpus"].rows
    for table in facts.tables.values():
        assert not table.unknown or "No such file" in table.unknown or table.table in ("gpus", "ipmi_events"), table
