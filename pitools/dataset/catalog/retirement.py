"""To retire a version, and to take that back; `gc` removes it once the grace is over."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import TryLater, UsageError
from pitools.core.fs import os_error
from pitools.store import retirement, tags, version_state
from pitools.store.manifest import FILE_NAME
from pitools.store.retirement import Retired
from pitools.store.version_list import published


def retire(path: Path, *, why: str = "", grace_s: int = 0, present: datetime | None = None) -> Retired:
    """Retire the version in folder `path`; again is as good as once. Raises UsageError when a tag names it."""
    root, name, version = _place(path)
    if known := retirement.of(root, name, version, path):
        return known
    try:
        written_ns = (path / FILE_NAME).stat().st_mtime_ns
    except OSError as error:
        raise UsageError("there is no such version", where=str(path), hint=f"see `pit dataset list {root}`") from error
    record = Retired(
        name=name,
        version=version,
        published=published(written_ns),
        when=timestamps.text(present or version_state.now()),
        by=version_state.author(),
        why=why,
        grace_s=grace_s,
    )
    file = version_state.retired_file(root, name, version)
    for written in (False, True):  # a tag may be set meanwhile: one of the two sees the other
        if named := [tag for tag, value in tags.read(root, name).items() if value.version == version]:
            file.unlink(missing_ok=True)
            hint = "move the tag to another version first, or remove it: `pit dataset tag`"
            raise UsageError(f"the tag {named[0]} names it", where=str(path), hint=hint)
        if not written:
            version_state.write(file, record)
    return record


def undo(root: Path, name: str, version: str) -> None:
    """Take a retirement back. Raises TryLater when `gc` has just taken the version, UsageError when it is gone."""
    file = version_state.retired_file(root, name, version)
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, file) from error
    path = root / name / version
    if (path / FILE_NAME).is_file():
        return
    aside = [
        each.name
        for each in version_state.names(root / version_state.TRASH)
        if each.name.startswith(f"{name}.{version}.")
    ]
    if any(not each.endswith(".gone") for each in aside):
        hint = "see `pit dataset list`; what a killed `gc` left aside, the next `pit dataset gc` brings back"
        raise TryLater("`gc` has taken it, and will bring it back unless it was decided", where=str(path), hint=hint)
    if (path / FILE_NAME).is_file():  # brought back in between
        return
    raise UsageError("there is no such version any more", where=str(path), hint="ingest it again")


def _place(path: Path) -> tuple[Path, str, str]:
    whole = path.resolve()
    return whole.parent.parent, whole.parent.name, whole.name
