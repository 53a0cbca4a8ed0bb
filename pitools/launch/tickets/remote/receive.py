"""The far side's part of a dataset's journey: `python -m pitools.launch.tickets.remote.receive HOME FINAL`.

The manifest is on stdin. Every file of the batches in HOME is compared with it; then all of them together become FINAL,
and HOME goes.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pitools.core.errors import ConfigError, DataError, PitError
from pitools.core.fs import from_os_error, open_regular, sync_fs, write_atomic
from pitools.store import digest, manifest
from pitools.store.manifest import FILE_NAME, FileEntry
from pitools.store.publish import publish_dir

_READERS = 4


def receive_dataset(home: Path, final: Path, raw: bytes) -> None:
    """Let the dataset appear at `final`; one that is there already stays. Safe to repeat, and to do twice at once.

    Raises DataError for a file that is missing or not what the manifest says; its batch, or all of them, is then
    removed, so that it can be sent again. Raises NoSpace, ClusterError.
    """
    if manifest.version_of(raw) != final.name:
        raise ConfigError(f"the manifest is that of version {manifest.version_of(raw)}", where=str(final))
    held = manifest.decode_manifest(raw, str(final))
    if not (final / FILE_NAME).is_file():
        building = home / f".whole.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            building.mkdir(parents=True)
            _link_batches(home, building, held.files)
            write_atomic(building / FILE_NAME, raw)
            sync_fs(building)
            publish_dir(building, final)
        except OSError as error:
            raise from_os_error(error, home) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)


def _link_batches(home: Path, building: Path, entries: tuple[FileEntry, ...]) -> None:
    """Link every file of the batches into one tree. Raises DataError."""
    batches = [path for path in home.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    with ThreadPoolExecutor(_READERS) as pool:
        wrong = [found for found in pool.map(lambda entry: _link_file(batches, building, entry), entries) if found]
    for again in {batch for batch, _ in wrong}:
        # Which batch should have had what has not come is not known here.
        for batch in [again] if again else batches:
            shutil.rmtree(batch, ignore_errors=True)
    if wrong:
        raise DataError(wrong[0][1])


def _link_file(batches: list[Path], building: Path, entry: FileEntry) -> tuple[Path | None, str] | None:
    """Link one file; else the batch that has a wrong one, and what is wrong."""
    batch = next((batch for batch in batches if os.path.lexists(batch / entry.path)), None)
    if batch is None:
        return None, f"{entry.path} has not come"
    try:
        size, text = _digest_file(batch / entry.path, entry)
    except OSError as error:
        size, text = 0, str(error.strerror)
    if (size, text) != (entry.bytes, entry.digest):
        return batch, f"{entry.path} is not what the manifest says: {size} bytes, {text}"
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
    """Do it; the exit code, and why on stderr."""
    home, final = map(Path, argv)
    try:
        receive_dataset(home, final, sys.stdin.buffer.read())
    except PitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
