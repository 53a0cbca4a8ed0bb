"""Verify a checkpoint's files against its manifest. Each rank can verify a share; the caller gathers the problems."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pitools.checkpoint.store import layout, owner
from pitools.checkpoint.store.hashing import FileDigest, default_threads, hash_files
from pitools.checkpoint.store.manifest import (
    MANIFEST_FILE,
    NO_FILE,
    CheckpointManifest,
    FileEntry,
    is_read_error,
    load_manifest,
)
from pitools.checkpoint.store.problem import CheckpointProblem, ProblemKind
from pitools.core.errors import ConfigError, DataError
from pitools.core.progress import Advance

# Each rank reads what it wrote unless some rank would read more than this factor of the mean share plus these bytes;
# then the files are divided by size.
_MAX_IMBALANCE, _SLACK_BYTES = 1.25, 16 << 20
# Beyond this number, stray files are reported together.
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
    """Return all problems of a checkpoint, by path; [] if all bytes match.

    share: (rank, world size) of this reader: each reads some of the files, all read the manifest.
    only: read only these files. rank_of_file: see `split_files`.
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
        kind: ProblemKind = "unreadable" if is_read_error(error) else "manifest"
        return [_problem(step_dir, MANIFEST_FILE, kind, "the checkpoint's manifest", error.message)]
    problems = [*_identity(step_dir, manifest)]
    if rank == 0:
        problems += _find_extra_files(step_dir, manifest)
    entries = split_files(manifest.files, world_size, rank_of_file)[rank]
    selected = entries if only is None else [entry for entry in entries if entry.path in only]
    problems += _contents(step_dir, selected, threads, advance)
    return sorted(problems, key=lambda problem: problem.path)


def split_files(
    files: tuple[FileEntry, ...], world_size: int, rank_of_file: RankOfFile | None = None
) -> list[list[FileEntry]]:
    """Return the files of each of `world_size` ranks, about equal in bytes; the same at every rank.

    rank_of_file: (path, ranks) → the rank that wrote it, and is likely to load it: its node then fetches it once. Not
    used if the shares would be too unequal (_MAX_IMBALANCE).
    """
    if world_size == 1:
        return [list(files)]
    shares: list[list[FileEntry]] = [[] for _ in range(world_size)]
    if rank_of_file:
        for entry in files:
            shares[rank_of_file(entry.path, world_size)].append(entry)
        sizes = [sum(entry.bytes for entry in share) for share in shares]
        if max(sizes) <= _MAX_IMBALANCE * sum(sizes) / world_size + _SLACK_BYTES:
            return shares
        shares = [[] for _ in range(world_size)]
    # From the largest down, back and forth over the ranks: nearly even, without searching for the least loaded.
    for number, entry in enumerate(sorted(files, key=lambda entry: (-entry.bytes, entry.path))):
        turn, place = divmod(number, world_size)
        shares[place if turn % 2 == 0 else world_size - 1 - place].append(entry)
    return shares


def _identity(step_dir: Path, manifest: CheckpointManifest) -> Iterator[CheckpointProblem]:
    if manifest.step != (step := layout.step_of(step_dir)):
        expected = "a checkpoint's name" if step is None else f"step {step}, as it is named"
        yield _problem(step_dir, MANIFEST_FILE, "manifest", expected, f"step {manifest.step}")
    try:
        folder_owner = owner.read_owner(step_dir.parent)
    except ConfigError:
        return  # a problem of the folder, which `claim_folder` reports
    if folder_owner and not owner.is_owned_by(folder_owner, manifest):
        expected, got = (f"run {record.run}, state {record.state_fingerprint}" for record in (folder_owner, manifest))
        yield _problem(step_dir, MANIFEST_FILE, "owner", expected, got)


def _find_extra_files(step_dir: Path, manifest: CheckpointManifest) -> Iterator[CheckpointProblem]:
    listed, reported = {entry.path for entry in manifest.files} | {MANIFEST_FILE}, 0
    try:
        for path, entry in layout.walk_files(step_dir):
            if path not in listed:
                yield _problem(step_dir, path, "extra", "nothing", _file_type(entry.stat(follow_symlinks=False)))
                reported += 1
                if reported == _MAX_EXTRAS:
                    return
    except OSError as error:
        yield _problem(step_dir, "", "unreadable", "a folder", f"{error.filename}: {error.strerror}")


def _contents(step_dir: Path, files: list[FileEntry], threads: int, advance: Advance) -> Iterator[CheckpointProblem]:
    expected = {entry.path: entry for entry in files}
    sizes = {entry.path: entry.bytes for entry in files}
    for path, digest in hash_files(step_dir, sizes, threads=threads or default_threads(), advance=advance):
        if problem := _compare(step_dir, expected[path], digest):
            yield problem


def _compare(step_dir: Path, entry: FileEntry, digest: FileDigest) -> CheckpointProblem | None:
    if isinstance(digest.error, (FileNotFoundError, NotADirectoryError)):
        return _problem(step_dir, entry.path, "missing", "a file", "nothing")
    if digest.error and digest.error.errno in NO_FILE:
        return _problem(step_dir, entry.path, "missing", "a file", str(digest.error.strerror))
    if digest.error:
        return _problem(step_dir, entry.path, "unreadable", "a file", str(digest.error.strerror))
    if digest.bytes != entry.bytes:
        return _problem(step_dir, entry.path, "size", str(entry.bytes), str(digest.bytes))
    if digest.digest != entry.digest:
        return _problem(step_dir, entry.path, "digest", entry.digest, digest.digest)
    return None


def _problem(step_dir: Path, path: str, problem: ProblemKind, expected: str, got: str) -> CheckpointProblem:
    # A name on disk can be any bytes; a record is text.
    shown = os.fsencode(path).decode(errors="backslashreplace")
    return CheckpointProblem(checkpoint=step_dir.name, path=shown, problem=problem, expected=expected, got=got)


def _file_type(status: os.stat_result) -> str:
    kind = "a file" if stat.S_ISREG(status.st_mode) else "a link" if stat.S_ISLNK(status.st_mode) else "a special file"
    return f"{kind} of {status.st_size} bytes"
