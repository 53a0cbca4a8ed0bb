"""Read and write a run's folder, which has this layout.

<runs>/<run-id>/
    request.toml        the request; no file for runs of a Python callable
    plan.json           pit.plan/1: the request resolved for one site
    script.sbatch       the submitted script
    job.json            pit.job-ref/1: the run's newest job or, locally, supervisor process
    jobs/<k>/           one submission, k = 0, 1, …: `launch/submission/submissions.py` draws it
    unstarted/<k>/      why a local run's k-th supervisor began no attempt
    events.jsonl        pit.event/1: changes to the run, oldest first
    cancel.json         pit.cancel/1: a request to cancel the run
    verdict.json        pit.verdict/1: how the run ended; absent until then. verdicts/ has those that were withdrawn
    move.json           pit.move/1: a move to another site, from its begin
    trace.json          pit.trace-request/1: steps that the ranks trace
    hooks.json          pit.hooks/1, with hooks.out: `launch/hooks.py` draws them
    slurm-*.out         the output of jobs; supervisor.out, supervisor.<k>.out: of local supervisors
    provenance.json     the run's sources, with site.json, code.json, code/, environment.txt, dirty.patch:
                        `launch/provenance` writes them
    checkpoints/        `pitools/checkpoint` draws it
    progress            number of saved steps, as text, from a program with its own checkpoint format
    submitit/           pickles and results of callables
    attempts/<n>/       one start of the ranks: `run/attempt_records.py` draws it
        hostfile        line i is the node of rank i
        nodes/<node>/<dataset>.json     pit.stage-run/1: the staging of a dataset on that node
        ranks/<rank>.json               pit.rank/1: that rank's node, process and datasets
        steps/<rank>.jsonl              pit.step/1
        traces/                         `run/traces.py` draws it
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
from pitools.core.fs import make_parents, open_0644, open_regular, write_atomic
from pitools.core.locks import is_owned_by_user, owner_name
from pitools.core.record import Record, decode_json

T = TypeVar("T", bound=Record)
# By the site's `paths.runs_access`. A run's folder holds code that is executed, and logs with arbitrary content.
MODES = {"owner": 0o700, "group": 0o750}
_MAX_RECORD_BYTES = 64 << 20  # a user's file can have any size
_TRUST_GROUP = 'or, where that group may be trusted, [paths] runs_access = "group" in the site file'


class RunRecord(Record, frozen=True, kw_only=True, tag="pit.run/1"):
    """The state of a run.

    state: Slurm's job state (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, …); UNKNOWN if undetermined.
    exit_code: of the last attempt; None until its end. job_id: of the newest job, "" before submission. attempt: the
    newest attempt's name, "" before the first. attempts: their number. steps: the last logged step + 1; without a step
    log, the saved steps. cause, reason: why the run, or else its last attempt, ended. is_over: whether the run has its
    verdict; without one the run is continued, even after its job ended. cancel_requested: time of a request to cancel
    that is not yet carried out, else "". pending_reason, expected_start: Slurm's, of a pending job; else "". params:
    the request's parameters. loss: of the last logged step.
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
    cancel_requested: str = ""
    pending_reason: str = ""
    expected_start: str = ""
    params: dict[str, str | int | float | bool] = {}
    loss: float | None = None


class JobRef(Record, frozen=True, kw_only=True, tag="pit.job-ref/1"):
    """A run's job or, for a local run, supervisor process.

    cluster: its ClusterName, "" if unknown: job ids are unique only within a cluster. job_number: position among the
    run's jobs, or supervisors, from 0. host, pid, start_ticks: of a local run's supervisor, else "" and 0; start_ticks:
    its start in clock ticks since that host's boot (field 22 of /proc/<pid>/stat).
    """

    job_id: str
    site: str
    submitted: str
    cluster: str = ""
    job_number: int = 0
    host: str = ""
    pid: int = 0
    start_ticks: int = 0


class AttemptExit(Record, frozen=True, kw_only=True, tag="pit.attempt-exit/1"):
    """How one attempt ended. state: as a Slurm job state, where no query is needed (local runs), else ""."""

    job_id: str
    exit_code: int
    ended: str
    state: str = ""


