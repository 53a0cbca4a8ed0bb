"""Tables `block_devices` and `raid_arrays`, from folders that stand for /sys, and programs that stand for smartctl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.gather import disks
from pitools.node.gather.disks import read_block_devices, read_raid_arrays
from pitools.node.gather.read import Query

NVME = {
    "smartctl": {"exit_status": 0},
    "model_name": "SAMSUNG MZQL23T8HCLS",
    "serial_number": "S64HNE0T500001",
    "smart_status": {"passed": True, "nvme": {"value": 0}},
    "nvme_smart_health_information_log": {
        "critical_warning": 4,
        "temperature": 41,
        "available_spare": 97,
        "available_spare_threshold": 10,
        "percentage_used": 105,
        "media_errors": 3,
    },
    "temperature": {"current": 41},
    "power_on_time": {"hours": 21000},
}
ATA = {
    "model_name": "ST4000NM0035",
    "smart_status": {"passed": False},
    "ata_smart_attributes": {
        "table": [
            {"id": 5, "name": "Reallocated_Sector_Ct", "raw": {"value": 8}},
            {"id": 9, "name": "Power_On_Hours", "raw": {"value": 100}},
            {"id": 197, "name": "Current_Pending_Sector", "raw": {"value": 2}},
        ]
    },
    "temperature": {"current": 33},
}
SCSI = {
    "smart_status": {"passed": True},
    "scsi_grown_defect_list": 5,
    "scsi_error_counter_log": {"read": {"total_uncorrected_errors": 1}, "write": {"total_uncorrected_errors": 0}},
    "scsi_percentage_used_endurance_indicator": 2,
}
SYS = {
    "block/loop0/size": "8",
    "block/dm-0/size": "8",
    "block/nvme0n1/device": "->../../nvme0",
    "block/nvme0n1/size": "7501476528",
    "block/nvme0n1/ro": "0",
    "block/nvme0n1/queue/rotational": "0",
    "nvme0/model": "SAMSUNG MZQL23T8HCLS-00A07          ",
    "nvme0/serial": "S64HNE0T500000      ",
    "nvme0/state": "live",
    "nvme0/hwmon3/temp1_input": "38850",
    "block/nvme1n1/device": "->../../subsystem1",
    "block/nvme1n1/size": "8",
    "block/nvme1c1n1/device": "->../../subsystem1/nvme1",
    "block/nvme1c1n1/hidden": "1",
    "subsystem1/nvme1/state": "connecting",
    "subsystem1/nvme1/hwmon4/temp1_input": "50000",
    "block/sda/device/model": "ST4000NM0035",
    "block/sda/device/state": "offline",
    "block/sda/size": "lots",
    "block/sda/ro": "1",
    "block/sda/queue/rotational": "1",
    "block/sda/device/hwmon/hwmon1/temp1_input": "31000",
    "block/sda/device/vpd_pg80": b"\x00\x80\x00\x08    Z1Z2Z3",
    "block/vda/device/vendor": "0x1af4",
    "block/vda/serial": "disk-1",
    "block/vda/size": "2048",
}
SMART_KEYS = ("smart_passed", "media_errors", "wear_share", "spare_share", "critical_warning", "power_on_h")


@pytest.fixture
def smartctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files are what smartctl prints for the disks of those names; it exits with bits of their state."""
    (tmp_path / "answers").mkdir()
    program = tmp_path / "bin" / "smartctl"
    program.parent.mkdir()
    answer = f'[ "$1 $2" = "--json --all" ] && cat {tmp_path}/answers/"$(basename "$3")"'
    program.write_text(f"#!/bin/sh\n{answer}\nexit 216\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return tmp_path / "answers"


def query(root: Path, write_tree) -> Query:
    """Return a query of a machine with these disks."""
    write_tree(root / "sys", SYS)
    return Query(root=root)


def test_disks_without_smartctl(tmp_path: Path, write_tree, last_rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only real disks are rows, with what sysfs says; a value that is no number is unknown."""
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = last_rows("block_devices", read_block_devices(query(tmp_path, write_tree)))
    assert list(rows) == ["nvme0n1", "nvme1n1", "sda", "vda"]
    assert (rows["nvme1n1"]["state"], rows["nvme1n1"]["temperature_c"]) == ("connecting", 50.0)
    assert rows["nvme0n1"] == {
        "device": "nvme0n1",
        "model": "SAMSUNG MZQL23T8HCLS-00A07",
        "serial": "S64HNE0T500000",
        "size_bytes": 3840755982336,
        "is_rotational": False,
        "is_read_only": False,
        "state": "live",
        "temperature_c": 38.85,
        "responds": True,
    }
    sda = rows["sda"]
    assert (sda["size_bytes"], sda["state"], sda["is_read_only"], sda["temperature_c"]) == (None, "offline", True, 31.0)
    assert (rows["vda"]["serial"], rows["vda"]["model"], rows["vda"]["size_bytes"]) == ("disk-1", None, 1 << 20)


def test_disks_with_smartctl(tmp_path: Path, write_tree, last_rows, smartctl: Path) -> None:
    """Its values are added to those of sysfs, whatever its exit code. Disks of virtual machines are not asked."""
    (smartctl / "nvme0n1").write_text(json.dumps(NVME))
    (smartctl / "sda").write_text('{"smartctl": {"exit_status": 2}}')
    (smartctl / "vda").write_text(json.dumps(NVME))
    rows = last_rows("block_devices", read_block_devices(query(tmp_path, write_tree)))
    nvme, sda = rows["nvme0n1"], rows["sda"]
    assert [nvme[key] for key in SMART_KEYS] == [True, 3, 1.05, 0.97, 4, 21000]
    assert (nvme["serial"], nvme["temperature_c"]) == ("S64HNE0T500000", 38.85)
    assert [sda[key] for key in SMART_KEYS] == [None] * 6
    assert (sda["model"], sda["serial"], sda["temperature_c"]) == ("ST4000NM0035", "Z1Z2Z3", 31.0)
    assert "smart_passed" not in rows["vda"]


@pytest.mark.parametrize("answer", ["", "{", "[]", "null", '{"smart_status": []}', "[" * 100_000])
def test_an_answer_that_is_none(tmp_path: Path, write_tree, last_rows, smartctl: Path, answer: str) -> None:
    """A smartctl that prints something else costs its values alone."""
    (smartctl / "nvme0n1").write_text(answer)
    rows = last_rows("block_devices", read_block_devices(query(tmp_path, write_tree)))
    assert (rows["nvme0n1"].get("smart_passed"), rows["nvme0n1"]["state"]) == (None, "live")


def test_a_smartctl_that_hangs(
    tmp_path: Path, write_tree, last_rows, smartctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed at its time-out; the disk's other values are read."""
    (smartctl.parent / "bin" / "smartctl").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(disks, "SMART_TIMEOUT_S", 0.1)
    rows = last_rows("block_devices", read_block_devices(query(tmp_path, write_tree)))
    assert (rows["nvme0n1"].get("smart_passed"), rows["nvme0n1"]["responds"]) == (None, True)


def test_a_disk_that_hangs_is_announced(tmp_path: Path, write_tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a disk is asked for its temperature, its row does not respond; one that hung is left out."""
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = read_block_devices(query(tmp_path, write_tree)._replace(hung={"nvme1n1", "sda", "vda"}))
    assert [(row["device"], row["responds"]) for row in rows] == [("nvme0n1", False), ("nvme0n1", True)]


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        (NVME, [True, 3, 1.05, 0.97, 4, 21000]),
        (ATA, [False, 10, None, None, None, None]),
        (SCSI, [True, 6, 0.02, None, None, None]),
    ],
    ids=["nvme", "ata", "scsi"],
)
def test_the_answers_of_each_protocol(answer: dict[str, Any], values: list[object]) -> None:
    """Health, errors and wear have other names for NVMe, SATA and SAS."""
    row = disks.parse_smart(answer)
    assert [row[key] for key in SMART_KEYS] == values


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NVME, *ATA, *SCSI, "id"]), inner),
    max_leaves=8,
)


@given(answer=JSON, name=st.sampled_from([*NVME, *ATA, *SCSI]), part=JSON)
def test_any_answer_makes_no_error(last_rows, answer: Any, name: str, part: Any) -> None:
    """Whatever JSON smartctl prints, each value has its type or is unknown."""
    for whole in (answer, {**NVME, **ATA, **SCSI, name: part}):
        row = disks.parse_smart(whole)
        assert row["smart_passed"] in (True, False, None)
        assert isinstance(row["serial"], str | None)
        assert all(not isinstance(row[key], bool | str) for key in SMART_KEYS[1:])


def raid(name: str, state: str, disks: str, members: list[str], **more: str) -> dict[str, str]:
    files = {"array_state": state, "level": "raid1", "raid_disks": disks, **more}
    files |= {f"dev-sd{letter}/state": member for letter, member in zip("abc", members, strict=False)}
    return {f"block/{name}/md/{key}": value for key, value in files.items()}


@pytest.mark.parametrize(
    ("files", "values"),
    [
        (raid("md0", "clean", "2", ["in_sync", "in_sync", "spare"], degraded="0"), ("clean", 2, 2)),
        (raid("md0", "active", "2", ["faulty", "in_sync,write_mostly"], degraded="1"), ("degraded", 2, 1)),
        (raid("md0", "active", "3 (2)", ["in_sync", "in_sync", "spare"], degraded="1"), ("degraded", 3, 2)),
        (raid("md0", "inactive", "0", ["spare", "spare"]), ("inactive", 0, 0)),
        (raid("md0", "broken", "2", ["in_sync"], level="raid0"), ("broken", 2, 1)),
        (raid("md0", "clear", "0", []), None),
    ],
    ids=["clean", "degraded", "growing", "inactive", "raid0", "stopped"],
)
def test_arrays(tmp_path: Path, write_tree, last_rows, files: dict[str, str], values: object) -> None:
    """An array that misses a disk is degraded; otherwise its state is the kernel's. A stopped one is none."""
    write_tree(tmp_path / "sys", {**files, "block/sda/size": "1"})
    rows = last_rows("raid_arrays", read_raid_arrays(Query(root=tmp_path)))
    expected = {} if values is None else {"md0": values}
    assert {name: (row["state"], row["disks"], row["disks_active"]) for name, row in rows.items()} == expected
    assert all(row["level"] == files["block/md0/md/level"] for row in rows.values())


@given(data=st.binary(max_size=40), name=st.sampled_from(sorted(SYS | raid("md0", "clean", "2", ["in_sync"]))))
def test_any_bytes_make_no_error(tmp_path_factory: pytest.TempPathFactory, write_tree, last_rows, data, name) -> None:
    """Whatever a file holds, both tables are read."""
    files = {**SYS, **raid("md0", "clean", "2", ["in_sync"], degraded="0")}
    root = tmp_path_factory.mktemp("root")
    write_tree(root / "sys", files if files[name][:2] == "->" else {**files, name: data})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(root))
        assert len(last_rows("block_devices", read_block_devices(Query(root=root)))) in (4, 5)
    last_rows("raid_arrays", read_raid_arrays(Query(root=root)))
