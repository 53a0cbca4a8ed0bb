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
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import is_shared, lock_within, open_readable_lock_file
from pitools.core.record import Record, decode_json
from pitools.stage.cache.layout import LOCKS, RECORDS, set_path
from pitools.stage.cache.lease import leased_set

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


def read_stage_record(root: Path, version: str) -> StageRecord:
    """Return the record of a version; an empty one when there is none or it cannot be read."""
    try:
        return decode_json(_path(root, version).read_bytes(), StageRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return StageRecord()


def write_stage_record(root: Path, version: str, *, source: str, n_bytes: int, signature: str = "") -> StageRecord:
    """Record a version as staged now; a pin stays. Call with its lock held. Raises NoSpace, TryLater, ClusterError.

    Call it before the set is published: one without a record is taken for one of unknown source, and never evicted.
    """
    return _update_record(
        root,
        version,
        lambda old: StageRecord(
            source=source, staged=timestamps.now_rfc3339(), bytes=n_bytes, pinned=old.pinned, signature=signature
        ),
    )


def set_pinned(root: Path, version: str, *, pinned: bool = True) -> StageRecord:
    """Keep a staged set from being evicted, or no more. Raises DataError when none stands there, else as `write`."""
    # With a lease, so that no evictor that has found it without a pin takes it now.
    with leased_set(set_path(root, version), touch=False):
        return _update_record(root, version, lambda old: msgspec.structs.replace(old, pinned=pinned))


def remove_stage_record(root: Path, version: str) -> None:
    """Remove the record of a version that no longer stands. Raises TryLater, ClusterError."""
    path = _path(root, version)
    with _lock_records(root):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_os_error(error, path) from error


def _update_record(root: Path, version: str, new: Callable[[StageRecord], StageRecord]) -> StageRecord:
    path = _path(root, version)
    with _lock_records(root):
        record = new(read_stage_record(root, version))
        write_atomic(path, msgspec.json.encode(record) + b"\n", mode=0o600)
        if is_shared(path.parent):
            path.chmod(0o644)
    return record


@contextmanager
def _lock_records(root: Path) -> Iterator[None]:
    """Hold all records for a moment: stagers and `pin` change the same ones."""
    path = root / LOCKS / RECORDS  # not the folder itself, which others may open where the root is shared
    try:
        for folder in (root / RECORDS, path.parent):  # a root from before there were records
            folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = open_readable_lock_file(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        if not lock_within(descriptor, fcntl.LOCK_EX, timeout_s=_TIMEOUT_S):
            message, hint = "the records are locked by another process", "lslocks tells by whom; run this again later"
            raise TryLater(message, where=str(path), hint=hint)
        yield
    finally:
        os.close(descriptor)


def _path(root: Path, version: str) -> Path:
    return root / RECORDS / f"{version}.json"
