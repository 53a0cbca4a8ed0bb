"""Jobs that ended before their first attempt: why, and where that is kept.

jobs/<k>/cause.json             of the run's k-th job
unbegun/<k>/cause.json          of a local run's k-th supervisor: a local run has no `jobs/`
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pitools.core.errors import DataError
from pitools.launch import jobs
from pitools.run import folder
from pitools.run.attempt import Cause


def path(run_dir: Path, ref: folder.JobRef) -> Path:
    """Return the file that says why a job began no attempt."""
    # Not in `jobs/`, by which a job knows that it has to ask for leave.
    at = run_dir / "unbegun" / str(ref.number) if ref.host else jobs.at(run_dir, ref.number)
    return at / "cause.json"


def causes(run_dir: Path) -> list[tuple[int, Cause]]:
    """Return the jobs of a run that are known to have begun no attempt, as (number, why), oldest first."""
    found = []
    for at in (*run_dir.glob("jobs/*/cause.json"), *run_dir.glob("unbegun/*/cause.json")):
        with contextlib.suppress(DataError, OSError):
            if at.parent.name.isdecimal() and (cause := folder.read(at, Cause)):
                found.append((int(at.parent.name), cause))
    return sorted(found, key=lambda one: one[0])
