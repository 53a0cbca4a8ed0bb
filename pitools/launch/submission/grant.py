"""Grant exactly one job the right to run a submission, by a symbolic link that is created once.

A ticket is a job in one site's queue; if that queue stops answering, the same work may get a second ticket elsewhere.
The link `grant` in the ticket's run folder decides between them. It points to `run.<job id>` or to `revoked`.
symlink(2) is atomic, also over NFS, and fails if the link exists: the first writer decides, all others read the link.

    ticket        its script writes its own job id when it starts, and exits with 75 if the link names another job
    dispatcher    writes `revoked`, so that a ticket can never run

A requeued job reads the grant of its first start and continues. A job that had completed exits instead: a slurmctld
that was down at its end starts it again. Once the run of a ticket was stopped, to be continued by another ticket, its
link is replaced by `revoked`. If an unanswered sbatch created two jobs of one name, only one gets the grant.
"""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path

from pitools.launch import exit_codes
from pitools.run.attempt_records import SUCCEEDED

GRANT_LINK = "grant"
REVOKED = "revoked"
_RUN = "run."

_SKIP_IF_FINISHED = """\
for done in {attempts}/*/{succeeded}; do [ -e "$done" ] && exit 0; done
"""
_CLAIM = """\
# This job may run once, here or elsewhere: see pitools/launch/submission/grant.py.
ln -sT "{run}$SLURM_JOB_ID" {link} 2>/dev/null
[ "$(readlink {link})" = "{run}$SLURM_JOB_ID" ] || exit {code}
"""


def add_grant_check(text: str, run_dir: str) -> str:
    """Return an sbatch script with a grant check before its first command.

    run_dir: the ticket's run folder, as its nodes see it.
    """
    lines = text.splitlines(keepends=True)
    # sbatch reads its directives up to the first command.
    head = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    check = (_CLAIM + _SKIP_IF_FINISHED).format(
        link=shlex.quote(f"{run_dir}/{GRANT_LINK}"),
        code=exit_codes.NOT_GRANTED,
        run=_RUN,
        attempts=shlex.quote(f"{run_dir}/attempts"),
        succeeded=SUCCEEDED,
    )
    return "".join([*lines[:head], check, *lines[head:]])


def grant_token(job_id: str) -> str:
    """Return the link target that grants this Slurm job."""
    return f"{_RUN}{job_id}"


def granted_job_id(token: str) -> str:
    """Return the job id that a link target grants; "" for REVOKED and for a missing link."""
    return token.removeprefix(_RUN) if token.startswith(_RUN) else ""


def is_granted(token: str) -> bool:
    """Whether a link target grants a job."""
    return bool(granted_job_id(token))


def claim(run_dir: Path, token: str) -> str:
    """Create the grant link to `token` unless the link exists; return its target. Raises OSError, also for a non-link.

    REVOKED also creates a missing run folder, so that a concurrent submission finds the folder taken.
    """
    if token == REVOKED:
        run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        (run_dir / GRANT_LINK).symlink_to(token)
    except FileExistsError:
        return str((run_dir / GRANT_LINK).readlink())
    return token


def replace(run_dir: Path, token: str = REVOKED) -> None:
    """Replace the grant of a job that has ended, so that it begins no further attempt if it is requeued.

    Raises OSError.
    """
    temp_path = run_dir / f".grant.{secrets.token_hex(4)}"
    temp_path.symlink_to(token)
    os.replace(temp_path, run_dir / GRANT_LINK)


def read_grant(run_dir: Path) -> str:
    """Return the grant link's target; "" without a link. Raises OSError if the link cannot be read."""
    try:
        return str((run_dir / GRANT_LINK).readlink())
    except FileNotFoundError:
        return ""
