"""Read the mounts of the node and how full they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pitools.node.gather.read import Query, read_bytes
from pitools.node.types import Row

# Their statfs(2) needs no disk, no other machine and no other process. Whatever is not here may hang.
_MEMORY_TYPES = frozenset(
    (
        *("bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl", "hugetlbfs"),
        *("binfmt_misc", "mqueue", "nsfs", "proc", "pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs"),
        *("tmpfs", "tracefs"),
    )
)


class _Mount(NamedTuple):
    """A line of mountinfo. server: what hangs together: the server of an NFS mount, otherwise the device's number."""

    path: bytes
    row: Row
    server: tuple[str, str]


def read_mounts(query: Query) -> Iterator[Row]:
    """Yield the rows of table `mounts`. Raises OSError if mounts cannot be read."""
    mounts = _list_mounts(query.proc)
    hung = {mount.server for mount in mounts if mount.row["target"] in query.hung}
    for mount in mounts:
        if mount.row["target"] in query.hung:
            continue
        if mount.row["type"] == "autofs":  # to ask would mount it
            yield mount.row
            continue
        if mount.row["type"] not in _MEMORY_TYPES:
            yield {**mount.row, "responds": False}
        if mount.server not in hung:
            yield {**mount.row, **_usage(mount.path)}


def mount_points(proc: Path) -> set[str]:
    """Return all mount points. Raises OSError if they cannot be read."""
    return {str(mount.row["target"]) for mount in _list_mounts(proc)}


def _list_mounts(proc: Path) -> list[_Mount]:
    """Return the mounts that are seen: a later one hides an earlier one of the same path."""
    lines = read_bytes(proc / "self/mountinfo")
    if lines is None:
        raise OSError(None, "cannot be read", str(proc / "self/mountinfo"))
    mounts = {mount.path: mount for line in lines.splitlines() if (mount := _parse(line))}
    return list(mounts.values())


def _parse(line: bytes) -> _Mount | None:
    """Return a line's mount: `29 1 259:2 / /boot rw,relatime shared:1 - ext4 /dev/sda1 rw,data=ordered`."""
    mount, separator, description = line.partition(b" - ")
    fields, described = mount.split(b" "), description.split(b" ")
    if not separator or len(fields) < 6 or len(described) < 3:
        return None
    path, device = _unescape(fields[4]), _to_text(_unescape(described[1]))
    of_mount, of_file_system = _to_text(fields[5]).split(","), _to_text(_unescape(described[2])).split(",")
    is_read_only = "ro" in (of_mount[0], of_file_system[0])  # of the file system, as after an error
    options = ["ro" if is_read_only else "rw", *of_file_system[1:], *of_mount[1:]]  # as /proc/mounts has them
    kind = _to_text(described[0])
    row: Row = {
        "target": _to_text(path),
        "device": device,
        "type": kind,
        "options": ",".join(dict.fromkeys(options)),
        "is_read_only": is_read_only,
        # mount(8) sets both; after an error the kernel sets the file system's alone, ext4 since Linux 6.15 a word.
        "is_forced_read_only": (of_mount[0], of_file_system[0]) == ("rw", "ro") or "emergency_ro" in of_file_system,
    }
    server = device.partition(":/")[0] if kind.startswith("nfs") else _to_text(fields[2])
    return _Mount(path, row, (kind, server))


def _unescape(field: bytes) -> bytes:
    return re.sub(rb"\\([0-3][0-7]{2})", lambda octal: bytes([int(octal[1], 8)]), field)


def _to_text(data: bytes) -> str:
    return data.decode(errors="replace")


def _usage(path: bytes) -> Row:
    """Return how full a file system is; one that answers with an error does not respond."""
    try:
        status = os.statvfs(path)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        # A FUSE mount of a user is closed to root; no path leads to one that a later mount over a parent hides.
        return {"responds": None}
    except (OSError, ValueError):  # ESTALE, ENOTCONN, EIO
        return {"responds": False}
    unit = status.f_frsize
    used = max(0, status.f_blocks - status.f_bfree)
    inodes = status.f_files
    return {
        "responds": True,
        "size_bytes": status.f_blocks * unit,
        "free_bytes": status.f_bavail * unit,
        "used_bytes": used * unit,
        "used_share": _share(used, used + status.f_bavail),
        "root_used_share": round(used / status.f_blocks, 4) if status.f_blocks else 0.0,
        "inodes": inodes,
        "inodes_free": status.f_ffree,
        "inodes_used_share": _share(max(0, inodes - status.f_ffree), inodes),
    }


def _share(used: int, total: int) -> float:
    """Return a share rounded up, as `df` does: what is above a limit of whole % stays above it."""
    return -(-used * 10_000 // total) / 10_000 if total else 0.0
