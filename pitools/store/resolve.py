"""Resolve a dataset argument to a version's folder, for every command, `--data`, the loader and the Python API.

ROOT/NAME/VERSION      the version's folder, or that of a copy
ROOT/NAME              the newest version that is neither retired nor quarantined as a whole
ROOT/NAME@TAG          the version that the tag names now
ROOT/NAME/1f3a9c       a unique prefix of the version, of at least 6 digits
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pitools.core.errors import DataError, PitError, UsageError, suggest
from pitools.core.output import format_cell
from pitools.store import retirement, tags, version_state
from pitools.store.manifest import MANIFEST_FILE
from pitools.store.version_list import (
    has_versions,
    is_version,
    lost_manifest_of,
    lost_versions,
    published_ns,
    version_dirs,
)

PREFIX_DIGITS = 6
_PREFIX = re.compile(rf"[0-9a-f]{{{PREFIX_DIGITS},32}}")


def resolve_version(text: str | Path, *, newest: bool = True) -> Path:
    """Return the folder of the named version.

    newest: accept ROOT/NAME. Raises UsageError for no match or several, DataError for an unreadable folder or a version
    that has lost its manifest, and as `find_version`.
    """
    try:
        path = find_version(text, newest=newest)
    except OSError as error:
        raise DataError(f"folder: cannot be read: {error.strerror}", where=str(error.filename or text)) from error
    if path is None:
        raise lost_manifest_of(_path(str(text))) or _unknown_error(_path(str(text)))
    return path


def find_version(text: str | Path, *, newest: bool = True) -> Path | None:
    """Return the folder of the named version; None if the text has none of the forms above.

    newest: accept ROOT/NAME. Raises UsageError for a tag or prefix that matches no version or several, DataError for a
    tag of a removed version, an unreadable catalog record, or where the newest version has lost its manifest; OSError.
    """
    path, text = _path(str(text)), str(text)
    if os.path.lexists(path / MANIFEST_FILE):
        return path
    home = _dataset_dir(path)
    if home != path and home.is_dir():
        name, separator, tag = path.name.partition("@")
        return _version_of_tag(home.parent, name, tag) if separator else _version_of_prefix(home, path.name)
    if has_versions(path.parent, path.name):
        if not newest:
            problem = "dataset: not a version (this command requires one)"
            raise UsageError(problem, where=text, hint="pass ROOT/NAME/VERSION")
        return _newest_version(path)
    for _, error in lost_versions(path.parent, path.name):
        raise error
    return None


def exists(path: Path) -> bool:
    """Whether a path exists, or names a version of an existing dataset."""
    home = _dataset_dir(path)
    return os.path.lexists(path) or (home != path and has_versions(home.parent, home.name))


def unusable_reason(path: Path) -> str:
    """Return why the version in folder `path` must not be used (retired or quarantined as a whole); "" if usable.

    Raises DataError for an unreadable record.
    """
    if why := retirement.retirement_reason(path):
        return why
    quarantine = version_state.read_quarantine(path)
    if quarantine and quarantine.whole_version:
        reason = format_cell(next(iter(quarantine.reasons), "no reason given"))
        return f"in quarantine: {reason} (`pit dataset check {path} --lift-quarantine`)"
    return ""


def split_dataset_path(text: str) -> tuple[Path, str]:
    """Return root and name of `ROOT/NAME`. Raises UsageError if there is no dataset."""
    path = _path(text).absolute()
    if not has_versions(path.parent, path.name):
        if (path / MANIFEST_FILE).is_file():
            problem = "a version (expected a dataset, ROOT/NAME)"
            raise UsageError(problem, where=str(path), hint=f"pass {path.parent}")
        raise _unknown_error(path)
    return path.parent, path.name


def require_root(root: Path) -> None:
    """Raise UsageError if `root` is the folder of a dataset or of a version."""
    path = _path(str(root)).absolute()
    for home in (path, path.parent):
        # Folders that are not versions may have a manifest.json, too.
        has_version = any(is_version(version.name) for version in version_dirs(home.parent, home.name))
        if has_version and not has_versions(home):
            problem = "a dataset or version (expected a root of datasets)"
            raise UsageError(problem, where=str(root), hint=f"pass {home.parent}")


def _path(text: str) -> Path:
    """Return the path, with `.` and `..` made absolute. Raises UsageError for an empty text and for a URL."""
    if not text:
        raise UsageError("dataset: empty path", hint="ROOT/NAME, ROOT/NAME@TAG or ROOT/NAME/VERSION")
    if "://" in text:
        problem = "dataset: a URL (expected a path)"
        raise UsageError(problem, where=text, hint="stage it first: `pit-stage run`")
    path = Path(text)
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))  # noqa: PTH100 (links stay)


def warning_for(path: Path) -> str:
    """Return the warning for users of the version in folder `path`; "" if none."""
    try:
        why = unusable_reason(path)
    except PitError as error:
        why = f"state unknown: {error}"
    return f"{path}: {why}" if why else ""


def _dataset_dir(path: Path) -> Path:
    """Return the dataset's folder for a text with a tag or prefix of a version; for an existing path, the path."""
    if os.path.lexists(path):
        return path
    name, separator, _ = path.name.partition("@")
    return path.with_name(name) if separator and name else path.parent if _PREFIX.fullmatch(path.name) else path


