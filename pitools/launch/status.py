"""What a run is now: its folder first, Slurm only for what the folder cannot say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pitools.core.errors import ConfigError, DataError, TryLater
from pitools.launch import local
from pitools.launch.plan import Plan
from pitools.run import folder, steps
from pitools.site.connect import client
from pitools.site.model import Site
from pitools.slurm.states import UNKNOWN, is_finished

_FIRST_POLL_S, _LAST_POLL_S = 2.0, 30.0


def plan_of(run_dir: Path) -> Plan:
    """The plan a run was made from. Raises DataError."""
    plan = folder.read(run_dir / "plan.json", Plan)
    if plan is None:
        raise DataError("not a run: it has no plan.json", where=str(run_dir))
    return plan


def show(run_dir: Path, site: Site, *, ask: bool = True) -> folder.Run:
    """The run's record. `ask=False` never calls Slurm: the state is then what the folder says, or UNKNOWN."""
    plan = plan_of(run_dir)
    job = folder.read(run_dir / "job.json", folder.JobRef)
    made = folder.attempts(run_dir)
    ended = _end(made)
    state = _state(site, job, ended, started=bool(made), ask=ask)
    if is_finished(state) and not ended:
        # It ended while Slurm was asked.
        made = folder.attempts(run_dir)
        ended = _end(made)
    return folder.Run(
        run_id=run_dir.name,
        name=plan.name,
        site=plan.site,
        job_id=job.job_id if job else "",
        run_dir=str(run_dir),
        state=state,
        exit_code=ended.exit_code if ended and is_finished(state) else None,
        nodes=plan.job.nodes,
        created=job.submitted if job else "",
        attempts=len(made),
    )


def _end(made: list[Path]) -> folder.Attempt | None:
    return folder.read(made[-1] / "exit.json", folder.Attempt) if made else None


def _state(site: Site, job: folder.JobRef | None, ended: folder.Attempt | None, *, started: bool, ask: bool) -> str:
    if job is None:
        return UNKNOWN
    if ended and (ended.state or ended.exit_code == 0):
        return ended.state or "COMPLETED"
    if site.scheduler == "none":
        if local.alive(job):
            return "RUNNING" if started else "PENDING"
        return "FAILED"
    if not ask:
        return "RUNNING" if started and not ended else UNKNOWN
    state = client(site).state_of([job.job_id])[job.job_id]
    # Where there is no accounting, Slurm forgets a job minutes after its end; its folder does not.
    return "FAILED" if state == UNKNOWN and ended else state


def wait(run_dir: Path, site: Site, seen: Callable[[int], None]) -> folder.Run:
    """Wait until the run has ended; `seen` gets the number of new steps of rank 0.

    The folder is looked at twice a second, Slurm at a growing interval of up to 30 s. Slurm out of reach is waited
    through: it says nothing about the run.
    """
    poll_s, asked = _FIRST_POLL_S, time.monotonic()
    log, shown = StepCount(), 0
    run = show(run_dir, site, ask=False)
    while not is_finished(run.state):
        time.sleep(0.5)
        made = folder.attempts(run_dir)
        if made and (new := log.count(made[-1] / "steps" / "0.jsonl") - shown) > 0:
            seen(new)
            shown += new
        run = show(run_dir, site, ask=False)
        ended = bool(made) and (made[-1] / "exit.json").exists()
        if not is_finished(run.state) and time.monotonic() - asked > (_FIRST_POLL_S if ended else poll_s):
            asked, poll_s = time.monotonic(), min(poll_s * 1.5, _LAST_POLL_S)
            try:
                run = show(run_dir, site)
            except TryLater:
                continue
    return run


class StepCount:
    """Counts the lines of a growing file, reading each byte once."""

    def __init__(self) -> None:
        self._path, self._at, self._lines = Path(), 0, 0

    def count(self, path: Path) -> int:
        """Whole lines so far; starts again when the path changes."""
        if path != self._path:
            self._path, self._at, self._lines = path, 0, 0
        if path.is_file():
            with path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
            self._at += len(data)
            self._lines += data.count(b"\n")
        return self._lines


def summary(run_dir: Path) -> steps.Summary | None:
    """What the step logs of the last attempt add up to."""
    made = folder.attempts(run_dir)
    return steps.summarize(steps.read(path) for path in (made[-1] / "steps").glob("*.jsonl")) if made else None


def cancel(run_dir: Path, site: Site) -> None:
    """End the run's job; a run that has ended is left alone. Raises ConfigError when there is no job."""
    job = folder.read(run_dir / "job.json", folder.JobRef)
    if job is None:
        raise ConfigError("the run has no job", where=str(run_dir))
    folder.note(run_dir, "cancel", job_id=job.job_id)
    if site.scheduler == "none":
        local.cancel(job)
    else:
        client(site).cancel([job.job_id])
