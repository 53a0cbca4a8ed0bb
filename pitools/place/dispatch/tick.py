"""One tick: look at every site, write down what was seen, take tickets back, decide, submit.

It may be killed anywhere: what it was about to do stands in the jobs' journals, and the next tick looks for it first.
A site that is silent, or refuses, stops nothing at the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.launch.tickets.ticket_state import Seen
from pitools.place.clusters.parallel import Answer, Asking, fault
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.clusters.snapshot import read as read_snapshot
from pitools.place.dispatch import planner, status, store, tickets
from pitools.place.dispatch.journal import Job, Ticket, What
from pitools.place.dispatch.reconcile import Board, Due, settle
from pitools.place.dispatch.wait_log import Foretelling
from pitools.place.types import Place, Withdraw
from pitools.site.load import load
from pitools.site.schema import Site

LOOK_S = 20.0  # for the looks at all sites together
MAX_AGE_S = 15.0  # how old a site's state may be, our own jobs apart
ACT_S = 60.0  # for what is done at all sites together
FAILOVER_S = 120.0
QUEUED = ("intended", "waiting", "taken")
D = TypeVar("D", Place, Withdraw)


class Look(NamedTuple):
    """What one site said: its tickets, and the site as a whole where that was wanted."""

    seen: dict[str, Seen]
    snapshot: Snapshot | None


class Ticker:
    """Ticks over one queue. Keeps between ticks only what would be found again without it."""

    def __init__(self, place: Path, decide: planner.Decide) -> None:
        self.place = place
        self._asking: Asking[Look] = Asking()
        self._decider = planner.Decider(decide, place)

    def tick(self) -> status.Ticked | None:
        """Tick once; None where another tick is at work. Raises ClusterError for a queue that cannot be written."""
        with store.locked(self.place) as is_ours:
            return self._tick() if is_ours else None

    def _tick(self) -> status.Ticked:
        board = Board(self.place)
        sites, faults = self._sites(board)
        asked = timestamps.now()
        answers = self._asking.ask({name: self._question(board, site) for name, site in sites.items()}, LOOK_S)
        looks = {name: one.said for name, one in answers.items() if isinstance(one.said, Look)}
        faults |= {name: one.said for name, one in answers.items() if isinstance(one.said, PitError)}
        rows = {row.site: row for row in status.sites(self.place).sites}
        due = {
            name: settle(board, name, _text(answers[name]), look.seen, _up_since(rows.get(name), asked))
            for name, look in looks.items()
        }
        # Since when each is silent that was silent before; what goes wrong from here on is no silence.
        silent = {name: row.since if (row := rows.get(name)) and row.state == "dark" else asked for name in faults}
        self._clear(board, sites, due, faults)
        self._take_back(board, sites, due, silent, faults)
        world = self._decider.see(board, sites, {name: look for name, look in looks.items() if name not in faults})
        self._do(board, sites, world, planner.Wanted([], self._decider.moves(board, world)), faults)
        self._do(board, sites, world, self._decider.decide(board, world), faults)
        _cancelled(board)
        board.put_away()
        store.prune(self.place)
        return status.write(self.place, board, asked, world.pools, faults, looks, self._decider.unfit(board))

    def _sites(self, board: Board) -> tuple[dict[str, Site], dict[str, PitError]]:
        """The sites that this tick has to do with."""
        sites: dict[str, Site] = {}
        faults: dict[str, PitError] = {}
        for job in board.jobs.values():
            names = {ticket.site for ticket in job.tickets if not ticket.is_swept}
            if not job.is_over and not any(ticket.is_running for ticket in job.tickets):
                names.update(job.asked.sites)
            for name in names - sites.keys() - faults.keys():
                try:
                    sites[name] = load(name)
                except PitError as error:
                    faults[name] = error
        return sites, faults

    def _question(self, board: Board, site: Site) -> Callable[[float], Look]:
        names = [ticket.name for _, ticket in board.tickets(site.name)]
        waiting = any(planner.is_open(job) and site.name in job.asked.sites for job in board.jobs.values())

        def look(left_s: float) -> Look:
            snapshot = read_snapshot(site, timeout_s=left_s, max_age_s=MAX_AGE_S) if waiting else None
            return Look(tickets.hands(site).state(site, names) if names else {}, snapshot)

        return look

    def _clear(
        self, board: Board, sites: Mapping[str, Site], due: Mapping[str, Due], faults: dict[str, PitError]
    ) -> None:
        """Bring home what has ended, clear away what never began, and leave no nodes chosen for what begins anew."""

        def act(name: str) -> None:
            tickets.fetch(board, sites[name], due[name].fetch)
            if due[name].gone:
                tickets.hands(sites[name]).forget(sites[name], due[name].gone)
            tickets.lift(sites[name], due[name].lift)

        _each([name for name, one in due.items() if one.fetch or one.gone or one.lift], act, faults)

    def _take_back(
        self,
        board: Board,
        sites: Mapping[str, Site],
        due: Mapping[str, Due],
        silent: Mapping[str, str],
        faults: dict[str, PitError],
    ) -> None:
        """Take back what its site asked for, and what nobody wants any more; end what is in the way."""
        _give_up_lost(board, silent)
        take = {name: list(one.take) for name, one in due.items()}
        ends = {name: dict(one.end) for name, one in due.items()}
        known = {(job.job_id, ticket.n) for pairs in take.values() for job, ticket in pairs}
        for job in board.jobs.values():
            for ticket in [*_unwanted(job), *_stranded(job, silent)]:
                if (job.job_id, ticket.n) not in known and ticket.site in sites:
                    take.setdefault(ticket.site, []).append((job, ticket))
            if job.is_cancelled:
                for ticket in job.live:
                    if ticket.is_running and ticket.slurm_id and ticket.site in due:
                        ends.setdefault(ticket.site, {})[ticket.slurm_id] = ticket.name

        def act(name: str) -> None:
            tickets.take_back(board, sites[name], take.get(name, ()))
            tickets.end(sites[name], ends.get(name, {}))

        _each(take.keys() | ends.keys(), act, faults)

    def _do(
        self,
        board: Board,
        sites: Mapping[str, Site],
        world: planner.World,
        wanted: planner.Wanted,
        faults: dict[str, PitError],
    ) -> None:
        """Carry out the decisions."""
        deadline = time.monotonic() + ACT_S
        places = _by_site(wanted.places)
        back = _by_site(wanted.withdrawals)
        told = Foretelling(world.pools, lambda job_id: self._decider.options(board.jobs[job_id], world))
        if places:
            told.waiting(list(board.jobs.values()))

        def act(name: str) -> None:
            pairs = [
                (job, ticket)
                for one in back.get(name, ())
                if (job := board.jobs[one.job_id])
                for ticket in job.live
                if ticket.pool == one.pool and not ticket.is_running
            ]
            tickets.take_back(board, sites[name], pairs)
            tickets.place(board, sites[name], places.get(name, ()), deadline=deadline, placed=told.placed)

        _each([name for name in places.keys() | back.keys() if name not in faults], act, faults)


def _unwanted(job: Job) -> list[Ticket]:
    """Tickets of a job that must not run any more, and do not yet."""
    return [ticket for ticket in job.live if job.is_cancelled and not ticket.is_running]


def _stranded(job: Job, silent: Mapping[str, str]) -> list[Ticket]:
    """Tickets that wait where Slurm has been silent for long, of a job that may go elsewhere. silent: site → since.

    Where only Slurm is silent they can be taken back all the same; else they stay in doubt.
    """
    long_ago = timestamps.text(datetime.fromisoformat(timestamps.now()) - timedelta(seconds=FAILOVER_S))
    if job.is_over or not set(job.asked.sites) - silent.keys():
        return []
    # Where one was placed the site had answered, whatever of that was written down.
    return [one for one in job.live if one.state in QUEUED and max(silent.get(one.site, "Z"), one.placed) < long_ago]


def _up_since(row: status.SiteRow | None, asked: str) -> str:
    """Since when a site that answered at `asked` has done so without a break. row: as the tick before left it."""
    return row.since if row and row.state == "up" else asked


def _give_up_lost(board: Board, silent: Collection[str]) -> None:
    """Believe who answers for it that a ticket of which its site says nothing will not run."""
    for job in list(board.jobs.values()):
        for ticket in job.live:
            if ticket.n in job.lost and (ticket.site in silent or ticket.unknown):
                board.note(job, What.VOID, ticket.n, why=f"given up as lost at {ticket.site}")


def _cancelled(board: Board) -> None:
    """Jobs that somebody wanted withdrawn and that have no ticket left are over."""
    for job in list(board.jobs.values()):
        if job.is_cancelled and not job.is_over and not job.live:
            board.note(job, What.CANCELLED)


def _each(sites: Iterable[str], act: Callable[[str], None], faults: dict[str, PitError]) -> None:
    """Act at several sites at once; what goes wrong at one, whatever it is, is noted as its fault."""
    names = sorted(sites)
    if not names:
        return

    def guarded(name: str) -> tuple[str, PitError | None]:
        try:
            act(name)
        except Exception as error:  # noqa: BLE001 - what was begun stands in the journals, and is looked for
            return name, fault(name, error)
        return name, None

    with ThreadPoolExecutor(len(names)) as pool:
        faults.update({name: error for name, error in pool.map(guarded, names) if error})


def _by_site(decisions: Sequence[D]) -> dict[str, list[D]]:
    found: dict[str, list[D]] = {}
    for decision in decisions:
        found.setdefault(decision.pool.partition("/")[0], []).append(decision)
    return found


def _text(answer: Answer[Look]) -> str:
    """When a site was asked, as journals write times."""
    return timestamps.text(datetime.fromtimestamp(answer.asked_s, UTC))
