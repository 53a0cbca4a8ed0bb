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
from pitools.store.publish import TEMPORARY, publish
from pitools.store.version_state import refresh


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A working folder. made: folders that were made for it, innermost first."""

    path: Path
    made: tuple[Path, ...]

    @property
    def store(self) -> Path:
        """The version to be."""
        return self.path / "store"

    @property
    def journal(self) -> Path:
        """The journals."""
        return self.path / "journal"

    def put(self, path: str, write: Callable[[Path], str]) -> str:
        """Have a file written, and put it at `path` in the store; returns what `write` returns. Raises OSError."""
        part = self.path / "part" / f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}"
        try:
            found = write(part)
            os.rename(part, self.at(path))
            part.unlink(missing_ok=True)  # of two links to one file, rename(2) leaves both
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return found

    def at(self, path: str) -> Path:
        """Where a file of the store lies; its folder is made, but never the store itself. Raises OSError."""
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
        """Let `gc` see that somebody is at work."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def is_gone(self) -> bool:
        """Whether somebody else published or removed it."""
        refresh(self.path)
        return not self.store.is_dir()

    def holds(self, files: Iterable[FileEntry]) -> bool:
        """Whether all files are there, of these sizes. They are not where another process removed the folder, and a
        third one made it anew, while this one was at work."""
        try:
            return all((self.store / file.path).stat().st_size == file.bytes for file in files)
        except OSError:
            return False

    def publish(self, final: Path) -> bool:
        """Rename the store to `final`, and remove the rest; False when it was there already."""
        new = publish(self.store, final)
        self.remove()
        return new

    def remove(self) -> None:
        """Remove all of it, and folders that were made for it and are empty."""
        # Under another name first: whoever begins the same ingest now gets a folder of his own.
        gone = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            os.rename(self.path, gone)
        remove_tree(gone)
        with contextlib.suppress(OSError):
            for folder in self.made:
                folder.rmdir()


def open_place(root: Path, name: str, key: str) -> Place:
    """The working folder of this ingest, made or found. Raises OSError, ClusterError where others may write to it."""
    home = root / TEMPORARY
    path = home / f"{name}.{key}"
    made = tuple(folder for folder in (home, *home.parents) if not folder.exists()) or (home,)
    place = Place(path=path, made=made)
    try:
        for _ in range(10):  # somebody may remove the empty `.tmp` in between
            try:
                _make(place)
            except FileNotFoundError:
                continue
            return place
    except OSError:
        _unmake(made)
        raise
    raise FileNotFoundError(errno.ENOENT, "another process keeps removing it", str(path))


def _make(place: Place) -> None:
    place.path.parent.mkdir(parents=True, exist_ok=True)
    # What lies here is believed, or even run on other nodes: others may not write here, whatever the umask.
    place.path.mkdir(mode=0o755, exist_ok=True)
    if place.path.stat().st_mode & 0o022:
        raise ClusterError("others may write to this unfinished ingest", where=str(place.path), hint="remove it")
    for folder in (place.journal, place.path / "part", place.store):
        folder.mkdir(exist_ok=True)


def _unmake(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
