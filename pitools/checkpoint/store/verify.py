"""Judge a checkpoint by its bytes. All ranks may share the work; what each finds is to be brought together."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pitools.checkpoint.store import layout, owner
from pitools.checkpoint.store.hashing import FileDigest, default_threads, hash_files
from pitools.checkpoint.store.manifest import FILE_NAME, CheckpointManifest, FileEntry, load_manifest
from pitools.checkpoint.store.problem import CheckpointProblem, ProblemKind
from pitools.core.errors import ConfigError, DataError
from pitools.core.progress import Advance

# No plain file stands there, and none will in a moment: a link, a socket, a device, what is not a file at all.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR)
# Of the mean share, and bytes: so much more one rank may have to read, that none reads what another node will load.
_MAX_IMBALANCE, _SMALL = 1.25, 16 << 20
# More stray files than this are not told one by one.
_MAX_EXTRAS = 1000


# (path below the checkpoint, ranks) → rank
RankOfFile = Callable[[str, int], int]


def verify_checkpoint(
    step_dir: Path,
    *,
    share: tuple[int, int] = (0, 1),
    only: Collection[str] | None = None,
    threads: int = 0,
    advance: Advance = lambda _: None,
    rank_of_file: RankOfFile | None = None,
) -> list[CheckpointProblem]:
    """Everything wrong with a checkpoint, by path; [] when it is just what was saved.

    share: (rank, world size) of who looks: each reads some of the files, all look at the manifest.
    only: of these files are the bytes read. rank_of_file: see `split_files`.
    """
    rank, world_size = share
    try:
        if not stat.S_ISDIR(step_dir.lstat().st_mode):
            return [_problem(step_dir, "", "manifest", "a folder", "a link or a file")]
        manifest = load_manifest(step_dir)
    except FileNotFoundError:
        return [_problem(step_dir, "", "missing", "a checkpoint", "nothing")]
    except OSError as error:
        return [_problem(step_dir, "", "unreadable", "a checkpoint", str(error.strerror))]
    except DataError as error:
        away = isinstance(cause := error.__cause__, OSError) and cause.errno not in _NO_FILE
        kind: ProblemKind = "unreadable" if away else "manifest"
        return [_problem(step_dir, FILE_NAME, kind, "the checkpoint's manifest", error.message)]
    found = [*_identity(step_dir, manifest)]
    if rank == 0:
        found += _find_extra_files(step_dir, manifest)
    mine = split_files(manifest.files, world_size, rank_of_file)[rank]
    wanted = mine if only is None else [entry for entry in mine if entry.path in only]
    found += _contents(step_dir, wanted, threads, advance)
    return sorted(found, key=lambda problem: problem.path)


def split_files(
    files: tuple[FileEntry, ...], world_size: int, rank_of_file: RankOfFile | None = None
) -> list[list[FileEntry]]:
    """The files of each of `world_size` ranks, about equal in bytes; the same at every rank.

    rank_of_file: (path, ranks) → the rank that wrote it, and is likely to load it: its node then fetches it once. Where
    ranks wrote very unequal parts it does not count.
    """
    if world_size == 1:
        return [list(files)]
    shares: list[list[FileEntry]] = [[] for _ in range(world_size)]
    if rank_of_file:
        for entry in files:
            shares[rank_of_file(entry.path, world_size)].append(entry)
        sizes = [sum(entry.bytes for entry in share) for share in shares]
        if max(sizes) <= _MAX_IMBALANCE * sum(sizes) / world_size + _SMALL:
            return shares
        shares = [[] for _ in range(world_size)]
    # Back and forth over the ranks from the largest down: near to even without looking for the least loaded.
    for number, entry in enumerate(sorted(files, key=lambda entry: (-entry.bytes, entry.path))):
        turn, place = divmod(number, world_size)
        shares[place if turn % 2 == 0 else world_size - 1 - place].append(entry)
    return shares


def _identity(step_dir: Path, manifest: CheckpointManifest) -> Iterator[CheckpointProblem]:
    if manifest.step != (step := layout.step_of(step_dir)):
        expected = "a checkpoint's name" if step is None else f"step {step}, as it is named"
        yield _problem(step_dir, FILE_NAME, "manifest", expected, f"step {manifest.step}")
    try:
        whose = owner.read_owner(step_dir.parent)
    except ConfigError:
        return  # that is the folder's fault, and told by who claims it
    if whose and not owner.is_owned_by(whose, manifest):
        expected, got = (f"run {who.run}, model {who.model}" for who in (whose, manifest))
        yield _problem(step_dir, FILE_NAME, "owner", expected, got)


def _find_extra_files(step_dir: Path, manifest: CheckpointManifest) -> Iterator[CheckpointProblem]:
    known, told = {entry.path for entry in manifest.files} | {FILE_NAME}, 0
    try:
        for path, entry in layout.walk_files(step_dir):
            if path not in known:
                yield _problem(step_dir, path, "extra", "nothing", _file_type(entry.stat(follow_symlinks=False)))
                told += 1
                if told == _MAX_EXTRAS:
                    return
    except OSError as error:
        yield _problem(step_dir, "", "unreadable", "a folder", f"{error.filename}: {error.strerror}")


def _contents(step_dir: Path, files: list[FileEntry], threads: int, advance: Advance) -> Iterator[CheckpointProblem]:
    expected = {entry.path: entry for entry in files}
    sizes = {entry.path: entry.bytes for entry in files}
    for path, found in hash_files(step_dir, sizes, threads=threads or default_threads(), advance=advance):
        if problem := _judge(step_dir, expected[path], found):
            yield problem


def _judge(step_dir: Path, entry: FileEntry, found: FileDigest) -> CheckpointProblem | None:
    if isinstance(found.error, (FileNotFoundError, NotADirectoryError)):
        return _problem(step_dir, entry.path, "missing", "a file", "nothing")
    if found.error and found.error.errno in _NO_FILE:
        return _problem(step_dir, entry.path, "missing", "a file", str(found.error.strerror))
    if found.error:
        return _problem(step_dir, entry.path, "unreadable", "a file", str(found.error.strerror))
    if found.bytes != entry.bytes:
        return _problem(step_dir, entry.path, "size", str(entry.bytes), str(found.bytes))
    if found.digest != entry.digest:
        return _problem(step_dir, entry.path, "digest", entry.digest, found.digest)
    return None


def _problem(step_dir: Path, path: str, problem: ProblemKind, expected: str, got: str) -> CheckpointProblem:
    # A name on disk can be any bytes; a record is text.
    shown = os.fsencode(path).decode(errors="backslashreplace")
    return CheckpointProblem(checkpoint=step_dir.name, path=shown, problem=problem, expected=expected, got=got)


def _file_type(status: os.stat_result) -> str:
    kind = "a file" if stat.S_ISREG(status.st_mode) else "a link" if stat.S_ISLNK(status.st_mode) else "a special file"
    return f"{kind} of {status.st_size} bytes"
