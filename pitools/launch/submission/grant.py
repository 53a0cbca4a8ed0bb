"""Grant exactly one job the right to run a submission, by a symbolic link that is created once.

A ticket is a job in one site's queue; the same work may get a second ticket elsewhere when that queue stops answering.
Neither Slurm's state nor ours decides between them, but the link `grant` in the ticket's run folder, which points to
`run.<job id>` or to `revoked`. symlink(2) is atomic, also over NFS, and fails where the link exists: the first writer
decides, and every other process reads the decision.

    ticket        its script writes its own job id at its start, and exits with 75 if the link names another
    dispatcher    writes `revoked`, so that a ticket can never run

A requeued job finds the grant of its first start and continues, unless it had completed: a controller that was down at
that moment restarts a completed job. If an unanswered submission made two jobs of one name, one of them has the grant.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from pitools.run.attempt_records import SUCCEEDED

GRANT_LINK = "grant"
REVOKED = "revoked"
_RUN = "run."
NOT_GRANTED = 75

_SKIP_IF_FINISHED = """\
for done in {attempts}/*/{succeeded}; do [ -e "$done" ] && exit 0; done
"""
_CLAIM = """\
# This job may run once, here or elsewhere: see pitools/launch/submission/grant.py.
ln -sT "{run}$SLURM_JOB_ID" {link} 2>/dev/null
[ "$(readlink {link})" = "{run}$SLURM_JOB_ID" ] || exit {code}
"""


def add_grant_check(text: str, run_dir: str) -> str:
    """Return the sbatch script with a grant check before its first command. run_dir: the ticket's, on its nodes."""
    lines = text.splitlines(keepends=True)
    # sbatch reads its flags up to the first command.
    head = next((at for at, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    ask = (_CLAIM + _SKIP_IF_FINISHED).format(
        link=shlex.quote(f"{run_dir}/{GRANT_LINK}"),
        code=NOT_GRANTED,
        run=_RUN,
        attempts=shlex.quote(f"{run_dir}/attempts"),
        succeeded=SUCCEEDED,
    )
    return "".join([*lines[:head], ask, *lines[head:]])


def grant_token(job_id: str) -> str:
    """Return the link target that grants this Slurm job."""
    return f"{_RUN}{job_id}"


def granted_job_id(token: str) -> str:
    """Return the job id that a link target grants; "" for REVOKED and for no link yet."""
    return token.removeprefix(_RUN) if token.startswith(_RUN) else ""


def is_granted(token: str) -> bool:
    """Return whether a link target grants a job."""
    return bool(granted_job_id(token))


def claim(run_dir: Path, token: str) -> str:
    """Create the link unless it exists; return the target that holds. Raises OSError, also for a file that is no link.

    token: the target to write. REVOKED also creates a missing folder: a submission under way then finds it taken.
    """
    if token == REVOKED:
        run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        (run_dir / GRANT_LINK).symlink_to(token)
    except FileExistsError:
        return str((run_dir / GRANT_LINK).readlink())
    return token


def read_grant(run_dir: Path) -> str:
    """Return the link's target; "" while there is no link. Raises OSError where it cannot be read."""
    try:
        return str((run_dir / GRANT_LINK).readlink())
    except FileNotFoundError:
        return ""
