"""The code of a run: a copy of the workdir as it was when the run was made, in the run's own folder.

code/           what runs
code.json       pit.code/1: what was put there; the program may have added to it since
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core.errors import ConfigError, DataError
from pitools.core.fs import from_os_error, open_regular
from pitools.core.progress import Advance, progress_bar
from pitools.core.record import Record
from pitools.core.units import format_size
from pitools.launch.provenance import workdir_walk
from pitools.launch.provenance.copy_rules import CopyRules
from pitools.run import run_folder
from pitools.site.tar_stream import TarEntry
from pitools.store import digest

CODE_DIR, LISTING_FILE = "code", "code.json"
LARGE_FILE_BYTES = 64 << 20  # a larger file is data: it stays where it is, and is linked to
_PROGRESS_BAR_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in the copy. link: where it leads, as written; digest: "" for all but files."""

    path: str
    kind: Literal["file", "folder", "link"] = "file"
    bytes: int = 0
    digest: str = ""
    link: str = ""


class CodeListing(Record, frozen=True, kw_only=True, tag="pit.code/1"):
    """What was copied, in a fixed order, and what was not.

    linked: links to what stayed outside: large files, environments, datasets, and links that led out. skipped: pipes,
    devices, and names that are no UTF-8. secrets, ignored: what the exclusions left out, folders whole. bytes: of the
    files. digest: of all that was copied and linked.
    """

    files: tuple[CopiedFile, ...]
    linked: tuple[CopiedFile, ...] = ()
    skipped: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    bytes: int = 0
    digest: str = ""


class _WalkedFile(NamedTuple):
    path: Path
    inner: str
    stat: os.stat_result


def copy_workdir(
    workdir: Path,
    to: Path,
    *,
    ignored: Iterable[str] | None = None,
    excluded_dirs: Collection[Path] = (),
    limit: int = workdir_walk.MAX_UPLOAD_BYTES,
) -> CodeListing:
    """Copy a workdir to the new folder `to`. excluded_dirs: folders in it that are no part of it, such as that of all
    runs.

    ignored: what git ignores there, None where that is not known: see copy_rules.py. Bytes are copied, never shared, so
    that no later change here is one there. Raises ConfigError for what cannot be read, and for more than `limit` bytes
    or 50,000 files.
    """
    root = workdir.resolve()
    left: list[Path] = []
    excluded: dict[Path, str] = {}
    walked = workdir_walk.walk_workdir(
        root, CopyRules(root, ignored), without=excluded_dirs, left_out=left, excluded=excluded
    )
    found = [_WalkedFile(path, str(path.relative_to(root)), path.lstat()) for path in _limit_files(walked, workdir)]
    small = [one for one in found if stat.S_ISREG(one.stat.st_mode) and one.stat.st_size <= LARGE_FILE_BYTES]
    total = sum(one.stat.st_size for one in small)
    if total > limit:
        raise _too_much(workdir, small, total, limit)
    made: list[CopiedFile] = []
    linked = [
        _link_entry(str(path.relative_to(root)), str(path)) for path in left if workdir_walk.is_needed_at_run_time(path)
    ]
    skipped = []
    to.mkdir(0o755)
    with progress_bar("code", total, unit="bytes", quiet=total < _PROGRESS_BAR_BYTES) as advance:
        for one in found:
            mode = one.stat.st_mode
            if not _is_text(one.inner) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                skipped.append(_shown(one.inner))
            elif stat.S_ISDIR(mode):
                (to / one.inner).mkdir(0o755)
                made.append(CopiedFile(path=one.inner, kind="folder"))
            elif stat.S_ISLNK(mode) and (target := _link_inside(one.path, root)):
                (to / one.inner).symlink_to(target)
                made.append(CopiedFile(path=one.inner, kind="link", link=target))
            elif stat.S_ISLNK(mode) or one.stat.st_size > LARGE_FILE_BYTES:
                linked.append(_link_entry(one.inner, os.path.realpath(one.path)))
            else:
                made.append(_copy(one.path, to / one.inner, one.inner, advance))
    for link in linked:
        (to / link.path).symlink_to(link.link)
    whole = _make_listing(made, linked, skipped)
    names = {
        why: sorted(_shown(str(path.relative_to(root))) for path in excluded if excluded[path] == why)
        for why in ("secret", "ignored")
    }
    return msgspec.structs.replace(whole, secrets=tuple(names["secret"]), ignored=tuple(names["ignored"]))


def restore_code(run_dir: Path, to: Path) -> CodeListing:
    """Copy the code of a run to the new folder `to`: what was put there when it was made, and nothing of its own.

    Raises DataError where one of its files has been changed, or is gone.
    """
    code = read_listing(run_dir)
    source = run_dir / CODE_DIR
    to.mkdir(0o755)
    try:
        for one in code.files:
            if one.kind == "folder":
                (to / one.path).mkdir(0o755)
            elif one.kind == "link":
                (to / one.path).symlink_to(one.link)
            elif _copy(source / one.path, to / one.path, one.path).digest != one.digest:
                raise _changed(run_dir, one.path)
        for one in code.linked:
            (to / one.path).parent.mkdir(parents=True, exist_ok=True)
            (to / one.path).symlink_to(one.link)
    except ConfigError as error:
        raise DataError(error.message, where=str(run_dir / CODE_DIR), hint=error.hint) from error
    except OSError as error:
        raise from_os_error(error, to) from error
    return code


