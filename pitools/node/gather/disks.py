"""Read the disks of the node, and its software RAID arrays."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import PitError
from pitools.node.gather.read import Query, list_names, read_bytes, read_flag, read_int, read_scaled, read_text, to_int
from pitools.node.types import Row

SMART_TIMEOUT_S = 5.0
_SECTOR_BYTES = 512  # of sysfs, whatever the disk's are
_CONTROLLER = re.compile(r"nvme\d+", re.ASCII)
_ATA_BAD_SECTORS = frozenset((5, 197, 198))  # reallocated, pending, uncorrectable


def read_block_devices(query: Query) -> Iterator[Row]:
    """Yield the rows of table `block_devices`: of real disks, not of partitions, loops, RAID or device mapper."""
    has_smartctl = shutil.which("smartctl") is not None
    for name in list_names(query.sys / "block"):
        disk = query.sys / "block" / name
        device = disk / "device"
        if name in query.hung or not device.exists() or read_flag(disk / "hidden"):  # a path of several
            continue
        # The device of an NVMe disk is its controller, or a subsystem with the controllers of its ports.
        parts = [device, *(device / part for part in list_names(device) if _CONTROLLER.fullmatch(part))]
        sectors = read_int(disk / "size")
        row: Row = {
            "device": name,
            "model": read_text(device / "model"),
            "serial": _serial(disk),
            "size_bytes": None if sectors is None else sectors * _SECTOR_BYTES,
            "is_rotational": read_flag(disk / "queue/rotational"),
            "is_read_only": read_flag(disk / "ro"),
            "state": next((state for part in parts if (state := read_text(part / "state"))), None),
        }
        yield {**row, "responds": False}
        row["temperature_c"] = next((value for part in parts if (value := _temperature(part)) is not None), None)
        if has_smartctl and name.startswith(("nvme", "sd")):
            smart = _read_smart(query.root / "dev" / name)
            row |= {key: value for key, value in smart.items() if row.get(key) is None}
        yield {**row, "responds": True}


def _serial(disk: Path) -> str | None:
    """Return the serial number that NVMe, virtio or SCSI (a page of vital product data) gives."""
    page = read_bytes(disk / "device/vpd_pg80", limit=256)
    scsi = page[4:].decode(errors="replace").strip("\0 ") if page else None
    return read_text(disk / "device/serial") or read_text(disk / "serial") or scsi


def _temperature(device: Path) -> float | None:
    # NVMe's hwmon is a child of the controller, with kernels before 5.16 below `hwmon`; drivetemp's of SATA too.
    for folder in (device, device / "hwmon"):
        for name in list_names(folder):
            value = read_scaled(folder / name / "temp1_input", 1000) if name.startswith("hwmon") else None
            if value is not None:
                return value
    return None


def _read_smart(device: Path) -> Row:
    try:
        done = subprocesses.run(["smartctl", "--json", "--all", str(device)], timeout_s=SMART_TIMEOUT_S)
        answer = msgspec.json.decode(done.stdout)
    except (PitError, msgspec.DecodeError, RecursionError):
        return {}
    return parse_smart(answer)


def parse_smart(answer: Any) -> Row:
    """Return what an answer of `smartctl --json --all` says; of what it lacks, None."""
    nvme = "nvme_smart_health_information_log"
    wear = _first(
        _number(answer, nvme, "percentage_used"),
        _number(answer, "endurance_used", "current_percent"),
        _number(answer, "scsi_percentage_used_endurance_indicator"),
    )
    spare = _first(_number(answer, nvme, "available_spare"), _number(answer, "spare_available", "current_percent"))
    passed = _value(answer, "smart_status", "passed")
    return {
        "model": _text(answer, "model_name"),
        "serial": _text(answer, "serial_number"),
        "smart_passed": passed if isinstance(passed, bool) else None,
        "temperature_c": _number(answer, "temperature", "current"),
        "media_errors": _first(_number(answer, nvme, "media_errors"), _ata_errors(answer), _scsi_errors(answer)),
        "wear_share": None if wear is None else wear / 100,
        "spare_share": None if spare is None else spare / 100,
        "critical_warning": _number(answer, nvme, "critical_warning"),
        "power_on_h": _number(answer, "power_on_time", "hours"),
    }


def _ata_errors(answer: Any) -> int | float | None:
    table = _value(answer, "ata_smart_attributes", "table")
    counts = [
        _number(attribute, "raw", "value")
        for attribute in (table if isinstance(table, list) else ())
        if _number(attribute, "id") in _ATA_BAD_SECTORS
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _scsi_errors(answer: Any) -> int | float | None:
    log = _value(answer, "scsi_error_counter_log")
    counts = [_number(log, kind, "total_uncorrected_errors") for kind in ("read", "write")]
    counts.append(_number(answer, "scsi_grown_defect_list"))
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _value(answer: Any, *path: str) -> Any:
    for key in path:
        answer = answer.get(key) if isinstance(answer, dict) else None
    return answer


def _number(answer: Any, *path: str) -> int | float | None:
    value = _value(answer, *path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(answer: Any, *path: str) -> str | None:
    value = _value(answer, *path)
    return value if isinstance(value, str) else None


def _first(*values: int | float | None) -> int | float | None:
    return next((value for value in values if value is not None), None)


def read_raid_arrays(query: Query) -> Iterator[Row]:
    """Yield the rows of table `raid_arrays`."""
    for name in list_names(query.sys / "block"):
        array = query.sys / "block" / name / "md"
        state = read_text(array / "array_state")
        if state is None or state == "clear":  # no array, or a stopped one
            continue
        disks = (read_text(array / "raid_disks") or "").partition(" ")[0]  # `3 (2)` while it grows
        members = [read_text(array / member / "state") for member in list_names(array) if member.startswith("dev-")]
        yield {
            "device": name,
            "level": read_text(array / "level"),
            "state": "degraded" if read_int(array / "degraded") else state,
            "disks": to_int(disks),
            "disks_active": sum("in_sync" in (member or "").split(",") for member in members),
        }