def _version_of_tag(root: Path, name: str, tag: str) -> Path:
    where = f"{root / name}@{tag}"
    tag_moves = tags.read_tags(root, name)
    if tag not in tag_moves:
        raise UsageError(f'no tag "{tag}"', where=where, hint=suggest(tag, tag_moves) or "`pit dataset tag` sets one")
    path = root / name / tag_moves[tag].version
    if not (path / MANIFEST_FILE).is_file():
        problem = f"tag: version {tag_moves[tag].version} is missing"
        raise DataError(problem, where=where, hint="move the tag, or ingest that version again")
    return path


def _version_of_prefix(home: Path, prefix: str) -> Path:
    matches = [path for path in version_dirs(home.parent, home.name) if path.name.startswith(prefix)]
    for path, error in lost_versions(home.parent, home.name):
        if path.name.startswith(prefix):
            raise error
    if len(matches) != 1:
        names = ", ".join(path.name for path in matches[:5])
        problem = (
            f"{len(matches)} versions begin with {prefix}: {names}" if matches else f"no version begins with {prefix}"
        )
        raise UsageError(problem, where=str(home), hint=f"see `pit dataset list {home.parent}`")
    return matches[0]


def _newest_version(home: Path) -> Path:
    root, name = home.absolute().parent, home.absolute().name
    retirements = retirement.read_retirements(root, name)

    def is_usable(path: Path) -> bool:
        quarantine = version_state.read_quarantine(path)
        return path.name not in retirements and not (quarantine and quarantine.whole_version)

    newest = next((path for path in reversed(list(version_dirs(home.parent, home.name))) if is_usable(path)), None)
    for path, error in lost_versions(home.parent, home.name):
        # An older version must not take the place of the one that was published last.
        if is_usable(path) and (newest is None or _is_newer(path, newest)):
            raise error
    if newest:
        return newest
    hint = "pass ROOT/NAME/VERSION, or undo: `pit dataset retire --undo`"
    raise UsageError("dataset: all versions are retired or in quarantine", where=str(home), hint=hint)


def _is_newer(path: Path, other: Path) -> bool:
    try:
        return published_ns(path) > published_ns(other)
    except OSError:  # neither a manifest nor a time of publication
        return False


def _unknown_error(path: Path) -> UsageError:
    if path.is_dir():
        names = sorted({version_dir.parts[-2] for version_dir in version_dirs(path)})
        ours = f"in this root: {', '.join(names[:10])}"
        hint = ours if names else "give ROOT/NAME, ROOT/NAME@TAG or a version's folder"
        return UsageError("not a dataset: it has no manifest.json", where=str(path), hint=hint)
    home = path.parent.absolute()
    if has_versions(home.parent, home.name):
        hint = f"see `pit dataset list {home.parent}`; the first {PREFIX_DIGITS} digits of a version will do"
        return UsageError("no such version", where=str(path), hint=hint)
    for place in (path, path.parent):  # ROOT/NAME, or ROOT/NAME/VERSION
        if names := sorted({found.parts[-2] for found in version_dirs(place.parent)}):
            return UsageError("no such dataset", where=str(path), hint=suggest(place.name, names))
    return UsageError("no such dataset", where=str(path), hint="ROOT/NAME, ROOT/NAME@TAG or ROOT/NAME/VERSION")
