"""Copy the workdir into a run's folder, list, verify and restore the copy.

code/           the copy, which the ranks execute; the program may add files
code.json       pit.code/1: the files that were copied
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
LARGE_FILE_BYTES = 64 << 20  # a larger file is data, which is linked instead of copied
_PROGRESS_BAR_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file, folder or link in the copy. link: the target, as written. digest: "" for folders and links."""

    path: str
    kind: Literal["file", "folder", "link"] = "file"
    bytes: int = 0
    digest: str = ""
    link: str = ""


class CodeListing(Record, frozen=True, kw_only=True, tag="pit.code/1"):
    """The contents of a copy, in a fixed order, and the files left out.

    linked: links to targets outside the copy: large files, environments, datasets, and targets of links out of the
    workdir. skipped: pipes, devices, and names that are not UTF-8. secrets, private, ignored: excluded files, and whole
    folders, by reason: see copy_rules.py.
    bytes: of the files. digest: of `files` and `linked`.
    """

    files: tuple[CopiedFile, ...]
    linked: tuple[CopiedFile, ...] = ()
    skipped: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    bytes: int = 0
    digest: str = ""


class _WalkedFile(NamedTuple):
    path: Path
    name: str
    stat: os.stat_result


def copy_workdir(
    workdir: Path,
    to: Path,
    *,
    ignored: Iterable[str] | None = None,
    tracked: Iterable[str] = (),
    excluded_dirs: Collection[Path] = (),
    limit: int = workdir_walk.MAX_UPLOAD_BYTES,
) -> CodeListing:
    """Copy a workdir to the new folder `to`, without hard links or reflinks, so that later changes do not affect it.

    ignored, tracked: as for `CopyRules`. excluded_dirs: folders to skip, such as the folder of all runs. Raises
    ConfigError for an unreadable file, and for more than `limit` bytes or 50,000 files.
    """
    root = workdir.resolve()
    skipped_dirs: list[Path] = []
    excluded: dict[Path, str] = {}
    walked = workdir_walk.walk_workdir(
        root, CopyRules(root, ignored, tracked), without=excluded_dirs, left_out=skipped_dirs, excluded=excluded
    )
    walked_files = [
        _WalkedFile(path, str(path.relative_to(root)), path.lstat()) for path in _limit_files(walked, workdir)
    ]
    small = [one for one in walked_files if stat.S_ISREG(one.stat.st_mode) and one.stat.st_size <= LARGE_FILE_BYTES]
    total = sum(one.stat.st_size for one in small)
    if total > limit:
        raise _too_large_error(workdir, small, total, limit)
    copied: list[CopiedFile] = []
    linked = [
        _link_entry(str(path.relative_to(root)), str(path))
        for path in skipped_dirs
        if workdir_walk.is_needed_at_run_time(path)
    ]
    skipped = []
    to.mkdir(0o755)
    with progress_bar("code", total, unit="bytes", quiet=total < _PROGRESS_BAR_BYTES) as advance:
        for file in walked_files:
            mode = file.stat.st_mode
            if not _is_text(file.name) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                skipped.append(_escape_name(file.name))
            elif stat.S_ISDIR(mode):
                (to / file.name).mkdir(0o755)
                copied.append(CopiedFile(path=file.name, kind="folder"))
            elif stat.S_ISLNK(mode) and (target := _link_inside(file.path, root)):
                (to / file.name).symlink_to(target)
                copied.append(CopiedFile(path=file.name, kind="link", link=target))
            elif stat.S_ISLNK(mode) or file.stat.st_size > LARGE_FILE_BYTES:
                linked.append(_link_entry(file.name, os.path.realpath(file.path)))
            else:
                copied.append(_copy_file(file.path, to / file.name, file.name, advance))
    for link in linked:
        (to / link.path).symlink_to(link.link)
    listing = _make_listing(copied, linked, skipped)
    names = {
        why: sorted(_escape_name(str(path.relative_to(root))) for path in excluded if excluded[path] == why)
        for why in ("secret", "private", "ignored")
    }
    return msgspec.structs.replace(
        listing,
        secrets=tuple(names["secret"]),
        private=tuple(names["private"]),
        ignored=tuple(names["ignored"]),
    )


def restore_code(run_dir: Path, to: Path) -> CodeListing:
    """Copy a run's code to the new folder `to`, without files that the program has added.

    Raises DataError for a changed or missing file.
    """
    code = read_listing(run_dir)
    source = run_dir / CODE_DIR
    to.mkdir(0o755)
    try:
        for file in code.files:
            if file.kind == "folder":
                (to / file.path).mkdir(0o755)
            elif file.kind == "link":
                (to / file.path).symlink_to(file.link)
            elif _copy_file(source / file.path, to / file.path, file.path).digest != file.digest:
                raise _changed_error(run_dir, file.path)
        for file in code.linked:
            (to / file.path).parent.mkdir(parents=True, exist_ok=True)
            (to / file.path).symlink_to(file.link)
    except ConfigError as error:
        raise DataError(error.message, where=str(run_dir / CODE_DIR), hint=error.hint) from error
    except OSError as error:
        raise from_os_error(error, to) from error
    return code


