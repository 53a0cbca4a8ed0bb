"""Leave to run: one word, written once, that settles whether a queued job may do its work.

A ticket is a job in one site's queue, and the same work may get another one elsewhere when that queue no longer
answers. What decides is neither Slurm's memory nor ours but a name in the ticket's own run folder: the symbolic link
`leave`, which points to `run.<job id>` or to `no`. Making a link is atomic, also over NFS, and fails where there is
one: whoever is first decides, and everybody else reads what was decided.

    ticket        its script writes its own id at its start, and ends with 75 where it then finds another word
    dispatcher    writes `no` to be certain that a ticket will never run

A job that Slurm requeued finds the word of its first start, and goes on, unless it had completed: a controller that was
away at that moment does not know it, and starts the job again. Should a submission that went unanswered have
made two jobs of one name, only one of them has leave.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from pitools.run.attempt_records import SUCCEEDED

LINK = "leave"
NO = "no"
_RUN = "run."
NO_LEAVE = 75

_DONE = """\
for done in {attempts}/*/{succeeded}; do [ -e "$done" ] && exit 0; done
"""
_PLAIN = """\
# This job may run once, here or elsewhere: see pitools/launch/submission/grant.py.
ln -sT "{run}$SLURM_JOB_ID" {link} 2>/dev/null
[ "$(readlink {link})" = "{run}$SLURM_JOB_ID" ] || exit {code}
"""


def script(text: str, run_dir: str) -> str:
    """An sbatch script that asks for leave before it does anything. run_dir: the ticket's, as its nodes see it."""
    lines = text.splitlines(keepends=True)
    # sbatch reads its flags up to the first command.
    head = next((at for at, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    ask = (_PLAIN + _DONE).format(
        link=shlex.quote(f"{run_dir}/{LINK}"),
        code=NO_LEAVE,
        run=_RUN,
        attempts=shlex.quote(f"{run_dir}/attempts"),
        succeeded=SUCCEEDED,
    )
    return "".join([*lines[:head], ask, *lines[head:]])


def word(job_id: str) -> str:
    """The word that lets this job of Slurm's run."""
    return f"{_RUN}{job_id}"


def granted_job_id(word: str) -> str:
    """Return the id of the job that a word lets run, or has let; "" of NO, and where there is no word yet."""
    return word.removeprefix(_RUN) if word.startswith(_RUN) else ""


def may_run(word: str) -> bool:
    """Whether a word lets a job run, or has let it."""
    return bool(granted_job_id(word))


def take(run_dir: Path, word: str) -> str:
    """Write the word if there is none yet; returns the one that holds. Raises OSError, also where it is no word.

    A folder that does not exist is made for `no`: a submission still under way then finds its place taken.
    """
    if word == NO:
        run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        (run_dir / LINK).symlink_to(word)
    except FileExistsError:
        return str((run_dir / LINK).readlink())
    return word


def told(run_dir: Path) -> str:
    """The word; "" while there is none. Raises OSError where it cannot be read."""
    try:
        return str((run_dir / LINK).readlink())
    except FileNotFoundError:
        return ""
