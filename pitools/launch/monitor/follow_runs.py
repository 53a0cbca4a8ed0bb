"""Runs followed, and continued where that is due, until all of them are over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core.errors import PitError, TryLater
from pitools.core.locks import is_owned_by_user
from pitools.launch.monitor import status
from pitools.run import run_folder
from pitools.run.run_folder import RunRecord
from pitools.site.schema import Site
from pitools.slurm.states import UNKNOWN, is_finished

if TYPE_CHECKING:
    from rich.table import Table

_POLL_S = 2.0
_MAX_MESSAGES = 8
_RESUME_AGAIN_S = 30.0  # between two tries to continue one run


def poll_runs(
    run_dirs: Sequence[Path], site: Site, report: Callable[[str], None], *, every_s: float = _POLL_S
) -> Iterator[list[RunRecord]]:
    """The runs' records every few seconds, until all are over. Continues those that are due; tells what went wrong.

    Slurm out of reach is waited through. A job that Slurm holds until somebody releases it is not waited for.
    """
    tried: dict[str, float] = {}
    told: set[str] = set()
    began = time.monotonic()

    def once(text: str) -> None:
        if text not in told:
            told.add(text)
            report(text)

    def broken(run_dir: Path, error: PitError) -> None:
        once(f"{run_dir.name}: {error}")

    while True:
        try:
            found = status.run_statuses(run_dirs, site, report_error=broken)
        except TryLater as error:
            report(str(error))
            found = status.run_statuses(run_dirs, site, query_slurm=False, report_error=broken)
        yield found
        held = [run for run in found if status.is_still_held(run, site, began)]
        for run in held:
            released = status.held_error(run)
            once(f"{run.run_id}: {released.message}; {released.hint}")
        if all(run.is_over or run in held for run in found):
            return
        for run in found:
            if _is_due(run, site, tried):
                tried[run.run_id] = time.monotonic()
                _resume_run(Path(run.run_dir), site, report, once)
        time.sleep(every_s)


def _is_due(run: RunRecord, site: Site, tried: dict[str, float]) -> bool:
    if run.is_over or time.monotonic() - tried.get(run.run_id, -_RESUME_AGAIN_S) < _RESUME_AGAIN_S:
        return False
    # A job that Slurm has forgotten is looked at as well: `resume` knows when that means something.
    ended = is_finished(run.state) or (run.state == UNKNOWN and bool(run.job_id))
    return (ended or bool(run.cancel_requested) or status.may_be_held_back(run, site)) and is_owned_by_user(
        Path(run.run_dir)
    )


def _resume_run(run_dir: Path, site: Site, tell: Callable[[str], None], once: Callable[[str], None]) -> None:
    try:
        done = status.try_resume(run_dir, site, once)
    except PitError as error:
        tell(f"{run_dir.name}: {error}")
        return
    if done and done.action not in ("untouched", "already_ended"):
        tell(f"{run_dir.name}: {done.action}: {done.reason}")


def changed_runs(rounds: Iterator[list[RunRecord]]) -> Iterator[RunRecord]:
    """Each run when it is first seen, and whenever its state, job, attempt, cause or what it waits for has changed."""
    last: dict[str, tuple[object, ...]] = {}
    for runs in rounds:
        for run in runs:
            waits = (run.pending_reason, run.cancel_requested)
            now = (run.state, run.job_id, run.attempts, run.cause, run.is_over, waits)
            if last.get(run.run_id) != now:
                last[run.run_id] = now
                yield run


def live_table(runs: Sequence[RunRecord], messages: Sequence[str]) -> Table:
    """The runs as a table for a terminal, with the last things that were said below it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption_justify="left")
    for name in ("run", "state", "job", "attempt", "steps", "loss", "cause", "waits for", "expected start"):
        table.add_column(name, no_wrap=True, min_width=22 if name == "run" else None)
    for run in runs:
        last = run_folder.last_attempt(Path(run.run_dir))
        step = status.last_step(last) if last else None
        loss = f"{step.loss:.5g}" if step and step.loss is not None else ""
        # Reasons quote logs: nothing in them is markup.
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
