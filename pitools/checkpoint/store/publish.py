"""Publish a checkpoint: every rank digests a share of the written files; rank 0 seals and renames the folder.

    all       unpublished_dir = layout.unpublished_path(folder, step, token)
    all       … the framework writes layout.create_payload_dir(unpublished_dir) …    barrier
    all       digest_share(unpublished_dir, rank, world_size)                        barrier
    rank 0    publish_checkpoint(folder, unpublished_dir, step, …)

Files are synced first, then the manifest, then the folders; the rename publishes it; the parent is synced last. A kill
at any point leaves the previous checkpoints, or the new one complete.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from pitools.checkpoint.store import layout, lookup, quarantine, unreadable
from pitools.checkpoint.store.hashing import FileDigest, default_threads, hash_files
from pitools.checkpoint.store.manifest import MANIFEST_FILE, CheckpointManifest, FileEntry, encode_manifest
from pitools.core import timestamps
from pitools.core.errors import ConfigError, DataError
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.record import Record, decode_json
from pitools.store import publish as renaming

_UNCOVERED = "call it after all ranks have written, with one folder that all nodes share"


class RankDigests(Record, frozen=True, kw_only=True, tag="pit.checkpoint-rank-digests/1"):
    """The files that one rank digested."""

    rank: int
    files: tuple[FileEntry, ...]


def rank_by_name(path: str, world_size: int) -> int:
    """Return a rank for a file, the same at every rank, for files whose writer is unknown."""
    return zlib.crc32(path.encode()) % world_size


def digest_share(
    unpublished_dir: Path,
    rank: int,
    world_size: int,
    *,
    rank_of_file: Callable[[str, int], int] = rank_by_name,
    threads: int = 0,
    known_digests: Mapping[str, FileDigest] = MappingProxyType({}),
) -> RankDigests:
    """Digest this rank's files of an unpublished folder, sync them, and write the digests for rank 0.

    rank_of_file: (path below `unpublished_dir`, ranks) → the rank that digests it; preferably its writer.
    known_digests: digests that this rank computed while writing durable files, which are not read again. Call when all
    ranks have written. Raises NoSpace, ClusterError, DataError.
    """
    try:
        sizes = layout.file_sizes(unpublished_dir, lambda path: rank_of_file(path, world_size) == rank)
        reused = {path: known_digests[path] for path in sizes.keys() & known_digests.keys()}
        entries = [_entry_of_written(unpublished_dir, path, sizes.pop(path), found) for path, found in reused.items()]
        for path, digest in hash_files(unpublished_dir, sizes, threads=threads or default_threads(), sync=True):
            if digest.error:
                raise digest.error
            if not digest.digest:
                raise DataError(
                    "still being written while it was digested", where=str(unpublished_dir / path), hint=_UNCOVERED
                )
            entries.append(FileEntry(path=path, bytes=digest.bytes, digest=digest.digest))
        share = RankDigests(rank=rank, files=tuple(entries))
        # Not durable: after power loss the whole folder is a leftover.
        write_atomic(unpublished_dir / layout.DIGESTS_DIR / f"{rank}.json", msgspec.json.encode(share), durable=False)
    except OSError as error:
        raise from_os_error(error, unpublished_dir) from error
    return share


def publish_checkpoint(
    folder: Path,
    unpublished_dir: Path,
    step: int,
    *,
    format: str,  # noqa: A002
    run: str,
    state_fingerprint: str,
    world_size: int,
    loader_state: Mapping[str, Any] | None = None,
    custom_metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Seal a folder, and publish it as the checkpoint after `step` steps; by rank 0, when all have digested.

    A damaged checkpoint of that step is moved aside. On failure the unpublished folder is removed. Raises ConfigError
    when that step has a complete checkpoint, DataError when the shares do not cover every file, NoSpace, ClusterError.
    """
    final = layout.step_path(folder, step)
    try:
        entries = _merge_digests(unpublished_dir, world_size)
        record = CheckpointManifest(
            step=step,
            t=timestamps.now_rfc3339(),
            format=format,
            run=run,
            state_fingerprint=state_fingerprint,
            world_size=world_size,
            files=entries,
            loader_state=dict(loader_state or {}),
            custom_metadata=dict(custom_metadata or {}),
        )
        data = encode_manifest(record)
        shutil.rmtree(unpublished_dir / layout.DIGESTS_DIR)
        write_atomic(unpublished_dir / MANIFEST_FILE, data)
        if os.path.lexists(final):
            if unreadable.is_marked_unreadable(final):
                quarantine.quarantine_checkpoint(
                    final, (), cause_text=f"not readable, and saved again: {unreadable.unreadable_reason(final)}"
                )
            elif lookup.read_if_complete(final) is None:
                quarantine.quarantine_checkpoint(final, (), cause_text="damaged, and saved again")
        unreadable.clear_mark(final)  # of an earlier checkpoint of this step that was removed by hand
        if not renaming.publish_dir(unpublished_dir, final):
            problem = f"step {step} is saved already: its checkpoint stays, and this state was not saved"
            hint = "restore before training (Checkpointer.restore), or give another checkpoint folder"
            raise ConfigError(problem, where=str(final), hint=hint)
    except BaseException as error:
        layout.remove_tree(unpublished_dir)
        if isinstance(error, OSError):
            raise from_os_error(error, unpublished_dir) from error
        raise
    lookup.update_latest_link(folder)
    return final


def _entry_of_written(unpublished_dir: Path, path: str, size: int, written: FileDigest) -> FileEntry:
    if size != written.bytes:
        problem = f"size differs from what was written (expected {written.bytes} bytes, got {size})"
        raise DataError(problem, where=str(unpublished_dir / path), hint=_UNCOVERED)
    return FileEntry(path=path, bytes=size, digest=written.digest)


def _merge_digests(unpublished_dir: Path, world_size: int) -> tuple[FileEntry, ...]:
    """Return the entries of all ranks, by path. Raises DataError unless they are exactly the files in the folder."""
    entries: dict[str, FileEntry] = {}
    for rank in range(world_size):
        path = unpublished_dir / layout.DIGESTS_DIR / f"{rank}.json"
        try:
            share = decode_json(path.read_bytes(), RankDigests)
        except FileNotFoundError as error:
            raise DataError(f"no digests of rank {rank}", where=str(path), hint=_UNCOVERED) from error
        except msgspec.DecodeError as error:
            raise DataError(f"digests of rank {rank}: cannot be read: {error}", where=str(path)) from error
        for entry in share.files:
            if entries.setdefault(entry.path, entry) != entry:
                raise DataError("digests of two ranks differ", where=str(unpublished_dir / entry.path), hint=_UNCOVERED)
    sizes = layout.file_sizes(unpublished_dir)
    for name in sorted(sizes.keys() | entries.keys()):
        if name not in entries:
            raise DataError("no rank digested this file", where=str(unpublished_dir / name), hint=_UNCOVERED)
        if sizes.get(name) != entries[name].bytes:
            problem = f"changed after its digest (expected {entries[name].bytes} bytes, got {sizes.get(name, 'none')})"
            raise DataError(problem, where=str(unpublished_dir / name), hint=_UNCOVERED)
    return tuple(entries[name] for name in sorted(entries))
