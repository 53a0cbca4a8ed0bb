"""What Slurm says of a run's newest job: its state, and how it ended."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
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
from pitools.slurm.states import UNKNOWN, is_finished

_TRIES, _PAUSE_S = 4, 0.5  # the job has KillWait, often 30 s, for all that it still wants to do
_CLOCK_SLACK = timedelta(seconds=1)  # Slurm keeps whole seconds


def job_states(site: Site, refs: Sequence[run_folder.JobRef], *, max_age_s: float = math.inf) -> dict[str, str]:
    """Job id → state, UNKNOWN where nobody knows; one question for all. Raises what asking raises."""
    if site.scheduler == "none":
        return {ref.job_id: _local_state(ref) for ref in refs}
    return slurm_cache.require_states(site, [ref.job_id for ref in refs], max_age_s=max_age_s) if refs else {}


def pending_info(site: Site, ids: Sequence[str]) -> dict[str, slurm_cache.CachedState]:
    """Why these jobs wait, and when they are expected to start, as Slurm said last. Asks for nothing that is known."""
    return slurm_cache.cached_states(site, ids) if ids and site.scheduler == "slurm" else {}


def _local_state(ref: run_folder.JobRef) -> str:
    lives = local_process.is_alive(ref)
    return UNKNOWN if lives is None else "RUNNING" if lives else "FAILED"


def orphan_pids(attempt: Path) -> list[int]:
    """Ids of this machine's processes that were started for an attempt, as `kill -9` of its supervisor leaves them.

    None after an orderly end: what left the ranks' sessions by then, such as another run's supervisor, is its own.
    """
    if (attempt / "exit.json").exists():
        return []
    mark = f"PIT_ATTEMPT_DIR={attempt}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return sorted(found)


def accounting_row(site: Site, job_id: str, state: str) -> AccountingRow | None:
    """How a job ended, as accounting has it; without accounting its last state; None where neither is known.

    Raises TryLater where only accounting can know, and does not answer.
    """
    if site.scheduler == "none":
        return None
    try:
        known = [one for one in client(site).accounting([job_id], attempts=False) if one.raw_id == job_id]
    except PitError as error:
        if isinstance(error, TryLater) and not is_finished(state):
            raise
        known = []
    # The database may lag behind the controller.
    ended = next((one for one in known if is_finished(one.state)), None)
    return ended or (AccountingRow(job_id=job_id, raw_id=job_id, state=state) if is_finished(state) else None)


def is_queued_or_running(site: Site, job_id: str) -> bool:
    """Whether slurmctld, asked now, has the job waiting or running. Raises what asking raises.

    To be asked before a run goes on elsewhere: a state that was final once is kept, and what has ended can be put back.
    """
    state = current_state(site, job_id)
    return bool(state) and not is_finished(state)


def current_state(site: Site, job_id: str) -> str:
    """The state that slurmctld, asked now, has of the job, "" where it has none. Raises what asking raises."""
    known = client(site).jobs([job_id], all_states=True) if site.scheduler == "slurm" else []
    return min((job.state for job in known), key=is_finished, default="")


def cancel_job(site: Site, job_id: str) -> None:
    """Take a job out of the queue that is not to begin any more. Raises what asking raises."""
    client(site).cancel([job_id])


def record_lost_nodes(site: Site, attempt: Path) -> None:
    """After a node's failure: write down which of the attempt's nodes it was, as far as Slurm can still tell."""
    start = run_folder.read_record(attempt / "start.json", AttemptStart)
    if site.scheduler == "slurm" and start and start.node_list:
        unreachable_nodes.nodes_lost_by_slurm(attempt, start, client(site).transport)


def is_forgotten(site: Site, job_id: str) -> bool:
    """Whether slurmctld answers and does not have the job: it neither waits nor runs. False where it cannot be asked.

    To be asked more than once, and minutes apart, before anything rests on it.
    """
    try:
        return site.scheduler == "slurm" and not client(site).jobs([job_id], all_states=True)
    except (PitError, UsageError):
        return False


def termination_reason(site: Site, job_id: str, started: str) -> AccountingRow | None:
    """What ends the job that asks, between its SIGTERM and its SIGKILL; None where Slurm does not say.

    slurmctld tells accounting at once that a job was preempted, cancelled or out of time. started: when the attempt
    began, to tell this start of the job from those before a requeue.
    """
    since = datetime.fromisoformat(started)
    for _ in range(_TRIES):
        try:
            known = client(site).accounting([job_id])
        except PitError:
            return None
        for one in reversed(known):
            if one.raw_id == job_id and one.end and datetime.fromisoformat(one.end) + _CLOCK_SLACK >= since:
                return one
        time.sleep(_PAUSE_S)
    return None
