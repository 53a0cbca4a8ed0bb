"""Choose nodes for a pending job, constrain the job to them, and choose again if other jobs take them.

The job is submitted with a start in one minute (`DELAYED_START_ARGS`); one scontrol update then sets its nodes and its
start time. The job keeps its id and age through every choice. If this process is killed, the job starts without one.
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

# Longer than a choice takes. Without a choice the job starts then.
DELAYED_START_ARGS = ("--begin=now+60",)

_FIRST_POLL_S, _MAX_POLL_S = 0.5, 5.0
_NOT_STARTED_S = 15.0  # a longer wait for apparently free nodes means that the job lacks some other resource there
_WAITS_FOR_NODES = frozenset({PendingReason.RESOURCES, PendingReason.RESERVATION})


def run_acquire_loop(
    slurm: Client, job_id: str, fabric: Fabric, options: AcquireOptions, report: Callable[[str], object] = str
) -> Acquired:
    """Choose nodes for a pending job and poll until it starts, or the options' tries or time are used up.

    While Slurm is unreachable, polling continues. On SIGINT, SIGTERM and SIGHUP the constraint is removed and the job
    stays queued. An error before the job may start cancels the job and is raised: UsageError for a job with its own
    node list, ClusterError if a reservation or a choice is refused. A later error is returned as a record in state
    UNKNOWN. report: called with a message for each choice and each loss of nodes.
    """
    require_choosable(fabric, options)
    loop = _AcquireLoop(slurm, job_id, fabric, options, report)
    with interrupt_on_termination():
        try:
            return loop.run()
        except PitError as error:
            is_unstarted = loop.is_start_delayed and (loop.job is None or loop.job.state == "PENDING")
            loop.release(cancel=is_unstarted)
            if is_unstarted:
                raise
            return loop.unknown_result(str(error))
        except BaseException:
            loop.release(cancel=False)
            raise
        finally:
            loop.delete_reservation()


class _AcquireLoop:
    """The state of one job's acquisition.

    constraint: the last one sent, or None. is_start_delayed: the job's start time is still the later one of its
    submission. is_confirmed: Slurm has answered the last update of the constraint.
    """

    def __init__(
        self, slurm: Client, job_id: str, fabric: Fabric, options: AcquireOptions, report: Callable[[str], object]
    ) -> None:
        self.slurm, self.job_id, self.fabric, self.options, self.report = slurm, job_id, fabric, options, report
        self.started_s = self.chosen_s = time.monotonic()
        self.tries = 0
        self.is_start_delayed = self.is_confirmed = True
        self.job: SlurmJob | None = None
        self.constraint: node_filter.Constraint | None = None
        self.choice: NodeChoice | None = None
        self.submitted_exclude: str | None = None
        self.reservation, self.reason = "", ""
        self.avoided_nodes: set[str] = set()

    def require_acquirable(self, job: SlurmJob) -> None:
        """Raise UsageError for a job whose nodes cannot be chosen."""
        if job.array_job_id or "+" in job.job_id:
            raise UsageError(f"job {self.job_id} is an array or a hetjob", hint="submit each task as a separate job")
        if job.required_nodes or job.reservation:
            problem = f"job {self.job_id} has its own nodes or reservation: {job.required_nodes or job.reservation}"
            raise UsageError(problem, hint="omit --nodelist and --reservation, or submit it with psbatch")
        self.submitted_exclude = job.excluded_nodes

    def run(self) -> Acquired:
        """Poll until the job starts; choose again if chosen nodes are lost."""
        pause_s = _FIRST_POLL_S
        while time.monotonic() - self.started_s < self.options.timeout_s + self.options.unreachable_s:
            with contextlib.suppress(TryLater):
                if result := self.step():
                    return result
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _MAX_POLL_S)
        self.release(cancel=False)
        return self.unknown_result("Slurm does not answer")

    def step(self) -> Acquired | None:
        """Poll once and act. Returns the record when the acquisition is over, else None."""
        nodes, job = self.slurm.nodes(), self.poll_job()  # in this order: the job's own allocation is no loss
        if self.submitted_exclude is None:
            self.require_acquirable(job)
        is_last_try = self.tries >= self.options.tries
        if job.state != "PENDING" or (self.constraint is None and is_last_try):
            return self.result(job)
        if loss_reason := self.lost_reason(job, nodes):
            self.reason = loss_reason
            self.report(f"job {self.job_id}: {loss_reason}")
        if time.monotonic() - self.started_s > self.options.timeout_s:
            self.reason = self.reason or f"not started within {self.options.timeout_s:g} s: {job.reason}"
            return self.give_up(job)
        if loss_reason and is_last_try:
            return self.give_up(job)
        if loss_reason or self.constraint is None or not self.is_confirmed:
            try:
                self.choose(job, nodes)
            except ClusterError as error:
                if self.is_start_delayed:
                    raise
                self.reason = error.message  # the job may have started: do not fail
                return self.give_up(job)
        return None

    def poll_job(self) -> SlurmJob:
        """Return the job's current record. Raises ClusterError if Slurm does not list the job."""
        jobs = self.slurm.job(self.job_id)
        if not jobs:
            raise ClusterError(f"job {self.job_id} not found", hint=f"check: sacct -j {self.job_id}")
        self.job = jobs[0]
        return self.job

    def lost_reason(self, job: SlurmJob, nodes: Sequence[Node]) -> str:
        """Return why the job cannot start under its constraint, or "" while it can."""
        if self.constraint is None:
            return ""
        free = self.constraint.allowed.intersection(node_filter.free_nodes(nodes, len(nodes) + 1))
        if len(free) < job.nodes:
            lost_nodes = hostlist.fold(set(self.choice.nodes if self.choice else ()) - free) or "other nodes"
            return f"{len(free)} of its {job.nodes} nodes are free, {lost_nodes} lost"
        reason = pending_reason(job.reason)
        is_stuck = reason in _WAITS_FOR_NODES and time.monotonic() - self.chosen_s > _NOT_STARTED_S
        if is_stuck or reason is PendingReason.BAD_CONSTRAINTS:
            self.avoided_nodes |= free
            return f"not started on free nodes: {job.reason}"
        return ""

    def choose(self, job: SlurmJob, nodes: Sequence[Node]) -> None:
        """Choose among the free nodes and constrain the job; with too few free nodes, remove the constraint."""
        own_job = msgspec.structs.replace(job, excluded_nodes=self.submitted_exclude or "")  # as submitted
        choices: list[tuple[float, str, NodeChoice]] = []
        reasons: list[tuple[int, str]] = []
        for partition in own_job.partition.split(","):  # a job runs in one partition only
            in_partition = msgspec.structs.replace(own_job, partition=partition)
            free = [
                name
                for name in node_filter.free_nodes(node_filter.fitting_nodes(nodes, in_partition), job.nodes)
                if name not in self.avoided_nodes
            ]
            try:
                choice = self.best_choice(job, free)
                choices.append((choice.cost, partition, choice))
            except ClusterError as error:
                reasons.append((len(free), error.message))
        if not choices:
            self.reason = max(reasons)[1]
            if self.constraint or self.is_start_delayed:
                self.release_constraint(self.reason)
            return
        _, partition, choice = min(choices, key=lambda each: each[0])
        avoided = {node.node for node in nodes}.intersection(self.options.avoid) - {*choice.nodes}
        if avoided:  # Slurm may take any other node of a chosen leaf
            excluded = ",".join(filter(None, (own_job.excluded_nodes, hostlist.fold(avoided))))
            own_job = msgspec.structs.replace(own_job, excluded_nodes=excluded)
        self.apply_choice(
            node_filter.constrain(choice, self.fabric, nodes, own_job, self.options.by, partition), choice
        )

    def best_choice(self, job: SlurmJob, free: Sequence[str]) -> NodeChoice:
        """Return the best choice of the free nodes. Raises ClusterError for too few."""
        from pitools.topology.choose import avoid_nodes, select_nodes  # imports numpy

        if len(free) < job.nodes:
            raise ClusterError(f"{len(free)} of {job.nodes} nodes are free")
        segment, objective = self.options.segment or job.segment, self.options.objective
        choice, _ = avoid_nodes(
            free,
            self.options.avoid,
            lambda costs: select_nodes(self.fabric, costs, job.nodes, objective=objective, segment=segment),
        )
        return choice

    def apply_choice(self, constraint: node_filter.Constraint, choice: NodeChoice) -> None:
        """Set the constraint and the start time in one update."""
        reservation = self.reserve(constraint) if constraint.reserved_nodes else None
        if reservation == "":
            return
        previous = self.constraint, self.choice
        # Set before the update: Slurm may apply it although no answer arrives.
        self.constraint, self.choice, self.is_confirmed = constraint, choice, False
        if not self.update(constraint.exclude, constraint.nodelist, reservation):
            self.constraint, self.choice = previous
            return
        self.chosen_s, self.is_start_delayed, self.is_confirmed = time.monotonic(), False, True
        self.tries += 1
        self.report(f"job {self.job_id}: choice {self.tries} is {hostlist.fold(choice.nodes)}, {choice.leaves} leaves")

    def update(self, exclude: str | None, nodelist: str | None, reservation: str | None) -> bool:
        """Update the job and let it start. Returns False if the job is no longer pending.

        Slurm's error then varies ("Invalid node name"), so the job's state decides.
        """
        try:
            self.slurm.update(
                self.job_id,
                exclude=exclude,
                nodelist=nodelist,
                reservation=reservation,
                start_now=self.is_start_delayed,
            )
        except ClusterError:
            if self.poll_job().state == "PENDING":
                raise
            return False
        return True

    def reserve(self, constraint: node_filter.Constraint) -> str:
        """Replace the reservation. Returns its name, "" if the nodes were lost."""
        if self.reservation:
            if not self.update(None, None, ""):
                return ""
            self.delete_reservation()
        name = f"pit-{self.job_id}-{secrets.token_hex(3)}"
        try:
            self.reservation = name
            minutes = int(self.options.timeout_s // 60) + 2
            self.slurm.reserve(name, constraint.reserved_nodes, self.slurm.user(), minutes)
        except ClusterError as error:
            self.reservation = ""
            if is_denied(error):
                problem = f"only operators may reserve nodes: {error.message}"
                hint = "use --by exclude, or ask an operator"
                raise ClusterError(problem, where="--by reservation", hint=hint) from error
            self.release_constraint(error.message)
        return self.reservation

    def delete_reservation(self) -> None:
        """Delete the reservation; if Slurm does not answer, it expires by itself."""
        if self.reservation:
            with contextlib.suppress(PitError):
                self.slurm.unreserve(self.reservation)
            self.reservation = ""

    def release_constraint(self, reason: str) -> None:
        """Remove the constraint."""
        self.reason = reason
        reservation = "" if self.reservation else None
        if self.update(self.submitted_exclude or "", "", reservation):
            self.constraint, self.is_start_delayed, self.is_confirmed = None, False, True
            self.report(f"job {self.job_id}: constraint removed: {reason}")

    def give_up(self, job: SlurmJob) -> Acquired:
        """Apply `on_failure`."""
        if self.options.on_failure == "cancel":
            if (current_job := self.poll_job()).state != "PENDING":  # the job started in the meantime
                return self.result(current_job)
            self.slurm.cancel([self.job_id])
            return self.result(self.poll_job())
        if self.options.on_failure == "release" and self.constraint:
            self.release_constraint(self.reason)
        return self.result(self.poll_job())

    def release(self, *, cancel: bool) -> None:
        """Cancel the job or remove its constraint; errors are ignored."""
        with contextlib.suppress(PitError):
            if cancel:
                self.slurm.cancel([self.job_id])
            elif self.submitted_exclude is not None:
                self.release_constraint("pit topology run has ended")
        self.delete_reservation()

    def unknown_result(self, reason: str) -> Acquired:
        """Return the record of a job whose state is not known."""
        last_job = self.job or SlurmJob(job_id=self.job_id, raw_id=self.job_id, state=UNKNOWN)
        return msgspec.structs.replace(self.result(last_job), state=UNKNOWN, reason=reason)

    def result(self, job: SlurmJob) -> Acquired:
        """Return the record of the job."""
        allocated = hostlist.expand(job.node_list) if job.node_list else []
        chosen = self.choice.nodes if self.choice else ()
        is_within = self.constraint.allowed.issuperset(allocated) if self.constraint and allocated else None
        return Acquired(
            job_id=self.job_id,
            state=job.state,
            node_list=job.node_list,
            is_within=is_within,
            by=self.options.by,
            leaves=node_filter.leaf_count(allocated or chosen, self.fabric),
            chosen=hostlist.fold(chosen) if chosen else "",
            tries=self.tries,
            is_released=self.constraint is None,
            reason=self.reason,
            waited_s=round(time.monotonic() - self.started_s, 1),
        )
