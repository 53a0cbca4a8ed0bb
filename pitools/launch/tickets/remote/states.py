"""Query, revoke and cancel remote tickets, and fetch their runs: one remote call for any number of tickets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import Unreachable
from pitools.core.record import decode_json
from pitools.launch.submission import grant
from pitools.launch.tickets import ticket_state
from pitools.launch.tickets.remote import paths
from pitools.launch.tickets.ticket_state import TicketState
from pitools.run import run_folder
from pitools.run.attempt_records import Decision
from pitools.site import remote_files
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.records import SlurmJob

FETCH_MAX_BYTES = 256 << 20
_RESUMABLE_MAX_BYTES = 1 << 46
_NOT_FETCHED = ("code", "checkpoints", "submitit")

# A line per ticket; shell built-ins where possible, because a process per ticket would be slow.
_STATE_SCRIPT = (
    'cd -- "$1" 2>/dev/null || { echo end; exit 0; }; while IFS= read -r n; do l=; j=; x=; y=; m=-1; '
    '[ -L "$n/grant" ] && l=$(readlink "$n/grant"); [ -s "$n/job.json" ] && IFS= read -r j < "$n/job.json"; '
    'for d in "$n"/attempts/*; do d=${d##*/}; case $d in *[!0-9]*) ;; *) [ "$d" -gt $m ] && m=$d;; esac; done; '
    'a=$n/attempts/$m; [ -s "$a/exit.json" ] && IFS= read -r x < "$a/exit.json"; '
    '[ -s "$a/decision.json" ] && IFS= read -r y < "$a/decision.json"; '
    'printf \'%s\\t%s\\t%s\\t%s\\t%s\\n\' "$n" "$l" "$j" "$x" "$y"; done; echo end'
)
_GRANT_SCRIPT = (
    '[ -L "$1" ] && { echo "$1 is a link, not a folder" >&2; exit 1; }; '
    'while IFS= read -r n; do g=$1/$n/grant; mkdir -p -- "$1/$n" || exit 1; '
    '[ -L "$g" ] || ln -sT "$2" "$g" || [ -L "$g" ] || exit 1; '
    'printf \'%s\\t%s\\n\' "$n" "$(readlink "$1/$n/grant")"; done; echo end'
)
_REGRANT_SCRIPT = (
    'while IFS= read -r n; do ln -sfT "$2" "$1/$n/grant" || exit 1; '
    'printf \'%s\\t%s\\n\' "$n" "$(readlink "$1/$n/grant")"; done; echo end'
)


class _TicketDir(msgspec.Struct, frozen=True):
    """The records in a ticket's run folder. is_damaged: whether the record of its job is unreadable."""

    grant: str = ""
    job_id: str = ""
    exit_code: int | None = None
    is_damaged: bool = False


def ticket_states(site: Site, names: Sequence[str]) -> dict[str, TicketState]:
    """Return the states of these tickets, and of the user's other jobs, by one squeue and at most one sacct.

    Raises Unreachable for a missing or incomplete answer.
    """
    slurm = client(site)
    listed = slurm.jobs(user=paths.remote_user(site), all_states=True)
    dirs = _read_ticket_dirs(site, names)
    jobs = ticket_state.jobs_by_name(listed, {name: ticket.grant for name, ticket in dirs.items()})
    empty_dir = _TicketDir()
    listed_states = {name: _state_of_queued(job, dirs.get(name, empty_dir)) for name, job in jobs.items()}
    unlisted_states = {name: _state_of_unlisted(dirs.get(name, empty_dir)) for name in names if name not in jobs}
    return listed_states | ticket_state.with_accounting(slurm, unlisted_states)


def _state_of_queued(job: SlurmJob, ticket: _TicketDir) -> TicketState:
    return ticket_state.state_of_listed(job, ticket.grant, ticket.exit_code)