class RankRecord(Record, frozen=True, kw_only=True, tag="pit.rank/1"):
    """Where one rank ran. coordinator: rank 0's `address:port`. data: dataset name → folder that the rank reads.

    oom_kills: the node's count of OOM kills before the start (`oom_kill` in /proc/vmstat); None if unavailable. t: when
    the rank's program was about to begin.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    pid: int
    coordinator: str
    data: dict[str, str]
    oom_kills: int | None = None
    t: str = ""


class Event(Record, frozen=True, kw_only=True, tag="pit.event/1"):
    """One change to the run."""

    t: str
    event: str
    detail: dict[str, Any] = {}


class RunNotFound(UsageError):
    """No run has the given id. suggestions: similar ids, the likeliest first."""

    def __init__(self, message: str, *, where: str = "", hint: str = "", suggestions: Sequence[str] = ()) -> None:
        super().__init__(message, where=where, hint=hint)
        self.suggestions = tuple(suggestions)


def new_run_id(name: str) -> str:
    """Return a unique run id that sorts by time: `bc-jax-20261121-013341-9f3c2a`."""
    stamp = timestamps.now_rfc3339()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return f"{name}-{stamp}-{secrets.token_hex(3)}"


def make_run_dir(path: Path, access: str) -> None:
    """Make a run's folder and its parents, readable by the owner alone or, with access "group", by its group as well.

    Raises OSError, and ConfigError where others could replace the folder.
    """
    make_parents(path, 0o777 if access == "group" else 0o755)
    path.mkdir(mode=0o700)
    # chmod, because of the umask. A set-group-ID bit inherited from the parent is kept.
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o777 | MODES[access])
    try:
        require_own_run(path, group_above=access == "group")
    except ConfigError:
        path.rmdir()
        raise


def run_dirs(root: Path) -> list[Path]:
    """Return the folders of all runs below a root, oldest first; [] without the root.

    Names that are not UTF-8 are left out: no record can hold them. So are links of other names, which would be runs
    once more. An unreadable folder (a stale file handle, unreachable storage) is included, so that reading it reports
    the error. Raises ClusterError where the root cannot be read.
    """
    try:
        names = [name for name in os.listdir(root) if _is_utf8(name) and not name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        message = f"cannot read this folder of runs: {os.strerror(error.errno or 0)}"
        raise ClusterError(message, where=str(root)) from error
    return [root / name for name in sorted(names, key=run_id_sort_key) if _has_plan(root / name)]


def count_closed(root: Path) -> int:
    """Return how many runs' folders below a root are closed to this user. Raises OSError."""
    with os.scandir(root) as entries:
        named = [one.path for one in entries if one.is_dir(follow_symlinks=False) and run_id_sort_key(one.name)[0]]
    return sum(not os.access(path, os.X_OK, effective_ids=True) for path in named)


def _is_utf8(name: str) -> bool:
    return not any("\ud800" <= sign <= "\udfff" for sign in name)  # os.listdir's signs of other bytes


def _has_plan(path: Path) -> bool:
    try:
        (path / "plan.json").stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # no run, or another user's
        return False
    except OSError:
        return True
    return not path.is_symlink() or path.resolve().name == path.name


def run_id_sort_key(run_id: str) -> tuple[str, str]:
    """Return a sort key of a run id: by creation time, after ids without one."""
    stamp = re.search(r"-(\d{8}-\d{6})-[0-9a-f]{6}$", run_id)
    return stamp[1] if stamp else "", run_id


def find_run(runs: Path, run: str) -> Path:
    """Return the folder of a run given by id or by path. Raises RunNotFound, UsageError, DataError."""
    for path in (runs / run, Path(run)):
        if (path / "plan.json").is_file():
            return path.resolve()
    incomplete = next((path for path in (runs / run, Path(run)) if run and (path / "request.toml").is_file()), None)
    if incomplete is not None:
        hint = _recovery_hint(incomplete.absolute())
        raise DataError("run folder: plan.json is missing", where=str(incomplete), hint=hint)
    if "/" in run:
        hint = "give a run's id, or its folder, which contains plan.json"
        raise UsageError(f'no run "{run}"', where=str(Path(run).absolute()), hint=hint)
    suggestions = suggest_ids(run, [path.parent.name for path in runs.glob("*/plan.json")])
    raise RunNotFound(f'no run "{run}"', where=str(runs), suggestions=suggestions)


def suggest_ids(run: str, run_ids: Collection[str]) -> list[str]:
    """Return the ids with the given prefix, newest first, or else the most similar id, if any."""
    matches = sorted((name for name in run_ids if run and name.startswith(run)), key=run_id_sort_key, reverse=True)
    return matches or [run_id for run_id in [most_similar(run, run_ids)] if run_id]


def _recovery_hint(run_dir: Path) -> str:
    """Return the commands for what a run without a plan still contains; of another user's none."""
    if not is_owned_by_user(run_dir):
        return f"it is {owner_name(run_dir)}'s: ask them"
    checkpoints = f"its checkpoints: pit checkpoint list {run_dir}/checkpoints"
    request = run_dir / "request.toml"
    return f"a new run of its request: pit launch run {request}; {checkpoints}" if request.is_file() else checkpoints


