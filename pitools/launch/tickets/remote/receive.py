"""Publish an uploaded dataset, at the remote site: `python -m pitools.launch.tickets.remote.receive HOME FINAL TIME`.

The manifest is on stdin. Every file of the batches in HOME is compared with it. Then all files are published as FINAL,
and HOME is removed. TIME is when the version was published first.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from pitools.core.errors import ConfigError, DataError, PitError
from pitools.core.fs import from_os_error, open_regular, sync_fs, write_atomic
from pitools.store import digest, manifest
from pitools.store.manifest import MANIFEST_FILE, FileEntry
from pitools.store.publish import publish_dir
from pitools.store.version_list import PUBLISHED_FILE, Publication

_READERS = 4


def receive_dataset(batch_root: Path, final: Path, raw: bytes, published_at: str) -> None:
    """Publish the dataset at `final`, unless it exists. Safe to repeat, and to run twice concurrently.

    raw: the manifest. published_at: when the version was published first, by which it is ordered here too. Raises
    DataError for a file that is missing or differs from the manifest, after removing its batch, or all batches, for a
    new upload. Raises NoSpace, ClusterError.
    """
    if manifest.version_of(raw) != final.name:
        message = f"manifest of version {manifest.version_of(raw)} (expected {final.name})"
        raise ConfigError(message, where=str(final))
    contents = manifest.decode_manifest(raw, str(final))
    if not (final / MANIFEST_FILE).is_file():
        building = batch_root / f".whole.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            building.mkdir(parents=True)
            _link_batches(batch_root, building, contents.files)
            write_atomic(building / MANIFEST_FILE, raw)
            record = Publication(published_at=published_at)
            write_atomic(building / PUBLISHED_FILE, msgspec.json.encode(record) + b"\n")
            sync_fs(building)
            publish_dir(building, final)
        except OSError as error:
            raise from_os_error(error, batch_root) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
    shutil.rmtree(batch_root, ignore_errors=True)


def _link_batches(batch_root: Path, building: Path, entries: tuple[FileEntry, ...]) -> None:
    """Link every file of the batches into one tree. Raises DataError."""
    batches = [path for path in batch_root.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    with ThreadPoolExecutor(_READERS) as pool:
        errors = [error for error in pool.map(lambda entry: _link_file(batches, building, entry), entries) if error]
    for damaged in {batch for batch, _ in errors}:
        # The batch of a missing file is not known here.
        for batch in [damaged] if damaged else batches:
            shutil.rmtree(batch, ignore_errors=True)
    if errors:
        raise DataError(errors[0][1])


def _link_file(batches: list[Path], building: Path, entry: FileEntry) -> tuple[Path | None, str] | None:
    """Link one file; return (batch, problem) for a damaged file, (None, problem) for a missing one."""
    batch = next((batch for batch in batches if os.path.lexists(batch / entry.path)), None)
    if batch is None:
        return None, f"{entry.path}: missing"
    try:
        size, text = _digest_file(batch / entry.path, entry)
    except OSError as error:
        size, text = 0, str(error.strerror)
    if (size, text) != (entry.bytes, entry.digest):
        return batch, f"{entry.path}: {size} bytes, {text} (expected {entry.bytes} bytes, {entry.digest})"
    to = building / entry.path
    to.parent.mkdir(parents=True, exist_ok=True)
    os.link(batch / entry.path, to, follow_symlinks=False)
    return None


def _digest_file(path: Path, entry: FileEntry) -> tuple[int, str]:
    hasher, total = digest.hasher_for(entry.digest), 0
    with open_regular(path) as file, mmap.mmap(-1, digest.BLOCK_BYTES) as buffer, memoryview(buffer) as view:
        while count := file.readinto(view):  # type: ignore[attr-defined]  # it is a buffered file
            hasher.update(view[:count])
            total += count
    return total, hasher.digest()


def main(argv: list[str]) -> int:
    """Publish the dataset of the command line; return the exit code."""
    batch_root, final, published_at = argv
    try:
        receive_dataset(Path(batch_root), Path(final), sys.stdin.buffer.read(), published_at)
    except PitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
