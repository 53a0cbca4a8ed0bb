"""Tags of versions, moved by compare-and-swap without a lock.

tags/prod/1.json  2.json  3.json     a move is link(2) of a finished file to the next number: of two concurrent moves
                                     one fails with EEXIST, on all file systems with hard links (NFS, Lustre)
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError, PitError, TryLater, UsageError
from pitools.core.fs import from_os_error, fsync_dir, open_regular
from pitools.core.record import Record, decode_json
from pitools.store import manifest, retirement, version_state
from pitools.store.manifest import MANIFEST_FILE
from pitools.store.version_list import is_version

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


class Tag(Record, frozen=True, kw_only=True, tag="pit.dataset-tag/1"):
    """Move number `number` of a tag of dataset `name`. version: the new version, "" for removal."""

    name: str
    tag: str
    version: str
    number: int
    moved_at: str
    moved_by: str
    reason: str = ""


class _Move(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    moved_at: str
    moved_by: str
    reason: str = ""


def read_tags(root: Path, name: str) -> dict[str, Tag]:
    """Return the current tags of a dataset by name. Raises DataError."""
    current_tags = {}
    for tag in tag_names(root, name):
        value = current_tag(root, name, tag)
        if value and value.version:
            current_tags[tag] = value
    return current_tags


def tag_names(root: Path, name: str) -> list[str]:
    """Return the names of all tags, also of removed ones."""
    return [folder.name for folder in version_state.list_names(version_state.tags_dir(root, name))]


def current_tag(root: Path, name: str, tag: str) -> Tag | None:
    """Return the tag's last move, which may be its removal; None if it never existed. Raises DataError."""
    number = max(_numbers(version_state.tags_dir(root, name) / tag), default=0)
    value = _read(root, name, tag, number) if number else None
    # An NFS client may cache a folder's names, but revalidates a file on open.
    while later := _read(root, name, tag, number + 1):
        number, value = number + 1, later
    return value


def tag_history(root: Path, name: str, tag: str) -> list[Tag]:
    """Return all moves of the tag, oldest first. Raises DataError."""
    numbers = sorted(_numbers(version_state.tags_dir(root, name) / tag))
    return [value for number in numbers if (value := _read(root, name, tag, number))]


def move_tag(root: Path, name: str, tag: str, version: str, *, expect: str | None = None, reason: str = "") -> Tag:
    """Move the tag to `version` ("": remove it) if it still names `expect` (None: the version at the call's start).

    Raises TryLater after a concurrent move, UsageError for a missing or retired version, DataError for a damaged
    manifest, and as `current_tag`.
    """
    if not _TAG.fullmatch(tag):
        hint = "use up to 100 letters, digits, dots, dashes and underscores, a letter or digit first"
        raise UsageError(f"tag {tag!r}: not a valid name", hint=hint)
    old_tag = current_tag(root, name, tag)
    old_version = old_tag.version if old_tag else ""
    if old_tag and old_version == version:  # also after a repeated command
        return old_tag
    if expect is not None and expect != old_version:
        raise _lost_race_error(root, name, tag, old_tag)
    if version:
        _require_version(root, name, version)
    number = old_tag.number + 1 if old_tag else 1
    moved = _append_move(root, name, tag, number, version, reason)
    try:
        if version:
            _require_version(
                root, name, version
            )  # `gc` and `retire` look at tags after they acted: one of the two sees the other
    except PitError:
        with contextlib.suppress(TryLater):
            _append_move(root, name, tag, number + 1, old_version, f"{version} went away")
        raise
    return moved


def _append_move(root: Path, name: str, tag: str, number: int, to: str, reason: str) -> Tag:
    """Append an entry to the history. Raises TryLater if another process was first."""
    folder = version_state.tags_dir(root, name) / tag
    entry = _Move(version=to, moved_at=timestamps.now_rfc3339(), moved_by=version_state.current_user(), reason=reason)
    temporary = folder / f".{number}.{os.urandom(8).hex()}"
    try:
        version_state.make_dir(folder)
        with open(temporary, "xb") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, folder / f"{number}.json")
        except OSError:
            # NFS repeats a request after a lost reply, and then fails on the link that the first request made.
            if temporary.stat().st_nlink != 2:
                raise
        fsync_dir(folder)
    except FileExistsError as error:
        raise _lost_race_error(root, name, tag, _read(root, name, tag, number)) from error
    except OSError as error:
        raise from_os_error(error, folder) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return Tag(name=name, tag=tag, number=number, **msgspec.structs.asdict(entry))


def _numbers(folder: Path) -> list[int]:
    names = (path.name.removesuffix(".json") for path in version_state.list_names(folder, ".json"))
    return [int(number) for number in names if _NUMBER.fullmatch(number)]


def _read(root: Path, name: str, tag: str, number: int) -> Tag | None:
    path = version_state.tags_dir(root, name) / tag / f"{number}.json"
    try:
        with open_regular(path) as file:
            entry = decode_json(file.read(), _Move)
        if entry.version and not is_version(entry.version):  # it becomes a path
            raise msgspec.ValidationError(f"{entry.version!r} is not a version")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = f"remove {path.name}: then the tag names its previous version"
        raise DataError(f"not a tag's value: {error}", where=str(path), hint=hint) from error
    return Tag(name=name, tag=tag, number=number, **msgspec.structs.asdict(entry))


def _require_version(root: Path, name: str, version: str) -> None:
    where = f"{root / name}/{version}"
    if not is_version(version):
        raise UsageError(f"version {version!r}: not a digest", where=where, hint=f"see `pit dataset list {root}`")
    try:
        with open_regular(root / name / version / MANIFEST_FILE) as opened:
            version_name = manifest.version_of(opened.read())
    except OSError as error:
        hint = f"see `pit dataset list {root}`"
        raise UsageError("no such version", where=where, hint=hint) from error
    if version_name != version:
        hint = f"`pit dataset check {where}`, or choose another version: `pit dataset list {root}`"
        raise DataError(
            f"manifest: of another version (expected {version}, got {version_name})", where=where, hint=hint
        )
    if retirement.retirement_of(root, name, version, root / name / version):
        raise UsageError("version: retired", where=where, hint=f"pit dataset retire --undo {where}")


def _lost_race_error(root: Path, name: str, tag: str, winner: Tag | None) -> TryLater:
    problem = "tag: not found"
    if winner:
        problem = f"tag: {winner.moved_by} moved it to {winner.version or 'nothing'} at {winner.moved_at}"
    return TryLater(
        problem, where=f"{root / name}@{tag}", hint="check the tag, and repeat the move if it is still needed"
    )
