"""What a run is now: its folder first, Slurm only for what the folder cannot say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core.errors import ConfigError, DataError, TryLater
from pitools.launch import local
from pitools.launch.plan import Plan
from pitools.run import folder, steps
from pitools.site.connect import client
from pitools.site.model import Site
from pitools.slurm.states import UNKNOWN, is_finished

_FIRST_POLL_S, _LAST_POLL_S = 2.0, 30.0
_LOST_AFTER = 6  # answers in a row, over a minute or more


def plan_of(run_dir: Path) -> Plan:
    """The plan a run was made from. Raises DataError."""
    plan = folder.read(run_dir / "plan.json", Plan)
    if plan is None:
        raise DataError("not a run: it has no plan.json", where=str(run_dir))
    return plan


def show(run_dir: Path, site: Site, *, ask: bool = True) -> folder.Run:
    """The run's record. `ask=False` never calls Slurm: the state is then what the folder says, or UNKNOWN."""
    (run,) = show_all([run_dir], site, ask=ask)
    return run


def show_all(run_dirs: Sequence[Path], site: Site, *, ask: bool = True) -> list[folder.Run]:
    """The records of runs of one site, for which Slurm is asked once at most. Raises DataError for what is no run."""
    seen = [_Seen.of(run_dir) for run_dir in run_dirs]
    said = {one.job.job_id: _of_folder(site, one) for one in seen if one.job}
    open_ids = [job_id for job_id, state in said.items() if not is_finished(state)]
    if ask and open_ids and site.scheduler == "slurm":
        said |= client(site).state_of(open_ids)
        seen = [_Seen.of(one.run_dir) for one in seen]  # a run may have ended while Slurm was asked
    return [_record(one, said.get(one.job.job_id, UNKNOWN) if one.job else UNKNOWN) for one in seen]


class _Seen(NamedTuple):
    """What a run's folder holds at one moment."""

    run_dir: Path
    plan: Plan
    job: folder.JobRef | None
    attempts: int
    ended: folder.Attempt | None

    @classmethod
    def of(cls, run_dir: Path) -> _Seen:
        made = folder.attempts(run_dir)
        ended = folder.read(made[-1] / "exit.json", folder.Attempt) if made else None
        return cls(run_dir, plan_of(run_dir), folder.read(run_dir / "job.json", folder.JobRef), len(made), ended)


def _of_folder(site: Site, seen: _Seen) -> str:
    """The state as far as the folder knows it: a job that Slurm may have requeued has not ended for certain."""
    if seen.ended and (seen.ended.state or seen.ended.exit_code == 0):
        return seen.ended.state or "COMPLETED"
    if site.scheduler == "none" and seen.job:
        alive = local.alive(seen.job)
        return UNKNOWN if alive is None else "FAILED" if not alive else "RUNNING" if seen.attempts else "PENDING"
    return "RUNNING" if seen.attempts and not seen.ended else UNKNOWN


def _record(seen: _Seen, state: str) -> folder.Run:
    if state == UNKNOWN and seen.ended:
        # Where there is no accounting, Slurm forgets a job minutes after its end; its folder does not.
        state = "FAILED"
    return folder.Run(
        run_id=seen.run_dir.name,
        name=seen.plan.name,
        site=seen.plan.site,
        job_id=seen.job.job_id if seen.job else "",
        run_dir=str(seen.run_dir),
        state=state,
        exit_code=seen.ended.exit_code if seen.ended and is_finished(state) else None,
        nodes=seen.plan.job.nodes,
        created=seen.job.submitted if seen.job else "",
        attempts=seen.attempts,
    )


class Watch:
    """Looks at a run until it has ended: its folder each time, Slurm at a growing interval of up to 30 s.

    Slurm out of reach is waited through: it says nothing about the run. A job that Slurm, asked again and again, does
    not know has ended without a word: `lost` is then true.
    """

    def __init__(self, run_dir: Path, site: Site) -> None:
        self._run_dir, self._site = run_dir, site
        self._poll_s, self._asked, self._unknown = _FIRST_POLL_S, time.monotonic(), 0

    @property
    def lost(self) -> bool:
        """Whether to stop waiting."""
        return self._unknown >= _LOST_AFTER

    def look(self) -> folder.Run:
        """The run now."""
        run = show(self._run_dir, self._site, ask=False)
        # Its script has ended: what Slurm makes of that (failed, requeued, timed out) is known at once.
        ended = run.state == "FAILED" and self._site.scheduler == "slurm"
        due = time.monotonic() - self._asked > (_FIRST_POLL_S if ended else self._poll_s)
        if is_finished(run.state) and not ended:
            return run
        if due:
            self._asked, self._poll_s = time.monotonic(), min(self._poll_s * 1.5, _LAST_POLL_S)
            try:
                run = show(self._run_dir, self._site)
            except TryLater:
                return msgspec.structs.replace(run, state=UNKNOWN)
            self._unknown = self._unknown + 1 if run.state == UNKNOWN else 0
            return run
        return msgspec.structs.replace(run, state=UNKNOWN) if ended else run


def wait(run_dir: Path, site: Site, seen: Callable[[int], None]) -> folder.Run:
    """Wait until the run has ended, or is lost; `seen` gets the number of new steps of rank 0."""
    watch, log, shown = Watch(run_dir, site), StepCount(), 0
    while True:
        run = watch.look()
        made = folder.attempts(run_dir)
        if made and (new := log.count(made[-1] / "steps" / "0.jsonl") - shown) > 0:
            seen(new)
            shown += new
        if is_finished(run.state) or watch.lost:
            return run
        time.sleep(0.5)


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
    if site.scheduler == "none":
        local.cancel(job)
    else:
        client(site).cancel([job.job_id])
    folder.note(run_dir, "cancel", job_id=job.job_id)
