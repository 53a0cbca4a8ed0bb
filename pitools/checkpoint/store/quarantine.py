"""Bad checkpoints are moved aside, with what was found, and never deleted: a person may still want them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pitools.checkpoint.store import layout, lookup, unreadable
from pitools.checkpoint.store.problem import Problem
from pitools.core import timestamps
from pitools.core.fs import os_error, sync_dir, write_atomic
from pitools.core.record import Record

REASON = "reason.json"


class Reason(Record, frozen=True, kw_only=True, tag="pit.checkpoint-quarantine/1"):
    """Why a checkpoint was moved aside."""

    t: str
    path: str
    why: str
    problems: tuple[Problem, ...] = ()


def put(step_dir: Path, problems: Sequence[Problem], *, why: str = "") -> Path | None:
    """Move a checkpoint to `quarantine/<name>.<stamp>/<name>`, with reason.json beside it; returns where it is now.

    None when another process had already moved it. `latest` then names the newest that is left. Raises NoSpace,
    ClusterError.
    """
    folder = step_dir.parent
    stamp = timestamps.now()[:19].replace("-", "").replace(":", "").replace("T", "-")
    aside = folder / layout.QUARANTINE / f"{step_dir.name}.{stamp}.{secrets.token_hex(2)}"
    reason = Reason(
        t=timestamps.now(),
        path=str(step_dir.absolute()),
        problems=tuple(problems[:1000]),
        why=why or (problems[0].text() if problems else "asked for"),
    )
    try:
        aside.mkdir(parents=True)
        # The reason first: what is moved is never without one.
        write_atomic(aside / REASON, msgspec.json.format(msgspec.json.encode(reason), indent=1))
        # Before it goes: `latest` never names what is not there.
        lookup.point(folder, without=layout.step_of(step_dir))
        try:
            os.rename(step_dir, aside / step_dir.name)
        except FileNotFoundError:
            (aside / REASON).unlink(missing_ok=True)
            aside.rmdir()
            return None
        for made in (aside, aside.parent, folder):
            sync_dir(made)
    except OSError as error:
        raise os_error(error, step_dir) from error
    unreadable.clear(step_dir)
    lookup.point(folder)
    return aside / step_dir.name
