"""Versions that were retired, whose grace is over, and that nothing names: taken aside, looked at again, removed.

    <root>/<name>/<version>  ──rename──▶  .trash/<name>.<version>.<rand>        taken: nobody finds it any more
                                              │ named meanwhile? renamed back
                                              └──rename──▶  ….gone              decided; then its records and files go

Whoever tags, leases or takes a version back looks, after writing that down, whether the version is still there; `gc`
looks, after taking it, whether somebody wrote. One of the two sees the other. What cannot be read may name it. A killed
`gc` leaves only what the next one finishes. With nothing retired, no manifest is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pitools.core import timestamps
from pitools.core.errors import ClusterError, PitError
from pitools.core.fs import below, os_error, remove_tree
from pitools.core.record import Record
from pitools.dataset.gc import abandoned_ingests
from pitools.dataset.gc.references import Key, Marks
from pitools.store import retirement, version_state
from pitools.store.manifest import FILE_NAME
from pitools.store.version_list import is_version

GRACE_S = 7 * 86400
_TAKEN = re.compile(r"(.+)\.([0-9a-f]{32})\.[0-9a-f]{8}")
_DECIDED = re.compile(r"(.+\.[0-9a-f]{8})\.gone")


class Collected(Record, frozen=True, kw_only=True, tag="pit.dataset-gc/1"):
    """What became of a retired version, or of an unfinished ingest (version "").

    state: `would-remove` says a dry run. why: it is `kept`, or what could not be deleted; else "". freed_bytes: of
    files that no other version has a hard link to.
    """

    name: str
    version: str
    state: Literal["kept", "removed", "would-remove"]
    why: str = ""
    freed_bytes: int = 0


def gc(
    root: Path,
    *,
    runs: Sequence[Path] = (),
    grace_s: int = GRACE_S,
    present: datetime | None = None,
    dry_run: bool = False,
) -> Iterator[Collected]:
    """Remove what was retired `grace_s` seconds ago and is named by no tag, lease, run or younger manifest.

    runs: folders of runs whose plans are read. One record a retired version and unfinished ingest. Raises ClusterError
    for a root that cannot be read.
    """
    trash = root / version_state.TRASH
    if trash.is_symlink():
        raise ClusterError("it is a link, and what it names is not ours", where=str(trash), hint="remove the link")
    # A clock that is ahead must end no grace and no lease: the file system's counts where it is earlier.
    moment = present or min(
        version_state.now(), (None if dry_run else version_state.refresh(root)) or version_state.now()
    )
    if not dry_run:
        _finish(root, trash, moment)
    taken = {
        Key(*found.groups()): path for path in version_state.names(trash) if (found := _TAKEN.fullmatch(path.name))
    }
    due: list[Key] = []
    for key in _retired(root):
        try:
            record = retirement.of(root, *key, root / key.name / key.version)
        except PitError as error:
            yield _kept(key, str(error))
            continue
        if record is None:  # of one that another `gc` has taken, or that went by hand
            continue
        if record.over(grace_s) > moment:
            yield _kept(key, f"within its grace until {timestamps.text(record.over(grace_s))}")
        else:
            due.append(key)
    if due or taken:
        marks = Marks(root, runs, moment)
        yield from _plan(root, due, taken, marks) if dry_run else _collect(root, due, taken, marks, moment)
    for name, size in abandoned_ingests.collect(root, grace_s, moment, dry_run=dry_run):
        yield Collected(name=name, version="", state="would-remove" if dry_run else "removed", freed_bytes=size)
    if not dry_run:
        _end_leases(root, moment)
        with contextlib.suppress(OSError):
            trash.rmdir()


def _plan(root: Path, due: list[Key], taken: dict[Key, Path], marks: Marks) -> Iterator[Collected]:
    """What `_collect` would do."""
    marks.look(taken.items())
    going, kept = _judge(root, {**dict.fromkeys(due), **taken}, marks)
    yield from (_kept(key, why) for key, why in kept.items())
    for key, size in _freed([(key, taken.get(key) or root / key.name / key.version) for key in going]):
        yield Collected(name=key.name, version=key.version, state="would-remove", freed_bytes=size)


def _collect(root: Path, due: list[Key], taken: dict[Key, Path], marks: Marks, moment: datetime) -> Iterator[Collected]:
    """Take aside what may go, look again, and remove it or bring it back. taken: by a `gc` that was killed."""
    marks.look(taken.items())
    going, kept = _judge(root, {**dict.fromkeys(due), **taken}, marks)
    done = [_kept(key, kept[key]) for key in due if key in kept]
    try:
        for key in going:
            if key not in taken:
                path = root / version_state.TRASH / f"{key.name}.{key.version}.{os.urandom(4).hex()}"
                if why := _rename(root / key.name / key.version, path):
                    done.append(_kept(key, why))
                else:
                    taken[key] = path
        # From here on, whoever names one of them sees that it is not there.
        for key in taken:
            _refresh(root, key)
        marks.look(taken.items(), fresh=True)
        going, kept = _judge(root, taken, marks)
        sizes = dict(_freed([(key, taken[key]) for key in going]))
    except BaseException:  # interrupted, say: nothing was decided
        for key, path in taken.items():
            _rename(path, root / key.name / key.version)
        raise
    done += [told for key, why in kept.items() if (told := _bring_back(root, key, taken[key], why))]
    decided = {key: taken[key].with_name(f"{taken[key].name}.gone") for key in going}
    decided = {key: path for key, path in decided.items() if not _rename(taken[key], path)}
    # Nobody waits for what is told: a reader that has enough must not leave a version aside.
    yield from done
    for key, path in decided.items():
        _forget(root, key, moment)
        remove_tree(path)
        why = f"what cannot be deleted of it is left in {path}" if path.exists() else ""
        yield Collected(name=key.name, version=key.version, state="removed", why=why, freed_bytes=sizes[key])


def _judge(root: Path, wanted: Mapping[Key, Path | None], marks: Marks) -> tuple[list[Key], dict[Key, str]]:
    """Which of the versions may go, and why the others stay. Those that were taken aside have a path."""
    kept: dict[Key, str] = {}
    again = {key for key, path in wanted.items() if path and _is_there(root, key)}
    for key, path in wanted.items():
        if key in again:  # ingested again while it was aside: what is aside is a copy
            continue
        try:
            if not path and ((root / key.name).is_symlink() or (root / key.name / key.version).is_symlink()):
                kept[key] = "it is reached by a link, and what that names is not ours"
            elif path and not retirement.of(root, *key, path):
                kept[key] = "its retirement was taken back"
            elif why := marks.keeps(key):
                kept[key] = why
        except (OSError, PitError) as error:  # what cannot be read may be what keeps it
            kept[key] = str(error)
    kept |= marks.descendants(wanted.keys() - kept.keys() - again)
    return [key for key in wanted if key not in kept], kept


def _retired(root: Path) -> Iterator[Key]:
    for home in _homes(root):
        with contextlib.suppress(PermissionError):  # of somebody who keeps it to himself
            for path in retirement.records(root, home.name):
                if is_version(path.stem):
                    yield Key(home.name, path.stem)


def _homes(root: Path) -> list[Path]:
    try:
        return version_state.names(root)
    except OSError as error:
        raise os_error(error, root) from error


def _kept(key: Key, why: str) -> Collected:
    return Collected(name=key.name, version=key.version, state="kept", why=why)


def _rename(old: Path, new: Path) -> str:
    """Why it could not be renamed, "" when it was: another `gc` may have been first, or a version be on a disk of its
    own."""
    try:
        new.parent.mkdir(exist_ok=True)
        os.rename(old, new)
    except OSError as error:
        return f"it cannot be moved: {error.strerror}"
    return ""


def _is_there(root: Path, key: Key) -> bool:
    return (root / key.name / key.version / FILE_NAME).is_file()


def _bring_back(root: Path, key: Key, path: Path, why: str) -> Collected | None:
    """Put a version where it was; None where another `gc` has removed it."""
    failed = _rename(path, root / key.name / key.version)
    if not failed or _is_there(root, key):
        return _kept(key, why)
    return _kept(key, f"{why}; it is in {path}: {failed}") if path.exists() else None


def _refresh(root: Path, key: Key) -> None:
    """See what names a version as it is now, on a network file system too."""
    tags, leases = version_state.tags_dir(root, key.name), version_state.leases_dir(root, *key)
    home = version_state.catalog_dir(root, key.name)
    for folder in (
        home,
        tags,
        *version_state.names(tags),
        leases.parent,
        leases,
        version_state.retired_file(root, *key).parent,
    ):
        if folder.is_dir():
            version_state.refresh(folder)


def _forget(root: Path, key: Key, moment: datetime) -> None:
    """Remove what was said of a version that was decided to go, unless it is there once more."""
    if _is_there(root, key):
        return
    with contextlib.suppress(OSError):
        version_state.retired_file(root, *key).unlink(missing_ok=True)
        version_state.quarantine_file(root, *key).unlink(missing_ok=True)
        version_state.end_leases(version_state.leases_dir(root, *key), moment)
        version_state.leases_dir(root, *key).rmdir()


def _end_leases(root: Path, moment: datetime) -> None:
    """Remove leases that are over: of processes that were killed."""
    for home in _homes(root):
        with contextlib.suppress(OSError):
            for folder in version_state.names(version_state.leases_dir(root, home.name, "")):
                version_state.end_leases(folder, moment)


def _finish(root: Path, trash: Path, moment: datetime) -> None:
    """Remove what an earlier `gc` decided, and what was said of it."""
    for path in version_state.names(trash):
        if found := _DECIDED.fullmatch(path.name):
            if version := _TAKEN.fullmatch(found[1]):
                _forget(root, Key(*version.groups()), moment)
            remove_tree(path)


def _freed(wanted: Iterable[tuple[Key, Path]]) -> Iterator[tuple[Key, int]]:
    """Bytes that each of these sets free, in this order: a file with several names does when the last one goes."""
    links: dict[tuple[int, int], int] = {}
    for key, path in wanted:
        size = 0
        for entry in below(path, passed=(*errno.errorcode,)):
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    place = (found.st_dev, found.st_ino)
                    links[place] = links.get(place, 0) + 1
                    size += found.st_size if links[place] == found.st_nlink else 0
        yield key, size
