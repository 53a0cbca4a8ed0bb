"""The state of an exporter between its cycles: one file for each site and worker, so that a cron job goes on as a
process does, and counters outlive a restart.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError, NoSpace
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import lock_or_timeout
from pitools.core.record import Record, decode_json
from pitools.core.user_dirs import ensure_private_dir, xdg_dir
from pitools.monitor.export.samples import Row, Samples, read_rows


class Queried(msgspec.Struct, frozen=True, kw_only=True):
    """The last query of a collector. began_s: Unix time. success_s: when the last that succeeded began, 0 for none.

    error: of one that failed, else "". gauges: of one that succeeded. note: what that left out. helps: of `native`: the
    help of each family.
    """

    began_s: float = 0.0
    duration_s: float = 0.0
    success_s: float = 0.0
    error: str = ""
    note: str = ""
    gauges: tuple[Row, ...] = ()
    helps: dict[str, str] = {}


class RunMark(msgspec.Struct, frozen=True, kw_only=True):
    """What of a run is counted. seconds: resource-seconds by state. attempts: those whose end was counted.

    seen_s: Unix time of the last look at it. resource, until, allocated_s, is_running: of its ledger; until is ""
    before its first allocation. productive_s: None if unknown. gpus: of one that runs. starts: of jobs in accounting,
    which count for no other run. is_over: whether its verdict is counted. is_shown: whether accounting showed a job of
    it at the last look.
    """

    seen_s: float = 0.0
    resource: str = ""
    until: str = ""
    seconds: dict[str, float] = {}
    queue_s: float = 0.0
    allocated_s: float = 0.0
    productive_s: float | None = None
    attempts: tuple[str, ...] = ()
    is_running: bool = False
    gpus: int = 0
    starts: tuple[str, ...] = ()
    is_over: bool = False
    is_shown: bool = True


class WorkerState(Record, frozen=True, kw_only=True, tag="pit.export-state/1"):
    """The state of one worker of a site: `slurm` or `runs`.

    queried: by collector. totals: counters and histograms. clocks: by collector, the cluster's Unix time of its last
    successful query, up to which counters are counted. leaves: the host list of each leaf switch; None if there is no
    fabric. running: raw ids of running jobs. runs: by run.
    """

    queried: dict[str, Queried] = {}
    totals: tuple[Row, ...] = ()
    clocks: dict[str, float] = {}
    leaves: tuple[str, ...] | None = None
    running: tuple[str, ...] = ()
    runs: dict[str, RunMark] = {}


def state_path(site: str, worker: str) -> Path:
    """Return the file of a worker's state, in a private folder. Raises ClusterError if others can write there."""
    return _folder() / f"{site}.{worker}.json"


def read_state(path: Path) -> WorkerState:
    """Return the state in a file; an empty one without a file. Raises DataError for a damaged one, which is renamed."""
    try:
        return decode_json(path.read_bytes(), WorkerState)
    except FileNotFoundError:
        return WorkerState()
    except OSError as error:
        raise from_os_error(error, path) from error
    except msgspec.DecodeError as error:
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(f"{path.name}.damaged"))
        raise DataError("damaged: renamed to *.damaged; counters begin again", where=str(path)) from error


def write_state(path: Path, state: WorkerState) -> None:
    """Write a state, durably: after a power loss counters do not go back. Raises NoSpace, ClusterError."""
    write_atomic(path, msgspec.json.encode(state), mode=0o600)


def totals_of(state: WorkerState) -> Samples:
    """Return the counters and histograms of a state, to be added to."""
    return read_rows(state.totals)


def take(site: str, worker: str) -> contextlib.ExitStack | None:
    """Hold a worker's state until what is returned is closed, or collected; None if another exporter holds it.

    Where no lock can be taken (a full disk, a file system without flock), nothing keeps two from counting at once.
    """
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(ClusterError, NoSpace):
            if not lock.enter_context(lock_or_timeout(_folder() / f"{site}.{worker}.lock", 0.0)):
                return None
        return lock.pop_all()


def _folder() -> Path:
    return ensure_private_dir(xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools" / "export")
