"""The folder on a node that holds its staged datasets: layout, safety, and the lock of each version.

<root>/objects/<version>/         whole sets, published by rename, never changed in place
<root>/.tmp/<version>.partial/    being copied, or left by an interrupted copy to be resumed; <version>.journal beside
<root>/.tmp/<version>.old.…/      moved aside; who gets its flock may remove it, once the version's lease is free
<root>/.locks/<version>           flock LOCK_EX of whoever changes that version, and one line that says who and how far
<root>/.leases/<version>          flock LOCK_SH of whoever reads it; its mtime is the last use (`lease.py`)
<root>/.records/<version>.json    where it came from, and whether it is pinned (`records.py`)
<root>/.quarantine/…              damaged sets that no source can replace; nothing here is used or removed by itself
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, TryLater
from pitools.core.fs import exchange, os_error, remove_tree
from pitools.core.lock import GLANCE_S, announced, flock, is_shared, open_kept, read_holder, who
from pitools.core.lock import Holder as Holder
from pitools.core.lock import Tell as Tell
from pitools.core.units import duration_text
from pitools.stage.sources.local import OBJECTS as OBJECTS
from pitools.store.manifest import FileEntry
from pitools.store.publish import TEMPORARY

LOCKS, LEASES, RECORDS, QUARANTINE = ".locks", ".leases", ".records", ".quarantine"
# What other users may see of a root that is shared. Unfinished and damaged data is nobody else's business, and whoever
# may open a lock file may also lock it, and keep the root's owner from staging for as long as they like.
_SHARED = (OBJECTS, LEASES, RECORDS)
_PRIVATE = (TEMPORARY, QUARANTINE, LOCKS)
# Folders and the manifest also take room, and a disk filled to the last byte serves nobody.
MARGIN_BYTES = 8 << 20
_ELSEWHERE = "choose another --to, or remove that folder"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def object_path(root: Path, version: str) -> Path:
    """Where a version stands once it is staged."""
    return root / OBJECTS / version


def partial_path(root: Path, version: str) -> Path:
    """Where a version is being copied to."""
    return root / TEMPORARY / f"{version}.partial"


def journal_path(root: Path, version: str) -> Path:
    """What says which part of `partial_path` is done."""
    return root / TEMPORARY / f"{version}.journal"


def require_safe(root: Path, *, reading: bool = False) -> None:
    """Refuse a root whose folders another user could have put there or could exchange. Raises ClusterError.

    reading: nothing will be written, so one other user is believed: whoever owns the root and shares it.
    """
    trusted = {os.geteuid(), 0}
    try:
        if root.is_symlink() and root.lstat().st_uid not in trusted:
            raise ClusterError("a symbolic link of another user", where=str(root), hint=_ELSEWHERE)
        if reading and root.exists():
            trusted.add(root.stat().st_uid)
        for folder in (root, *(root / name for name in _SHARED + _PRIVATE)):
            with contextlib.suppress(FileNotFoundError):
                found = folder.stat() if folder is root else folder.lstat()
                if what := _danger(found, trusted, sticky=folder is root):
                    raise ClusterError(what, where=str(folder), hint=_ELSEWHERE)
    except OSError as error:
        raise os_error(error, root) from error


def _danger(found: os.stat_result, trusted: set[int], *, sticky: bool) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return "a symbolic link or a file stands where a folder should be"
    if found.st_uid not in trusted:
        return f"the folder belongs to another user (uid {found.st_uid})"
    # In a sticky folder, such as /tmp, others may add names but cannot take ours away.
    if found.st_mode & stat.S_IWOTH and not (sticky and found.st_mode & stat.S_ISVTX):
        return "every user may write to this folder"
    return ""


def prepare(root: Path, *, shared: bool = False) -> None:
    """Make the root's folders where they are missing, for this user alone: data keeps the privacy of its reader.

    shared: open them, also those that stand, for all users to read and to lease; without it a root stays as it is.
    Raises ClusterError.
    """
    require_safe(root)  # before anything is made there
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        _make_folder(root, shared=shared, change=shared)
        open_to_all = shared or is_shared(root / OBJECTS)
        for name in _SHARED:
            _make_folder(root / name, shared=open_to_all, change=shared)
        for name in _PRIVATE:
            _make_folder(root / name, shared=False, change=shared)
    except OSError as error:
        raise os_error(error, root) from error
    require_safe(root)  # and what others made in between


def _make_folder(folder: Path, *, shared: bool, change: bool) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not change:
            return
    if change or shared:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                os.fchmod(descriptor, 0o755 if shared else 0o700)
        finally:
            os.close(descriptor)


@contextmanager
def locked(
    root: Path, version: str, *, timeout_s: float, waiting: Callable[[Holder], None] = lambda _: None
) -> Iterator[Tell]:
    """Hold a version's lock to stage or repair it; yields `tell(done_bytes, bytes)`, for waiters to see.

    While another process has the lock, `waiting` is called with who that is, once a second. What was moved aside is
    removed at the end; an unfinished copy stays, to be resumed. Raises TryLater on time-out, ClusterError.
    """
    try:
        with _lock_file(root, version) as descriptor:
            if not flock(
                descriptor, fcntl.LOCK_EX, timeout_s=timeout_s, meanwhile=lambda: waiting(read_holder(descriptor))
            ):
                what = f"another process has been staging this version for {duration_text(timeout_s)}"
                hint = f"it is {who(read_holder(descriptor))}: run this again later"
                raise TryLater(what, where=str(object_path(root, version)), hint=hint)
            with announced(descriptor) as tell:
                yield tell
                with contextlib.suppress(OSError):
                    touch_lease(root, version)
    finally:
        sweep(root, version)


@contextmanager
def try_locked(root: Path, version: str) -> Iterator[bool]:
    """Hold a version's lock if nobody else has it; yields whether it was had. Raises ClusterError."""
    with _lock_file(root, version) as descriptor:
        if flock(descriptor, fcntl.LOCK_EX, timeout_s=GLANCE_S):
            with announced(descriptor):
                yield True
        else:
            yield False


