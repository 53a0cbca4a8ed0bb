"""Bad checkpoints are moved aside, with what was found, and never deleted: a person may still want them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, lookup, unreadable
from pitools.checkpoint.store.problem import CheckpointProblem
from pitools.core import timestamps
from pitools.core.fs import from_os_error, fsync_dir, write_atomic
from pitools.core.record import Record

REASON_FILE = "reason.json"


class QuarantineReason(Record, frozen=True, kw_only=True, tag="pit.checkpoint-quarantine/1"):
    """Why a checkpoint was moved aside."""

    t: str
    path: str
    reason: str
    problems: tuple[CheckpointProblem, ...] = ()


def quarantine_checkpoint(
    step_dir: Path, problems: Sequence[CheckpointProblem], *, cause_text: str = ""
) -> Path | None:
    """Move a checkpoint to `quarantine/<name>.<stamp>/<name>`, with reason.json beside it; returns where it is now.

    None when another process had already moved it. `latest` then names the newest that is left. Raises NoSpace,
    ClusterError.
    """
    folder = step_dir.parent
    stamp = timestamps.now_rfc3339()[:19].replace("-", "").replace(":", "").replace("T", "-")
    aside = folder / layout.QUARANTINE / f"{step_dir.name}.{stamp}.{secrets.token_hex(2)}"
    reason = QuarantineReason(
        t=timestamps.now_rfc3339(),
        path=str(step_dir.absolute()),
        problems=tuple(problems[:1000]),
        reason=cause_text or (problems[0].text() if problems else "asked for"),
    )
    try:
        aside.mkdir(parents=True)
        # The reason first: what is moved is never without one.
        write_atomic(aside / REASON_FILE, msgspec.json.format(msgspec.json.encode(reason), indent=1))
        # Before it goes: `latest` never names what is not there.
        lookup.update_latest_link(folder, except_step=layout.step_of(step_dir))
        try:
            os.rename(step_dir, aside / step_dir.name)
        except FileNotFoundError:
            (aside / REASON_FILE).unlink(missing_ok=True)
            aside.rmdir()
            return None
        for made in (aside, aside.parent, folder):
            fsync_dir(made)
    except OSError as error:
        raise from_os_error(error, step_dir) from error
    unreadable.clear_mark(step_dir)
    lookup.update_latest_link(folder)
    return aside / step_dir.name