def code_entries(run_dir: Path, *, name: str = CODE_DIR) -> list[TarEntry]:
    """The code of a run, to be sent where no file of this machine is seen: what it links to outside stays behind."""
    if wrong := changed_paths(run_dir):
        raise _changed(run_dir, wrong[0])
    found = [TarEntry(name=name)]
    for one in read_listing(run_dir).files:
        path = run_dir / CODE_DIR / one.path if one.kind == "file" else None
        found.append(TarEntry(name=f"{name}/{one.path}", path=path, link=one.link))
    return found


def read_listing(run_dir: Path) -> CodeListing:
    """What was put into a run's `code/`. Raises DataError where that is not known."""
    code = run_folder.read_record(run_dir / LISTING_FILE, CodeListing)
    if code is None:
        hint = "it was made with snapshot = false, or by a version that kept none"
        raise DataError("the run has no copy of its code", where=str(run_dir), hint=hint)
    for one in (*code.files, *code.linked):
        if one.path.startswith("/") or {"", ".", ".."} & set(one.path.split("/")):
            raise DataError(f"{one.path!r} is no path inside of a folder", where=str(run_dir / LISTING_FILE))
    return code


def changed_paths(run_dir: Path) -> list[str]:
    """The paths in a run's `code/` that are no longer what was put there; what was added since is none of them."""
    return [one.path for one in read_listing(run_dir).files if not _is_unchanged(run_dir / CODE_DIR / one.path, one)]


def _is_unchanged(path: Path, one: CopiedFile) -> bool:
    try:
        if one.kind == "link":
            return str(path.readlink()) == one.link
        if one.kind == "folder":
            return path.is_dir() and not path.is_symlink()
        return path.lstat().st_size == one.bytes and digest.digest_file(path) == (one.bytes, one.digest)
    except OSError:
        return False


def _changed(run_dir: Path, inner: str) -> DataError:
    hint = "put back what was there, or launch from a workdir of your own"
    return DataError(f"code/{inner} is not what was put there", where=str(run_dir), hint=hint)


def _limit_files(walked: Iterable[Path], workdir: Path) -> Iterator[Path]:
    for count, path in enumerate(walked):
        if count >= workdir_walk.MAX_FILES:
            what = f"the workdir holds more than {workdir_walk.MAX_FILES} files"
            raise ConfigError(what, where=str(workdir), hint="keep data outside of it, or set snapshot = false")
        yield path


def _too_much(workdir: Path, found: Iterable[_WalkedFile], total: int, limit: int) -> ConfigError:
    tops: dict[str, int] = {}
    for one in found:
        top = one.inner.partition("/")[0]
        tops[top] = tops.get(top, 0) + one.stat.st_size
    largest = max(tops, key=tops.__getitem__)
    what = f"the workdir holds {format_size(total)}, more than the {format_size(limit)} that a run keeps of its code"
    hint = f"{_shown(largest)} is {format_size(tops[largest])} of it: keep data outside, or set snapshot = false"
    return ConfigError(what, where=str(workdir), hint=hint)


def _copy(source: Path, to: Path, inner: str, advance: Advance = lambda _: None) -> CopiedFile:
    hasher, total = digest.Hasher(), 0
    try:
        with open_regular(source) as file:
            found = os.fstat(file.fileno())
            # Not more than its owner lets others see of it, and nothing that others could change: it is executed.
            descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, found.st_mode & 0o755 | 0o200)
            with os.fdopen(descriptor, "wb", buffering=0) as copy:
                while block := file.read(_BLOCK_BYTES):
                    hasher.update(block)
                    copy.write(block)
                    total += len(block)
                    advance(len(block))
            os.utime(to, ns=(found.st_atime_ns, found.st_mtime_ns))
    except OSError as error:
        if error.filename == str(to) or error.filename is None:
            raise
        what, hint = f"cannot be read: {error.strerror}", "make it readable, move it away, or set snapshot = false"
        raise ConfigError(f'"{_shown(inner)}" {what}', where=str(source), hint=hint) from error
    return CopiedFile(path=inner, bytes=total, digest=hasher.digest())


def _link_inside(link: Path, root: Path) -> str:
    """Where a link in the folder leads, relative to itself; "" where that is outside, or a name that is no text."""
    target = os.path.realpath(link)
    return os.path.relpath(target, link.parent) if Path(target).is_relative_to(root) and _is_text(target) else ""


def _link_entry(inner: str, target: str) -> CopiedFile:
    size = 0
    with contextlib.suppress(OSError):  # it leads nowhere, here
        found = Path(target).stat()
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return CopiedFile(path=inner, kind="link", bytes=size, link=target)


def _is_text(name: str) -> bool:
    """Whether a file's name is UTF-8, as a listing's must be."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _shown(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _make_listing(files: list[CopiedFile], linked: list[CopiedFile], skipped: list[str]) -> CodeListing:
    text = "".join(f"{one.kind}\t{one.path}\t{one.digest}{one.link}\n" for one in (*files, *linked))
    return CodeListing(
        files=tuple(files),
        linked=tuple(linked),
        skipped=tuple(skipped),
        bytes=sum(one.bytes for one in files),
        digest=digest.digest_bytes(text.encode()),
    )