@contextmanager
def _lock_file(root: Path, version: str) -> Iterator[int]:
    path = root / LOCKS / version
    try:
        # The lease file too, so that also users who can only read have one to lock.
        if not (root / LEASES / version).exists():
            touch_lease(root, version)
        descriptor = open_kept(path)
    except OSError as error:
        raise os_error(error, path) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def touch_lease(root: Path, version: str) -> None:
    """Say that a version was used now. Raises OSError."""
    descriptor = open_kept(root / LEASES / version)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def holder(root: Path, version: str) -> Holder | None:
    """Who holds a version's lock; None when nobody does, as far as this user may see; makes no file."""
    try:
        descriptor = os.open(root / LOCKS / version, _READ)
    except OSError:
        return None
    try:
        return None if flock(descriptor, fcntl.LOCK_SH, timeout_s=0) else read_holder(descriptor)
    finally:
        os.close(descriptor)


def is_leased(root: Path, version: str, *, timeout_s: float = 0) -> bool:
    """Whether a process holds a lease of a version, as far as this user may see; makes no file."""
    try:
        descriptor = os.open(root / LEASES / version, _READ)
    except OSError:
        return False
    try:
        return not flock(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s)
    finally:
        os.close(descriptor)


def move_aside(path: Path, root: Path) -> Path:
    """Take something out of readers' sight, to where `sweep` removes it. Call with its version's lock held."""
    aside = _aside(path, root)
    try:
        os.rename(path, aside)
    except OSError as error:
        raise os_error(error, path) from error
    return aside


def replace_set(new: Path, final: Path, root: Path) -> bool:
    """Exchange what stands at `final` for a new folder in one step, and move it aside; False where the file system
    cannot exchange. Call with the version's lock held. Raises OSError.
    """
    aside = _aside(final, root)
    descriptor = os.open(new, _READ | os.O_DIRECTORY)
    try:
        # The new folder takes the other's future name first, so that no kill leaves a set that is in use to be taken
        # for an unfinished copy. Its flock keeps it from `sweep` meanwhile.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(new, aside)
        done = False
        try:
            done = exchange(aside, final)
        finally:
            if not done:
                os.rename(aside, new)
    finally:
        os.close(descriptor)
    return done


def _aside(path: Path, root: Path) -> Path:
    # Named as `store/publish.py` names its folders.
    name = f"{path.name}.old.{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}"
    return root / TEMPORARY / name


def sweep(root: Path, version: str = "") -> None:
    """Remove what was moved aside, of one version or of all, but for what another process is removing already, and
    for sets that were replaced while their version was leased: whoever reads them keeps them until the lease ends.
    """
    for path in (root / TEMPORARY).glob(f"{version}*.old.*"):
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(path.lstat().st_mode):
                path.unlink()
                continue
            descriptor = os.open(path, _READ | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_leased(root, path.name.partition(".old.")[0]):
                    remove_tree(path)
            finally:
                os.close(descriptor)
    # Of a copy that was killed when it had just been published. One that is being made has its folder first.
    for journal in (root / TEMPORARY).glob(f"{version}*.journal"):
        if not journal.with_suffix(".partial").exists():
            with contextlib.suppress(OSError):
                journal.unlink()


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
