"""Accelerators: NVML that fails anywhere, amdgpu's and a TPU's files, and nodes without any.

No GPU was there when this was written: what NVML and amdgpu answer is what their documentation says.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, ToolMissing
from pitools.node.gather import gpus, nvidia
from pitools.node.gather.child import Collector, read_tables
from pitools.node.gather.read import Query
from pitools.node.types import Row
from tests.node.gather.conftest import Check, Write
from tests.node.gather.fake_nvml import ERRORS, FIELD_IDS, H100_ROW, MISSING, FakeNvml, h100
from tests.node.gather.pci_files import pci

GONE = bytes([255] * 64)


def write_node(folder: Path, write_tree: Write) -> Path:
    """Write a node with four H100 on its PCI bus, an NVSwitch beside them, and the files that the driver makes."""
    files: dict[str, str | bytes] = {}
    for number in range(4):
        address = f"0000:{0x10 + number:02x}:00.0"
        gpu = pci(address, "10DE:2330", "30200", "nvidia", numa_node="1")
        files |= {f"sys/{name}": text for name, text in gpu.items()}
        files[f"proc/driver/nvidia/gpus/{address}/information"] = f"Device Minor: \t {number}"
        files[f"dev/nvidia{number}"] = ""
    switch = pci("0000:0a:00.0", "10DE:22A3", "68000", "nvidia")
    return write_tree(folder, files | {f"sys/{name}": text for name, text in switch.items()})


@pytest.fixture
def node(tmp_path: Path, write_tree: Write) -> Path:
    """A node with four H100."""
    return write_node(tmp_path, write_tree)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory, write_tree: Write) -> Path:
    """The same, of all examples of a property."""
    return write_node(tmp_path_factory.mktemp("node"), write_tree)


def read(node: Path, nvml: Any = None, amdsmi: Any = None) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", nvml)
        patch.setitem(sys.modules, "amdsmi", amdsmi)
        return list(gpus.read_gpus(Query(root=node)))


def test_all_values_of_an_h100(node: Path, last_rows: Check) -> None:
    """Each key as the documented calls give it; NVML is opened once, and closed."""
    nvml = FakeNvml([h100(number) for number in range(4)])
    rows = last_rows("gpus", read(node, nvml))
    assert rows.keys() == {0, 1, 2, 3}
    assert rows[1] == H100_ROW | {
        "index": 1,
        "uuid": "GPU-00000001-1111-2222-3333-444455556666",
        "serial": "1654922000001",
        "pci": "0000:11:00.0",
        "numa_node": 1,
    }
    assert (nvml.calls.count("nvmlInit"), nvml.calls.count("nvmlShutdown")) == (1, 1)


def test_a_gpu_that_is_lost(node: Path, last_rows: Check) -> None:
    """Without a handle, or from one call to the next: it does not respond, with its PCI address; others are read."""
    fails: dict[tuple[str, int | None], int] = {
        ("nvmlDeviceGetHandleByIndex", 2): 15,
        ("nvmlDeviceGetPowerUsage", 3): 15,
        ("nvmlDeviceGetMigMode", 0): 3,
    }
    rows = last_rows("gpus", read(node, FakeNvml([h100(number) for number in range(4)], fails)))
    assert [rows[index]["responds"] for index in range(4)] == [True, True, False, False]
    assert [rows[index]["is_lost"] for index in range(4)] == [False, False, True, True]
    assert (rows[2]["pci"], rows[2]["error"], rows[2]["numa_node"]) == ("0000:12:00.0", "GPU is lost", 1)
    assert (rows[3]["pci"], rows[3]["error"], "power_w" in rows[3]) == ("0000:13:00.0", "GPU is lost", False)
    assert "mig_mode" not in rows[0]


def test_a_gpu_that_nvml_does_not_have(node: Path, last_rows: Check) -> None:
    """It is on the bus, and may be used by this process: it follows the others, and does not respond."""
    rows = last_rows("gpus", read(node, FakeNvml([h100(number) for number in (0, 1, 3)])))
    assert [(row["index"], row["pci"], row["responds"]) for row in rows.values()] == [
        (0, "0000:10:00.0", True),
        (1, "0000:11:00.0", True),
        (2, "0000:13:00.0", True),
        (3, "0000:12:00.0", False),
    ]


def test_gpus_of_others_are_no_fault(node: Path, last_rows: Check, write_tree: Write) -> None:
    """In a job or container with a part of the GPUs the others are not missing, nor are those of virtual machines."""
    for number in (2, 3):
        (node / f"dev/nvidia{number}").unlink()
    write_tree(node / "sys", pci("0000:a0:00.0", "10DE:2330", "30200", "vfio-pci"))
    write_tree(node / "sys", pci("0000:a1:00.0", "10DE:2330", "30200", "nouveau"))
    write_tree(node / "sys", pci("0000:a2:00.0", "10DE:2330", "30200", "", physfn="x"))
    rows = last_rows("gpus", read(node, FakeNvml([h100(0), h100(1)])))
    assert [row["responds"] for row in rows.values()] == [True, True]
    fails: dict[tuple[str, int | None], int] = {("nvmlDeviceGetHandleByIndex", 1): 4}
    (node / "dev/nvidia1").unlink()
    rows = last_rows("gpus", read(node, FakeNvml([h100(0), h100(1)], fails)))
    assert [row["responds"] for row in rows.values()] == [True, None]


@pytest.mark.parametrize(("function", "code"), [("nvmlInit", 18), ("nvmlInit", 9), ("nvmlDeviceGetCount", 999)])
def test_a_driver_that_cannot_be_used(node: Path, last_rows: Check, function: str, code: int) -> None:
    """After an update without a reboot: no GPU responds. A container without GPUs knows nothing of them."""
    nvml = FakeNvml([h100(0)], {(function, None): code})
    rows = last_rows("gpus", read(node, nvml))
    assert [(row["pci"], row["responds"], row["error"]) for row in rows.values()] == [
        (f"0000:{0x10 + number:02x}:00.0", False, ERRORS[code]) for number in range(4)
    ]
    for path in (node / "dev").iterdir():
        path.unlink()
    with pytest.raises(ClusterError, match=ERRORS[code]):
        read(node, nvml)


def test_gpus_without_a_driver(tmp_path: Path, last_rows: Check, write_tree: Write) -> None:
    """A GPU that no driver is bound to does not respond, whoever made it."""
    devices = pci("0000:10:00.0", "10DE:2330", "30200", "") | pci("0000:20:00.0", "1002:74A1", "120000", "")
    write_tree(tmp_path / "sys", devices)
    rows = last_rows("gpus", read(tmp_path, FakeNvml([], {("nvmlInit", None): 9})))
    assert [(row["index"], row["vendor"], row["error"]) for row in rows.values()] == [
        (0, "nvidia", "Driver Not Loaded"),
        (1, "amd", "no driver is bound"),
    ]


def test_newer_and_older_answers(node: Path, last_rows: Check) -> None:
    """NVLink 5 has counters of each link alone; an old pynvml has other names; a PCIe card has no NVLink or fabric."""
    new, old, card, unready = h100(0), h100(1), h100(2), h100(3)
    new["fields"] = {91: 2, (208, 0): 5, (208, 1): 6, (214, 1): 1}
    old["CurrentClocksThrottleReasons"] = old.pop("CurrentClocksEventReasons")
    old["MemoryInfo"] = lambda *version: None if version else SimpleNamespace(total=1, used=0)
    old["Name"], old["PciInfo"] = b"Tesla V100", SimpleNamespace(busId=b"00000000:11:00.0")
    card["fields"] = {230: 99}
    del card["GpuFabricInfoV"], card["Temperature"]
    card["TemperatureV"] = 50
    unready["GpuFabricInfoV"] = lambda info: setattr(info._obj, "state", 2) or 0
    rows = last_rows("gpus", read(node, FakeNvml([new, old, card, unready])))
    assert (rows[0]["nvlinks"], rows[0]["nvlink_errors"]) == (2, 12)
    assert (rows[1]["slowdowns"], rows[1]["memory_bytes"]) == ("SwPowerCap,HwThermalSlowdown", 1)
    assert (rows[1]["model"], rows[1]["pci"]) == ("Tesla V100", "0000:11:00.0")
    assert (rows[2]["recovery_action"], rows[2]["temperature_c"]) == ("99", 50)
    assert rows[2].keys() & {"nvlinks", "fabric_state", "memory_temperature_c"} == set()
    assert (rows[3]["fabric_state"], rows[3].get("fabric_domain")) == ("in-progress", None)


FUNCTIONS = sorted({f"nvmlDeviceGet{name}" for name in h100(0) if name != "fields"} | {"nvmlDeviceGetFieldValues"})
CODES = [code for code in ERRORS if code not in (15, 16)]


@given(
    fails=st.dictionaries(
        st.tuples(st.sampled_from(FUNCTIONS), st.sampled_from([None, 0, 1, 2, 3])), st.sampled_from([MISSING, *CODES])
    )
)
@settings(max_examples=60)
def test_any_call_may_fail(shared_node: Path, last_rows: Check, fails: dict[tuple[str, int | None], int]) -> None:
    """On any GPU, in any way: each is a row that responds, and what it has is what NVML said."""
    healthy = last_rows("gpus", read(shared_node, FakeNvml([h100(number) for number in range(4)])))
    nvml = FakeNvml([h100(number) for number in range(4)], fails)
    rows = last_rows("gpus", read(shared_node, nvml))
    assert [row["responds"] for row in rows.values()] == [True] * 4
    assert nvml.calls.count("nvmlInit") == nvml.calls.count("nvmlShutdown") == 1
    sums = {"nvlinks", "nvlink_errors", "retired_pages"}  # of the calls that answered
    for index, row in rows.items():
        assert {key: value for key, value in row.items() if key not in sums and value is not None}.items() <= (
            healthy[index].items()
        )


def test_a_gpu_that_hangs_is_left_out(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that does not return costs its time-out once; that GPU does not respond, the others are read."""
    hanging = h100(2)
    hanging["PowerUsage"] = lambda: time.sleep(60)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([h100(0), h100(1), hanging, h100(3)]))
    facts = read_tables([Collector("gpus", "NVML", gpus.read_gpus, timeout_s=1.0)], Query(root=node))
    rows = {row["index"]: row for row in facts.tables["gpus"].rows}
    assert [rows[index]["responds"] for index in range(4)] == [True, True, False, True]
    assert (rows[2]["pci"], rows[2]["error"]) == ("0000:12:00.0", "no answer within the time-out")


