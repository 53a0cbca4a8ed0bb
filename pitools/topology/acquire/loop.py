"""Choose nodes for a pending job, constrain the job to them, and choose again when they are taken.

The job is submitted to begin a minute later (`DELAYED_START_ARGS`); one scontrol update then sets its nodes and its
begin time. It keeps its id and age through every choice. If this process is killed, the job begins by itself.
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
from pitools.core.signals import interrupt_on_termination
from pitools.slurm.client import Client
from pitools.slurm.errors import is_denied
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import UNKNOWN, PendingReason, pending_reason
from pitools.topology.acquire import node_filter
from pitools.topology.acquire.options import Acquired, AcquireOptions, require_choosable
from pitools.topology.fabric_model import Fabric

if TYPE_CHECKING:
    from pitools.topology.choose import NodeChoice

DELAYED_START_ARGS = (
    "--begin=now+60",
)  # more than the choice takes; should nobody make it, the job begins without one

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 5.0
_NOT_STARTED_S = 15.0  # of waiting for nodes that look free: whatever the job lacks there, we do not see it
_NODES_LACKING = frozenset({PendingReason.RESOURCES, PendingReason.RESERVATION})


def run_acquire_loop(
    slurm: Client, job_id: str, fabric: Fabric, options: AcquireOptions, report: Callable[[str], object] = str
) -> Acquired:
    """Choose nodes for a waiting job and follow it until it starts, or the tries or the time are over.

    Slurm out of reach is waited through. Interrupted, hung up on or told to end, the constraint is lifted and the job
    waits on. What goes wrong before the job may begin cancels it and raises: UsageError for a job that names nodes
    itself, ClusterError where a reservation or the choice is refused. What goes wrong later raises nothing: the job is
    there, and the record tells, in state UNKNOWN. report: is told of every choice, and of its loss.
    """
    require_choosable(fabric, options)
    loop = _AcquireLoop(slurm, job_id, fabric, options, report)
    with interrupt_on_termination():
        try:
            return loop.run()
        except PitError as error:
            is_unstarted = loop.is_held and (loop.job is None or loop.job.state == "PENDING")
            loop.release(cancel=is_unstarted)
            if is_unstarted:
                raise
            return loop.unknown_result(str(error))
        except BaseException:
            loop.release(cancel=False)
            raise
        finally:
            loop.unreserve()


class _AcquireLoop:
    """The state of one job's acquisition.

    constraint: the one sent last, None without. is_held: the begin time is not set yet, as far as Slurm has answered.
    is_confirmed: Slurm has answered to the last constraint.
    """

    def __init__(
        self, slurm: Client, job_id: str, fabric: Fabric, options: AcquireOptions, report: Callable[[str], object]
    ) -> None:
        self.slurm, self.job_id, self.fabric, self.options, self.report = slurm, job_id, fabric, options, report
        self.started_s = self.chosen_s = time.monotonic()
        self.tries = 0
        self.is_held = self.is_confirmed = True
        self.job: SlurmJob | None = None
        self.constraint: node_filter.Constraint | None = None
        self.choice: NodeChoice | None = None
        self.own_exclude: str | None = None
        self.reservation, self.reason = "", ""
        self.avoided: set[str] = set()

    def require_acquirable(self, job: SlurmJob) -> None:
        """Raise UsageError for a job whose nodes cannot be chosen."""
        if job.array_job_id or "+" in job.job_id:
            raise UsageError(f"job {self.job_id} is an array or several jobs", hint="give each a job of its own")
        if job.required_nodes or job.reservation:
            what = f"job {self.job_id} names its nodes itself: {job.required_nodes or job.reservation}"
            raise UsageError(what, hint="leave out --nodelist and --reservation, or submit it with psbatch")
        self.own_exclude = job.excluded_nodes

    def run(self) -> Acquired:
        """Poll until the job starts; choose again when chosen nodes are lost."""
        pause_s = _FIRST_PAUSE_S
        while time.monotonic() - self.started_s < self.options.timeout_s + self.options.unreachable_s:
            with contextlib.suppress(TryLater):
                if ended := self.step():
                    return ended
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _MAX_PAUSE_S)
        self.release(cancel=False)
        return self.unknown_result("Slurm does not answer")

    def step(self) -> Acquired | None:
        """Poll once and act; return the record once nothing more is to be done."""
        nodes, job = self.slurm.nodes(), self.poll_job()  # in this order: nodes that the job itself took are no loss
        if self.own_exclude is None:
            self.require_acquirable(job)
        tried = self.tries >= self.options.tries
        if job.state != "PENDING" or (self.constraint is None and tried):
            return self.result(job)
        if lost := self.lost_reason(job, nodes):
            self.reason = lost
            self.report(f"job {self.job_id}: {lost}")
        if time.monotonic() - self.started_s > self.options.timeout_s:
            self.reason = self.reason or f"it did not start within {self.options.timeout_s:g} s: {job.reason}"
            return self.give_up(job)
        if lost and tried:
            return self.give_up(job)
        if lost or self.constraint is None or not self.is_confirmed:
            try:
                self.choose(job, nodes)
            except ClusterError as error:
                if self.is_held:
                    raise
                self.reason = error.message  # no reason to lose a job that may begin by now
                return self.give_up(job)
        return None

    def poll_job(self) -> SlurmJob:
        """Return the job as it is now."""
        found = self.slurm.job(self.job_id)
        if not found:
            raise ClusterError(f"Slurm does not know job {self.job_id}", hint="it may have been cancelled")
        self.job = found[0]
        return self.job

    def lost_reason(self, job: SlurmJob, nodes: Sequence[Node]) -> str:
        """Return why the job cannot start under its constraint, or "" while it can."""
        if self.constraint is None:
            return ""
        left = self.constraint.allowed.intersection(node_filter.free_nodes(nodes, len(nodes) + 1))
        if len(left) < job.nodes:
            gone = hostlist.fold(set(self.choice.nodes if self.choice else ()) - left) or "others'"
            return f"{len(left)} of its {job.nodes} nodes are left, {gone} are lost"
        reason = pending_reason(job.reason)
        is_stuck = reason in _NODES_LACKING and time.monotonic() - self.chosen_s > _NOT_STARTED_S
        if is_stuck or reason is PendingReason.BAD_CONSTRAINTS:
            self.avoided |= left
            return f"it does not start on nodes that look free: {job.reason}"
        return ""

    def choose(self, job: SlurmJob, nodes: Sequence[Node]) -> None:
        """Choose among the free nodes and constrain the job; with too few free, the job waits unconstrained."""
        own = msgspec.structs.replace(job, excluded_nodes=self.own_exclude or "")  # before it was told of a choice
        found: list[tuple[float, str, NodeChoice]] = []
        reasons: list[tuple[int, str]] = []
        for partition in own.partition.split(","):  # it will run in one of them, and not across
            in_partition = msgspec.structs.replace(own, partition=partition)
            free = [
                name
                for name in node_filter.free_nodes(node_filter.fitting_nodes(nodes, in_partition), job.nodes)
                if name not in self.avoided
            ]
            try:
                choice = self.best_choice(job, free)
                found.append((choice.cost, partition, choice))
            except ClusterError as error:
                reasons.append((len(free), error.message))
        if not found:
            self.reason = max(reasons)[1]
            if self.constraint or self.is_held:
                self.release_constraint(self.reason)
            return
        _, partition, choice = min(found, key=lambda each: each[0])
        self.apply_choice(node_filter.constrain(choice, self.fabric, nodes, own, self.options.by, partition), choice)

    def best_choice(self, job: SlurmJob, free: Sequence[str]) -> NodeChoice:
        """Return the best choice of the free nodes. Raises ClusterError where they are too few."""
        from pitools.topology.choose import select_nodes  # numpy comes with it

        if len(free) < job.nodes:
            raise ClusterError(f"{len(free)} of {job.nodes} nodes are free")
        return select_nodes(
            self.fabric,
            free,
            job.nodes,
            objective=self.options.objective,
            segment=self.options.segment or job.segment,
            spares=min(self.options.spares, len(free) - job.nodes),
        )

    def apply_choice(self, constraint: node_filter.Constraint, choice: NodeChoice) -> None:
        """Set the constraint and the begin time in one update."""
        reservation = self.reserve(constraint) if constraint.reserved_nodes else None
        if reservation == "":
            return
        before = self.constraint, self.choice
        self.constraint, self.choice, self.is_confirmed = (
            constraint,
            choice,
            False,
        )  # it may be told, though no answer comes
        if not self.update(constraint.exclude, constraint.nodelist, reservation):
            self.constraint, self.choice = before
            return
        self.chosen_s, self.is_held, self.is_confirmed = time.monotonic(), False, True
        self.tries += 1
        self.report(f"job {self.job_id}: choice {self.tries} is {hostlist.fold(choice.nodes)}, {choice.leaves} leaves")

    def update(self, exclude: str | None, nodelist: str | None, reservation: str | None) -> bool:
        """Tell Slurm, and that the job may begin; False where it has begun, or ended, and cannot be told any more.

        What Slurm says then depends on what it was told ("Invalid node name"): so it is looked at, and not read.
        """
        try:
            self.slurm.update(
                self.job_id, exclude=exclude, nodelist=nodelist, reservation=reservation, start_now=self.is_held
            )
        except ClusterError:
            if self.poll_job().state == "PENDING":
                raise
            return False
        return True

    def reserve(self, constraint: node_filter.Constraint) -> str:
        """A new reservation's name, "" when its nodes were lost; the one before it is removed."""
        if self.reservation:
            if not self.update(None, None, ""):
                return ""
            self.unreserve()
        name = f"pit-{self.job_id}-{secrets.token_hex(3)}"
        try:
            self.reservation = name
            minutes = int(self.options.timeout_s // 60) + 2
            self.slurm.reserve(name, constraint.reserved_nodes, self.slurm.user(), minutes)
        except ClusterError as error:
            self.reservation = ""
            if is_denied(error):
                what = f"this Slurm lets only operators reserve nodes: {error.message}"
                raise ClusterError(
                    what, where="--by reservation", hint="use --by exclude, or ask an operator"
                ) from error
            self.release_constraint(error.message)
        return self.reservation

    def unreserve(self) -> None:
        """Delete the reservation; if Slurm does not answer, it expires by itself."""
        if self.reservation:
            with contextlib.suppress(PitError):
                self.slurm.unreserve(self.reservation)
            self.reservation = ""

    def release_constraint(self, reason: str) -> None:
        """Remove the constraint."""
        self.reason = reason
        reservation = "" if self.reservation else None
        if self.update(self.own_exclude or "", "", reservation):
            self.constraint, self.is_held, self.is_confirmed = None, False, True
            self.report(f"job {self.job_id}: without a constraint: {reason}")

    def give_up(self, job: SlurmJob) -> Acquired:
        """Apply `on_failure`."""
        if self.options.on_failure == "cancel":
            if (now := self.poll_job()).state != "PENDING":  # it was in time after all
                return self.result(now)
            self.slurm.cancel([self.job_id])
            return self.result(self.poll_job())
        if self.options.on_failure == "release" and self.constraint:
            self.release_constraint(self.reason)
        return self.result(self.poll_job())

    def release(self, *, cancel: bool) -> None:
        """Cancel the job or remove its constraint, as far as Slurm answers."""
        with contextlib.suppress(PitError):
            if cancel:
                self.slurm.cancel([self.job_id])
            elif self.own_exclude is not None:
                self.release_constraint("pit topology run has ended")
        self.unreserve()

    def unknown_result(self, reason: str) -> Acquired:
        """Return the record of a job whose state is not known."""
        last = self.job or SlurmJob(job_id=self.job_id, raw_id=self.job_id, state=UNKNOWN)
        return msgspec.structs.replace(self.result(last), state=UNKNOWN, reason=reason)

    def result(self, job: SlurmJob) -> Acquired:
        """Return the record of the job."""
        got = hostlist.expand(job.node_list) if job.node_list else []
        chosen = self.choice.nodes if self.choice else ()
        within = self.constraint.allowed.issuperset(got) if self.constraint and got else None
        return Acquired(
            job_id=self.job_id,
            state=job.state,
            node_list=job.node_list,
            is_within=within,
            by=self.options.by,
            leaves=node_filter.leaf_count(got or chosen, self.fabric),
            chosen=hostlist.fold(chosen) if chosen else "",
            tries=self.tries,
            is_released=self.constraint is None,
            reason=self.reason,
            waited_s=round(time.monotonic() - self.started_s, 1),
        )
