"""Read and write a run, which is a folder with this layout.

<runs>/<run-id>/
    request.toml        the request as it was given; callables have none
    plan.json           pit.plan/1: the request resolved for one site
    script.sbatch       what was submitted
    job.json            pit.job-ref/1: which job, or process, this run became; of several the newest
    jobs/<k>/           one submission, k = 0, 1, …: `launch/submission/submissions.py` draws it
    unstarted/<k>/       why a local run's k-th supervisor began no attempt
    events.jsonl        pit.event/1: what was done to the run, oldest first
    cancel.json         pit.cancel/1: a cancel that was asked for, and is not yet carried out
    verdict.json        pit.verdict/1: how it ended, once and for all; absent while it is to go on
    provenance.json     what it was made from, with code/, environment.txt, dirty.patch: `launch/reproduce` writes them
    checkpoints/        `pitools/checkpoint` draws it
    progress            steps that are safe, as text, of a program that keeps its checkpoints in a way of its own
    submitit/           pickles and results of callables
    attempts/<n>/       one start of the ranks: `run/attempt_records.py` draws what it keeps
        hostfile        line i is the node of rank i
        nodes/<node>/<dataset>.json     pit.stage/1: what that node staged
        ranks/<rank>.json               pit.rank/1: where that rank ran and what it read
        steps/<rank>.jsonl              pit.step/1
        logs/                           <rank>.out, srun.err, stage.<node>.out
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pitools.core import timestamps, trust
from pitools.core.errors import ClusterError, ConfigError, DataError, UsageError, most_similar
from pitools.core.fs import make_parents, open_regular, own, write_atomic
from pitools.core.record import Record, decode_json

T = TypeVar("T", bound=Record)
# By the site's `paths.runs_access`: a run's folder holds what runs, and logs that may hold anything.
MODES = {"owner": 0o700, "group": 0o750}
_TRUST_GROUP = 'or, where that group may be trusted, [paths] runs_access = "group" in the site file'


class RunRecord(Record, frozen=True, kw_only=True, tag="pit.run/1"):
    """What a run is now.

    state: Slurm's word (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, …), UNKNOWN where none can be had.
    exit_code: of the last attempt; None until it ended. job_id: of its newest job, "" before submission. attempt: the
    newest's name, "" before the first; attempts: how many there were. steps: the last one reached + 1, or those that
    are safe where the program logs none. cause, reason: why it ended, or why its last attempt did. is_over: whether
    that is its verdict: a run without one goes on, whatever became of its job. cancel_asked: when its cancel was asked
    for that is still to be carried out, "" where none is. pending_reason, expected_start: of a job that waits, as Slurm
    has them; "" where it says nothing.
    """

    run_id: str
    name: str
    site: str
    job_id: str
    run_dir: str
    state: str
    exit_code: int | None
    nodes: int
    created: str
    attempt: str = ""
    attempts: int = 0
    steps: int = 0
    cause: str = ""
    reason: str = ""
    is_over: bool = False
    cancel_asked: str = ""
    pending_reason: str = ""
    expected_start: str = ""


class JobRef(Record, frozen=True, kw_only=True, tag="pit.job-ref/1"):
    """The job, or the local process, that a run was submitted as.

    cluster: its ClusterName, "" where that is not known: job ids count anew on every cluster. number: which of the
    run's jobs, or supervisors, it is, 0 for the first. host, pid, start_ticks: of a local run's supervisor, else "" and
    0; start_ticks is when it started, in clock ticks since that host's boot (field 22 of /proc/<pid>/stat).
    """

    job_id: str
    site: str
    submitted: str
    cluster: str = ""
    number: int = 0
    host: str = ""
    pid: int = 0
    start_ticks: int = 0


class AttemptExit(Record, frozen=True, kw_only=True, tag="pit.attempt-exit/1"):
    """How one attempt ended. state: Slurm's word, where it is known without asking Slurm (local runs), else ""."""

    job_id: str
    exit_code: int
    ended: str
    state: str = ""


