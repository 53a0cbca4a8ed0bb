"""Parse and format durations and sizes: seconds and bytes as text."""

from __future__ import annotations

import re

from pitools.core.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _BYTES[f"{_letter}B"] = 1000**_power
    _BYTES[f"{_letter}iB"] = 1024**_power

_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(min|[smhdw])")
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]i?B|B)?")


def parse_duration(text: str) -> int:
    """Return the seconds of `90s`, `30m`, `2h`, `1d12h`, or of Slurm's `MM`, `MM:SS`, `HH:MM:SS`, `D-HH[:MM[:SS]]`.

    A bare number is minutes, as in `sbatch --time`. Raises UsageError for anything else.
    """
    text = text.strip()
    parts = _DURATION_PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return round(sum(float(number) * _SECONDS[unit] for number, unit in parts))
    match = _SLURM_TIME.fullmatch(text)
    if not match:
        raise UsageError(f'"{text}" is not a duration', hint="write 90s, 30m, 2h, 1d12h or Slurm's D-HH:MM:SS")
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def to_slurm_time(total_s: int) -> str:
    """Return `D-HH:MM:SS` or `HH:MM:SS`, which every Slurm option and version reads."""
    days, rest = divmod(total_s, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def parse_size(text: str) -> int:
    """Return the bytes of `200GiB`, `1.5TB`, `4096`. Raises UsageError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f'"{text}" is not a size', hint="write 200GiB, 1.5TB or a number of bytes")
    number, unit = match.groups()
    return round(float(number) * _BYTES[unit or "B"])


def format_size(n_bytes: float) -> str:
    """Return a size with two or three figures in binary units: `1.3 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} PiB"


def format_duration(total_s: float) -> str:
    """Return a duration as `85 ms`, `3.2 s`, `4m10s` or `2h05m`."""
    if total_s < 1:
        return f"{total_s * 1000:.0f} ms"
    if total_s < 60:
        return f"{total_s:.1f} s"
    minutes, rest = divmod(round(total_s), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def exact_duration(total_s: int) -> str:
    """Return a duration that parse_duration and Prometheus read, in its largest whole unit: `5m`, `3d`, `90s`."""
    unit = next((unit for unit in "dhm" if total_s and total_s % _SECONDS[unit] == 0), "s")
    return f"{total_s // _SECONDS[unit]}{unit}"
