"""Remove retired versions after their grace, if nothing references them: move aside, check again, delete.

    <root>/<name>/<version>  ──rename──▶  .trash/<name>.<version>.<rand>        moved aside: no longer listed
                                               │ referenced meanwhile? renamed back
                                               └──rename──▶  ….deleting          final; records and files are deleted

A process that tags, leases or restores a version checks, after writing that, whether the version is still there; `gc`
checks, after moving it aside, for such records. One of the two notices the other. An unreadable record counts as a
reference. The next `gc` finishes the work of a killed one. Without retired versions, no manifest is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pitools.core import timestamps, units
from pitools.core.errors import ClusterError, PitError
from pitools.core.fs import from_os_error, iter_tree, remove_tree
from pitools.core.record import Record
from pitools.dataset.gc import abandoned_ingests
from pitools.dataset.gc.references import References, VersionKey
from pitools.store import retirement, version_state
from pitools.store.manifest import MANIFEST_FILE
from pitools.store.version_list import is_version

GRACE_S = 7 * 86400
_TRASHED_NAME = re.compile(r"(.+)\.([0-9a-f]{32})\.[0-9a-f]{8}")
_CONDEMNED_NAME = re.compile(r"(.+\.[0-9a-f]{8})\.deleting")


class GcResult(Record, frozen=True, kw_only=True, tag="pit.dataset-gc/1"):
    """Outcome for a retired version, or for an abandoned ingest (version "").

    state: `would-remove` in a dry run. reason: why it is `kept`, or which files could not be deleted; else "".
    freed_bytes: of files without a hard link in another version.
    """

    name: str
    version: str
    state: Literal["kept", "removed", "would-remove"]
    reason: str = ""
    freed_bytes: int = 0


def collect_garbage(
    root: Path, *, runs: Sequence[Path] = (), grace_s: int = GRACE_S, now: datetime | None = None, dry_run: bool = False
) -> Iterator[GcResult]:
    """Remove versions retired at least `grace_s` seconds ago without a tag, lease, run or derived version.

    runs: folders of runs whose plans are read. Yields one record per retired version and abandoned ingest. Raises
    ClusterError for an unreadable root.
    """
    trash = root / version_state.TRASH
    if trash.is_symlink():
        raise ClusterError("a link (expected a folder)", where=str(trash), hint="remove the link")
    # The earlier of this clock and the file system's: a clock that is ahead must not end a grace or a lease.
    moment = now or min(
        version_state.utc_now(), (None if dry_run else version_state.file_system_time(root)) or version_state.utc_now()
    )
    if not dry_run:
        _finish(root, trash, moment)
    moved = {
        VersionKey(*matched.groups()): path
        for path in version_state.list_names(trash)
        if (matched := _TRASHED_NAME.fullmatch(path.name))
    }
    due: list[VersionKey] = []
    for key in _retired(root):
        try:
            record = retirement.retirement_of(root, *key, root / key.name / key.version)
        except PitError as error:
            yield _kept_result(key, str(error))
            continue
        if record is None:  # moved by another `gc`, or by hand
            continue
        if record.grace_ends(grace_s) > moment:
            yield _kept_result(key, f"within its grace until {timestamps.to_rfc3339(record.grace_ends(grace_s))}")
        else:
            due.append(key)
    if due or moved:
        references = References(root, runs, moment)
        yield from (
            _plan_removals(root, due, moved, references) if dry_run else _remove(root, due, moved, references, moment)
        )
        if references.forbidden:
            print(
                f"pit: {min(references.forbidden)}: not readable by this user ({len(references.forbidden)} such in "
                "all), and may name versions, so none is removed: run `pit dataset gc` as root",
                file=sys.stderr,
            )
    for name, size in abandoned_ingests.remove_abandoned(root, grace_s, moment, dry_run=dry_run):
        if size is None:
            least = units.format_duration(max(grace_s, abandoned_ingests.IDLE_S))
            yield _kept_result(VersionKey(name, ""), f"an ingest that wrote in the last {least}")
        else:
            yield GcResult(name=name, version="", state="would-remove" if dry_run else "removed", freed_bytes=size)
    if not dry_run:
        _end_leases(root, moment)
        with contextlib.suppress(OSError):
            trash.rmdir()


def _plan_removals(
    root: Path, due: list[VersionKey], trashed: dict[VersionKey, Path], references: References
) -> Iterator[GcResult]:
    """Yield what `_remove` would do."""
    references.update(trashed.items())
    removable, kept = _decide(root, {**dict.fromkeys(due), **trashed}, references)
    yield from (_kept_result(key, reason) for key, reason in kept.items())
    for key, size in _freed_bytes([(key, trashed.get(key) or root / key.name / key.version) for key in removable]):
        yield GcResult(name=key.name, version=key.version, state="would-remove", freed_bytes=size)


def _remove(
    root: Path, due: list[VersionKey], trashed: dict[VersionKey, Path], references: References, moment: datetime
) -> Iterator[GcResult]:
    """Move versions aside, check references again, then remove or restore them. trashed: left aside by a killed
    `gc`."""
    references.update(trashed.items())
    removable, kept = _decide(root, {**dict.fromkeys(due), **trashed}, references)
    done = [_kept_result(key, kept[key]) for key in due if key in kept]
    try:
        for key in removable:
            if key not in trashed:
                path = root / version_state.TRASH / f"{key.name}.{key.version}.{os.urandom(4).hex()}"
                if reason := _rename(root / key.name / key.version, path):
                    done.append(_kept_result(key, reason))
                else:
                    trashed[key] = path
        # From here on, a process that references one of them finds it missing.
        for key in trashed:
            _revalidate_references(root, key)
        references.update(trashed.items(), fresh=True)
        removable, kept = _decide(root, trashed, references)
        sizes = dict(_freed_bytes([(key, trashed[key]) for key in removable]))
    except BaseException:  # such as an interrupt, before the final rename
        for key, path in trashed.items():
            _rename(path, root / key.name / key.version)
        raise
    done += [result for key, reason in kept.items() if (result := _restore(root, key, trashed[key], reason))]
    decided = {key: trashed[key].with_name(f"{trashed[key].name}.deleting") for key in removable}
    decided = {key: path for key, path in decided.items() if not _rename(trashed[key], path)}
    # Independent of the caller: one that stops reading the records must not leave a version aside.
    yield from done
    for key, path in decided.items():
        _remove_catalog_records(root, key, moment)
        remove_tree(path)
        reason = f"some files cannot be deleted: {path}" if path.exists() else ""
        yield GcResult(name=key.name, version=key.version, state="removed", reason=reason, freed_bytes=sizes[key])


def _decide(
    root: Path, candidates: Mapping[VersionKey, Path | None], references: References
) -> tuple[list[VersionKey], dict[VersionKey, str]]:
    """Return the versions to remove, and the reasons to keep the others. A path: where the version was moved aside."""
    kept: dict[VersionKey, str] = {}
    reingested = {key for key, path in candidates.items() if path and _is_published(root, key)}
    for key, path in candidates.items():
        if key in reingested:  # ingested again meanwhile: the trashed one is a copy
            continue
        try:
            if not path and ((root / key.name).is_symlink() or (root / key.name / key.version).is_symlink()):
                kept[key] = "its path has a link (expected folders)"
            elif path and not retirement.retirement_of(root, *key, path):
                kept[key] = "its retirement was undone"
            elif reason := references.reference_to(key):
                kept[key] = reason
        except (OSError, PitError) as error:  # an unreadable record may be a reference
            kept[key] = str(error)
    kept |= references.kept_descendants(candidates.keys() - kept.keys() - reingested)
    return [key for key in candidates if key not in kept], kept


def _retired(root: Path) -> Iterator[VersionKey]:
    for home in _dataset_dirs(root):
        with contextlib.suppress(PermissionError):  # a private folder of another user
            for path in retirement.retirement_files(root, home.name):
                if is_version(path.stem):
                    yield VersionKey(home.name, path.stem)


def _dataset_dirs(root: Path) -> list[Path]:
    try:
        return version_state.list_names(root)
    except OSError as error:
        raise from_os_error(error, root) from error


def _kept_result(key: VersionKey, reason: str) -> GcResult:
    return GcResult(name=key.name, version=key.version, state="kept", reason=reason)


def _rename(old: Path, new: Path) -> str:
    """Rename; return "", or why it failed: another `gc` was faster, or the version is on another file system."""
    try:
        new.parent.mkdir(exist_ok=True)
        os.rename(old, new)
    except OSError as error:
        return f"cannot be moved: {error.strerror}"
    return ""


def _is_published(root: Path, key: VersionKey) -> bool:
    return (root / key.name / key.version / MANIFEST_FILE).is_file()


def _restore(root: Path, key: VersionKey, path: Path, reason: str) -> GcResult | None:
    """Move a version back; return None if another `gc` has removed it."""
    failed = _rename(path, root / key.name / key.version)
    if not failed or _is_published(root, key):
        return _kept_result(key, reason)
    return _kept_result(key, f"{reason}; moved aside to {path}: {failed}") if path.exists() else None


def _revalidate_references(root: Path, key: VersionKey) -> None:
    """Revalidate the folders of a version's references on a network file system."""
    tags, leases = version_state.tags_dir(root, key.name), version_state.leases_dir(root, *key)
    home = version_state.catalog_dir(root, key.name)
    for folder in (
        home,
        tags,
        *version_state.list_names(tags),
        leases.parent,
        leases,
        version_state.retired_file(root, *key).parent,
    ):
        if folder.is_dir():
            version_state.revalidate_nfs(folder)


