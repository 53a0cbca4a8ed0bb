"""What happened at each site: how long jobs waited beside what was foretold, and how fast data got there.

One file of lines a site, only ever appended to, and halved when it is full.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.locks import open_readable_lock_file
from pitools.core.record import Record
from pitools.core.user_dirs import ensure_private_dir, xdg_dir

MAX_LOG_BYTES = 4 << 20  # some 20,000 lines
_RECENT_TRANSFERS = 20


class WaitPredicted(Record, frozen=True, kw_only=True, tag="pit.wait-predicted/1"):
    """A job was put into a pool's queue.

    slurm_s: the wait that Slurm foretold; quantiles: the quantiles that were made of it, where there were any;
    features: what was known then, as `estimate.features` has it.
    """

    t_s: float
    job: str
    pool: str
    slurm_s: float
    quantiles: tuple[float, float, float] | None = None
    features: dict[str, float] = {}


class WaitEnded(Record, frozen=True, kw_only=True, tag="pit.wait-ended/1"):
    """A job of the queue has started, at `t_s`; or it was taken back before that."""

    t_s: float
    job: str
    pool: str
    started: bool


class TransferRecord(Record, frozen=True, kw_only=True, tag="pit.transfer-record/1"):
    """Data was copied to the site."""

    t_s: float
    bytes: int
    wall_s: float


WaitLine = WaitPredicted | WaitEnded


def record_predicted(
    site: str,
    job: str,
    pool: str,
    raw_s: float,
    features: Mapping[str, float],
    quantiles: tuple[float, float, float] | None = None,
) -> None:
    """Note that a job is put into a pool's queue now. job: a name that no other has. Raises ClusterError, NoSpace."""
    line = WaitPredicted(
        t_s=time.time(), job=job, pool=pool, slurm_s=raw_s, quantiles=quantiles, features=dict(features)
    )
    _append(site, line)


def record_ended(site: str, job: str, pool: str, *, started_s: float | None) -> None:
    """Note that it waits no more: it started at this Unix time of our clock, or, if None, was taken back now.

    Safe to repeat: the first counts.
    """
    is_started = started_s is not None
    _append(
        site, WaitEnded(t_s=time.time() if started_s is None else started_s, job=job, pool=pool, started=is_started)
    )


def record_transfer(site: str, n_bytes: int, wall_s: float) -> None:
    """Note that data was copied to the site's `paths.data`."""
    _append(site, TransferRecord(t_s=time.time(), bytes=n_bytes, wall_s=wall_s))


def read_waits(site: str) -> list[WaitLine]:
    """What was noted of waits at a site, in order of time, each end behind its beginning and only once."""
    found: list[WaitLine] = []
    waiting: dict[tuple[str, str], float] = {}
    for line in _read(site):
        if isinstance(line, WaitPredicted):
            waiting[line.job, line.pool] = line.t_s
            found.append(line)
        elif isinstance(line, WaitEnded) and (line.job, line.pool) in waiting:
            # Slurm's times are whole seconds, and clocks are set back: a start may seem to come before its beginning.
            began_s = waiting.pop((line.job, line.pool))
            found.append(msgspec.structs.replace(line, t_s=max(began_s, line.t_s)))
    return sorted(found, key=lambda line: line.t_s)


def measured_transfer_rate(site: str) -> float | None:
    """Bytes a second of the last transfers to the site, all together; None where there was none."""
    recent = [line for line in _read(site) if isinstance(line, TransferRecord)][-_RECENT_TRANSFERS:]
    seconds = sum(one.wall_s for one in recent)
    return sum(one.bytes for one in recent) / seconds if seconds > 0 else None


def _path(site: str) -> Path:
    state = xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools"
    return ensure_private_dir(state / "place-history") / f"{site}.jsonl"


def _append(site: str, record: Record) -> None:
    path = _path(site)
    line = msgspec.json.encode(record) + b"\n"
    try:
        lock = open_readable_lock_file(path.with_suffix(".lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                # Whoever was killed within a line must not take this one with it.
                file.write(line if _ends_with_newline(path) else b"\n" + line)
                size = file.tell()
            if size > MAX_LOG_BYTES:
                _drop_older_half(path)
        finally:
            os.close(lock)
    except OSError as error:
        raise from_os_error(error, path) from error


def _ends_with_newline(path: Path) -> bool:
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        return file.read(1) in (b"", b"\n")


def _drop_older_half(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    write_atomic(path, b"".join(lines[len(lines) // 2 :]), mode=0o600, durable=False)


def _read(site: str) -> Sequence[Record]:
    """Every line that is whole."""
    try:
        with open_regular(_path(site)) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found: list[Record] = []
    decoder = msgspec.json.Decoder(WaitPredicted | WaitEnded | TransferRecord)
    for line in lines:
        try:
            found.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # cut short by a kill
    return found