class RankRecord(Record, frozen=True, kw_only=True, tag="pit.rank/1"):
    """Where one rank ran. coordinator: rank 0's `address:port`. data: dataset name → folder it reads.

    oom_kills: how many processes the node's kernel had killed for want of memory before; None where it does not say.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    pid: int
    coordinator: str
    data: dict[str, str]
    oom_kills: int | None = None


class Event(Record, frozen=True, kw_only=True, tag="pit.event/1"):
    """One thing that was done to the run."""

    t: str
    event: str
    detail: dict[str, Any] = {}


class RunNotFound(UsageError):
    """No run has the given id. suggestions: ids that may be meant, the likeliest first."""

    def __init__(self, what: str, *, where: str = "", hint: str = "", suggestions: Sequence[str] = ()) -> None:
        super().__init__(what, where=where, hint=hint)
        self.suggestions = tuple(suggestions)


def new_run_id(name: str) -> str:
    """A run id that sorts by time and cannot meet another: `bc-jax-20261121-013341-9f3c2a`."""
    stamp = timestamps.now_rfc3339()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return f"{name}-{stamp}-{secrets.token_hex(3)}"


def make_run_dir(path: Path, access: str) -> None:
    """Make a run's folder, its owner's alone or, where the site says "group", its group's to read, and those above it.

    Raises OSError, and ConfigError where others could put another folder in its place.
    """
    make_parents(path, 0o777 if access == "group" else 0o755)
    path.mkdir(mode=0o700)
    # Whatever the umask; a set-group-ID bit that it has from its parent stays.
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o777 | MODES[access])
    try:
        require_own_run(path, group_above=access == "group")
    except ConfigError:
        path.rmdir()
        raise


def run_dirs(root: Path) -> list[Path]:
    """The folders of all runs below a root, oldest first; [] where there is no such folder.

    One that cannot be looked into now (a stale file handle, storage that is away) is among them: reading it says so.
    Raises ClusterError where the root cannot be read.
    """
    try:
        names = [name for name in os.listdir(root) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        what = f"cannot read this folder of runs: {os.strerror(error.errno or 0)}"
        raise ClusterError(what, where=str(root)) from error
    return [root / name for name in sorted(names, key=run_id_sort_key) if _has_plan(root / name)]


def _has_plan(path: Path) -> bool:
    try:
        (path / "plan.json").stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # no run, or somebody else's
        return False
    except OSError:
        return True
    return True


def run_id_sort_key(run_id: str) -> tuple[str, str]:
    """What sorts run ids by when they were made, oldest first, after names that do not say."""
    stamp = re.search(r"-(\d{8}-\d{6})-[0-9a-f]{6}$", run_id)
    return stamp[1] if stamp else "", run_id


def find_run(runs: Path, run: str) -> Path:
    """The folder of a run given by id or by path. Raises RunNotFound, UsageError, DataError."""
    for path in (runs / run, Path(run)):
        if (path / "plan.json").is_file():
            return path.resolve()
    rest = next((path for path in (runs / run, Path(run)) if run and (path / "request.toml").is_file()), None)
    if rest is not None:
        raise DataError("a part of the run is gone: plan.json", where=str(rest), hint=_recovery_hint(rest.absolute()))
    if "/" in run:
        hint = "give a run's id, or its folder, which holds plan.json"
        raise UsageError(f'no run "{run}"', where=str(Path(run).absolute()), hint=hint)
    suggestions = suggest_ids(run, [path.parent.name for path in runs.glob("*/plan.json")])
    raise RunNotFound(f'no run "{run}"', where=str(runs), suggestions=suggestions)


def suggest_ids(run: str, known: Collection[str]) -> list[str]:
    """Return the known ids that begin as the given one, newest first, or else the most similar one, if any."""
    begun = sorted((name for name in known if run and name.startswith(run)), key=run_id_sort_key, reverse=True)
    return begun or [name for name in [most_similar(run, known)] if name]


def _recovery_hint(run_dir: Path) -> str:
    """Return what a run without a plan can still be used for."""
    anew = "start it anew from its request (request.toml there is a copy)"
    left = f"its checkpoints: pit checkpoint list {run_dir}/checkpoints"
    return "; ".join([*([anew] if (run_dir / "request.toml").is_file() else ()), left])


def require_safe_runs_dir(runs: Path, *, group: bool = False) -> None:
    """Refuse a folder where others could exchange the runs that this user makes. Raises ConfigError.

    group: the folders may be a group's, as `require_own_run` has it.
    """
    trust.require_trusted(runs, "folder of runs", group_above=group, inside=True, alternative=_TRUST_GROUP)


def require_own_run(run_dir: Path, *, group_above: bool = False) -> None:
    """Refuse a run that others made or could have changed: what it holds would be started as this user.

    group_above: the folders above it may be a group's. Raises ConfigError.
    """
    for name in ("", "plan.json", "script.sbatch", "code", "submitit", "jobs"):
        if not name or (run_dir / name).exists():
            trust.require_trusted(run_dir / name, "run folder", group_above=group_above, alternative=_TRUST_GROUP)


def attempt_dirs(run_dir: Path) -> list[Path]:
    """The run's attempts, oldest first."""
    # `<restart>`, or `<array task>.<restart>`: numbers sort as numbers.
    found = [path for path in (run_dir / "attempts").glob("*") if re.fullmatch(r"\d+(\.\d+)?", path.name)]
    return sorted(found, key=lambda path: [int(part) for part in path.name.split(".")])


