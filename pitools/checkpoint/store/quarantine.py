"""Move damaged checkpoints aside, with the reason; they are never deleted, because a person may need them."""

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
    target = folder / layout.QUARANTINE / f"{step_dir.name}.{stamp}.{secrets.token_hex(2)}"
    reason = QuarantineReason(
        t=timestamps.now_rfc3339(),
        path=str(step_dir.absolute()),
        problems=tuple(problems[:1000]),
        reason=cause_text or (problems[0].text() if problems else "requested"),
    )
    try:
        target.mkdir(parents=True)
        # The reason is written before the move, so that no moved checkpoint is without it.
        write_atomic(target / REASON_FILE, msgspec.json.format(msgspec.json.encode(reason), indent=1))
        # Before the move, so that `latest` never names a missing checkpoint.
        lookup.update_latest_link(folder, except_step=layout.step_of(step_dir))
        try:
            os.rename(step_dir, target / step_dir.name)
        except OSError as error:
            (target / REASON_FILE).unlink(missing_ok=True)
            target.rmdir()
            lookup.update_latest_link(folder)
            if isinstance(error, FileNotFoundError):
                return None
            raise
        for created in (target, target.parent, folder):
            fsync_dir(created)
    except OSError as error:
        raise from_os_error(error, step_dir) from error
    unreadable.clear_mark(step_dir)
    lookup.update_latest_link(folder)
    return target / step_dir.name
