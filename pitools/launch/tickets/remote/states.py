"""What became of far tickets, and what may still become of them: each question is one call, for any number of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, Unreachable
from pitools.core.record import decode_json
from pitools.launch.submission import grant
from pitools.launch.tickets import ticket_state
from pitools.launch.tickets.remote import paths
from pitools.launch.tickets.ticket_state import TicketState
from pitools.run import run_folder
from pitools.site import remote_files
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.records import SlurmJob

FETCH_MAX_BYTES = 256 << 20
_NOT_FETCHED = ("code", "checkpoints", "submitit")

# A line a ticket, read without starting a program for each.
_STATE_SCRIPT = (
    'cd -- "$1" 2>/dev/null || { echo end; exit 0; }; while IFS= read -r n; do l=; j=; x=; m=-1; '
    '[ -L "$n/grant" ] && l=$(readlink "$n/grant"); [ -s "$n/job.json" ] && IFS= read -r j < "$n/job.json"; '
    'for d in "$n"/attempts/*; do d=${d##*/}; case $d in *[!0-9]*) ;; *) [ "$d" -gt $m ] && m=$d;; esac; done; '
    '[ -s "$n/attempts/$m/exit.json" ] && IFS= read -r x < "$n/attempts/$m/exit.json"; '
    'printf \'%s\\t%s\\t%s\\t%s\\n\' "$n" "$l" "$j" "$x"; done; echo end'
)
_GRANT_SCRIPT = (
    '[ -L "$1" ] && { echo "$1 is a link, not a folder" >&2; exit 1; }; '
    'while IFS= read -r n; do mkdir -p -- "$1/$n"; ln -sT "$2" "$1/$n/grant" 2>/dev/null; '
    'printf \'%s\\t%s\\n\' "$n" "$(readlink "$1/$n/grant")"; done; echo end'
)


class _TicketDir(msgspec.Struct, frozen=True):
    """What a ticket's folder says. is_damaged: whether the record of its job cannot be read."""

    grant: str = ""
    job_id: str = ""
    exit_code: int | None = None
    is_damaged: bool = False


def ticket_states(site: Site, names: Sequence[str]) -> dict[str, TicketState]:
    """What is known of these tickets, and of every other job of ours there: one squeue, and sacct for the forgotten.

    Raises Unreachable when the site gives no answer, or half of one.
    """
    slurm = client(site)
    listed = slurm.jobs(user=paths.remote_user(site), all_states=True)
    told = _read_ticket_dirs(site, names)
    jobs = ticket_state.jobs_by_name(listed, {name: at.grant for name, at in told.items()})
    none = _TicketDir()
    found = {name: _state_of_queued(job, told.get(name, none)) for name, job in jobs.items()}
    forgotten = {name: _state_of_unlisted(told.get(name, none)) for name in names if name not in jobs}
    return found | ticket_state.with_accounting(slurm, forgotten)


def _state_of_queued(job: SlurmJob, at: _TicketDir) -> TicketState:
    return ticket_state.state_of_listed(job, at.grant, at.exit_code)


def _state_of_unlisted(at: _TicketDir) -> TicketState:
    if at.is_damaged:
        return ticket_state.state_without_id(at.grant, at.exit_code)
    return ticket_state.state_of_unlisted(at.job_id, at.grant, at.exit_code)


def _read_ticket_dirs(site: Site, names: Sequence[str]) -> dict[str, _TicketDir]:
    found = {}
    for name, word, job, ended in _run_for_each(site, _STATE_SCRIPT, names, 4):
        ref, attempt = _parse_record(job, run_folder.JobRef), _parse_record(ended, run_folder.AttemptExit)
        code = attempt.exit_code if attempt else None
        found[name] = _TicketDir(word, ref.job_id if ref else "", code, is_damaged=bool(job) and ref is None)
    return found


def _parse_record(text: str, kind: type[run_folder.T]) -> run_folder.T | None:
    """The record in a line; None for none, or half of one: it must not keep other tickets from being known."""
    with contextlib.suppress(msgspec.DecodeError):
        return decode_json(text, kind) if text else None
    return None


def revoke(site: Site, names: Sequence[str]) -> dict[str, bool]:
    """Make sure that these tickets never run; False for one that has had leave before. Slurm is not asked."""
    words = {line[0]: line[1] for line in _run_for_each(site, _GRANT_SCRIPT, names, 2, grant.REVOKED)}
    return {name: not grant.is_granted(_write_grant(site, name, words.get(name, ""))) for name in names}


def _write_grant(site: Site, name: str, word: str) -> str:
    if not word:
        raise ClusterError("no word could be left there", where=f"{site.name}:{paths.ticket_dir(site, name)}")
    return word


def _run_for_each(site: Site, script: str, names: Sequence[str], fields: int, *words: str) -> Iterator[list[str]]:
    """The answer's line for each name, cut at its tabs. Raises Unreachable for anything less than all of it."""
    if not names:
        return
    for name in names:
        paths.ticket_dir(site, name)  # what it refuses is no name
    runs = paths.remote_runs_dir(site)
    done = remote_files.run_shell(site, script, runs, *words, stdin="".join(f"{name}\n" for name in names))
    if done.code:
        raise remote_files.transfer_error(site, done, runs)
    *lines, end = done.stdout.split("\n")[:-1] or [""]
    cut = [line.split("\t") for line in lines]
    if end != "end" or any(len(line) != fields for line in cut) or not {line[0] for line in cut} <= set(names):
        raise Unreachable("half an answer", where=f"{site.name}:{runs}", hint="try again")
    yield from cut


def cancel_tickets(site: Site, jobs: Mapping[str, str]) -> None:
    """End these tickets' jobs, id → name. Safe to repeat: one that got its id since then has another name."""
    for job_id, name in jobs.items():
        client(site).cancel([job_id], name=name)


def remove_ticket_dirs(site: Site, names: Sequence[str]) -> None:
    """Remove the folders of tickets that were taken back and that Slurm does not know any more."""
    remote_files.remove_paths(site, *(paths.ticket_dir(site, name) for name in names))


def fetch_run(site: Site, name: str, to: Path, *, limit: int = FETCH_MAX_BYTES) -> bool:
    """Bring a run's records, logs and step logs here as the folder `to`, whole; False where there is no run.

    Code and checkpoints stay. Raises ClusterError where it is more than `limit` bytes, and Unreachable; what was at
    `to` is then still there.
    """
    return remote_files.get_tree(site, paths.ticket_dir(site, name), to, without=_NOT_FETCHED, limit=limit)
