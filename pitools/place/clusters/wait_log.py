"""Log the predicted and actual waits of each site's tickets, and the transfers to the site.

Each site has one JSON Lines file, which is opened for appending. At its size limit the older half is dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import Unreachable
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.locks import lock_or_timeout
from pitools.core.record import Record
from pitools.core.user_dirs import ensure_private_dir, xdg_dir

MAX_LOG_BYTES = 4 << 20  # some 20,000 lines
_RECENT_TRANSFERS = 20
_LOCK_S = 5.0  # a writer holds the lock for milliseconds: a longer one is stopped, or its file system hangs


class WaitPredicted(Record, frozen=True, kw_only=True, tag="pit.wait-predicted/1"):
    """A job was submitted to a pool.

    estimate_s: the wait by Slurm's method, see `pools.estimate_start_s`. quantiles: the prediction of `wait_model`, if
    there was one. features: its other input, see `wait_model.log_features`.
    """

    t_s: float
    ticket: str
    pool: str
    estimate_s: float
    quantiles: tuple[float, float, float] | None = None
    features: dict[str, float] = {}


class WaitEnded(Record, frozen=True, kw_only=True, tag="pit.wait-ended/1"):
    """A job started at `t_s`, or was withdrawn before it started."""

    t_s: float
    ticket: str
    pool: str
    started: bool


class TransferRecord(Record, frozen=True, kw_only=True, tag="pit.transfer-record/1"):
    """Data was copied to the site in wall_s seconds."""

    t_s: float
    bytes: int
    wall_s: float


WaitLine = WaitPredicted | WaitEnded


def record_predicted(
    site: str,
    ticket: str,
    pool: str,
    estimate_s: float,
    features: Mapping[str, float],
    quantiles: tuple[float, float, float] | None = None,
) -> None:
    """Record that a ticket of this name is submitted to a pool now. Raises ClusterError, NoSpace, Unreachable."""
    line = WaitPredicted(
        t_s=time.time(), ticket=ticket, pool=pool, estimate_s=estimate_s, quantiles=quantiles, features=dict(features)
    )
    _append(site, line)


def record_ended(site: str, ticket: str, pool: str, *, started_s: float | None) -> None:
    """Record the end of a wait: the start of the job (started_s, Unix time of our clock), or its withdrawal now (None).

    Idempotent: the first record counts.
    """
    is_started = started_s is not None
    _append(
        site,
        WaitEnded(t_s=time.time() if started_s is None else started_s, ticket=ticket, pool=pool, started=is_started),
    )


def record_transfer(site: str, n_bytes: int, wall_s: float) -> None:
    """Record that data was copied to the site's `paths.data`."""
    _append(site, TransferRecord(t_s=time.time(), bytes=n_bytes, wall_s=wall_s))


def read_waits(site: str) -> list[WaitLine]:
    """Return the recorded waits of a site by time: each prediction, and each end once and after its prediction."""
    lines: list[WaitLine] = []
    predicted_s: dict[tuple[str, str], float] = {}
    for line in _read_lines(site):
        if isinstance(line, WaitPredicted):
            predicted_s[line.ticket, line.pool] = line.t_s
            lines.append(line)
        elif isinstance(line, WaitEnded) and (line.ticket, line.pool) in predicted_s:
            # Slurm's times are whole seconds, and clocks are set back: a start may be dated before the submission.
            queued_s = predicted_s.pop((line.ticket, line.pool))
            lines.append(msgspec.structs.replace(line, t_s=max(queued_s, line.t_s)))
    return sorted(lines, key=lambda line: line.t_s)


def measured_transfer_rate(site: str) -> float | None:
    """Return the mean rate of the last transfers to the site, in bytes per second; None without any."""
    transfers = [line for line in _read_lines(site) if isinstance(line, TransferRecord)][-_RECENT_TRANSFERS:]
    seconds = sum(transfer.wall_s for transfer in transfers)
    return sum(transfer.bytes for transfer in transfers) / seconds if seconds > 0 else None


def _history_path(site: str) -> Path:
    state = xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools"
    return ensure_private_dir(state / "place-wait-log") / f"{site}.jsonl"


def _append(site: str, record: Record) -> None:
    path = _history_path(site)
    line = msgspec.json.encode(record) + b"\n"
    try:
        with lock_or_timeout(path.with_suffix(".lock"), _LOCK_S) as has_lock:
            if not has_lock:
                hint = f"see who holds it: fuser {path.with_suffix('.lock')}"
                raise Unreachable(f"locked for {_LOCK_S:g} s by another process", where=str(path), hint=hint)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                # A writer may have been killed within the last line: do not append to that.
                file.write(line if _ends_with_newline(path) else b"\n" + line)
                size = file.tell()
            if size > MAX_LOG_BYTES:
                _drop_older_half(path)
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


def _read_lines(site: str) -> Sequence[Record]:
    """Return every complete record of a site's log."""
    try:
        with open_regular(_history_path(site)) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    records: list[Record] = []
    decoder = msgspec.json.Decoder(WaitPredicted | WaitEnded | TransferRecord)
    for line in lines:
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # the writer was killed within the line
    return records