def test_without_pynvml_gpus_are_unknown(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install. A node without GPUs needs nothing."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ToolMissing) as error:
        list(gpus.read_gpus(Query(root=node)))
    assert "pitools-hpc[gpu]" in error.value.hint
    for path in (node / "sys/bus/pci/devices").glob("0000:1*"):
        (path / "uevent").write_text("")
    assert list(gpus.read_gpus(Query(root=node))) == []


def test_pynvml_has_what_is_called() -> None:
    """Each function, structure and field of a present version. An older one lacks some: those values are None."""
    pynvml = pytest.importorskip("pynvml")
    if not hasattr(pynvml, "nvmlDeviceGetTemperatureV"):
        pytest.skip("pynvml is older than 13")
    fields = [f"NVML_FI_DEV_{name}" for name in FIELD_IDS] + [*nvidia._NVLINK_TOTALS, *nvidia._NVLINK_COUNTS]
    structures = ["c_nvmlEccSramErrorStatus_v1_t", "c_nvmlGpuFabricInfoV_t"]
    missing = [name for name in [*FUNCTIONS, *fields, *structures] if not hasattr(pynvml, name)]
    assert missing == []
    assert {name: getattr(pynvml, f"NVML_FI_DEV_{name}") for name in FIELD_IDS} == FIELD_IDS
    assert dict(pynvml.c_nvmlEccSramErrorStatus_v1_t._fields_).keys() >= {"bThresholdExceeded"}
    wanted = {"clusterUuid", "status", "cliqueId", "state", "healthMask"}
    assert dict(pynvml.c_nvmlGpuFabricInfoV_t._fields_).keys() >= wanted
    assert pynvml.nvmlMemory_v2 == nvidia._MEMORY_V2
    assert pynvml.NVML_ERROR_GPU_IS_LOST == nvidia._GPU_IS_LOST
    for bit, name in nvidia._SLOWDOWNS.items():
        assert getattr(pynvml, f"nvmlClocksEventReason{name}") == bit


MI300 = {
    "unique_id": "0x9f3f3d3c1b2a0001",
    "product_name": "AMD Instinct MI300X",
    "vbios_version": "113-M3000100-102",
    "numa_node": "1",
    "mem_info_vram_total": "206141652992",
    "mem_info_vram_used": "297066496",
    "pcie_replay_count": "2",
    "current_link_speed": "32.0 GT/s PCIe",
    "max_link_speed": "32.0 GT/s PCIe",
    "current_link_width": "8",
    "max_link_width": "16",
    "ras__umc_err_count": "ue: 1\nce: 10",
    "ras__gfx_err_count": "ue: 0\nce: 2\nde: 0",
    "ras__features": "feature mask: 0x5fff",
    "ras__gpu_vram_bad_pages": "0x027f5d43 : 0x00001000 : R\n0x027f5d4b : 0x00001000 : P",
    "hwmon__hwmon7__temp2_label": "junction",
    "hwmon__hwmon7__temp2_input": "41000",
    "hwmon__hwmon7__temp3_label": "mem",
    "hwmon__hwmon7__temp3_input": "38000",
    "hwmon__hwmon7__power1_input": "132000000",
    "hwmon__hwmon7__power1_cap": "750000000",
    "hwmon__hwmon7__freq1_label": "sclk",
    "hwmon__hwmon7__freq1_input": "132000000",
}


class FakeAmdsmi:
    """A stand-in for amdsmi: two GPUs, of which the second refuses."""

    def amdsmi_init(self) -> None:
        """Return nothing, as the real one."""

    def amdsmi_get_processor_handles(self) -> list[str]:
        """Return handles."""
        return ["0000:C1:00.0", "0000:C2:00.0"]

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        """Return the PCI address."""
        return handle

    def amdsmi_get_gpu_asic_info(self, handle: str) -> dict[str, str]:
        """Return the name for the market."""
        if "C2" in handle:
            raise RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")
        return {"market_name": "Instinct MI300X OAM"}

    def amdsmi_get_gpu_process_list(self, handle: str) -> list[int]:
        """Return the processes."""
        if "C2" in handle:
            raise RuntimeError("AMDSMI_STATUS_NO_PERM")
        return [4711, 4712]


def test_amd_gpus(tmp_path: Path, last_rows: Check, write_tree: Write) -> None:
    """From sysfs, and from amdsmi what that lacks; one that fell off the bus does not respond."""
    devices = (
        pci("0000:c1:00.0", "1002:74A1", "120000", "amdgpu", **MI300)
        | pci("0000:c2:00.0", "1002:74A1", "120000", "amdgpu", ras__gpu_vram_bad_pages="0x027f5d43 : 0x00001000 : R")
        | pci("0000:c3:00.0", "1002:74A1", "120000", "amdgpu", config=GONE)
        | pci("0000:03:00.0", "1002:1480", "60000", "")
    )
    write_tree(tmp_path / "sys", devices | {"module/amdgpu/version": "6.10.5"})
    rows = last_rows("gpus", read(tmp_path, amdsmi=FakeAmdsmi()))
    assert rows[0] == {
        "index": 0,
        "pci": "0000:c1:00.0",
        "vendor": "amd",
        "numa_node": 1,
        "responds": True,
        "is_lost": False,
        "error": "",
        "pcie_generation": 5,
        "max_pcie_generation": 5,
        "pcie_width": 8,
        "max_pcie_width": 16,
        "uuid": "0x9f3f3d3c1b2a0001",
        "serial": "0x9f3f3d3c1b2a0001",
        "model": "Instinct MI300X OAM",
        "driver": "6.10.5",
        "vbios": "113-M3000100-102",
        "memory_bytes": 206141652992,
        "memory_used_bytes": 297066496,
        "temperature_c": 41.0,
        "memory_temperature_c": 38.0,
        "power_w": 132.0,
        "power_limit_w": 750.0,
        "sm_clock_mhz": 132.0,
        "ecc_corrected": 12,
        "ecc_uncorrected": 1,
        "retired_pages": 2,
        "retired_pages_pending": True,
        "remap_failed": False,
        "pcie_replays": 2,
        "processes": 2,
    }
    assert (rows[1]["responds"], rows[1]["ecc_corrected"]) == (True, None)
    assert (rows[1]["retired_pages"], rows[1]["retired_pages_pending"]) == (1, False)
    assert [rows[number]["is_lost"] for number in range(3)] == [False, False, True]
    assert (rows[2]["responds"], rows[2]["error"]) == (False, "fell off the PCI bus")
    assert last_rows("gpus", read(tmp_path))[0]["model"] == "AMD Instinct MI300X"


@given(contents=st.lists(st.binary(max_size=60), min_size=1, max_size=5))
@settings(max_examples=40)
def test_any_bytes_of_amdgpu_are_read(
    tmp_path_factory: pytest.TempPathFactory, write_tree: Write, last_rows: Check, contents: list[bytes]
) -> None:
    """Every file holds anything: values or None."""
    files = {name: contents[number % len(contents)] for number, name in enumerate(MI300)}
    folder = tmp_path_factory.mktemp("node")
    write_tree(folder / "sys", pci("0000:c1:00.0", "1002:74A1", "120000", "amdgpu", **files))
    assert last_rows("gpus", read(folder))[0]["responds"] is True


def test_tpus(tmp_path: Path, last_rows: Check, write_tree: Write) -> None:
    """Until v5p they are /dev/accelN, since v5e groups of vfio; without that file this process may not use it."""
    tpu = pci("0000:00:04.0", "1AE0:005E", "ff00", "accel", accel__accel0__dev="1") | pci(
        "0000:00:05.0", "1AE0:0063", "88000", "vfio-pci", iommu_group="->../../../../kernel/iommu_groups/7"
    )
    nic = pci("0000:00:06.0", "1AE0:0042", "20000", "gvnic")
    write_tree(tmp_path / "sys", tpu | nic)
    write_tree(tmp_path / "dev", {"accel0": ""})
    rows = last_rows("gpus", read(tmp_path))
    assert [(row["index"], row["vendor"], row["model"], row["responds"]) for row in rows.values()] == [
        (0, "google", "TPU v4", True),
        (1, "google", "TPU v5e", None),
    ]
    assert str(tmp_path / "dev/vfio/7") in str(rows[1]["error"])
    write_tree(tmp_path / "dev", {"vfio/7": ""})
    assert last_rows("gpus", read(tmp_path))[1]["responds"] is True
    write_tree(tmp_path / "sys", pci("0000:00:04.0", "1AE0:005E", "ff00", "accel", config=GONE))
    assert last_rows("gpus", read(tmp_path))[0]["responds"] is False


def test_the_real_bus_of_this_machine(last_rows: Check) -> None:
    """Whatever it has, reading it raises no error of ours."""
    try:
        last_rows("gpus", gpus.read_gpus(Query()))
    except (ToolMissing, ClusterError, OSError):
        pytest.skip("no PCI bus, or GPUs without their library")
