"""Query Slurm, or this machine's processes, for the state and the end of a run's jobs."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from pitools.core.errors import PitError, TryLater, UsageError
from pitools.launch import slurm_cache
from pitools.launch.probes import unreachable_nodes
from pitools.launch.submission import local_process
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow
from pitools.slurm.states import UNKNOWN, is_final

_TRIES, _PAUSE_S = 4, 0.5  # the job has only KillWait, often 30 s, for everything after its SIGTERM
_CLOCK_SLACK = timedelta(seconds=1)  # Slurm keeps whole seconds


def job_states(site: Site, refs: Sequence[run_folder.JobRef], *, max_age_s: float = math.inf) -> dict[str, str]:
    """Return job id → state, UNKNOWN for unknown jobs, by one query for all. Raises what querying raises."""
    if site.scheduler == "none":
        return {ref.job_id: _local_state(ref) for ref in refs}
    return slurm_cache.require_states(site, [ref.job_id for ref in refs], max_age_s=max_age_s) if refs else {}


def pending_info(site: Site, ids: Sequence[str]) -> dict[str, slurm_cache.CachedState]:
    """Return the cached pending reason and expected start of these jobs. Queries Slurm if the cache is due."""
    return slurm_cache.cached_states(site, ids) if ids and site.scheduler == "slurm" else {}


def _local_state(ref: run_folder.JobRef) -> str:
    is_alive = local_process.is_alive(ref)
    return UNKNOWN if is_alive is None else "RUNNING" if is_alive else "FAILED"


def orphan_pids(attempt: Path) -> list[int]:
    """Return the ids of this machine's processes that a killed supervisor of an attempt left, ascending.

    [] after an orderly end: processes that left the ranks' sessions by then, such as another run's supervisor, stay.
    """
    if (attempt / "exit.json").exists():
        return []
    # The supervisor may have reached the folder of runs through a link.
    real_path, marker = os.path.realpath(attempt), b"PIT_ATTEMPT_DIR="
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            values = [text for text in path.read_bytes().split(b"\0") if text.startswith(marker)]
            if any(os.path.realpath(os.fsdecode(text.removeprefix(marker))) == real_path for text in values):
                pids.append(int(path.parent.name))
    return sorted(pids)


def query_end(site: Site, job_id: str, state: str) -> AccountingRow | None:
    """Return how a job ended, by accounting, else by its final `state`; None if neither is known.

    Raises TryLater if accounting does not respond and `state` is not final.
    """
    return query_ends(site, {job_id: state})[job_id]


def query_ends(site: Site, states: Mapping[str, str]) -> dict[str, AccountingRow | None]:
    """Return job id → how the job ended, as `query_end`, by one sacct for all. states: job id → slurmctld's state."""
    rows: list[AccountingRow] = []
    if site.scheduler == "slurm" and states:
        try:
            rows = client(site).accounting(list(states), all_starts=False)
        except PitError as error:
            if isinstance(error, TryLater) and not all(map(is_final, states.values())):
                raise
    # The database may lag behind the controller.
    ends = {key: row for row in reversed(rows) if is_final(row.state) for key in (row.job_id, row.raw_id)}
    known = {
        job_id: AccountingRow(job_id=job_id, raw_id=job_id, state=state)
        for job_id, state in states.items()
        if site.scheduler == "slurm" and is_final(state)
    }
    return {job_id: ends.get(job_id) or known.get(job_id) for job_id in states}


def query_tasks(site: Site, array_id: str) -> dict[str, AccountingRow]:
    """Return task → accounting of its last start, of an array; {} if accounting does not respond."""
    with contextlib.suppress(PitError):
        rows = client(site).accounting([array_id], all_starts=False)
        return {row.job_id.removeprefix(f"{array_id}_"): row for row in rows}
    return {}


def is_queued_or_running(site: Site, job_id: str) -> bool:
    """Whether slurmctld reports the job as pending or running now. Raises what querying raises.

    Needed before another job continues a run: final states are cached, but Slurm can requeue an ended job.
    """
    state = current_state(site, job_id)
    return bool(state) and not is_final(state)


def current_state(site: Site, job_id: str) -> str:
    """Return slurmctld's state of the job, uncached, "" if unknown. Raises what querying raises."""
    return current_states(site, [job_id]).get(job_id, "")


def current_states(site: Site, ids: Collection[str]) -> dict[str, str]:
    """Return job id → slurmctld's state, uncached, by one squeue for all, without the jobs that it does not know."""
    jobs = client(site).jobs(list(ids), all_states=True) if site.scheduler == "slurm" and ids else []
    states: dict[str, str] = {}
    for job in jobs:  # of an array or a het job, each part
        for job_id in {job.raw_id, job.job_id, re.split(r"[_+]", job.job_id)[0]}.intersection(ids):
            states[job_id] = min(states.get(job_id, job.state), job.state, key=is_final)
    return states


def cancel_job(site: Site, job_id: str) -> None:
    """Cancel a job that is not to start any more. Raises what scancel raises."""
    client(site).cancel([job_id])


def record_lost_nodes(site: Site, attempt: Path) -> None:
    """Record which of the attempt's nodes Slurm reports as down, after a node's failure."""
    start = run_folder.read_record(attempt / "start.json", AttemptStart)
    if site.scheduler == "slurm" and start and start.node_list:
        unreachable_nodes.nodes_lost_by_slurm(attempt, start, client(site).transport)


def is_forgotten(site: Site, job_id: str) -> bool:
    """Whether slurmctld responds and does not know the job. False after a failed query.

    Call it repeatedly, minutes apart, before relying on it: a restarting slurmctld has no jobs yet.
    """
    try:
        return site.scheduler == "slurm" and not client(site).jobs([job_id], all_states=True)
    except (PitError, UsageError):
        return False


def query_termination(site: Site, job_id: str, started: str) -> AccountingRow | None:
    """Return the accounting of a job that is being terminated, between its SIGTERM and SIGKILL; None if not available.

    slurmctld reports to accounting without delay that a job was preempted, cancelled or out of time.
    started: the attempt's start, which tells this start of the job from those before a requeue.
    """
    since = datetime.fromisoformat(started)
    for _ in range(_TRIES):
        try:
            rows = client(site).accounting([job_id])
        except PitError:
            return None
        for row in reversed(rows):
            if (
                job_id in (row.job_id, row.raw_id)
                and row.end
                and datetime.fromisoformat(row.end) + _CLOCK_SLACK >= since
            ):
                return row
        time.sleep(_PAUSE_S)
    return None
