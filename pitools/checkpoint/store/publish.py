"""Making a checkpoint: every rank digests a share of what was written, rank 0 seals and shows it.

    rank 0    place = layout.begin(folder, step, token)
    all       … the framework writes layout.payload(place) …                barrier
    all       digest_share(place, rank, world_size)                         barrier
    rank 0    publish(folder, place, step, …)

Files are durable first, then the manifest, then the folders' names; the rename shows it; the parent follows. A kill at
any point leaves what stood before, or the new one whole.
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
from pitools.checkpoint.store.hashing import Hashed, default_threads, digests
from pitools.checkpoint.store.manifest import FILE_NAME, FileEntry, Manifest, encode
from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.core.fs import os_error, write_atomic
from pitools.core.record import Record, decode_json
from pitools.store import publish as renaming

_UNCOVERED = "was it written after the ranks had met, or do they see different folders?"


class Share(Record, frozen=True, kw_only=True, tag="pit.checkpoint-share/1"):
    """What one rank digested."""

    rank: int
    files: tuple[FileEntry, ...]


def by_name(path: str, world_size: int) -> int:
    """A rank for a file, the same at every rank, where nobody knows who wrote it."""
    return zlib.crc32(path.encode()) % world_size


def digest_share(
    place: Path,
    rank: int,
    world_size: int,
    *,
    writer: Callable[[str, int], int] = by_name,
    threads: int = 0,
    known: Mapping[str, Hashed] = MappingProxyType({}),
) -> Share:
    """Digest this rank's files of a building folder, make them durable, and leave word for rank 0.

    writer: (path below `place`, ranks) → the rank that digests it; best the one that wrote it, which has it in memory.
    known: what this rank digested while it wrote it, and made durable: it is not read again.
    Call when all have written. Raises NoSpace, ClusterError, DataError.
    """
    try:
        mine = layout.sizes(place, lambda path: writer(path, world_size) == rank)
        had = {path: known[path] for path in mine.keys() & known.keys()}
        entries = [_as_written(place, path, mine.pop(path), found) for path, found in had.items()]
        for path, found in digests(place, mine, threads=threads or default_threads(), sync=True):
            if found.error:
                raise found.error
            if not found.digest:
                raise DataError("still being written while it was digested", where=str(place / path), hint=_UNCOVERED)
            entries.append(FileEntry(path=path, bytes=found.bytes, digest=found.digest))
        share = Share(rank=rank, files=tuple(entries))
        # Not durable: after power loss the whole folder is a leftover.
        write_atomic(place / layout.SHARES / f"{rank}.json", msgspec.json.encode(share), durable=False)
    except OSError as error:
        raise os_error(error, place) from error
    return share


def publish(
    folder: Path,
    place: Path,
    step: int,
    *,
    format: str,  # noqa: A002
    run: str,
    model: str,
    world_size: int,
    loader: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    shares: int = 0,
    t: str = "",
) -> Path:
    """Seal a building folder and show it as the checkpoint after `step` steps; rank 0 alone, when all have digested.

    shares: how many there are, one of each rank unless said. t: when it was saved, now unless said.
    Where a whole checkpoint of that step stands already it stays, and this one goes; a damaged one is moved aside.
    On failure the building folder is removed. Raises DataError when the shares do not cover every file, NoSpace,
    ClusterError.
    """
    final = layout.step_path(folder, step)
    try:
        entries = _merge(place, shares or world_size)
        record = Manifest(
            step=step,
            t=t or timestamps.now(),
            format=format,
            run=run,
            model=model,
            world_size=world_size,
            files=entries,
            loader=dict(loader or {}),
            extra=dict(extra or {}),
        )
        data = encode(record)
        shutil.rmtree(place / layout.SHARES)
        write_atomic(place / FILE_NAME, data)
        if os.path.lexists(final):
            if unreadable.is_marked(final):
                quarantine.put(final, (), why=f"not readable, and saved again: {unreadable.reason(final)}")
            elif lookup.whole_at(final) is None:
                quarantine.put(final, (), why="damaged, and saved again")
        unreadable.clear(final)  # of one that somebody removed
        if not renaming.publish(place, final):
            layout.discard(place)
    except BaseException as error:
        layout.discard(place)
        if isinstance(error, OSError):
            raise os_error(error, place) from error
        raise
    lookup.point(folder)
    return final


def _as_written(place: Path, path: str, size: int, written: Hashed) -> FileEntry:
    if size != written.bytes:
        what = f"it has {size} bytes, and {written.bytes} were written"
        raise DataError(what, where=str(place / path), hint=_UNCOVERED)
    return FileEntry(path=path, bytes=size, digest=written.digest)


def _merge(place: Path, shares: int) -> tuple[FileEntry, ...]:
    """The entries of all shares, by path. Raises DataError unless they are just the files that are there."""
    told: dict[str, FileEntry] = {}
    for rank in range(shares):
        path = place / layout.SHARES / f"{rank}.json"
        try:
            share = decode_json(path.read_bytes(), Share)
        except FileNotFoundError as error:
            raise DataError(f"rank {rank} left no digests", where=str(path), hint=_UNCOVERED) from error
        except msgspec.DecodeError as error:
            raise DataError(f"rank {rank}'s digests cannot be read: {error}", where=str(path)) from error
        for entry in share.files:
            if told.setdefault(entry.path, entry) != entry:
                raise DataError("two ranks found different bytes", where=str(place / entry.path), hint=_UNCOVERED)
    found = layout.sizes(place)
    for name in sorted(found.keys() | told.keys()):
        if name not in told:
            raise DataError("no rank digested this file", where=str(place / name), hint=_UNCOVERED)
        if found.get(name) != told[name].bytes:
            what = f"it had {told[name].bytes} bytes when it was digested, and now {found.get(name, 'none')}"
            raise DataError(what, where=str(place / name), hint=_UNCOVERED)
    return tuple(told[name] for name in sorted(told))