def _remove_catalog_records(root: Path, key: VersionKey, moment: datetime) -> None:
    """Remove the retirement, quarantine and leases of a removed version, unless it exists again."""
    if _is_published(root, key):
        return
    with contextlib.suppress(OSError):
        version_state.retired_file(root, *key).unlink(missing_ok=True)
        version_state.quarantine_file(root, *key).unlink(missing_ok=True)
        version_state.remove_expired_leases(version_state.leases_dir(root, *key), moment)
        version_state.leases_dir(root, *key).rmdir()


def _end_leases(root: Path, moment: datetime) -> None:
    """Remove expired leases of killed processes."""
    for home in _dataset_dirs(root):
        with contextlib.suppress(OSError):
            for folder in version_state.list_names(version_state.leases_dir(root, home.name, "")):
                version_state.remove_expired_leases(folder, moment)


def _finish(root: Path, trash: Path, moment: datetime) -> None:
    """Finish the removals that an earlier `gc` decided."""
    for path in version_state.list_names(trash):
        if matched := _CONDEMNED_NAME.fullmatch(path.name):
            if version := _TRASHED_NAME.fullmatch(matched[1]):
                _remove_catalog_records(root, VersionKey(*version.groups()), moment)
            remove_tree(path)


def _freed_bytes(versions: Iterable[tuple[VersionKey, Path]]) -> Iterator[tuple[VersionKey, int]]:
    """Yield the bytes freed by each version, in this order: a hard-linked file counts when its last link goes."""
    links: dict[tuple[int, int], int] = {}
    for key, path in versions:
        size = 0
        for entry in iter_tree(path, ignored_errnos=(*errno.errorcode,)):
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    inode = (status.st_dev, status.st_ino)
                    links[inode] = links.get(inode, 0) + 1
                    size += status.st_size if links[inode] == status.st_nlink else 0
        yield key, size
