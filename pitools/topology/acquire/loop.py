"""Nodes for a job that waits: choose, tell Slurm, and choose again when somebody else was faster.

The job is submitted to begin a minute later (`HELD`), then told its nodes and to begin now, in one call. It keeps its
id and its age through every new choice. Whoever ends this process leaves a job that begins by itself.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from pitools.core import hostlist
from pitools.core.errors import ClusterError, PitError, TryLater, UsageError
from pitools.core.signals import interrupted
from pitools.slurm.client import Client
from pitools.slurm.errors import is_denied
from pitools.slurm.records import Job, Node
from pitools.slurm.states import UNKNOWN, PendingReason, pending_reason
from pitools.topology.acquire import node_filter
from pitools.topology.acquire.options import Acquired, Wish, check
from pitools.topology.fabric_model import Fabric

if TYPE_CHECKING:
    from pitools.topology.choose import Choice

HELD = ("--begin=now+60",)  # more than the choice takes; should nobody make it, the job begins without one

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 5.0
_STUCK_S = 15.0  # of waiting for nodes that look free: whatever the job lacks there, we do not see it
_LACKING = frozenset({PendingReason.RESOURCES, PendingReason.RESERVATION})


def acquire(slurm: Client, job_id: str, fabric: Fabric, wish: Wish, say: Callable[[str], object] = str) -> Acquired:
    """Choose nodes for a waiting job and follow it until it starts, or the tries or the time are over.

    Slurm out of reach is waited through. Interrupted, hung up on or told to end, the constraint is lifted and the job
    waits on. What goes wrong before the job may begin cancels it and raises: UsageError for a job that names nodes
    itself, ClusterError where a reservation or the choice is refused. What goes wrong later raises nothing: the job is
    there, and the record tells, in state UNKNOWN. say: is told of every choice, and of its loss.
    """
    check(fabric, wish)
    hunt = _Hunt(slurm, job_id, fabric, wish, say)
    with interrupted():
        try:
            return hunt.follow()
        except PitError as error:
            is_ours = hunt.is_held and (hunt.job is None or hunt.job.state == "PENDING")
            hunt.abandon(cancel=is_ours)
            if is_ours:
                raise
            return hunt.unknown(str(error))
        except BaseException:
            hunt.abandon(cancel=False)
            raise
        finally:
            hunt.unreserve()


class _Hunt:
    """One job's way to its nodes.

    limits: what Slurm was told last, None when nothing. is_held: not to begin yet, as far as Slurm has answered.
    is_sure: it has answered to the last limits.
    """

    def __init__(self, slurm: Client, job_id: str, fabric: Fabric, wish: Wish, say: Callable[[str], object]) -> None:
        self.slurm, self.job_id, self.fabric, self.wish, self.say = slurm, job_id, fabric, wish, say
        self.began = self.since = time.monotonic()
        self.tries = 0
        self.is_held = self.is_sure = True
        self.job: Job | None = None
        self.limits: node_filter.Constraint | None = None
        self.choice: Choice | None = None
        self.own: str | None = None
        self.reservation, self.why = "", ""
        self.avoid: set[str] = set()

    def check(self, job: Job) -> None:
        """That nodes can be chosen for the job, before it is told of any."""
        if job.array_job_id or "+" in job.job_id:
            raise UsageError(f"job {self.job_id} is an array or several jobs", hint="give each a job of its own")
        if job.required_nodes or job.reservation:
            what = f"job {self.job_id} names its nodes itself: {job.required_nodes or job.reservation}"
            raise UsageError(what, hint="leave out --nodelist and --reservation, or submit it with psbatch")
        self.own = job.excluded_nodes

    def follow(self) -> Acquired:
        """Look until the job starts; choose again when what was chosen is lost."""
        pause_s = _FIRST_PAUSE_S
        while time.monotonic() - self.began < self.wish.timeout_s + self.wish.silent_s:
            with contextlib.suppress(TryLater):
                if ended := self.step():
                    return ended
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LAST_PAUSE_S)
        self.abandon(cancel=False)
        return self.unknown("Slurm does not answer")

    def step(self) -> Acquired | None:
        """One look, and what follows from it; the record once there is nothing more to do."""
        nodes, job = self.slurm.nodes(), self.look()  # in this order: nodes that the job itself took are no loss
        if self.own is None:
            self.check(job)
        tried = self.tries >= self.wish.tries
        if job.state != "PENDING" or (self.limits is None and tried):
            return self.told(job)
        if lost := self.lost(job, nodes):
            self.why = lost
            self.say(f"job {self.job_id}: {lost}")
        if time.monotonic() - self.began > self.wish.timeout_s:
            self.why = self.why or f"it did not start within {self.wish.timeout_s:g} s: {job.reason}"
            return self.give_up(job)
        if lost and tried:
            return self.give_up(job)
        if lost or self.limits is None or not self.is_sure:
            try:
                self.choose(job, nodes)
            except ClusterError as error:
                if self.is_held:
                    raise
                self.why = error.what  # no reason to lose a job that may begin by now
                return self.give_up(job)
        return None

    def look(self) -> Job:
        """The job now."""
        found = self.slurm.job(self.job_id)
        if not found:
            raise ClusterError(f"Slurm does not know job {self.job_id}", hint="it may have been cancelled")
        self.job = found[0]
        return self.job

    def lost(self, job: Job, nodes: Sequence[Node]) -> str:
        """Why the job cannot start on what it was told, or "" while it still can."""
        if self.limits is None:
            return ""
        left = self.limits.allowed.intersection(node_filter.free(nodes, len(nodes) + 1))
        if len(left) < job.nodes:
            gone = hostlist.fold(set(self.choice.nodes if self.choice else ()) - left) or "others'"
            return f"{len(left)} of its {job.nodes} nodes are left, {gone} are lost"
        reason = pending_reason(job.reason)
        is_stuck = reason in _LACKING and time.monotonic() - self.since > _STUCK_S
        if is_stuck or reason is PendingReason.BAD_CONSTRAINTS:
            self.avoid |= left
            return f"it does not start on nodes that look free: {job.reason}"
        return ""

    def choose(self, job: Job, nodes: Sequence[Node]) -> None:
        """Choose among what is free, and tell Slurm; where too few are free, the job waits like any other."""
        own = msgspec.structs.replace(job, excluded_nodes=self.own or "")  # before it was told of a choice
        found: list[tuple[float, str, Choice]] = []
        why: list[tuple[int, str]] = []
        for partition in own.partition.split(","):  # it will run in one of them, and not across
            alone = msgspec.structs.replace(own, partition=partition)
            free = [
                name
                for name in node_filter.free(node_filter.fitting(nodes, alone), job.nodes)
                if name not in self.avoid
            ]
            try:
                choice = self.best(job, free)
                found.append((choice.cost, partition, choice))
            except ClusterError as error:
                why.append((len(free), error.what))
        if not found:
            self.why = max(why)[1]
            if self.limits or self.is_held:
                self.lift(self.why)
            return
        _, partition, choice = min(found, key=lambda each: each[0])
        self.tell(node_filter.constrain(choice, self.fabric, nodes, own, self.wish.by, partition), choice)

    def best(self, job: Job, free: Sequence[str]) -> Choice:
        """The best of what is free. Raises ClusterError where that is too little."""
        from pitools.topology.choose import choose  # numpy comes with it

        if len(free) < job.nodes:
            raise ClusterError(f"{len(free)} of {job.nodes} nodes are free")
        return choose(
            self.fabric,
            free,
            job.nodes,
            objective=self.wish.objective,
            segment=self.wish.segment or job.segment,
            spares=min(self.wish.spares, len(free) - job.nodes),
        )

    def tell(self, limits: node_filter.Constraint, choice: Choice) -> None:
        """One update: the constraint and leave to begin."""
        keep = self.reserve(limits) if limits.keep else None
        if keep == "":
            return
        before = self.limits, self.choice
        self.limits, self.choice, self.is_sure = limits, choice, False  # it may be told, though no answer comes
        if not self.update(limits.exclude, limits.nodelist, keep):
            self.limits, self.choice = before
            return
        self.since, self.is_held, self.is_sure = time.monotonic(), False, True
        self.tries += 1
        self.say(f"job {self.job_id}: choice {self.tries} is {hostlist.fold(choice.nodes)}, {choice.leaves} leaves")

    def update(self, exclude: str | None, nodelist: str | None, reservation: str | None) -> bool:
        """Tell Slurm, and that the job may begin; False where it has begun, or ended, and cannot be told any more.

        What Slurm says then depends on what it was told ("Invalid node name"): so it is looked at, and not read.
        """
        try:
            self.slurm.update(
                self.job_id, exclude=exclude, nodelist=nodelist, reservation=reservation, start_now=self.is_held
            )
        except ClusterError:
            if self.look().state == "PENDING":
                raise
            return False
        return True

    def reserve(self, limits: node_filter.Constraint) -> str:
        """A new reservation's name, "" when its nodes were lost; the one before it is removed."""
        if self.reservation:
            if not self.update(None, None, ""):
                return ""
            self.unreserve()
        name = f"pit-{self.job_id}-{secrets.token_hex(3)}"
        try:
            self.reservation = name
            minutes = int(self.wish.timeout_s // 60) + 2
            self.slurm.reserve(name, limits.keep, self.slurm.user(), minutes)
        except ClusterError as error:
            self.reservation = ""
            if is_denied(error):
                what = f"this Slurm lets only operators reserve nodes: {error.what}"
                raise ClusterError(
                    what, where="--by reservation", hint="use --by exclude, or ask an operator"
                ) from error
            self.lift(error.what)
        return self.reservation

    def unreserve(self) -> None:
        """Let the reservation end; if Slurm cannot be told, it ends by itself."""
        if self.reservation:
            with contextlib.suppress(PitError):
                self.slurm.unreserve(self.reservation)
            self.reservation = ""

    def lift(self, why: str) -> None:
        """Let the job start wherever it fits."""
        self.why = why
        reservation = "" if self.reservation else None
        if self.update(self.own or "", "", reservation):
            self.limits, self.is_held, self.is_sure = None, False, True
            self.say(f"job {self.job_id}: without a constraint: {why}")

    def give_up(self, job: Job) -> Acquired:
        """What was asked for in this case."""
        if self.wish.then == "cancel":
            if (now := self.look()).state != "PENDING":  # it was in time after all
                return self.told(now)
            self.slurm.cancel([self.job_id])
            return self.told(self.look())
        if self.wish.then == "lift" and self.limits:
            self.lift(self.why)
        return self.told(self.look())

    def abandon(self, *, cancel: bool) -> None:
        """Leave the job so that nothing of ours holds it, as far as Slurm can be told."""
        with contextlib.suppress(PitError):
            if cancel:
                self.slurm.cancel([self.job_id])
            elif self.own is not None:
                self.lift("nobody watches it any more")
        self.unreserve()

    def unknown(self, why: str) -> Acquired:
        """The record of a job that is there, though it cannot be told how it is."""
        last = self.job or Job(job_id=self.job_id, raw_id=self.job_id, state=UNKNOWN)
        return msgspec.structs.replace(self.told(last), state=UNKNOWN, why=why)

    def told(self, job: Job) -> Acquired:
        """The record."""
        got = hostlist.expand(job.node_list) if job.node_list else []
        chosen = self.choice.nodes if self.choice else ()
        within = self.limits.allowed.issuperset(got) if self.limits and got else None
        return Acquired(
            job_id=self.job_id,
            state=job.state,
            node_list=job.node_list,
            is_within=within,
            by=self.wish.by,
            leaves=node_filter.leaves_of(got or chosen, self.fabric),
            chosen=hostlist.fold(chosen) if chosen else "",
            tries=self.tries,
            is_lifted=self.limits is None,
            why=self.why,
            waited_s=round(time.monotonic() - self.began, 1),
        )