def last_attempt(run_dir: Path) -> Path | None:
    """Return the run's newest attempt; None before its first."""
    return next(reversed(attempt_dirs(run_dir)), None)


def last_exit(run_dir: Path) -> AttemptExit | None:
    """Return how the run's newest attempt ended; None before that, or where its record cannot be read."""
    with contextlib.suppress(DataError, OSError):
        return read_record(last / "exit.json", AttemptExit) if (last := last_attempt(run_dir)) else None
    return None


def job_output_files(run_dir: Path) -> list[Path]:
    """The outputs of the run's jobs, oldest first: ids sort as numbers."""

    def ids(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.stem)]

    return sorted(run_dir.glob("slurm-*.out"), key=lambda path: (ids(path), path.name))


def first_event(run_dir: Path) -> Event | None:
    """Return the first thing that was done to the run; None where that cannot be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError), open_regular(run_dir / "events.jsonl") as file:
        return decode_json(file.readline(4096), Event)
    return None


def write_record(path: Path, record: Record, *, durable: bool = False) -> None:
    """Write one record as a file that is whole or absent. durable: also after a loss of power."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(record) + b"\n", durable=durable)


def read_record(path: Path, kind: type[T]) -> T | None:
    """The record in a file; None where there is no file. Raises DataError."""
    try:
        with open_regular(path) as file:
            return decode_json(file.read(), kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ELOOP):  # a pipe, a link
            raise
        what = f"damaged, or of another version of pit: it holds no {kind.__name__} ({error})"
        hint = _recovery_hint(path.parent) if path.name == "plan.json" else "move it away: the run's other files count"
        raise DataError(what, where=str(path), hint=hint) from error


def read_or_none(path: Path, kind: type[T]) -> T | None:
    """The record in a file; None where there is none that can be read."""
    try:
        return read_record(path, kind)
    except (DataError, OSError):  # one that was cut short says nothing; the others still do
        return None


def append_event(run_dir: Path, event: str, **detail: Any) -> None:
    """Append an event. One short write to a file opened for appending is not split by another process's."""
    with open(run_dir / "events.jsonl", "ab", buffering=0, opener=own) as file:
        file.write(msgspec.json.encode(Event(t=timestamps.now_rfc3339(), event=event, detail=detail)) + b"\n")
