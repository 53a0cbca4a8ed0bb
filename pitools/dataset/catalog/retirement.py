"""Retire versions, and undo a retirement; `gc` removes a retired version once its grace is over."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import TryLater, UsageError
from pitools.core.fs import from_os_error
from pitools.store import retirement, tags, version_state
from pitools.store.manifest import MANIFEST_FILE
from pitools.store.retirement import Retirement
from pitools.store.version_list import published_at


def retire_version(path: Path, *, reason: str = "", grace_s: int = 0, now: datetime | None = None) -> Retirement:
    """Retire the version in folder `path`; of a retired one, replace the reason, and extend the grace.

    Raises UsageError when it is missing or has a tag.
    """
    root, name, version = _split_path(path)
    file = version_state.retired_file(root, name, version)
    if existing := retirement.retirement_of(root, name, version, path):
        reason, grace_s = reason or existing.reason, max(grace_s, existing.grace_s)
        record = msgspec.structs.replace(existing, reason=reason, grace_s=grace_s)
        if record != existing:
            version_state.write_catalog_record(file, record)
        return record
    try:
        (path / MANIFEST_FILE).stat()
        published = published_at(path)
    except OSError as error:
        raise UsageError("version: missing", where=str(path), hint=f"see `pit dataset list {root}`") from error
    record = Retirement(
        name=name,
        version=version,
        published=published,
        retired_at=timestamps.to_rfc3339(now or version_state.utc_now()),
        retired_by=version_state.current_user(),
        reason=reason,
        grace_s=grace_s,
    )
    for written in (False, True):  # checked before and after the write: a tag may be set meanwhile
        if named := [tag for tag, value in tags.read_tags(root, name).items() if value.version == version]:
            file.unlink(missing_ok=True)
            hint = "move the tag to another version first, or remove it: `pit dataset tag`"
            raise UsageError(f"version: has the tag {named[0]} (expected none)", where=str(path), hint=hint)
        if not written:
            version_state.write_catalog_record(file, record)
    return record


def undo_retirement(root: Path, name: str, version: str) -> None:
    """Undo a retirement. Raises TryLater while `gc` has the version aside, UsageError when it is gone."""
    file = version_state.retired_file(root, name, version)
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(error, file) from error
    path = root / name / version
    if (path / MANIFEST_FILE).is_file():
        return
    trashed = [
        entry.name
        for entry in version_state.list_names(root / version_state.TRASH)
        if entry.name.startswith(f"{name}.{version}.")
    ]
    if any(not entry.endswith(".deleting") for entry in trashed):
        hint = "see `pit dataset list`; the next `pit dataset gc` restores what a killed `gc` moved aside"
        raise TryLater("version: moved aside by `gc`, which removes or restores it", where=str(path), hint=hint)
    if (path / MANIFEST_FILE).is_file():  # brought back in between
        return
    raise UsageError("version: removed", where=str(path), hint="ingest it again")


def _split_path(path: Path) -> tuple[Path, str, str]:
    resolved = path.resolve()
    return resolved.parent.parent, resolved.parent.name, resolved.name
