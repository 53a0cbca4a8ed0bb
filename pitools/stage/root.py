"""The folder on a node that holds its staged datasets: layout, safety, lock and space.

<root>/objects/<version>/         whole datasets; nothing else ever stands here
<root>/.tmp/<version>.<unique>/   unfinished, or moved aside to be deleted (`store/publish.py`)
<root>/.locks/<version>           flock(2), held by whoever changes that version; the kernel frees it on any death
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, NoSpace, TryLater
from pitools.core.files import os_error
from pitools.core.units import duration_text, size_text
from pitools.store.manifest import FileEntry
from pitools.store.publish import TEMPORARY

OBJECTS = "objects"
LOCKS = ".locks"
# Folders and the manifest also take room, and a disk filled to the last byte serves nobody.
MARGIN_BYTES = 8 << 20
_POLL_S = 0.05


def object_path(root: Path, version: str) -> Path:
    """Where a version stands once it is staged."""
    return root / OBJECTS / version


def require_safe(root: Path) -> None:
    """Refuse a root whose folders another user could have put there or could exchange. Raises ClusterError."""
    for folder in (root / OBJECTS, root / TEMPORARY, root / LOCKS):
        try:
            found = folder.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise os_error(error, folder) from error
        if not stat.S_ISDIR(found.st_mode):
            what = "a symbolic link or a file stands where a folder should be"
        elif found.st_uid not in (os.geteuid(), 0):
            what = f"the folder belongs to another user (uid {found.st_uid})"
        elif found.st_mode & stat.S_IWOTH:
            what = "every user may write to this folder"
        else:
            continue
        raise ClusterError(what, where=str(folder), hint="choose another --to, or remove that folder")


def prepare(root: Path) -> None:
    """Make the root's folders where they are missing, for this user alone: data keeps the privacy of its reader."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for folder in (root / OBJECTS, root / LOCKS):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise os_error(error, root) from error
    require_safe(root)


@contextmanager
def locked(root: Path, version: str, *, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a version's lock, calling `waiting` once when another process has it. Raises TryLater on time-out.

    What the block leaves in `.tmp` of this version, in whatever way it ends, is removed before the lock is freed.
    """
    descriptor = _open_lock(root / LOCKS / version)
    try:
        if not _try_lock(descriptor):
            waiting()
            deadline = time.monotonic() + timeout_s
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    what = f"another process has been staging this version for {duration_text(timeout_s)}"
                    raise TryLater(what, where=str(object_path(root, version)))
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            _remove_left(root, version)
    finally:
        os.close(descriptor)


def move_aside(path: Path, root: Path) -> None:
    """Take a damaged object out of readers' sight, to where it will be removed. Call with its lock held."""
    # Named as `store/publish.py` names its folders, so that it is swept like them after a kill.
    aside = f"{path.name}.old.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        os.rename(path, root / TEMPORARY / aside)
    except OSError as error:
        raise os_error(error, path) from error


def _remove_left(root: Path, version: str) -> None:
    home = root / TEMPORARY
    for path in home.glob(f"{version}.*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not empty while other versions are being staged
        home.rmdir()


def _open_lock(path: Path) -> int:
    # Lock files are never deleted: deleting one while another process waits on it would let two hold "the" lock.
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise os_error(error, path) from error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        what = f"this file system has no locks: {error.strerror}"
        raise ClusterError(what, hint="stage to a node's own disk") from error
    return True


def free_bytes(root: Path) -> int:
    """Bytes this user may still write there; of the nearest folder above that exists. Raises ClusterError."""
    try:
        while not root.is_dir() and root != root.parent:
            root = root.parent
        found = os.statvfs(root)
    except OSError as error:
        raise os_error(error, root) from error
    return found.f_bavail * found.f_frsize


def needed_bytes(files: Iterable[FileEntry]) -> int:
    """What files of these sizes take on a disk of 4 KiB blocks, and the margin."""
    return sum((entry.bytes + 4095) // 4096 * 4096 for entry in files) + MARGIN_BYTES


def require_space(root: Path, files: Iterable[FileEntry]) -> None:
    """Refuse before the first byte what cannot fit. Raises NoSpace."""
    needed, free = needed_bytes(files), free_bytes(root)
    if free < needed:
        what = f"{size_text(needed)} needed, {size_text(free)} free"
        raise NoSpace(what, where=str(root), hint="free space there, or choose another destination")
