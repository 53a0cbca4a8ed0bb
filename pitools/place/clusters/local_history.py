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

from pitools.core.fs import os_error, plain_file, write_atomic
from pitools.core.lock import open_kept
from pitools.core.record import Record
from pitools.core.user_dirs import base, private

FULL_BYTES = 4 << 20  # some 20,000 lines
_RECENT = 20


class Foretold(Record, frozen=True, kw_only=True, tag="pit.wait-foretold/1"):
    """A job was put into a pool's queue.

    raw_s: the wait that Slurm foretold; said: the quantiles that were made of it, where there were any; features: what
    was known then, as `estimate.features` has it.
    """

    t_s: float
    job: str
    pool: str
    raw_s: float
    said: tuple[float, float, float] | None = None
    features: dict[str, float] = {}


class Waited(Record, frozen=True, kw_only=True, tag="pit.wait-over/1"):
    """A job of the queue has started, at `t_s`; or it was taken back before that."""

    t_s: float
    job: str
    pool: str
    started: bool


class Moved(Record, frozen=True, kw_only=True, tag="pit.transfer/1"):
    """Data was copied to the site."""

    t_s: float
    bytes: int
    wall_s: float


Line = Foretold | Waited


def foretold(
    site: str,
    job: str,
    pool: str,
    raw_s: float,
    features: Mapping[str, float],
    said: tuple[float, float, float] | None = None,
) -> None:
    """Note that a job is put into a pool's queue now. job: a name that no other has. Raises ClusterError, NoSpace."""
    line = Foretold(t_s=time.time(), job=job, pool=pool, raw_s=raw_s, said=said, features=dict(features))
    _append(site, line)


def over(site: str, job: str, pool: str, *, started_s: float | None) -> None:
    """Note that it waits no more: it started at this Unix time of our clock, or, if None, was taken back now.

    Safe to repeat: the first counts.
    """
    is_started = started_s is not None
    _append(site, Waited(t_s=time.time() if started_s is None else started_s, job=job, pool=pool, started=is_started))


def moved(site: str, n_bytes: int, wall_s: float) -> None:
    """Note that data was copied to the site's `paths.data`."""
    _append(site, Moved(t_s=time.time(), bytes=n_bytes, wall_s=wall_s))


def waits(site: str) -> list[Line]:
    """What was noted of waits at a site, in order of time, each end behind its beginning and only once."""
    found: list[Line] = []
    waiting: dict[tuple[str, str], float] = {}
    for line in _read(site):
        if isinstance(line, Foretold):
            waiting[line.job, line.pool] = line.t_s
            found.append(line)
        elif isinstance(line, Waited) and (line.job, line.pool) in waiting:
            # Slurm's times are whole seconds, and clocks are set back: a start may seem to come before its beginning.
            began_s = waiting.pop((line.job, line.pool))
            found.append(msgspec.structs.replace(line, t_s=max(began_s, line.t_s)))
    return sorted(found, key=lambda line: line.t_s)


def bandwidth(site: str) -> float | None:
    """Bytes a second of the last transfers to the site, all together; None where there was none."""
    recent = [line for line in _read(site) if isinstance(line, Moved)][-_RECENT:]
    seconds = sum(one.wall_s for one in recent)
    return sum(one.bytes for one in recent) / seconds if seconds > 0 else None


def _path(site: str) -> Path:
    state = base("XDG_STATE_HOME", ".local/state") / "pitools"
    return private(state / "place-history") / f"{site}.jsonl"


def _append(site: str, record: Record) -> None:
    path = _path(site)
    line = msgspec.json.encode(record) + b"\n"
    try:
        lock = open_kept(path.with_suffix(".lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                # Whoever was killed within a line must not take this one with it.
                file.write(line if _ends_whole(path) else b"\n" + line)
                size = file.tell()
            if size > FULL_BYTES:
                _halve(path)
        finally:
            os.close(lock)
    except OSError as error:
        raise os_error(error, path) from error


def _ends_whole(path: Path) -> bool:
    with plain_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        return file.read(1) in (b"", b"\n")


def _halve(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    write_atomic(path, b"".join(lines[len(lines) // 2 :]), mode=0o600, durable=False)


def _read(site: str) -> Sequence[Record]:
    """Every line that is whole."""
    try:
        with plain_file(_path(site)) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found: list[Record] = []
    decoder = msgspec.json.Decoder(Foretold | Waited | Moved)
    for line in lines:
        try:
            found.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # cut short by a kill
    return found
