"""Records of the versions at a root, beyond their bytes: the source, its quarantine, and whether a set is pinned.

<root>/.records/<version>.json    pit.stage-record/1, replaced by rename
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import is_world_readable
from pitools.core.record import Record, decode_json
from pitools.stage.cache.layout import LOCKS, OBJECTS, RECORDS, root_lock, staged_path
from pitools.stage.cache.lease import leased_set
from pitools.stage.sources.base import Source
from pitools.stage.sources.local import LocalSource
from pitools.store.version_state import Quarantine, read_quarantine

_TIMEOUT_S = 10.0
_MAX_STORE_KEYS = 16


class StageRecord(Record, frozen=True, kw_only=True, tag="pit.stage-record/1"):
    """One version at a root.

    source: folder or URL it was staged from, "" when unknown: such a set may be the only copy, and is never evicted.
    staged: when. bytes: of all its files. pinned: never evicted either. store_keys: keys of the plain stores of
    this content that were staged, the newest last; none for a dataset version. quarantine: of the source, as of the
    last staging.
    """

    source: str = ""
    staged: str = ""
    bytes: int = 0
    pinned: bool = False
    store_keys: tuple[str, ...] = ()
    quarantine: Quarantine | None = None


def read_stage_record(root: Path, version: str) -> StageRecord:
    """Return the record of a version; an empty one when there is none or it cannot be read."""
    try:
        return decode_json(_record_path(root, version).read_bytes(), StageRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return StageRecord()


def write_stage_record(root: Path, version: str, *, source: str, n_bytes: int, store_key: str = "") -> StageRecord:
    """Record a version as staged now; pin and quarantine are kept. store_key: of the plain store that was staged. Call
    with its lock held. Raises NoSpace, TryLater, ClusterError.

    Call it before the set is published: a set without a record counts as of unknown source, and is never evicted.
    """

    def update(old: StageRecord) -> StageRecord:
        other_keys = tuple(key for key in old.store_keys if key != store_key)
        return StageRecord(
            source=source,
            staged=timestamps.now_rfc3339(),
            bytes=n_bytes,
            pinned=old.pinned,
            store_keys=(*other_keys, store_key)[-_MAX_STORE_KEYS:] if store_key else old.store_keys,
            quarantine=old.quarantine,
        )

    return _update_record(root, version, update)


def record_quarantine(root: Path, version: str, quarantine: Quarantine | None) -> None:
    """Record the quarantine of a version's source. Raises as `write_stage_record`."""
    if read_stage_record(root, version).quarantine != quarantine:
        _update_record(root, version, lambda old: msgspec.structs.replace(old, quarantine=quarantine))


def read_source_quarantine(source: Source) -> Quarantine | None:
    """Return the quarantine of the version at a source; None if there is none. Raises DataError, else as the source."""
    if isinstance(source, LocalSource):
        return quarantine_of(source.folder)
    from pitools.stage.sources.object_store import remote

    return remote.read_remote_quarantine(source.label)


def source_dir(path: Path) -> Path:
    """Return the folder that a staged version was copied from, if accessible; else its own folder."""
    if path.parent.name == OBJECTS:
        source = Path(read_stage_record(path.parent.parent, path.name).source)
        with contextlib.suppress(OSError):
            if source.is_absolute() and source.is_dir():
                return source
    return path


def quarantine_of(path: Path) -> Quarantine | None:
    """Return the quarantine of the version in folder `path`; of a staged version its source's, and where that is no
    accessible folder, as it was at the last staging. Warns where that cannot be read. Raises DataError."""
    folder = source_dir(source_dir(path))  # a staged version may be the source of another one
    recorded = folder.parent.name == OBJECTS and _recorded_quarantine(_record_path(folder.parent.parent, folder.name))
    return recorded or read_quarantine(folder)


def _recorded_quarantine(path: Path) -> Quarantine | None:
    try:
        return decode_json(path.read_bytes(), StageRecord).quarantine
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"{path}: {error.strerror}: episodes in quarantine are not left out", stacklevel=3)
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"not a stage record: {error}", where=str(path), hint="remove the file, stage again") from error


def set_pinned(root: Path, version: str, *, pinned: bool = True) -> StageRecord:
    """Pin or unpin a staged set. Raises DataError when there is none, else as `write_stage_record`."""
    # With a lease, so that an evictor that read the record before cannot remove the set now.
    with leased_set(staged_path(root, version), touch=False):
        return _update_record(root, version, lambda old: msgspec.structs.replace(old, pinned=pinned))


def remove_stage_record(root: Path, version: str) -> None:
    """Remove the record of an evicted version. Raises TryLater, ClusterError."""
    path = _record_path(root, version)
    with _lock_records(root):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_os_error(error, path) from error


def _update_record(root: Path, version: str, update: Callable[[StageRecord], StageRecord]) -> StageRecord:
    path = _record_path(root, version)
    with _lock_records(root):
        record = update(read_stage_record(root, version))
        write_atomic(path, msgspec.json.encode(record) + b"\n", mode=0o600)
        if is_world_readable(path.parent):
            path.chmod(0o644)
    return record


@contextmanager
def _lock_records(root: Path) -> Iterator[None]:
    """Lock all records of a root for a short update: stagers and `pin` change the same files."""
    try:
        for folder in (root / RECORDS, root / LOCKS):  # an older root has none
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, root) from error
    # Not the folder itself, which other users of a shared root may open and lock.
    with root_lock(root, RECORDS, activity="changes the records", timeout_s=_TIMEOUT_S):
        yield


def _record_path(root: Path, version: str) -> Path:
    return root / RECORDS / f"{version}.json"