def _state_of_unlisted(ticket: _TicketDir) -> TicketState:
    if ticket.is_damaged:
        return ticket_state.state_without_id(ticket.grant, ticket.exit_code)
    return ticket_state.state_of_unlisted(ticket.job_id, ticket.grant, ticket.exit_code)


def _read_ticket_dirs(site: Site, names: Sequence[str]) -> dict[str, _TicketDir]:
    dirs = {}
    for name, grant_token, job, ended, decided in _run_for_each(site, _STATE_SCRIPT, names, 5):
        ref, attempt = _parse_record(job, run_folder.JobRef), _parse_record(ended, run_folder.AttemptExit)
        code = ticket_state.recorded_exit_code(attempt, _parse_record(decided, Decision))
        dirs[name] = _TicketDir(grant_token, ref.job_id if ref else "", code, is_damaged=bool(job) and ref is None)
    return dirs


def _parse_record(text: str, kind: type[run_folder.T]) -> run_folder.T | None:
    """Return the record in a line; None for an empty or damaged line, which must not hide the other tickets."""
    with contextlib.suppress(msgspec.DecodeError):
        return decode_json(text, kind) if text else None
    return None


def revoke(site: Site, names: Sequence[str]) -> dict[str, bool]:
    """Revoke these tickets, without a query; return, by name, False for a ticket whose job was granted before."""
    lines = _run_for_each(site, _GRANT_SCRIPT, names, 2, grant.REVOKED)
    return {name: not grant.is_granted(token) for name, token in lines}


def withdraw_grants(site: Site, names: Sequence[str]) -> None:
    """Revoke the grants of tickets that have ended: whoever requeues their jobs, they begin no further attempt."""
    list(_run_for_each(site, _REGRANT_SCRIPT, names, 2, grant.REVOKED))


def _run_for_each(site: Site, script: str, names: Sequence[str], fields: int, *args: str) -> Iterator[list[str]]:
    """Run a shell script over names on stdin; yield its output lines split at tabs. Raises Unreachable if truncated."""
    if not names:
        return
    for name in names:
        paths.ticket_dir(site, name)  # raises for an invalid name
    runs = paths.remote_runs_dir(site)
    done = remote_files.run_shell(site, script, runs, *args, stdin="".join(f"{name}\n" for name in names))
    if done.code:
        raise remote_files.transfer_error(site, done, runs)
    *lines, end = done.stdout.split("\n")[:-1] or [""]
    rows = [line.split("\t") for line in lines]
    if end != "end" or any(len(line) != fields for line in rows) or not {line[0] for line in rows} <= set(names):
        raise Unreachable("incomplete answer", where=f"{site.name}:{runs}", hint="try again")
    yield from rows


def cancel_tickets(site: Site, jobs: Mapping[str, str]) -> None:
    """Cancel these tickets' jobs, id → name. Safe to repeat: a later job with a reused id has another name."""
    for job_id, name in jobs.items():
        client(site).cancel([job_id], name=name)


def remove_ticket_dirs(site: Site, names: Sequence[str]) -> None:
    """Remove the folders of revoked tickets without a job in Slurm."""
    remote_files.remove_paths(site, *(paths.ticket_dir(site, name) for name in names))


def fetch_run(
    site: Site, name: str, to: Path, *, limit: int = FETCH_MAX_BYTES, without: Sequence[str] = _NOT_FETCHED
) -> bool:
    """Download a run's records, logs and step logs as the folder `to`, atomically; return False if there is no run.

    without: folders to leave out, by default code and checkpoints. Raises ClusterError for more than `limit` bytes,
    and Unreachable; an existing `to` then stays.
    """
    return remote_files.get_tree(site, paths.ticket_dir(site, name), to, without=without, limit=limit)


def fetch_resumable(site: Site, name: str, to: Path) -> bool:
    """Download a run with its code and checkpoints, from which another run can continue; as `fetch_run`, of any size.

    Links are left out: `latest` is not needed to find a checkpoint.
    """
    return fetch_run(site, name, to, limit=_RESUMABLE_MAX_BYTES, without=("submitit",))