def require_safe_runs_dir(runs: Path, *, group: bool = False) -> None:
    """Raise ConfigError for a folder in which other users could replace this user's runs.

    group: whether folders that a group may write are accepted.
    """
    trust.require_trusted(runs, "folder of runs", group_above=group, inside=True, alternative=_TRUST_GROUP)


def require_own_run(run_dir: Path, *, group_above: bool = False) -> None:
    """Raise ConfigError for a run that other users made or could change: its code would run as this user.

    group_above: whether a group may write the folders above the run.
    """
    for name in ("", "plan.json", "script.sbatch", "code", "submitit", "jobs"):
        if not name or (run_dir / name).exists():
            trust.require_trusted(run_dir / name, "run folder", group_above=group_above, alternative=_TRUST_GROUP)


def attempt_dirs(run_dir: Path) -> list[Path]:
    """Return the folders of the run's attempts, oldest first."""
    # `<restart>`, or `<array task>.<restart>`: numbers sort as numbers.
    dirs = [path for path in (run_dir / "attempts").glob("*") if re.fullmatch(r"\d+(\.\d+)?", path.name)]
    return sorted(dirs, key=lambda path: [int(part) for part in path.name.split(".")])


def last_attempt(run_dir: Path) -> Path | None:
    """Return the run's newest attempt; None before its first."""
    return next(reversed(attempt_dirs(run_dir)), None)


def last_exit(run_dir: Path) -> AttemptExit | None:
    """Return the exit record of the run's newest attempt; None before its end, or if unreadable."""
    with contextlib.suppress(DataError, OSError):
        return read_record(last / "exit.json", AttemptExit) if (last := last_attempt(run_dir)) else None
    return None


def job_output_files(run_dir: Path) -> list[Path]:
    """Return the output files of the run's jobs, oldest first: ids sort as numbers."""

    def ids(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.stem)]

    return sorted(run_dir.glob("slurm-*.out"), key=lambda path: (ids(path), path.name))


def first_event(run_dir: Path) -> Event | None:
    """Return the first event of the run; None if unreadable."""
    with contextlib.suppress(OSError, msgspec.DecodeError), open_regular(run_dir / "events.jsonl") as file:
        return decode_json(file.readline(4096), Event)
    return None


def write_record(path: Path, record: Record, *, durable: bool = False) -> None:
    """Write one record atomically. durable: with fsync, so that the record survives a power failure."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(record) + b"\n", durable=durable)


def read_record(path: Path, kind: type[T]) -> T | None:
    """Return the record in a file; None without the file. Raises DataError, OSError."""
    try:
        with open_regular(path) as file:
            size = min(os.fstat(file.fileno()).st_size, _MAX_RECORD_BYTES)  # read() allocates what it is asked for
            return decode_json(file.read(size), kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ELOOP):  # a pipe, a link
            raise
        problem, hint = "damaged", f"move it away: mv {path} {path}.bad"
        if isinstance(error, msgspec.ValidationError):
            problem, hint = "written by another release of pitools", "use that release for this run"
        hint = _recovery_hint(path.parent) if path.name == "plan.json" else hint
        raise DataError(f"{problem} (expected {kind.__name__}: {error})", where=str(path), hint=hint) from error


def read_or_none(path: Path, kind: type[T]) -> T | None:
    """Return the record in a file; None without the file, or if unreadable."""
    with contextlib.suppress(DataError, OSError):
        return read_record(path, kind)
    return None


def record_created(run_dir: Path, site: str, *, ticket: bool = False) -> None:
    """Write the first event of a run, without which nothing continues the run. Raises OSError.

    ticket: see `is_ticket`.
    """
    _append_event(run_dir, "created", {"site": site, **({"ticket": True} if ticket else {})})


def is_ticket(run_dir: Path) -> bool:
    """Whether a run is of `pit place`: it has one job, whose script permits no other, and the queue decides on another
    run."""
    first = first_event(run_dir)
    return first is not None and bool(first.detail.get("ticket"))


def append_event(run_dir: Path, event: str, **detail: Any) -> None:
    """Append an event; if that fails, as on a full disk, the event is lost, and the caller goes on."""
    with contextlib.suppress(OSError):
        _append_event(run_dir, event, detail)


def _append_event(run_dir: Path, event: str, detail: dict[str, Any]) -> None:
    # One short write in append mode is not interleaved with another process's.
    with open(run_dir / "events.jsonl", "ab", buffering=0, opener=open_0644) as file:
        file.write(msgspec.json.encode(Event(t=timestamps.now_rfc3339(), event=event, detail=detail)) + b"\n")
