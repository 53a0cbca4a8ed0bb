"""Submit, query and revoke tickets at a site that shares a file system with this machine.

launch/tickets/remote/ has the same functions for a site that shares none. A ticket's run folder is `<runs>/<name>`,
and its Slurm job has the same name: both can be found after a crash during the submission.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, ConfigError, DataError
from pitools.core.fs import from_os_error, write_atomic
from pitools.launch import hooks
from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.launch.provenance import provenance
from pitools.launch.submission import exactly_once, grant, node_choice, submissions
from pitools.launch.tickets import ticket_state
from pitools.launch.tickets.ticket_state import TicketState
from pitools.run import run_folder
from pitools.run.attempt_records import Decision
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.template import expand_placeholders
from pitools.slurm.errors import OutcomeUnknown
from pitools.slurm.records import SlurmJob


def runs_dir(site: Site) -> str:
    """Return the site's folder of runs. Raises ConfigError for a relative path: ticks differ in working folder."""
    runs = expand_placeholders(site.paths.runs)
    if not Path(runs).is_absolute():
        where, hint = f"paths.runs of site {site.name}", f'runs = "{Path(runs).absolute()}"; or PIT_RUNS, in cron too'
        raise ConfigError(f'invalid folder of runs: "{runs}" (expected an absolute path)', where=where, hint=hint)
    return runs


def ticket_dir(site: Site, name: str) -> Path:
    """Return the run folder of a ticket. Raises ConfigError."""
    return Path(runs_dir(site)) / name


def submit_ticket(
    plan: Plan, site: Site, *, name: str, populate: Callable[[Path], None] = lambda _: None
) -> run_folder.JobRef:
    """Submit a plan under this name, or find its job of an earlier call. A name is submitted at most once.

    Chooses its nodes, if the request asks for that, among the nodes free now. populate: adds files to the run folder
    before it is renamed into place.

    Raises ClusterError for a refused or revoked ticket, FolderNotCreated on a full disk, Unreachable, and
    OutcomeUnknown if Slurm may have the job: repeat the call later, or revoke the ticket.
    """
    run_dir = ticket_dir(site, name)
    if not run_dir.exists():
        with ticket_state.before_submission():
            _create_ticket_dir(run_dir, plan, site, populate)
    if not (run_dir / "script.sbatch").exists():
        raise ClusterError("ticket was revoked before its submission", where=str(run_dir), hint="submit a new ticket")
    if not submissions.is_unresolved(run_dir, 0):
        return _submit_with_node_choice(run_dir, plan, site)
    if job := exactly_once.find_submitted(run_dir, site, 0):
        return job
    raise OutcomeUnknown(
        "ticket was submitted, but has no job of its name", where=str(run_dir), hint="revoke the ticket"
    )


def _submit_with_node_choice(run_dir: Path, plan: Plan, site: Site) -> run_folder.JobRef:
    slurm = client(site)
    fabric = node_choice.load_fabric(plan, site, slurm)
    job = exactly_once.submit_once(
        run_dir, site, job_number=0, retry_for_s=0.0, args=node_choice.DELAYED_START_ARGS if fabric else ()
    )
    if fabric:
        node_choice.record_choice(
            run_dir,
            node_choice.acquire_nodes(plan, site, fabric, slurm, job.job_id, follow_s=node_choice.TICKET_FOLLOW_S),
        )
    return job


def _create_ticket_dir(run_dir: Path, plan: Plan, site: Site, populate: Callable[[Path], None]) -> None:
    """Create the run folder with its script. Raises ClusterError for a name that was revoked meanwhile, and NoSpace."""
    building = _hidden_dir(run_dir)
    shutil.rmtree(building, ignore_errors=True)  # left by a killed process
    try:
        run_folder.make_run_dir(building, site.paths.runs_access)
        write_atomic(building / "request.toml", plan.request_text, durable=False)
        plan = provenance.capture(plan, site, building, run_dir)
        write_atomic(building / "plan.json", msgspec.json.format(msgspec.json.encode(plan), indent=1), durable=False)
        (building / "checkpoints").mkdir(0o755)
        (building / "attempts").mkdir(0o755)
        # A ticket's job never submits another: `pit place` decides on the next job.
        env = {**plan.request.env, "PIT_RECOVER": "allocation"}
        ticket_plan = planning.plan_of_ticket(plan)
        ticket_plan = msgspec.structs.replace(ticket_plan, request=msgspec.structs.replace(plan.request, env=env))
        text = planning.render_script(ticket_plan, site, run_dir=str(run_dir))
        write_atomic(building / "script.sbatch", grant.add_grant_check(text, str(run_dir)), durable=False)
        run_folder.record_created(building, site.name, ticket=True)
        if plan.hooks:
            hooks.mark_pending(building)
        populate(building)
        os.rename(building, run_dir)
    except OSError as error:
        raise from_os_error(error, run_dir) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _hidden_dir(run_dir: Path) -> Path:
    """Return the folder that a ticket's is built as, and renamed to before its removal; one process acts at a site."""
    return run_dir.with_name(f".{run_dir.name}")


