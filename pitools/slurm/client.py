"""The client of a cluster: each method runs a Slurm command, here or over ssh, and returns records.

Every method raises Unreachable (75) if the controller, the accounting database or the ssh host does not answer,
ClusterError (4) with Slurm's message if Slurm refuses, and ToolMissing if Slurm's commands are not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import BinaryIO

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.slurm import argv, job_components, parse_accounting, parse_cluster, parse_jobs, parse_nodes, submit_rate
from pitools.slurm.errors import (
    OutcomeUnknown,
    SlurmReason,
    died_without_message,
    error_for,
    has_failed,
    job_not_found,
    reason_of,
    was_not_sent,
)
from pitools.slurm.fields import new_separator, none_to_empty, parse_slurm_time, split_rows
from pitools.slurm.records import (
    AccountingRow,
    Association,
    Block,
    Config,
    Node,
    Partition,
    Qos,
    SlurmJob,
    StartEstimate,
    Submitted,
    Switch,
)
from pitools.slurm.states import UNKNOWN, parse_job_state
from pitools.slurm.transport import LOGIN_OUTPUT_END, QUERY_ENV, RunFunction, Transport, run_command

__all__ = ["Client", "Transport"]


def _row(job_id: str, reason: str, start: str, raw_id: str, state: str) -> job_components.JobPart:
    row = job_components.JobPart(job_id, raw_id, parse_job_state(state))
    return (
        row._replace(reason=none_to_empty(reason), start=parse_slurm_time(start, UTC))
        if row.state == "PENDING"
        else row
    )


class Client:
    """Client of one cluster. transport: host and environment of its commands. run: replaces `subprocesses.run`."""

    def __init__(self, transport: Transport | None = None, run: RunFunction = subprocesses.run) -> None:
        self.transport = transport or Transport()
        self._run = run

    def version(self) -> tuple[int, ...]:
        """Return the version of the Slurm commands, such as (22, 5, 8). Needs no controller."""
        return parse_cluster.parse_version(self._read(argv.VERSION))

    def user(self) -> str:
        """Return the user name on the cluster."""
        return self._read(argv.USER).strip()

    def home(self) -> str:
        """Return the user's home directory on the cluster."""
        return self._read(argv.HOME).strip()

    def config(self) -> Config:
        """Return the configuration of slurmctld."""
        return parse_cluster.parse_config(self._read(argv.CONFIG))

    def is_up(self) -> bool:
        """Return whether one of the cluster's controllers answers."""
        return any(self.controllers())

    def controllers(self) -> list[bool]:
        """Return for each of the cluster's controllers whether it answers."""
        return parse_cluster.parse_ping(self._call(argv.PING, QUERY_ENV).stdout)

    def partitions(self) -> list[Partition]:
        """Return the partitions that this user may see."""
        return parse_nodes.parse_partitions(self._read(argv.PARTITIONS))

    def nodes(self, names: str = "") -> list[Node]:
        """Return all nodes, or those of a host list."""
        return parse_nodes.parse_nodes(self._read(argv.show_nodes(names)))

    def address(self, node: str) -> str:
        """Return the address of a node for slurmctld. Raises ClusterError for several nodes."""
        nodes = self.nodes(node)
        if len(nodes) != 1:
            raise ClusterError(
                f'"{node}" is {len(nodes)} nodes (expected 1)', where="scontrol show node", hint="name one node"
            )
        return nodes[0].address

    def topology(self) -> list[Switch | Block]:
        """Return switches or blocks; [] for a flat topology."""
        done = self._call(argv.TOPOLOGY, QUERY_ENV)
        if done.code and reason_of(done.stderr) is SlurmReason.NO_TOPOLOGY:
            return []
        return parse_cluster.parse_topology(self._stdout_or_raise(argv.TOPOLOGY, done))

    def jobs(
        self,
        ids: Sequence[str] = (),
        *,
        user: str = "",
        name: str = "",
        all_states: bool = False,
        each_task: bool = False,
    ) -> list[SlurmJob]:
        """Return unfinished jobs, filtered by ids, user and exact name; unknown ids are ignored.

        all_states: include jobs that ended minutes ago. each_task: a record for every task of a pending array.
        """
        sep = new_separator()
        command = argv.squeue(ids, user, name, all_states=all_states, each_task=each_task, sep=sep)
        done = self._call(command, QUERY_ENV)
        if done.code and job_not_found(done.stderr):
            return []
        jobs = parse_jobs.parse_squeue(self._stdout_or_raise(command, done), sep, zone=UTC)
        return [job for job in jobs if not name or job.name == name]

    def job(self, job_id: str) -> list[SlurmJob]:
        """Return a job's detailed records, several for an array or het job; [] if unknown."""
        command = argv.show_job(job_id)
        done = self._call(command, QUERY_ENV)
        if done.code and job_not_found(done.stderr):
            return []
        return parse_jobs.parse_scontrol_jobs(self._stdout_or_raise(command, done), UTC)

    def accounting(
        self,
        ids: Sequence[str] = (),
        *,
        user: str = "",
        name: str = "",
        since: datetime | None = None,
        all_starts: bool = True,
    ) -> list[AccountingRow]:
        """Return accounting rows of these ids, or since a time with its zone. all_starts: all, else the last."""
        sep = new_separator()
        rows = parse_accounting.parse_sacct(
            self._read(argv.sacct(ids, user, name, since, all_starts=all_starts, sep=sep)), sep, UTC
        )
        return [row for row in rows if not name or row.name == name]

    def admin_comments(self, ids: Sequence[str]) -> dict[str, str]:
        """Return raw job id → AdminComment of its last start; programs such as jobstats write it, on one line."""
        lines = (line.partition("|") for line in self._read(argv.admin_comments(ids)).splitlines())
        return {raw_id: text for raw_id, _, text in lines if raw_id.isdecimal()}

    def associations(self, user: str = "") -> list[Association]:
        """Return the associations of a user, or of all users."""
        return parse_accounting.parse_associations(self._read(argv.associations(user)))

    def default_accounts(self, user: str) -> dict[str, str]:
        """Return cluster → the user's default account."""
        return parse_accounting.parse_default_accounts(self._read(argv.default_accounts(user)))

    def qos(self) -> list[Qos]:
        """Return every QOS."""
        return parse_accounting.parse_qos(self._read(argv.QOS))

    def state_of(self, ids: Sequence[str]) -> dict[str, str]:
        """Return job id → state, by one squeue, then one sacct for the ids that squeue does not list.

        A job that neither lists is UNKNOWN, never finished; the same without accounting. The state of an array or het
        job is that of its first unfinished part, else of its first part that is not COMPLETED.
        """
        if not ids:
            return {}
        jobs = self.jobs(ids, all_states=True, each_task=True)
        states = job_components.states_from_squeue(
            job_components.JobPart(job.job_id, job.raw_id, job.state) for job in jobs
        )
        missing = [job_id for job_id in ids if job_id not in states]
        if missing:
            states = {**self._states_from_accounting(missing), **states}
        return {job_id: states.get(job_id, UNKNOWN) for job_id in ids}

    def _states_from_accounting(self, ids: Sequence[str]) -> dict[str, str]:
        try:
            jobs = self.accounting(ids, all_starts=False)
        except PitError:
            return {}
        return job_components.states_from_accounting(
            job_components.JobPart(job.job_id, job.raw_id, job.state) for job in jobs
        )

    def my_jobs(self) -> list[job_components.JobPart]:
        """Return all jobs and array tasks of this user, with those that ended minutes ago.

        Pending jobs have a reason and an expected start. The cheapest squeue for polling: one call for all jobs.
        """
        sep = new_separator()
        command = argv.my_jobs(sep)
        rows = split_rows(self._read(command), sep, len(argv.MY_JOBS_FORMAT), command[0])
        return [_row(*values) for values in rows]

    def test_only(self, script: str, args: Sequence[str] = ()) -> StartEstimate:
        """Estimate when and where the script would start. Its `--begin` is read as UTC."""
        command = argv.test_only(args)
        done = self._call(command, QUERY_ENV, stdin=script)
        self._stdout_or_raise(command, done)
        return parse_cluster.parse_estimate(done.stderr, UTC)

    def submit(
        self, script: str = "", *, path: str = "", args: Sequence[str] = (), answer: BinaryIO | None = None
    ) -> Submitted:
        """Submit a script: its text, or the file at `path` on the cluster.

        The job gets this environment without variables of Slurm and MPI. answer: an empty file for sbatch's output,
        which survives a kill of this process: see `read_answer`. Submissions are rate-limited per user and host.
        Raises OutcomeUnknown if the job may be queued nevertheless: search for its name before submitting again.
        """
        command = argv.submit(args, path)
        submit_rate.wait_turn()
        hint = "the job may be queued: first search for its name with squeue"
        done = self.run_once(command, hint, stdin=script or None, stdout=answer)
        try:
            return parse_cluster.parse_submitted(done.stdout)
        except ClusterError as error:
            raise OutcomeUnknown(
                error.message, where=error.where, hint="search for the job's name with squeue"
            ) from error

    @staticmethod
    def read_answer(answer: BinaryIO) -> Submitted | None:
        """Return the job in a file of sbatch's output; None if the output is missing or truncated."""
        answer.seek(0)
        # Over ssh the output of the login is first.
        output = answer.read().decode(errors="replace").rpartition(LOGIN_OUTPUT_END)[2]
        try:
            return parse_cluster.parse_submitted(output) if output.endswith("\n") else None
        except ClusterError:
            return None

    def cancel(self, ids: Sequence[str], name: str = "", user: str = "") -> None:
        """Cancel jobs. Ended and unknown jobs are ignored. Safe to repeat.

        name, user: cancel only jobs with these: a slurmctld that crashed may reuse forgotten ids for new jobs.
        """
        command = argv.cancel(ids, name, user)
        done = self._call(command, {})
        # Not died_without_message: scancel's own refusals have codes above 128.
        if done.code < 0 or (done.code and not done.stderr.strip()):
            raise Unreachable(f"exited with code {done.code} and no message", where=command[0])
        if (done.code or "error" in done.stderr) and not job_not_found(done.stderr):
            raise self._error_for(command, done)

    def requeue(self, ids: Sequence[str]) -> None:
        """Requeue batch jobs under their ids."""
        self.run_once(argv.requeue(ids), "the jobs may have been requeued: first check with squeue")

    def update(
        self,
        job_id: str,
        *,
        exclude: str | None = None,
        nodelist: str | None = None,
        reservation: str | None = None,
        start_now: bool = False,
    ) -> None:
        """Change a pending job, which keeps its id and age. exclude, nodelist, reservation: "" removes, None keeps.

        start_now: let a delayed job start now. Safe to repeat. Raises ClusterError for a job that has started.
        """
        self._read(
            argv.update_job(job_id, exclude=exclude, nodelist=nodelist, reservation=reservation, start_now=start_now)
        )

    def drain_node(self, node: str, reason: str) -> None:
        """Drain a node; its jobs continue. Safe to repeat; replaces the reason of an earlier drain. Operators only."""
        self._read(argv.drain_node(node, reason))

    def resume_node(self, node: str) -> None:
        """Let a drained or down node run jobs again. Raises ClusterError for one that is neither. Operators only."""
        self._read(argv.resume_node(node))

    def reserve(self, name: str, nodes: str, user: str, minutes: int) -> None:
        """Reserve nodes for a user's jobs, for at most `minutes`. Operators only."""
        self.run_once(
            argv.create_reservation(name, nodes, user, minutes),
            f"the reservation {name} may exist; it expires by itself",
        )

    def unreserve(self, name: str) -> None:
        """End a reservation, if it exists; its jobs continue. Safe to repeat."""
        command = argv.delete_reservation(name)
        done = self._call(command, {})
        if done.code and reason_of(done.stderr) is SlurmReason.RESERVATION_IN_USE:
            command = argv.end_reservation(name)
            done = self._call(command, {})
        if has_failed(done) and reason_of(done.stderr) is not SlurmReason.RESERVATION_NOT_FOUND:
            raise self._error_for(command, done)

    def _read(self, command: Sequence[str]) -> str:
        return self._stdout_or_raise(command, self._call(command, QUERY_ENV))

    def run_once(
        self, command: Sequence[str], hint: str, stdin: str | None = None, stdout: BinaryIO | None = None
    ) -> subprocesses.Completed:
        """Run a command that must not be repeated blindly. Raises OutcomeUnknown if it may have been carried out."""
        try:
            done = self._call(command, {}, stdin, stdout)
            if died_without_message(done):
                raise Unreachable(f"exited with code {done.code} and no message", where=command[0])
            self._stdout_or_raise(command, done)
        except Unreachable as error:
            if was_not_sent(error):
                raise
            raise OutcomeUnknown(error.message, where=error.where, hint=hint) from error
        return done

    def _call(
        self, command: Sequence[str], env: Mapping[str, str], stdin: str | None = None, stdout: BinaryIO | None = None
    ) -> subprocesses.Completed:
        done = run_command(self.transport, command, env=env, stdin=stdin, stdout=stdout, run=self._run)
        if stdout is None:
            return done
        stdout.seek(0)
        return done._replace(stdout=stdout.read().decode(errors="replace").rpartition(LOGIN_OUTPUT_END)[2])

    def _stdout_or_raise(self, command: Sequence[str], done: subprocesses.Completed) -> str:
        if has_failed(done):
            raise self._error_for(command, done)
        return done.stdout

    def _error_for(self, command: Sequence[str], done: subprocesses.Completed) -> PitError:
        return error_for(command[0], self.transport.host, done.code, done.stderr or done.stdout)
