"""Read what is one for the whole node: kernel, load, CPUs, memory, clock."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from pitools.node.gather.read import Query, list_names, read_measure, read_text, to_float, to_int
from pitools.node.types import Row, Value

_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex(2)
_TIMEX_BYTES = 256  # struct timex has 208


def read_system(query: Query) -> Iterator[Row]:
    """Yield the one row of table `system`."""
    proc, sys = query.proc, query.sys
    loads = (read_text(proc / "loadavg") or "").split() + [""] * 3
    is_synchronized, error_s = _clock()
    yield {
        "kernel": read_text(proc / "sys/kernel/osrelease"),
        "os": _os_release(read_text(query.root / "etc/os-release") or ""),
        "uptime_s": read_measure(proc / "uptime"),
        "load_1m": to_float(loads[0]),
        "load_5m": to_float(loads[1]),
        "load_15m": to_float(loads[2]),
        **_cpus(sys / "devices/system/cpu"),
        "numa_nodes": count_in_list(read_text(sys / "devices/system/node/has_memory")),
        **_memory(read_meminfo(proc)),
        "largest_free_block_bytes": _largest_free_block(read_text(proc / "buddyinfo") or ""),
        "clocksource": read_text(sys / "devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_is_synchronized": is_synchronized,
        "clock_error_s": error_s,
    }


def _os_release(text: str) -> str | None:
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    return " ".join(values[key].strip().strip("\"'") for key in ("ID", "VERSION_ID") if key in values) or None


def count_in_list(text: str | None) -> int | None:
    """Return how many numbers the kernel's list names: 4 for `0-2,7`. None for what is no list."""
    if text is None or not re.fullmatch(r"(\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*)?", text, re.ASCII):
        return None
    ends = [part.partition("-") for part in text.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _cpus(folder: Path) -> dict[str, Value]:
    cores: set[str] = set()
    sockets: set[str] = set()
    for name in list_names(folder):
        # An offline CPU has no folder topology.
        if name.startswith("cpu") and name[3:].isdigit():
            topology = f"{folder}/{name}/topology"
            if socket := read_text(f"{topology}/physical_package_id", limit=64):
                sockets.add(socket)
                cores.add(read_text(f"{topology}/thread_siblings_list") or name)
    return {
        "cpus": count_in_list(read_text(folder / "online")),
        "cpus_present": count_in_list(read_text(folder / "present")),
        "cores": len(cores) or None,
        "sockets": len(sockets) or None,
    }


def read_meminfo(proc: Path) -> dict[str, int | None]:
    """Return /proc/meminfo in bytes."""
    lines = (line.partition(":") for line in (read_text(proc / "meminfo") or "").splitlines())
    kib = {name: to_int(value.removesuffix("kB").strip()) for name, _, value in lines}
    return {name: None if value is None else value * 1024 for name, value in kib.items()}


def _memory(memory: dict[str, int | None]) -> dict[str, Value]:
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    free = [memory.get(name) for name in ("MemFree", "Buffers", "Cached")]
    known = [size for size in free if size is not None]
    return {
        "memory_bytes": total,
        "memory_available_bytes": available,
        "memory_free_bytes": sum(known) if len(known) == len(free) else None,
        "memory_used_share": round(1 - available / total, 4) if total and available is not None else None,
        "swap_bytes": memory.get("SwapTotal"),
        "swap_free_bytes": memory.get("SwapFree"),
    }


def _largest_free_block(text: str) -> int | None:
    """Return the bytes of the largest free block in a zone Normal, from the counts by order of /proc/buddyinfo."""
    zones = re.findall(r"^Node +\d+, +zone +Normal((?: +\d+)+) *$", text, re.MULTILINE | re.ASCII)
    if not zones:
        return None
    sizes = [os.sysconf("SC_PAGE_SIZE") << order for zone in zones for order, n in enumerate(zone.split()) if int(n)]
    return max(sizes, default=0)


def _clock() -> tuple[bool | None, float | None]:
    """Return whether the kernel's clock is disciplined, and the largest error that it may have, in seconds."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: only read
    try:
        if ctypes.CDLL(None).adjtimex(timex) < 0:
            return None, None
    except (OSError, AttributeError):
        return None, None
    # modes, offset, freq, maxerror, esterror (µs), status
    _, _, _, max_error_us, _, status = struct.unpack_from("@Illlli", timex)
    return not status & _UNSYNCHRONIZED, max_error_us / 1e6
