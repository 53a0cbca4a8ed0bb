"""Find the version that a text names, wherever one can be given: every command, `--data`, the loader, the Python API.

ROOT/NAME/VERSION      its folder, or a copy's
ROOT/NAME              the newest that is neither retired nor in quarantine as a whole
ROOT/NAME@TAG          what a tag names now
ROOT/NAME/1f3a9c       a part of the version, from its beginning, of at least 6 digits
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pitools.core.errors import DataError, UsageError, suggest
from pitools.core.output import format_cell
from pitools.store import retirement, tags, version_state
from pitools.store.manifest import FILE_NAME
from pitools.store.version_list import is_version, lost_manifest_of, version_dirs

PREFIX_DIGITS = 6
_PREFIX = re.compile(rf"[0-9a-f]{{{PREFIX_DIGITS},32}}")


def resolve_version(text: str | Path, *, newest: bool = True) -> Path:
    """Return the folder of the version that is named.

    newest: whether the name of a dataset alone will do. Raises UsageError for a name that fits none or many, and as
    `find`, but DataError for a folder that cannot be read, and for a version that has lost its manifest.
    """
    try:
        path = find_version(text, newest=newest)
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}", where=str(error.filename or text)) from error
    if path is None:
        raise lost_manifest_of(_path(str(text))) or _unknown_error(_path(str(text)))
    return path


def find_version(text: str | Path, *, newest: bool = True) -> Path | None:
    """Return the folder of the version that is named, None where the text is of none of the forms above.

    newest: as for `resolve`. Raises UsageError for a tag or digits that fit no version or many, DataError for a tag
    that names what is gone, and for a record of the catalog that cannot be read, OSError.
    """
    path, text = _path(str(text)), str(text)
    if os.path.lexists(path / FILE_NAME):
        return path
    home = _dataset_dir(path)
    if home != path and home.is_dir():
        name, at, tag = path.name.partition("@")
        return _version_of_tag(home.parent, name, tag) if at else _version_of_prefix(home, path.name)
    if any(version_dirs(path.parent, path.name)):
        if not newest:
            raise UsageError("this command wants one version", where=text, hint="name it: ROOT/NAME/VERSION")
        return _newest_version(path)
    return None


def exists(path: Path) -> bool:
    """Return whether a path exists, or names a version of a dataset that does."""
    home = _dataset_dir(path)
    return os.path.lexists(path) or (home != path and any(version_dirs(home.parent, home.name)))


def unusable_reason(path: Path) -> str:
    """Return why the version in folder `path` is not to be used, "" when nothing is said against all of it.

    Raises DataError for a record that cannot be read.
    """
    if why := retirement.retirement_reason(path):
        return why
    known = version_state.read_quarantine(path)
    if known and known.whole_version:
        reason = format_cell(next(iter(known.reasons), "no reason is given"))
        return f"in quarantine: {reason} (`pit dataset check {path} --release`)"
    return ""


def split_dataset_path(text: str) -> tuple[Path, str]:
    """Root and name of `ROOT/NAME`. Raises UsageError where there is no dataset."""
    path = _path(text).absolute()
    if not any(version_dirs(path.parent, path.name)):
        if (path / FILE_NAME).is_file():
            raise UsageError("this is one version of a dataset", where=str(path), hint=f"give {path.parent}")
        raise _unknown_error(path)
    return path.parent, path.name


def require_root(root: Path) -> None:
    """Raises UsageError for the folder of a dataset, or of a version, in place of the root that it is in."""
    path = _path(str(root)).absolute()
    for home in (path, path.parent):
        # Folders of other things beside a root have a manifest.json too.
        here = any(is_version(version.name) for version in version_dirs(home.parent, home.name))
        if here and not any(version_dirs(home)):
            hint = f"give its root, {home.parent}"
            raise UsageError("this is a dataset, or in one", where=str(root), hint=hint)


def _path(text: str) -> Path:
    """As it is given, but `.` and `..` have names of their own. Raises UsageError for no text at all, and for a URL."""
    if not text:
        raise UsageError("no dataset is named", hint="ROOT/NAME, ROOT/NAME@TAG or ROOT/NAME/VERSION")
    if "://" in text:
        raise UsageError("a file system is read here", where=text, hint="stage it first: `pit-stage run`")
    path = Path(text)
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))  # noqa: PTH100 (links stay)


def warning_for(path: Path) -> str:
    """Return what is to be said to those who begin with the version in folder `path`, "" for nothing."""
    try:
        why = unusable_reason(path)
    except DataError as error:
        why = f"perhaps not to be used: {error}"
    return f"{path} is {why}" if why else ""


def _dataset_dir(path: Path) -> Path:
    """Return the dataset's folder where a path that does not exist names one of its versions, else the path."""
    if os.path.lexists(path):
        return path
    name, at, _ = path.name.partition("@")
    return path.with_name(name) if at and name else path.parent if _PREFIX.fullmatch(path.name) else path


def _version_of_tag(root: Path, name: str, tag: str) -> Path:
    where = f"{root / name}@{tag}"
    known = tags.read_tags(root, name)
    if tag not in known:
        raise UsageError(f'no tag "{tag}"', where=where, hint=suggest(tag, known) or "`pit dataset tag` sets one")
    path = root / name / known[tag].version
    if not (path / FILE_NAME).is_file():
        what = f"the tag names {known[tag].version}, which is not there"
        raise DataError(what, where=where, hint="move the tag, or ingest that version again")
    return path


def _version_of_prefix(home: Path, prefix: str) -> Path:
    found = [path for path in version_dirs(home.parent, home.name) if path.name.startswith(prefix)]
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:5])
        what = f"{len(found)} versions begin with {prefix}: {names}" if found else f"no version begins with {prefix}"
        raise UsageError(what, where=str(home), hint=f"see `pit dataset list {home.parent}`")
    return found[0]


def _newest_version(home: Path) -> Path:
    root, name = home.absolute().parent, home.absolute().name
    gone = retirement.read_retirements(root, name)
    for path in reversed(list(version_dirs(home.parent, home.name))):
        kept = version_state.read_quarantine(path)
        if path.name not in gone and not (kept and kept.whole_version):
            return path
    hint = "name one: ROOT/NAME/VERSION; or take one back: `pit dataset retire --undo`"
    raise UsageError("all its versions are retired or in quarantine", where=str(home), hint=hint)


def _unknown_error(path: Path) -> UsageError:
    if path.is_dir():
        names = sorted({found.parts[-2] for found in version_dirs(path)})
        ours = f"in this root: {', '.join(names[:10])}"
        hint = ours if names else "give ROOT/NAME, ROOT/NAME@TAG or a version's folder"
        return UsageError("not a dataset: it has no manifest.json", where=str(path), hint=hint)
    home = path.parent.absolute()
    if any(version_dirs(home.parent, home.name)):
        hint = f"see `pit dataset list {home.parent}`; the first {PREFIX_DIGITS} digits of a version will do"
        return UsageError("no such version", where=str(path), hint=hint)
    for place in (path, path.parent):  # ROOT/NAME, or ROOT/NAME/VERSION
        if names := sorted({found.parts[-2] for found in version_dirs(place.parent)}):
            return UsageError("no such dataset", where=str(path), hint=suggest(place.name, names))
    return UsageError("no such dataset", where=str(path), hint="ROOT/NAME, ROOT/NAME@TAG or ROOT/NAME/VERSION")
