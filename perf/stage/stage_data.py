"""Sets of random bytes to stage: made, changed, staged by our own command, and compared with their copy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perf.harness.workspace import execute
from pitools.store import digest, manifest
from pitools.store.manifest import FileEntry, Manifest

PIT_STAGE = Path(sys.executable).parent / "pit-stage"
MIB = 1 << 20


class FileSet(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset version that was made. folder: `<root>/pick/<version>`. bytes: of its files, without the manifest."""

    folder: Path
    version: str
    files: tuple[FileEntry, ...]

    @property
    def bytes(self) -> int:
        """Of all files, without the manifest."""
        return sum(entry.bytes for entry in self.files)


def make_file_set(root: Path, sizes: Sequence[int], *, seed: int = 1, in_folder: int = 500) -> FileSet:
    """A version of files of these sizes, `in_folder` to a folder, of bytes that no method can compress."""
    import numpy as np

    random = np.random.Generator(np.random.SFC64(seed))
    folder, entries = root / "pick" / "new", []
    for number, size in enumerate(sizes):
        name = f"images/c/{number // in_folder}/{number % in_folder}"
        if number % in_folder == 0:
            (folder / name).parent.mkdir(parents=True)
        entries.append(_write(folder, name, random.bytes(size)))
    return _finish(folder, entries)


def make_next_version(old: FileSet, every: int, *, seed: int = 2) -> FileSet:
    """The next version of a set: one file of `every` is new, the others are the same files, times and all."""
    import numpy as np

    random = np.random.Generator(np.random.SFC64(seed))
    folder, entries = old.folder.parent / "new", []
    for number, entry in enumerate(old.files):
        (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
        if number % every == every // 2:
            entries.append(_write(folder, entry.path, random.bytes(entry.bytes)))
            # A day later: rsync takes a file of the same size and the same second for the same file.
            now = (old.folder / entry.path).stat().st_mtime + 86_400
            os.utime(folder / entry.path, (now, now))
        else:
            os.link(old.folder / entry.path, folder / entry.path)
            entries.append(entry)
    return _finish(folder, entries, parent=old.version)


def _write(folder: Path, name: str, content: bytes) -> FileEntry:
    (folder / name).write_bytes(content)
    return FileEntry(path=name, bytes=len(content), digest=digest.digest_bytes(content))


def _finish(folder: Path, entries: list[FileEntry], parent: str = "") -> FileSet:
    files = tuple(sorted(entries, key=lambda entry: entry.path))
    data = manifest.encode_manifest(Manifest(name="pick", episodes=1, steps=1, arrays={}, files=files, parent=parent))
    (folder / manifest.MANIFEST_FILE).write_bytes(data)
    version = manifest.version_of(data)
    return FileSet(folder=folder.rename(folder.parent / version), version=version, files=files)


def stage_argv(made: FileSet, root: Path) -> list[str]:
    """What a user types to stage a set."""
    return [str(PIT_STAGE), "run", str(made.folder), "--to", str(root)]


def stage(made: FileSet, root: Path) -> dict[str, object]:
    """Stage a set with our command; its record."""
    return record_in(execute(*stage_argv(made, root)))


def record_in(out: str) -> dict[str, object]:
    """The `pit.stage-run/1` among the lines that our command wrote."""
    records = [msgspec.json.decode(line) for line in out.splitlines()]
    return next(record for record in records if record["schema"] == "pit.stage-run/1")


def require_same(made: FileSet, folder: Path, *, content: bool) -> None:
    """Exit unless every file of the set is in `folder`, whole: by size, or byte for byte."""
    for entry in made.files:
        path = folder / entry.path
        if path.stat().st_size != entry.bytes or (content and digest.digest_file(path)[1] != entry.digest):
            sys.exit(f"{path} is not what the set holds: that was no copy")
