"""A job looked for by its name, when sbatch did not live to tell its id."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pitools.core.errors import PitError, TryLater
from pitools.launch.submission import grant
from pitools.run import run_folder
from pitools.slurm.client import Client
from pitools.slurm.errors import Unanswered

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.25, 5.0
_DIGESTS_S = 30.0  # where the controller does not say
_CLOCKS_APART = timedelta(hours=1)


def look(
    slurm: Client, name: str, path: Path, *, intended: datetime, over_s: float, until: float, doubt: Unanswered
) -> str | None:
    """The id of the job that Slurm shows under a name; None when it has had the time to show one and has none.

    Args:
        path: the job's folder in its run, where several jobs of the name settle which of them runs.
        intended: since when there may be one.
        over_s: for how long sbatch has certainly been over.
        until: when to give up (time.monotonic); it is looked once in any case.
        doubt: raised then.
    """
    settled, pause = 0.0, _FIRST_LOOK_S
    while True:
        # No failure to ask, of whatever kind, says that the job is not there.
        with contextlib.suppress(PitError, OSError):
            now = time.monotonic()
            if found := _in_queue(slurm, name, path):
                return found
            settled = settled or now + _digests_s(slurm) - over_s
            if now >= settled:
                return _in_accounts(slurm, name, intended)
        if time.monotonic() + pause > until:
            hint = "run the same command again: it looks for the job first"
            raise Unanswered(doubt.what, where=doubt.where, hint=hint) from doubt
        time.sleep(pause * random.uniform(0.75, 1.0))  # noqa: S311
        pause = min(2 * pause, _LONGEST_LOOK_S)


def _digests_s(slurm: Client) -> float:
    """How long slurmctld may take over a request whose sender has given up."""
    try:
        return float(slurm.config().values.get("MessageTimeout", "").split()[0])
    except (ValueError, IndexError):
        return _DIGESTS_S


def _in_queue(slurm: Client, name: str, path: Path) -> str | None:
    known = slurm.jobs(user=slurm.user(), name=name, all_states=True)
    ids = sorted({job.raw_id for job in known}, key=int)
    if len(ids) < 2:
        return ids[0] if ids else None
    first = _first(path, ids)
    if waiting := sorted({job.raw_id for job in known if job.state == "PENDING"} - {first}, key=int):
        slurm.cancel(waiting)
    run_folder.note(path.parent.parent, "doubled", kept=first, cancelled=waiting)
    return first


def _first(path: Path, ids: Sequence[str]) -> str:
    """Which of several may run: the one that has leave, or else the lowest, which gets it here."""
    held = grant.granted_job_id(grant.take(path, grant.word(ids[0])))
    return held if held in ids else ids[0]


def _in_accounts(slurm: Client, name: str, intended: datetime) -> str | None:
    since = intended.astimezone(UTC) - _CLOCKS_APART
    try:
        known = slurm.accounting(user=slurm.user(), name=name, since=since, attempts=False)
    except TryLater:
        raise
    except PitError:  # none are kept here: the queue's word is all there is
        return None
    return min((job.raw_id for job in known), key=int, default=None)
