"""Stage one version onto this node: found there, or copied and verified in one pass and published by a rename."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pitools.core.progress import Advance
from pitools.core.record import Record
from pitools.stage.copy import copy
from pitools.stage.root import locked, move_aside, object_path, prepare, require_safe, require_space
from pitools.stage.source import Dataset
from pitools.stage.verify import is_whole, looks_whole
from pitools.stage.workers import default_readers
from pitools.store.publish import publishing


class Stage(Record, frozen=True, kw_only=True, tag="pit.stage/1"):
    """What staging one version did.

    state: `staged` (it was absent), `present` (nothing was copied), `repaired` (a damaged copy was replaced).
    path: the folder to train from. bytes: of all files. copied_bytes, verified_bytes: written, and compared by
    digest, by this call.
    """

    dataset: str
    version: str
    source: str
    path: str
    state: Literal["staged", "present", "repaired"]
    files: int
    bytes: int
    copied_bytes: int
    verified_bytes: int
    wall_s: float
    node: str


def stage(
    dataset: Dataset,
    root: Path,
    *,
    verify: bool = False,
    readers: int = 0,
    timeout_s: float = 3600,
    advance: Advance = lambda _: None,
    waiting: Callable[[], None] = lambda: None,
) -> Stage:
    """Make `<root>/objects/<version>/` hold this version, whole, whatever was there; safe to repeat and to race.

    A copy that stands is believed by names and sizes, or with `verify` by content. readers: threads, 0 for the
    default. timeout_s: how long to wait for another process that stages the same version.

    Raises DataError (the source is not what it claims), NoSpace, ClusterError (the root is refused), TryLater.
    """
    started = time.monotonic()
    root = root.absolute()
    readers = readers or default_readers()
    final = object_path(root, dataset.version)
    total = dataset.manifest.total_bytes

    def whole() -> bool:
        return is_whole(final, dataset, readers=readers, advance=advance) if verify else looks_whole(final, dataset)

    def done(state: Literal["staged", "present", "repaired"]) -> Stage:
        moved = state != "present"
        return Stage(
            dataset=dataset.manifest.name,
            version=dataset.version,
            source=str(dataset.folder),
            path=str(final),
            state=state,
            files=len(dataset.manifest.files),
            bytes=total,
            copied_bytes=total if moved else 0,
            verified_bytes=total if moved or verify else 0,
            wall_s=time.monotonic() - started,
            node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        )

    require_safe(root)
    if whole():  # without the lock, so that a root that can only be read serves what it has
        return done("present")
    prepare(root)
    with locked(root, dataset.version, timeout_s=timeout_s, waiting=waiting):
        if whole():
            return done("present")
        damaged = os.path.lexists(final)
        _replace(dataset, final, root, readers=readers, advance=advance)
    return done("repaired" if damaged else "staged")


def _replace(dataset: Dataset, final: Path, root: Path, *, readers: int, advance: Advance) -> None:
    with publishing(final, root=root) as new:  # first removes what killed processes left, which makes room
        require_space(root, dataset.manifest.files)
        new.chmod(0o700)  # until it stands in `objects`, whose mode says who may read
        copy(dataset, new, readers=readers, advance=advance)
        new.chmod(0o755)
        # Only now, with the new copy complete: jobs that read the damaged one keep it as long as can be.
        if os.path.lexists(final):
            move_aside(final, root)
