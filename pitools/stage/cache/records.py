"""What is known of each version at a root beyond its bytes: where it came from, and whether it is to stay.

<root>/.records/<version>.json    pit.stage-record/1, replaced by rename
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import TryLater
from pitools.core.fs import os_error, write_atomic
from pitools.core.lock import flock, is_shared, open_kept
from pitools.core.record import Record, decode_json
from pitools.stage.cache.layout import LOCKS, RECORDS, object_path
from pitools.stage.cache.lease import lease

_TIMEOUT_S = 10.0


class StageRecord(Record, frozen=True, kw_only=True, tag="pit.stage-record/1"):
    """One version at a root.

    source: folder or URL it was staged from, "" where that is not known: such a set may be the only copy, and is
    never evicted. staged: when. bytes: of all its files. pinned: never evicted either. signature: what a plain store
    looked like when it was staged, else "".
    """

    source: str = ""
    staged: str = ""
    bytes: int = 0
    pinned: bool = False
    signature: str = ""


def read(root: Path, version: str) -> StageRecord:
    """The record of a version; one that knows nothing where there is none, or it cannot be read."""
    try:
        return decode_json(_path(root, version).read_bytes(), StageRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return StageRecord()


def write(root: Path, version: str, *, source: str, n_bytes: int, signature: str = "") -> StageRecord:
    """Say that a version is staged now; a pin stays. Call with its lock held. Raises NoSpace, TryLater, ClusterError.

    Call it before the set is published: one without a record is taken for one of unknown source, and never evicted.
    """
    return _change(
        root,
        version,
        lambda old: StageRecord(
            source=source, staged=timestamps.now(), bytes=n_bytes, pinned=old.pinned, signature=signature
        ),
    )


def pin(root: Path, version: str, *, pinned: bool = True) -> StageRecord:
    """Keep a staged set from being evicted, or no more. Raises DataError when none stands there, else as `write`."""
    # With a lease, so that no evictor that has found it without a pin takes it now.
    with lease(object_path(root, version), use=False):
        return _change(root, version, lambda old: msgspec.structs.replace(old, pinned=pinned))


def remove(root: Path, version: str) -> None:
    """Forget a version that no longer stands. Raises TryLater, ClusterError."""
    path = _path(root, version)
    with _alone(root):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise os_error(error, path) from error


def _change(root: Path, version: str, new: Callable[[StageRecord], StageRecord]) -> StageRecord:
    path = _path(root, version)
    with _alone(root):
        record = new(read(root, version))
        write_atomic(path, msgspec.json.encode(record) + b"\n", mode=0o600)
        if is_shared(path.parent):
            path.chmod(0o644)
    return record


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold all records for a moment: stagers and `pin` change the same ones."""
    path = root / LOCKS / RECORDS  # not the folder itself, which others may open where the root is shared
    try:
        for folder in (root / RECORDS, path.parent):  # a root from before there were records
            folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = open_kept(path)
    except OSError as error:
        raise os_error(error, path) from error
    try:
        if not flock(descriptor, fcntl.LOCK_EX, timeout_s=_TIMEOUT_S):
            what, hint = "the records are locked by another process", "lslocks tells by whom; run this again later"
            raise TryLater(what, where=str(path), hint=hint)
        yield
    finally:
        os.close(descriptor)


def _path(root: Path, version: str) -> Path:
    return root / RECORDS / f"{version}.json"