def ticket_states(site: Site, names: Sequence[str]) -> dict[str, TicketState]:
    """Return the states of these tickets, and of the user's other jobs, by one squeue and at most one sacct.

    Raises Unreachable when the site's Slurm gives no answer.
    """
    slurm = client(site)
    # By user, not by name: squeue fails for unknown names. Jobs that ended minutes ago are included.
    listed = slurm.jobs(user=slurm.user(), all_states=True)
    grants = {name: _read_grant(ticket_dir(site, name)) for name in names}
    jobs = ticket_state.jobs_by_name(listed, grants)
    listed_states = {name: _state_of_queued(site, job, grants.get(name)) for name, job in jobs.items()}
    unlisted_states = {name: _state_of_unlisted(site, name) for name in names if name not in jobs}
    return listed_states | ticket_state.with_accounting(slurm, unlisted_states)


def _state_of_queued(site: Site, job: SlurmJob, grant_token: str | None) -> TicketState:
    if grant_token is None:  # no requested ticket: the user may have a thousand other jobs, so no folder is read
        return ticket_state.state_of_listed(job, "", None)
    return ticket_state.state_of_listed(job, grant_token, _exit_code(ticket_dir(site, job.name)))


def _state_of_unlisted(site: Site, name: str) -> TicketState:
    run_dir = ticket_dir(site, name)
    try:
        ref = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    except DataError:  # a damaged record of one ticket must not hide the others
        return ticket_state.state_without_id(_read_grant(run_dir), _exit_code(run_dir))
    return ticket_state.state_of_unlisted(ref.job_id if ref else "", _read_grant(run_dir), _exit_code(run_dir))


def _exit_code(run_dir: Path) -> int | None:
    attempt, ended = run_folder.last_attempt(run_dir), run_folder.last_exit(run_dir)
    decision = run_folder.read_or_none(attempt / "decision.json", Decision) if attempt else None
    return ticket_state.recorded_exit_code(ended, decision)


def _read_grant(run_dir: Path) -> str:
    try:
        return grant.read_grant(run_dir)
    except OSError as error:
        raise from_os_error(error, run_dir) from error


def revoke(site: Site, names: Sequence[str]) -> dict[str, bool]:
    """Revoke these tickets, without a query; return, by name, False for a ticket whose job was granted before."""
    try:
        return {name: not grant.is_granted(grant.claim(ticket_dir(site, name), grant.REVOKED)) for name in names}
    except OSError as error:
        raise from_os_error(error, Path(error.filename or site.paths.runs)) from error


def withdraw_grants(site: Site, names: Sequence[str]) -> None:
    """Revoke the grants of tickets that have ended: whoever requeues their jobs, they begin no further attempt."""
    for name in names:
        try:
            grant.replace(ticket_dir(site, name))
        except OSError as error:
            raise from_os_error(error, ticket_dir(site, name)) from error


def cancel_tickets(site: Site, jobs: Mapping[str, str]) -> None:
    """Cancel these tickets' jobs, id → name. Safe to repeat: a later job with a reused id has another name."""
    for job_id, name in jobs.items():
        client(site).cancel([job_id], name=name)


def remove_ticket_dirs(site: Site, names: Sequence[str]) -> None:
    """Remove the folders of revoked tickets without a job in Slurm.

    A job that appears late all the same finds no grant without the folder, nor in a partly removed one.
    """
    for name in names:
        run_dir = ticket_dir(site, name)
        hidden = _hidden_dir(run_dir)
        shutil.rmtree(hidden, ignore_errors=True)  # left by a killed process
        with contextlib.suppress(OSError):
            os.rename(run_dir, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
