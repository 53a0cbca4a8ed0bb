"""Slurm, asked: each method runs one command where the cluster is reached and returns records.

Every method raises Unreachable (75) when the controller, the accounting database or the ssh host gives no answer,
ClusterError (4) with Slurm's own sentence when it refuses, and ToolMissing where Slurm's commands are not installed.
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


def _row(job_id: str, reason: str, start: str, raw_id: str, state: str) -> job_components.SqueueRow:
    row = job_components.SqueueRow(job_id, raw_id, parse_job_state(state))
    return (
        row._replace(reason=none_to_empty(reason), start=parse_slurm_time(start, UTC))
        if row.state == "PENDING"
        else row
    )


class Client:
    """One cluster. transport: how its commands are run; run: what runs a program, as `core/subprocesses.py` does."""

    def __init__(self, transport: Transport | None = None, run: RunFunction = subprocesses.run) -> None:
        self.transport = transport or Transport()
        self._run = run

    def version(self) -> tuple[int, ...]:
        """Version of the Slurm commands, such as (22, 5, 8). Asks no controller."""
        return parse_cluster.parse_version(self._read(argv.VERSION))

    def user(self) -> str:
        """Whom the commands run as, on the cluster's side."""
        return self._read(argv.USER).strip()

    def home(self) -> str:
        """The user's home on the cluster's side."""
        return self._read(argv.HOME).strip()

    def config(self) -> Config:
        """What slurmctld runs with."""
        return parse_cluster.parse_config(self._read(argv.CONFIG))

    def is_up(self) -> bool:
        """Whether one of the cluster's controllers answers."""
        return " UP" in self._call(argv.PING, QUERY_ENV).stdout

    def partitions(self) -> list[Partition]:
        """Every partition that this user may see."""
        return parse_nodes.parse_partitions(self._read(argv.PARTITIONS))

    def nodes(self, names: str = "") -> list[Node]:
        """Every node, or those of a folded host list."""
        return parse_nodes.parse_nodes(self._read(argv.show_nodes(names)), UTC)

    def address(self, node: str) -> str:
        """The address at which slurmctld reaches a node."""
        found = self.nodes(node)
        if len(found) != 1:
            raise ClusterError(f'"{node}" is {len(found)} nodes', where="scontrol show node", hint="name one node")
        return found[0].address

    def topology(self) -> list[Switch | Block]:
        """Switches or blocks; [] for a flat topology."""
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
        """Jobs that have not ended (`all_states`: or ended minutes ago), narrowed by ids, user and exact name.

        An id that slurmctld does not know is no error: it has no job here.
        """
        sep = new_separator()
        command = argv.squeue(ids, user, name, all_states=all_states, each_task=each_task, sep=sep)
        done = self._call(command, QUERY_ENV)
        if done.code and job_not_found(done.stderr):
            return []
        found = parse_jobs.parse_squeue(self._stdout_or_raise(command, done), sep, zone=UTC)
        return [job for job in found if not name or job.name == name]

    def job(self, job_id: str) -> list[SlurmJob]:
        """One job in detail, with its restarts and batch host; several for an array or het job; [] when unknown."""
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
        attempts: bool = True,
    ) -> list[AccountingRow]:
        """What accounting keeps of these ids, or since an aware moment; every attempt, or only the last of each job."""
        sep = new_separator()
        found = parse_accounting.parse_sacct(
            self._read(argv.sacct(ids, user, name, since, attempts=attempts, sep=sep)), sep, UTC
        )
        return [job for job in found if not name or job.name == name]

    def associations(self, user: str = "") -> list[Association]:
        """Accounts, partitions and QOS that a user, or anyone, is associated with."""
        return parse_accounting.parse_associations(self._read(argv.associations(user)))

    def default_accounts(self, user: str) -> dict[str, str]:
        """Cluster → the account that a user's jobs are charged to there when they name none."""
        return parse_accounting.parse_default_accounts(self._read(argv.default_accounts(user)))

    def qos(self) -> list[Qos]:
        """Every QOS."""
        return parse_accounting.parse_qos(self._read(argv.QOS))

    def state_of(self, ids: Sequence[str]) -> dict[str, str]:
        """State of each job: one squeue for all, then one sacct for those that squeue does not know.

        UNKNOWN, never a finished state, for what neither knows, and where there is no accounting. The state of a whole
        array or het job is its first unfinished part's, else that of its first part that did not complete.
        """
        if not ids:
            return {}
        jobs = self.jobs(ids, all_states=True, each_task=True)
        known = job_components.states_from_squeue(
            job_components.SqueueRow(job.job_id, job.raw_id, job.state) for job in jobs
        )
        missing = [job_id for job_id in ids if job_id not in known]
        if missing:
            known = {**self._states_from_accounting(missing), **known}
        return {job_id: known.get(job_id, UNKNOWN) for job_id in ids}

    def _states_from_accounting(self, ids: Sequence[str]) -> dict[str, str]:
        try:
            jobs = self.accounting(ids, attempts=False)
        except PitError:
            return {}
        return job_components.states_from_accounting(
            job_components.SqueueRow(job.job_id, job.raw_id, job.state) for job in jobs
        )

    def my_jobs(self) -> list[job_components.SqueueRow]:
        """Id, number and state of every job of this user, each task by itself, also of those that ended minutes ago; of
        those that wait also why, and when they are expected to start.

        As cheap as squeue can be: for all jobs at once, and for asking again and again.
        """
        sep = new_separator()
        command = argv.my_jobs(sep)
        said = split_rows(self._read(command), sep, len(argv.MY_JOBS_FORMAT), command[0])
        return [_row(*values) for values in said]

    def test_only(self, script: str, args: Sequence[str] = ()) -> StartEstimate:
        """When and where the script would start now. A `--begin` in it is read as UTC here."""
        command = argv.test_only(args)
        done = self._call(command, QUERY_ENV, stdin=script)
        self._stdout_or_raise(command, done)
        return parse_cluster.parse_estimate(done.stderr, UTC)

    def submit(
        self, script: str = "", *, path: str = "", args: Sequence[str] = (), answer: BinaryIO | None = None
    ) -> Submitted:
        """Queue a script: its text, or the file at `path` on the cluster's side.

        The job's environment is this one less what Slurm and MPI left in it. answer: an empty file for what sbatch
        says, which stays when this process is killed: see `answered`. Submissions of a user from one host follow each
        other at a pace. Raises Unanswered when the job may have been queued all the same: look for it by name before
        submitting it again.
        """
        command = argv.submit(args, path)
        submit_rate.wait_turn()
        hint = "the job may be queued: look for its name with squeue first"
        done = self.run_once(command, hint, stdin=script or None, stdout=answer)
        try:
            return parse_cluster.parse_submitted(done.stdout)
        except ClusterError as error:
            raise OutcomeUnknown(
                error.message, where=error.where, hint="look for the job's name with squeue"
            ) from error

    @staticmethod
    def read_answer(answer: BinaryIO) -> Submitted | None:
        """The job that a file for sbatch's answer names; None where it holds none, or half of one."""
        answer.seek(0)
        # Over ssh what the login said comes first.
        said = answer.read().decode(errors="replace").rpartition(LOGIN_OUTPUT_END)[2]
        try:
            return parse_cluster.parse_submitted(said) if said.endswith("\n") else None
        except ClusterError:
            return None

    def cancel(self, ids: Sequence[str], name: str = "", user: str = "") -> None:
        """End these jobs; those that have ended, or are not known, are left alone. Safe to repeat.

        name, user: those of another are left alone, too. A slurmctld that crashed gives ids that it forgot to new jobs.
        """
        command = argv.cancel(ids, name, user)
        done = self._call(command, {})
        # Not is_silent: a refusal of scancel's own has codes above 128.
        if done.code < 0 or (done.code and not done.stderr.strip()):
            raise Unreachable(f"it ended with {done.code} and did not say why", where=command[0])
        if (done.code or "error" in done.stderr) and not job_not_found(done.stderr):
            raise self._error_for(command, done)

    def requeue(self, ids: Sequence[str]) -> None:
        """Put these batch jobs back in the queue under their own ids."""
        self.run_once(argv.requeue(ids), "the jobs may have been requeued: look at them with squeue first")

    def update(
        self,
        job_id: str,
        *,
        exclude: str | None = None,
        nodelist: str | None = None,
        reservation: str | None = None,
        start_now: bool = False,
    ) -> None:
        """Change what a waiting job asks for, under its own id and age; None is left as it is, "" asks for nothing.

        start_now: a job that was to begin later may start at once. Safe to repeat. A job that has started is refused.
        """
        self._read(
            argv.update_job(job_id, exclude=exclude, nodelist=nodelist, reservation=reservation, start_now=start_now)
        )

    def reserve(self, name: str, nodes: str, user: str, minutes: int) -> None:
        """Keep nodes for a user's jobs, for so many minutes at most. Operators only: others are refused."""
        self.run_once(
            argv.create_reservation(name, nodes, user, minutes),
            f"the reservation {name} may be there: it ends by itself",
        )

    def unreserve(self, name: str) -> None:
        """End a reservation; what runs in it goes on. One that is not there is left alone. Safe to repeat."""
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
        """Run what must not be repeated blindly: in doubt, say so."""
        try:
            done = self._call(command, {}, stdin, stdout)
            if died_without_message(done):
                raise Unreachable(f"it ended with {done.code} and did not say why", where=command[0])
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
