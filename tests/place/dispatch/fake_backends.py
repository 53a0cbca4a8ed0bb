"""Clusters in memory that lie, fall silent, refuse and forget, and a queue over them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import ClusterError, Unreachable
from pitools.launch.plan import Plan
from pitools.launch.request import Request
from pitools.launch.submission import grant
from pitools.launch.tickets.ticket_state import ABSENT, TicketState
from pitools.place import types
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.dispatch import status, store, tick
from pitools.run.run_folder import JobRef
from pitools.site.schema import Site
from pitools.slurm import records
from pitools.slurm.errors import OutcomeUnknown

SITES = ("alpha", "beta", "gamma")
Wait = Callable[[float], None]


class Killed(BaseException):
    """kill -9 of the tick."""


class Faults:
    """What may go wrong, by chance, until it is told to stop."""

    def __init__(self, dice: random.Random, share: float) -> None:
        self.dice, self.share = dice, share

    def strikes(self, weight: float = 1.0) -> bool:
        return self.dice.random() < self.share * weight

    def kill(self) -> None:
        if self.strikes(0.5):
            raise Killed


class Cluster:
    """A Slurm and its files, in memory: scripts ask for leave as the real ones do."""

    def __init__(self, faults: Faults, ran: Counter[str]) -> None:
        self.faults, self.ran = faults, ran
        self.jobs: dict[str, list[str]] = {}  # Slurm's id → name, state
        self.late: list[str] = []  # still on its way to slurmctld, though nobody waits for it any more
        self.words: dict[str, str] = {}
        self.exit_codes: dict[str, int] = {}  # by ticket, of those that ended neither well nor for want of a grant
        self.last = 0
        self.is_dark = False
        self.has_files = False  # though Slurm is silent

    def answer(self) -> None:
        if self.is_dark or self.faults.strikes(0.3):
            raise Unreachable("connection refused")

    def runs_dir(self, site: Site) -> str:
        return site.paths.runs

    def submit_ticket(self, plan: Plan, site: Site, *, name: str) -> JobRef:
        self.faults.kill()
        self.answer()
        if self.faults.strikes(0.3):
            raise ClusterError("invalid account")
        if self.faults.strikes(0.6):
            self.late += [name] if self.faults.dice.random() < 0.5 else []
            raise OutcomeUnknown("socket timed out")
        assert name not in [reference for reference, _ in self.jobs.values()], "a name is given to sbatch once"
        self._queue(name)
        self.faults.kill()
        if self.faults.strikes():
            raise OutcomeUnknown("socket timed out")
        if self.faults.strikes(0.2):
            raise ClusterError("connection reset by peer")  # it says that it refused, and has it
        return JobRef(job_id=str(self.last), site=site.name, submitted=timestamps.now_rfc3339())

    def _queue(self, name: str) -> None:
        self.last += 1
        self.jobs[str(self.last)] = [name, "PENDING"]

    def ticket_states(self, site: Site, names: Sequence[str]) -> dict[str, TicketState]:
        self.answer()
        reference = {name: self._seen(job_id, name, state) for job_id, (name, state) in self.jobs.items()}
        return {name: TicketState(ABSENT, "", self.words.get(name, "")) for name in names} | reference

    def _seen(self, job_id: str, name: str, state: str) -> TicketState:
        code = 0 if state == "COMPLETED" else self.exit_codes.get(name, 75)
        job = records.SlurmJob(job_id=job_id, raw_id=job_id, state=state, name=name)
        return TicketState(state, job_id, self.words.get(name, ""), code, job)

    def revoke(self, site: Site, names: Sequence[str]) -> dict[str, bool]:
        self.faults.kill()
        if self.is_dark and not self.has_files:
            raise Unreachable("connection refused")
        used = {name: not grant.is_granted(self.words.setdefault(name, grant.REVOKED)) for name in names}
        self.faults.kill()
        return used

    def withdraw_grants(self, site: Site, names: Sequence[str]) -> None:
        self.faults.kill()
        self.answer()
        self.words.update(dict.fromkeys(names, grant.REVOKED))
        self.faults.kill()

    def cancel_tickets(self, site: Site, jobs: Mapping[str, str]) -> None:
        self.answer()
        for job_id, name in jobs.items():
            if self.jobs.get(job_id) in ([name, "PENDING"], [name, "RUNNING"]):
                self.jobs[job_id][1] = "CANCELLED"

    def remove_ticket_dirs(self, site: Site, names: Sequence[str]) -> None:
        for name in names:
            assert not grant.is_granted(self.words.get(name, "")), "what ran is not forgotten"
            assert name not in self.exit_codes, "nor is what others go on from"

    def step(self) -> None:
        """Time passes: jobs start, ask for leave, and end."""
        self.is_dark = self.faults.strikes()
        while self.late and self.faults.dice.random() < 0.5:
            self._queue(self.late.pop())
        for job_id, job in self.jobs.items():
            name, state = job
            if state == "RUNNING" and grant.is_granted(self.words.get(name, "")):
                if self.faults.dice.random() < 0.5:
                    job[1] = "COMPLETED"
                elif self.faults.strikes():  # preempted: it saves, and ends
                    job[1], self.exit_codes[name] = "FAILED", 95
            elif state == "RUNNING":
                job[1] = "FAILED"
            elif state == "PENDING" and self.faults.dice.random() < 0.5:
                self.words.setdefault(name, grant.grant_token(job_id))
                job[1] = "RUNNING"
            if job[1] == "COMPLETED" and state == "RUNNING":
                self.ran[name.rpartition(".")[0]] += 1
        if self.faults.strikes(0.3):  # slurmctld comes back without its latest job, and gives its number to another
            late = str(self.last)
            if late in self.jobs and self.jobs[late][1] == "PENDING":
                del self.jobs[late]
                self.last -= 1


class World:
    """Several clusters, one queue, and a policy that places and withdraws at random."""

    def __init__(self, place: Path, seed: int, share: float) -> None:
        self.place, self.dice = place, random.Random(seed)
        self.faults, self.ran = Faults(self.dice, share), Counter[str]()
        self.clusters = {name: Cluster(self.faults, self.ran) for name in SITES}

    def decide(
        self, now_s: float, jobs: Sequence[types.PendingJob], pools: object, held: Sequence[types.Ticket]
    ) -> list[types.Submit | types.Withdraw]:
        expected: list[types.Submit | types.Withdraw] = []
        for job in jobs:
            own_part = next((ticket for ticket in held if ticket.job_id == job.job_id), None)
            if own_part is None and self.dice.random() < 0.9:
                expected.append(types.Submit(job_id=job.job_id, pool=self.dice.choice(job.options).pool))
            elif own_part and self.faults.strikes():
                expected.append(types.Withdraw(job_id=job.job_id, pool=own_part.pool))
        return expected

    def tick(self) -> status.TickResult | None:
        try:
            return tick.Dispatcher(self.place, self.decide).tick()
        except Killed:
            return None


def snapshot(site: Site, cluster: Cluster) -> Snapshot:
    if cluster.is_dark:
        raise Unreachable("connection refused")
    node = records.Node(node="n1", state="idle", partitions=("train",))
    partition = records.Partition(partition="train", state="up", node_list="n1")
    return Snapshot(
        site=site.name,
        seen_s=0.0,
        skew_s=0.0,
        cluster=site.name,
        enforced_limits=(),
        partitions=(partition,),
        nodes=(node,),
        jobs=(),
    )


def add(world: World, count: int) -> list[str]:
    request = Request(name="bc", command="true")
    requested = [store.make_request(request, SITES, user="ada") for _ in range(count)]
    return [job.job_id for job in store.enqueue(world.place, requested)]
