"""The working folder of an ingest, shared without a lock by all processes that run the same ingest.

<root>/.tmp/<name>.<key>/     key: a digest of the request, so that the same command resumes in the same folder
    store/                    the files of the version; renamed to <root>/<name>/<version> at the end
    part/                     files being written, under unique names
    journal/                  the journals of finished jobs

Concurrent ingests share the work by their journals. The bytes depend on the request alone, so a shard written twice
does no harm: both writers rename the same bytes to the same path. Only `open_work_dir` creates `store`: after its
rename a late writer cannot create a file, so a published version is never changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import ClusterError
from pitools.core.fs import fsync_dir, remove_tree
from pitools.store.manifest import FileEntry
from pitools.store.publish import BUILD_DIR, publish_dir
from pitools.store.version_list import PUBLISHED_FILE, Publication
from pitools.store.version_state import revalidate_nfs


class IngestWorkDir(msgspec.Struct, frozen=True, kw_only=True):
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
            result = write_file(part)
            os.rename(part, self.file_path(path))
            part.unlink(missing_ok=True)  # of two links to one file, rename(2) leaves both
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return result

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
        """Return whether all files exist with these sizes; False after another process recreated the folder."""
        try:
            return all((self.store / file.path).stat().st_size == file.bytes for file in files)
        except OSError:
            return False

    def publish(self, final: Path) -> bool:
        """Record the time, rename the store to `final`, and remove the rest; False where `final` existed. Raises
        OSError for a removed store, NoSpace or ClusterError."""
        self.put_file(PUBLISHED_FILE, _write_publication)
        is_first = not final.parent.exists()
        new = publish_dir(self.store, final)
        if is_first:  # users who may write to the root may add versions, whatever the umask
            with contextlib.suppress(OSError):
                final.parent.chmod(stat.S_IMODE(final.parent.parent.stat().st_mode))
        self.remove()
        return new

    def remove(self) -> None:
        """Remove the folder, and empty folders created for it."""
        # Rename first: an ingest of the same request that starts now then creates its own folder.
        moved_aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            os.rename(self.path, moved_aside)
        remove_tree(moved_aside)
        with contextlib.suppress(OSError):
            for folder in self.created_dirs:
                folder.rmdir()


def open_work_dir(root: Path, name: str, key: str) -> IngestWorkDir:
    """Create or open the working folder of an ingest. Raises OSError, ClusterError where others may write to it, or
    where this user may not publish."""
    home = root / BUILD_DIR
    path = home / f"{name}.{key}"
    if (root / name).is_dir() and not os.access(root / name, os.W_OK):
        hint = f"ask its owner for `chmod --reference {root} {root / name}`, or choose another --name"
        raise ClusterError("dataset folder: not writable by this user", where=str(root / name), hint=hint)
    created_dirs = tuple(folder for folder in (home, *home.parents) if not folder.exists()) or (home,)
    work_dir = IngestWorkDir(path=path, created_dirs=created_dirs)
    try:
        for _ in range(10):  # another process may remove the empty `.tmp` meanwhile
            try:
                _create(work_dir)
            except FileNotFoundError:
                continue
            return work_dir
    except OSError:
        _remove_empty(created_dirs)
        raise
    raise FileNotFoundError(errno.ENOENT, "removed repeatedly by another process", str(path))


def make_tmp_dir(root: Path) -> Path:
    """Create `<root>/.tmp` for all users who may write to the root; each can replace only their own folders in it.
    Raises OSError."""
    home = root / BUILD_DIR
    for folder in reversed([folder for folder in (root, *root.parents) if not folder.exists()]):
        folder.mkdir(exist_ok=True)
        fsync_dir(folder.parent)
    with contextlib.suppress(FileExistsError):
        home.mkdir()
        home.chmod(stat.S_IMODE(root.stat().st_mode) | stat.S_ISVTX)
    return home


def _create(work_dir: IngestWorkDir) -> None:
    make_tmp_dir(work_dir.path.parent.parent)
    # Journals are trusted and plans are unpickled on other nodes: no other user may write below, whatever the umask.
    work_dir.path.mkdir(mode=0o700, exist_ok=True)
    status = work_dir.path.stat()
    with tempfile.TemporaryFile(dir=work_dir.path) as probe:  # its owner is this user's, as the file system maps users
        is_own = os.fstat(probe.fileno()).st_uid == status.st_uid
    if status.st_mode & 0o022 or not is_own:
        problem = "working folder: writable by other users" if is_own else "working folder: belongs to another user"
        raise ClusterError(problem, where=str(work_dir.path), hint=f"its owner can: rm -r {work_dir.path}")
    for folder in (work_dir.journal, work_dir.path / "part", work_dir.store):
        folder.mkdir(exist_ok=True)


def _write_publication(part: Path) -> str:
    """Write the record of a publication at this moment of the file system's clock, which all its writers share."""
    with part.open("xb") as file:
        moment = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, UTC)
        file.write(msgspec.json.encode(Publication(published_at=timestamps.to_rfc3339(moment))) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return ""


def _remove_empty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
