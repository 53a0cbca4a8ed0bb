"""What a tick does at one site: take tickets back, and place new ones. Each act is safe to repeat.

Every intent is in the job's journal before the act. What is not certain to have gone well is left as it is written
there: the next tick looks first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, UsageError
from pitools.launch.plan import Plan
from pitools.launch.tickets import remote, shared_fs
from pitools.launch.tickets.ticket_state import Seen
from pitools.place.dispatch import options, wait_log
from pitools.place.dispatch.journal import Job, Ticket, What
from pitools.place.dispatch.reconcile import Board
from pitools.place.types import Place
from pitools.run.run_folder import JobRef
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import Unanswered

MOST = 32  # submissions to one site in one tick


class Hands(Protocol):
    """What can be done with the tickets of a site: see launch/tickets/shared_fs.py."""

    def submit(self, plan: Plan, site: Site, *, name: str) -> JobRef: ...  # noqa: D102
    def state(self, site: Site, names: Sequence[str]) -> dict[str, Seen]: ...  # noqa: D102
    def take_back(self, site: Site, names: Sequence[str]) -> dict[str, bool]: ...  # noqa: D102
    def cancel(self, site: Site, jobs: Mapping[str, str]) -> None: ...  # noqa: D102
    def forget(self, site: Site, names: Sequence[str]) -> None: ...  # noqa: D102


def hands(site: Site) -> Hands:
    """Those of a site on this machine's own network, or of one that is far."""
    return remote if site.reach.kind == "ssh" else shared_fs


def fetch(board: Board, site: Site, due: Sequence[tuple[Job, Ticket]]) -> None:
    """Bring what these tickets' runs have left to tell into the jobs' folders. Raises Unreachable."""
    for job, ticket in due:
        why = ""
        try:
            if site.reach.kind == "ssh":
                remote.fetch(site, ticket.name, Path(job.path) / "run")
        except (ClusterError, DataError) as error:
            why = f"its logs stay at {site.name}: {error}"
        board.note(job, What.SWEPT, ticket.n, why=why)


def take_back(board: Board, site: Site, due: Sequence[tuple[Job, Ticket]]) -> None:
    """Make sure that these tickets never run, then take them out of the site's queue.

    One that has leave already stays, and is the job's. Raises Unreachable, with all as it was written before.
    """
    if not due:
        return
    for job, ticket in due:
        if ticket.state != "taken":
            board.note(job, What.WITHDRAW, ticket.n)
    taken = hands(site).take_back(site, [ticket.name for _, ticket in due])
    for job, ticket in due:
        if taken[ticket.name]:
            board.note(job, What.VOID, ticket.n)
        else:
            board.note(job, What.STARTED, ticket.n, why="it had begun already")
    # Out of the queue as well; if that fails now, the next tick finds it void and yet in the queue.
    end(site, {ticket.slurm_id: ticket.name for _, ticket in due if taken[ticket.name] and ticket.slurm_id})


def end(site: Site, jobs: Mapping[str, str]) -> None:
    """End tickets' jobs, id → name. Safe to repeat."""
    if jobs:
        hands(site).cancel(site, jobs)


def lift(site: Site, due: Sequence[tuple[Job, str]]) -> None:
    """Let tickets, (job, id in Slurm), start wherever they fit. Safe to repeat. Raises Unreachable."""
    for job, slurm_id in due:
        with contextlib.suppress(ClusterError):  # it has started meanwhile
            wanted = job.asked.request
            client(site).update(slurm_id, exclude=wanted.exclude, nodelist=wanted.nodelist)


def place(
    board: Board, site: Site, decisions: Sequence[Place], *, deadline: float, placed: Callable[[Place, str], None]
) -> None:
    """Submit what was decided, in its order, until MOST or the deadline (time.monotonic). Raises Unreachable.

    placed: is told of each that is in the queue, and its ticket's name.
    """
    for decision in decisions[:MOST]:
        if time.monotonic() > deadline:
            return
        job = board.jobs[decision.job_id]
        partition = decision.pool.partition("/")[2]
        try:
            planned = options.plan(job, site, partition)
        except (ConfigError, DataError, UsageError) as error:
            board.note(job, What.REFUSED, pool=decision.pool, why=str(error))
            continue
        if name := _submit(board, site, job, decision, planned):
            placed(decision, name)


def _submit(board: Board, site: Site, job: Job, decision: Place, plan: Plan) -> str:
    """The name of the ticket; "" where it was refused."""
    job, ticket = board.intend(job.job_id, decision.pool, decision.why)
    try:
        ref = hands(site).submit(plan, site, name=ticket.name)
    except Unanswered:
        raise
    except PitError as error:
        # Slurm says that it has not got it. Should that be wrong, the job finds that it has no leave.
        hands(site).take_back(site, [ticket.name])
        is_refused = isinstance(error, (ClusterError, ConfigError, DataError, UsageError))
        board.note(job, What.REFUSED if is_refused else What.VOID, ticket.n, pool=decision.pool, why=str(error))
        if not is_refused:
            raise
        return ""
    board.note(job, What.SUBMITTED, ticket.n, slurm_id=ref.job_id)
    if isinstance(ref, remote.Sent) and ref.data_bytes:
        wait_log.moved(site.name, ref.data_bytes, ref.data_s)
    return ticket.name
