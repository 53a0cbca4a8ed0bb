"""Where an ingest works until all is there, shared without a lock by whoever is asked for the same.

<root>/.tmp/<name>.<key>/     key: a digest of what is asked, so that the same command goes on where another stopped
    store/                    the version to be, file by file; renamed to <root>/<name>/<version> in the end
    part/                     files that are being written, under names that are nobody else's
    journal/                  what is done

What is written depends on what is asked alone. Two that work here share the work, by what each writes in the journal.
A shard that both take up does no harm: who puts a file in its place puts the same bytes there, and whoever finds all
of them there publishes. Nobody makes `store` but in `open`: once it was published, a late writer finds no place for its
file, and nothing can be added to what is published.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError
from pitools.core.fs import remove_tree
from pitools.store.manifest import FileEntry
from pitools.store.publish import STAGING_DIR, publish_dir
from pitools.store.version_state import revalidate_nfs


class StagingDir(msgspec.Struct, frozen=True, kw_only=True):
    """Working folder of an ingest. created_dirs: folders created for it, innermost first."""

    path: Path
    created_dirs: tuple[Path, ...]

    @property
    def store(self) -> Path:
        """Return the folder of the version being made."""
        return self.path / "store"

    @property
    def journal(self) -> Path:
        """Return the folder of the journals."""
        return self.path / "journal"

    def put_file(self, path: str, write_file: Callable[[Path], str]) -> str:
        """Call `write_file` with a temporary path, move the file to `path` in the store, and return its result. Raises
        OSError."""
        part = self.path / "part" / f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}"
        try:
            found = write_file(part)
            os.rename(part, self.file_path(path))
            part.unlink(missing_ok=True)  # of two links to one file, rename(2) leaves both
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return found

    def file_path(self, path: str) -> Path:
        """Return a file's path in the store; creates its folder, but never the store. Raises OSError."""
        final = self.store / path
        missing: list[Path] = []
        folder = final.parent
        while folder != self.store and not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
        return final

    def touch(self) -> None:
        """Update the folder's time, so that `gc` leaves it."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def is_gone(self) -> bool:
        """Return whether another process published or removed it."""
        revalidate_nfs(self.path)
        return not self.store.is_dir()

    def has_files(self, files: Iterable[FileEntry]) -> bool:
        """Return whether all files exist with these sizes. False where the folder was removed and created anew
        meanwhile."""
        try:
            return all((self.store / file.path).stat().st_size == file.bytes for file in files)
        except OSError:
            return False

    def publish(self, final: Path) -> bool:
        """Rename the store to `final` and remove the rest; False where `final` existed."""
        new = publish_dir(self.store, final)
        self.remove()
        return new

    def remove(self) -> None:
        """Remove the folder, and empty folders created for it."""
        # Under another name first: whoever begins the same ingest now gets a folder of his own.
        moved_aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            os.rename(self.path, moved_aside)
        remove_tree(moved_aside)
        with contextlib.suppress(OSError):
            for folder in self.created_dirs:
                folder.rmdir()


def open_staging_dir(root: Path, name: str, key: str) -> StagingDir:
    """Create or open the working folder of an ingest. Raises OSError, or ClusterError where others may write to it."""
    home = root / STAGING_DIR
    path = home / f"{name}.{key}"
    made = tuple(folder for folder in (home, *home.parents) if not folder.exists()) or (home,)
    place = StagingDir(path=path, created_dirs=made)
    try:
        for _ in range(10):  # somebody may remove the empty `.tmp` in between
            try:
                _create(place)
            except FileNotFoundError:
                continue
            return place
    except OSError:
        _remove_empty(made)
        raise
    raise FileNotFoundError(errno.ENOENT, "another process keeps removing it", str(path))


def _create(place: StagingDir) -> None:
    place.path.parent.mkdir(parents=True, exist_ok=True)
    # What lies here is believed, or even run on other nodes: others may not write here, whatever the umask.
    place.path.mkdir(mode=0o755, exist_ok=True)
    if place.path.stat().st_mode & 0o022:
        raise ClusterError("others may write to this unfinished ingest", where=str(place.path), hint="remove it")
    for folder in (place.journal, place.path / "part", place.store):
        folder.mkdir(exist_ok=True)


def _remove_empty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
