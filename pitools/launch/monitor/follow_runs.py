"""Follow runs until all have ended, and continue interrupted ones on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core.errors import PitError
from pitools.core.locks import is_owned_by_user
from pitools.launch.monitor import run_snapshot, status, wait
from pitools.launch.recovery import tick
from pitools.run import run_folder
from pitools.run.run_folder import RunRecord
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_final

if TYPE_CHECKING:
    from rich.table import Table

_POLL_S = 2.0
_MAX_MESSAGES = 8
_RESUME_AGAIN_S = 30.0  # between two attempts to continue one run


def poll_runs(
    run_dirs: Sequence[Path], site: Site, report: Callable[[str], None], *, every_s: float = _POLL_S
) -> Iterator[list[RunRecord]]:
    """Yield the runs' records every `every_s` seconds until all runs have ended, and continue interrupted runs.

    report: gets a line for each problem. An unreachable Slurm is reported and polled again. Ends earlier if all other
    runs wait for a job that Slurm holds until it is released.
    """
    tried_at: dict[str, float] = {}
    report_once = wait.report_once(set(), report)
    began = time.monotonic()

    def report_broken(run_dir: Path, error: PitError) -> None:
        report_once(f"{run_dir.name}: {error}")

    while True:
        try:
            runs = status.run_statuses(run_dirs, site, report_error=report_broken)
        except PitError as error:
            report_once(str(error))
            runs = status.run_statuses(run_dirs, site, query_slurm=False, report_error=report_broken)
        yield runs
        held_runs = [run for run in runs if wait.is_still_held(run, site, began)]
        for run in held_runs:
            hold = wait.held_error(run)
            report_once(f"{run.run_id}: {hold.message}; {hold.hint}")
        if all(run.is_over or run in held_runs for run in runs):
            return
        for run in runs:
            if _is_due(run, site, tried_at):
                tried_at[run.run_id] = time.monotonic()
                _resume_run(Path(run.run_dir), site, report, report_once)
        time.sleep(every_s)


def _is_due(run: RunRecord, site: Site, tried_at: dict[str, float]) -> bool:
    if run.is_over or time.monotonic() - tried_at.get(run.run_id, -_RESUME_AGAIN_S) < _RESUME_AGAIN_S:
        return False
    # Also for a job that Slurm has forgotten: `resume` decides when that means that it has ended.
    run_dir = Path(run.run_dir)
    ended = is_final(run.state) or (run.state == UNKNOWN and (bool(run.job_id) or tick.is_abandoned(run_dir)))
    return (ended or bool(run.cancel_requested) or wait.may_be_delayed(run, site)) and is_owned_by_user(run_dir)


def _resume_run(run_dir: Path, site: Site, report: Callable[[str], None], report_once: Callable[[str], None]) -> None:
    try:
        result = wait.try_resume(run_dir, site, report_once)
    except PitError as error:
        report(f"{run_dir.name}: {error}")
        return
    if result and result.action not in ("untouched", "already_ended"):
        report(f"{run_dir.name}: {result.action}: {result.reason}")


def changed_runs(rounds: Iterator[list[RunRecord]]) -> Iterator[RunRecord]:
    """Yield each run once at first, and after each change of its state, job, attempt, cause or reason to wait."""
    last_states: dict[str, tuple[object, ...]] = {}
    for runs in rounds:
        for run in runs:
            waits = (run.pending_reason, run.cancel_requested)
            run_state = (run.state, run.job_id, run.attempts, run.cause, run.is_over, waits)
            if last_states.get(run.run_id) != run_state:
                last_states[run.run_id] = run_state
                yield run


def live_table(runs: Sequence[RunRecord], messages: Sequence[str]) -> Table:
    """Return the runs as a table for a terminal, with the newest messages below it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption_justify="left")
    for name in ("run", "state", "job", "attempt", "steps", "loss", "cause", "waits for", "expected start"):
        table.add_column(name, no_wrap=True, min_width=22 if name == "run" else None)
    for run in runs:
        attempt = run_folder.last_attempt(Path(run.run_dir))
        step = run_snapshot.last_step(attempt) if attempt else None
        loss = f"{step.loss:.5g}" if step and step.loss is not None else ""
        # Reasons quote logs: Text keeps rich from reading them as markup.
        cells = (
            run.run_id,
            run.state,
            run.job_id,
            run.attempt,
            str(run.steps),
            loss,
            run.cause,
            run.pending_reason,
            run.expected_start,
        )
        table.add_row(*(Text(cell) for cell in cells))
    ended = [f"{run.run_id}: {run.cause}: {run.reason}" for run in runs if run.cause and run.state != "COMPLETED"]
    table.caption = Text("\n".join([*ended[-_MAX_MESSAGES:], *messages]))
    return table
