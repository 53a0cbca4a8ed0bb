"""Tickets of a site whose files are seen from here: a plan becomes a job of a given name, once, and can be asked for.

launch/tickets/remote/ has the same functions for a site that shares no file system. A ticket's run folder is
`<runs>/<name>`, and the job that Slurm knows has the same name: so both can be found by a process that never heard an
answer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError
from pitools.core.fs import from_os_error, write_atomic
from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.launch.provenance import provenance
from pitools.launch.submission import exactly_once, grant, node_choice, submissions
from pitools.launch.tickets import ticket_state
from pitools.launch.tickets.ticket_state import TicketState
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.site.template import expand_placeholders, rank_command
from pitools.slurm.errors import OutcomeUnknown
from pitools.slurm.records import SlurmJob


def ticket_dir(site: Site, name: str) -> Path:
    """The folder of a ticket."""
    return Path(expand_placeholders(site.paths.runs)).absolute() / name


def submit_ticket(plan: Plan, site: Site, *, name: str) -> run_folder.JobRef:
    """Queue a plan under this name and return its job; one that was queued before is only looked up.

    Where the request wants its nodes chosen, that is done here too, among those that are free at this moment.

    Raises ClusterError when Slurm refuses, Unreachable when it cannot be asked, Unanswered when it may have it: look
    again later, by the same call, or take it back. A name is never given to sbatch twice.
    """
    at = ticket_dir(site, name)
    if not at.exists():
        _create_ticket_dir(at, plan, site)
    if not (at / "script.sbatch").exists():
        raise ClusterError("it was taken back before it was submitted", where=str(at), hint="submit it anew")
    if not submissions.is_unresolved(at, 0):
        return _submit_run(at, plan, site)
    if known := exactly_once.find_submitted(at, site, 0):
        return known
    raise OutcomeUnknown("it was submitted before, and no job of its name is there", where=str(at), hint="take it back")


def _submit_run(run_dir: Path, plan: Plan, site: Site) -> run_folder.JobRef:
    slurm = client(site)
    fabric = node_choice.load_fabric(plan, site, slurm)
    job = exactly_once.submit_once(
        run_dir, site, number=0, retry_for_s=0.0, args=node_choice.DELAYED_START_ARGS if fabric else ()
    )
    if fabric:
        node_choice.record_choice(
            run_dir, node_choice.acquire_nodes(plan, fabric, slurm, job.job_id, follow_s=node_choice.TICKET_FOLLOW_S)
        )
    return job


def _create_ticket_dir(run_dir: Path, plan: Plan, site: Site) -> None:
    """The run's folder with its script; a name that is taken back meanwhile has a folder, and raises ClusterError."""
    # Of this process alone: another that was killed here has left its own behind.
    building = run_dir.with_name(f".{run_dir.name}.{os.getpid()}")
    try:
        run_folder.make_run_dir(building, site.paths.runs_access)
        write_atomic(building / "request.toml", plan.request_text, durable=False)
        plan = provenance.capture(plan, site, building, run_dir)
        write_atomic(building / "plan.json", msgspec.json.format(msgspec.json.encode(plan), indent=1), durable=False)
        (building / "checkpoints").mkdir(0o755)
        (building / "attempts").mkdir(0o755)
        payload = rank_command(site, "plan", f"{run_dir}/plan.json")
        # A ticket goes on in its own job alone: which other job does its work is for the queue to say.
        env = {**plan.request.env, "PIT_RECOVER": "allocation"}
        shown = msgspec.structs.replace(plan, request=msgspec.structs.replace(plan.request, env=env))
        text = planning.render_script(shown, site, run_dir=str(run_dir), payload=payload)
        write_atomic(building / "script.sbatch", grant.add_grant_check(text, str(run_dir)), durable=False)
        os.rename(building, run_dir)
    except OSError as error:
        raise from_os_error(error, run_dir) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def ticket_states(site: Site, names: Sequence[str]) -> dict[str, TicketState]:
    """What is known of these tickets, and of every other job of ours there: one squeue, and sacct for the forgotten.

    Raises Unreachable when the site's Slurm gives no answer.
    """
    slurm = client(site)
    # By user and not by name: names that Slurm has never heard of would be no answer at all. Those that ended minutes
    # ago are still known.
    listed = slurm.jobs(user=slurm.user(), all_states=True)
    words = {name: _read_grant(ticket_dir(site, name)) for name in names}
    jobs = ticket_state.jobs_by_name(listed, words)
    found = {name: _state_of_queued(site, job, words.get(name)) for name, job in jobs.items()}
    told = {name: _state_of_unlisted(site, name) for name in names if name not in jobs}
    return found | ticket_state.with_accounting(slurm, told)


def _state_of_queued(site: Site, job: SlurmJob, word: str | None) -> TicketState:
    if word is None:  # no ticket that was asked for: perhaps somebody has a thousand jobs of their own
        return ticket_state.state_of_listed(job, "", None)
    return ticket_state.state_of_listed(job, word, _exit_code(ticket_dir(site, job.name)))


def _state_of_unlisted(site: Site, name: str) -> TicketState:
    at = ticket_dir(site, name)
    try:
        ref = run_folder.read_record(at / "job.json", run_folder.JobRef)
    except DataError:  # a damaged record of one ticket must not keep the others from being known
        return ticket_state.state_without_id(_read_grant(at), _exit_code(at))
    return ticket_state.state_of_unlisted(ref.job_id if ref else "", _read_grant(at), _exit_code(at))


def _exit_code(run_dir: Path) -> int | None:
    ended = run_folder.last_exit(run_dir)
    return ended.exit_code if ended else None


def _read_grant(run_dir: Path) -> str:
    try:
        return grant.read_grant(run_dir)
    except OSError as error:
        raise from_os_error(error, run_dir) from error


def revoke(site: Site, names: Sequence[str]) -> dict[str, bool]:
    """Make sure that these tickets never run; False for one that has had leave before. Slurm is not asked."""
    try:
        return {name: not grant.is_granted(grant.claim(ticket_dir(site, name), grant.REVOKED)) for name in names}
    except OSError as error:
        raise from_os_error(error, Path(error.filename or site.paths.runs)) from error


def cancel_tickets(site: Site, jobs: Mapping[str, str]) -> None:
    """End these tickets' jobs, id → name. Safe to repeat: one that got its id since then has another name."""
    for job_id, name in jobs.items():
        client(site).cancel([job_id], name=name)


def remove_ticket_dirs(site: Site, names: Sequence[str]) -> None:
    """Remove the folders of tickets that were taken back and that Slurm does not know any more.

    Without its folder a job that turns up late all the same finds no leave either; nor does it in half a folder.
    """
    for name in names:
        at = ticket_dir(site, name)
        gone = at.with_name(f".{name}.gone")
        shutil.rmtree(gone, ignore_errors=True)  # of somebody who was killed here
        with contextlib.suppress(OSError):
            os.rename(at, gone)
        shutil.rmtree(gone, ignore_errors=True)