def code_entries(run_dir: Path, *, name: str = CODE_DIR) -> list[TarEntry]:
    """Return a run's code as tar entries below `name`, without links to targets outside. Raises DataError."""
    if changed := changed_paths(run_dir):
        raise _changed_error(run_dir, changed[0])
    entries = [TarEntry(name=name)]
    for file in read_listing(run_dir).files:
        path = run_dir / CODE_DIR / file.path if file.kind == "file" else None
        entries.append(TarEntry(name=f"{name}/{file.path}", path=path, link=file.link))
    return entries


def read_listing(run_dir: Path) -> CodeListing:
    """Return the listing of a run's `code/`.

    Raises DataError for a missing or damaged listing, and for a path that may lead outside: `..`, or below a link.
    """
    code = run_folder.read_record(run_dir / LISTING_FILE, CodeListing)
    if code is None:
        raise DataError("the run has no copy of its code", where=str(run_dir), hint="launch it from its workdir")
    links = {file.path for file in (*code.files, *code.linked) if file.kind == "link"}
    for file in (*code.files, *code.linked):
        parents = {str(parent) for parent in Path(file.path).parents}
        if file.path.startswith("/") or {"", ".", ".."} & set(file.path.split("/")) or parents & links:
            raise DataError(f"not a path inside the folder: {file.path!r}", where=str(run_dir / LISTING_FILE))
    return code


def changed_paths(run_dir: Path) -> list[str]:
    """Return the changed and missing paths in a run's `code/`, without added ones."""
    return [
        file.path for file in read_listing(run_dir).files if not _is_unchanged(run_dir / CODE_DIR / file.path, file)
    ]


def _is_unchanged(path: Path, file: CopiedFile) -> bool:
    try:
        if file.kind == "link":
            return str(path.readlink()) == file.link
        if file.kind == "folder":
            return path.is_dir() and not path.is_symlink()
        return path.lstat().st_size == file.bytes and digest.digest_file(path) == (file.bytes, file.digest)
    except OSError:
        return False


def _changed_error(run_dir: Path, inner: str) -> DataError:
    hint = "restore the file, or launch from your own workdir"
    return DataError(f"code/{inner}: changed", where=str(run_dir), hint=hint)


def _limit_files(walked: Iterable[Path], workdir: Path) -> Iterator[Path]:
    for count, path in enumerate(walked):
        if count >= workdir_walk.MAX_FILES:
            problem = f"the workdir has more than {workdir_walk.MAX_FILES} files"
            raise ConfigError(problem, where=str(workdir), hint="move data out of it, or set snapshot = false")
        yield path


def _too_large_error(workdir: Path, files: Iterable[_WalkedFile], total: int, limit: int) -> ConfigError:
    tops: dict[str, int] = {}
    for file in files:
        top = file.name.partition("/")[0]
        tops[top] = tops.get(top, 0) + file.stat.st_size
    largest = max(tops, key=tops.__getitem__)
    problem = f"the workdir has {format_size(total)} (a copy may have {format_size(limit)})"
    hint = f"move data out of it ({_escape_name(largest)}: {format_size(tops[largest])}), or set snapshot = false"
    return ConfigError(problem, where=str(workdir), hint=hint)


def _copy_file(source: Path, to: Path, name: str, advance: Advance = lambda _: None) -> CopiedFile:
    hasher, total = digest.Hasher(), 0
    try:
        with open_regular(source) as file:
            status = os.fstat(file.fileno())
            # No more read permissions than the source, and no write permission for others: the copy is executed.
            descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, status.st_mode & 0o755 | 0o200)
            with os.fdopen(descriptor, "wb", buffering=0) as copy:
                while block := file.read(_BLOCK_BYTES):
                    hasher.update(block)
                    copy.write(block)
                    total += len(block)
                    advance(len(block))
            os.utime(to, ns=(status.st_atime_ns, status.st_mtime_ns))
    except OSError as error:
        if error.filename == str(to) or error.filename is None:
            raise
        hint = "make it readable, move it away, or set snapshot = false"
        raise ConfigError(
            f'cannot read "{_escape_name(name)}": {error.strerror}', where=str(source), hint=hint
        ) from error
    return CopiedFile(path=name, bytes=total, digest=hasher.digest())


def _link_inside(link: Path, root: Path) -> str:
    """Return a link's target relative to the link's folder; "" for a target outside the root, or not in UTF-8."""
    target = os.path.realpath(link)
    return os.path.relpath(target, link.parent) if Path(target).is_relative_to(root) and _is_text(target) else ""


def _link_entry(name: str, target: str) -> CopiedFile:
    size = 0
    with contextlib.suppress(OSError):  # a dangling link
        status = Path(target).stat()
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return CopiedFile(path=name, kind="link", bytes=size, link=target)


def _is_text(name: str) -> bool:
    """Return whether a file's name is valid UTF-8, which a listing requires."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _escape_name(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _make_listing(files: list[CopiedFile], linked: list[CopiedFile], skipped: list[str]) -> CodeListing:
    text = "".join(f"{entry.kind}\t{entry.path}\t{entry.digest}{entry.link}\n" for entry in (*files, *linked))
    return CodeListing(
        files=tuple(files),
        linked=tuple(linked),
        skipped=tuple(skipped),
        bytes=sum(one.bytes for one in files),
        digest=digest.digest_bytes(text.encode()),
    )
