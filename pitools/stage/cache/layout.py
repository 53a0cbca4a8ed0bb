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
from pitools.core.fs import exchange_names, from_os_error, remove_tree
from pitools.core.locks import (
    PROBE_S,
    describe_owner,
    is_shared,
    lock_within,
    open_readable_lock_file,
    publish_owner,
    read_lock_owner,
)
from pitools.core.locks import LockOwner as LockOwner
from pitools.core.locks import ReportProgress as ReportProgress
from pitools.core.units import format_duration
from pitools.stage.sources.local import OBJECTS as OBJECTS
from pitools.store.manifest import FileEntry
from pitools.store.publish import STAGING_DIR

LOCKS, LEASES, RECORDS, QUARANTINE = ".locks", ".leases", ".records", ".quarantine"
# What other users may see of a root that is shared. Unfinished and damaged data is nobody else's business, and whoever
# may open a lock file may also lock it, and keep the root's owner from staging for as long as they like.
_SHARED_DIRS = (OBJECTS, LEASES, RECORDS)
_PRIVATE_DIRS = (STAGING_DIR, QUARANTINE, LOCKS)
# Folders and the manifest also take room, and a disk filled to the last byte serves nobody.
MARGIN_BYTES = 8 << 20
_ELSEWHERE_HINT = "choose another --to, or remove that folder"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def set_path(root: Path, version: str) -> Path:
    """Return the folder of a staged version."""
    return root / OBJECTS / version


def partial_path(root: Path, version: str) -> Path:
    """Return the folder of a version's unfinished copy."""
    return root / STAGING_DIR / f"{version}.partial"


def journal_path(root: Path, version: str) -> Path:
    """Return the journal of a version's unfinished copy."""
    return root / STAGING_DIR / f"{version}.journal"


def require_safe(root: Path, *, reading: bool = False) -> None:
    """Refuse a root whose folders another user could have put there or could exchange. Raises ClusterError.

    reading: nothing will be written, so one other user is believed: whoever owns the root and shares it.
    """
    trusted = {os.geteuid(), 0}
    try:
        if root.is_symlink() and root.lstat().st_uid not in trusted:
            raise ClusterError("a symbolic link of another user", where=str(root), hint=_ELSEWHERE_HINT)
        if reading and root.exists():
            trusted.add(root.stat().st_uid)
        for folder in (root, *(root / name for name in _SHARED_DIRS + _PRIVATE_DIRS)):
            with contextlib.suppress(FileNotFoundError):
                status = folder.stat() if folder is root else folder.lstat()
                if reason := _unsafe_reason(status, trusted, sticky=folder is root):
                    raise ClusterError(reason, where=str(folder), hint=_ELSEWHERE_HINT)
    except OSError as error:
        raise from_os_error(error, root) from error


def _unsafe_reason(status: os.stat_result, trusted: set[int], *, sticky: bool) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return "a symbolic link or a file stands where a folder should be"
    if status.st_uid not in trusted:
        return f"the folder belongs to another user (uid {status.st_uid})"
    # In a sticky folder, such as /tmp, others may add names but cannot take ours away.
    if status.st_mode & stat.S_IWOTH and not (sticky and status.st_mode & stat.S_ISVTX):
        return "every user may write to this folder"
    return ""


def create_root(root: Path, *, shared: bool = False) -> None:
    """Make the root's folders where they are missing, for this user alone: data keeps the privacy of its reader.

    shared: open them, also those that stand, for all users to read and to lease; without it a root stays as it is.
    Raises ClusterError.
    """
    require_safe(root)  # before anything is made there
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        _make_folder(root, shared=shared, change=shared)
        open_to_all = shared or is_shared(root / OBJECTS)
        for name in _SHARED_DIRS:
            _make_folder(root / name, shared=open_to_all, change=shared)
        for name in _PRIVATE_DIRS:
            _make_folder(root / name, shared=False, change=shared)
    except OSError as error:
        raise from_os_error(error, root) from error
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
def version_lock(
    root: Path, version: str, *, timeout_s: float, on_wait: Callable[[LockOwner], None] = lambda _: None
) -> Iterator[ReportProgress]:
    """Hold a version's lock to stage or repair it; yields `report_progress(done_bytes, bytes)`, read by waiters.

    While another process has the lock, `on_wait` is called with its owner once a second. What was moved aside is
    removed at the end; an unfinished copy stays, to be resumed. Raises TryLater on time-out, ClusterError.
    """
    try:
        with _lock_file(root, version) as descriptor:
            if not lock_within(
                descriptor, fcntl.LOCK_EX, timeout_s=timeout_s, on_wait=lambda: on_wait(read_lock_owner(descriptor))
            ):
                message = f"another process has been staging this version for {format_duration(timeout_s)}"
                hint = f"it is {describe_owner(read_lock_owner(descriptor))}: run this again later"
                raise TryLater(message, where=str(set_path(root, version)), hint=hint)
            with publish_owner(descriptor) as report_progress:
                yield report_progress
                with contextlib.suppress(OSError):
                    touch_lease(root, version)
    finally:
        purge_trash(root, version)


@contextmanager
def try_version_lock(root: Path, version: str) -> Iterator[bool]:
    """Hold a version's lock if nobody else has it; yields whether it was had. Raises ClusterError."""
    with _lock_file(root, version) as descriptor:
        if lock_within(descriptor, fcntl.LOCK_EX, timeout_s=PROBE_S):
            with publish_owner(descriptor):
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
        descriptor = open_readable_lock_file(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def touch_lease(root: Path, version: str) -> None:
    """Set a version's last use to now. Raises OSError."""
    descriptor = open_readable_lock_file(root / LEASES / version)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def lock_owner(root: Path, version: str) -> LockOwner | None:
    """Return the owner of a version's lock; None when it is free or not readable. Creates no file."""
    try:
        descriptor = os.open(root / LOCKS / version, _READ)
    except OSError:
        return None
    try:
        return None if lock_within(descriptor, fcntl.LOCK_SH, timeout_s=0) else read_lock_owner(descriptor)
    finally:
        os.close(descriptor)


def is_leased(root: Path, version: str, *, timeout_s: float = 0) -> bool:
    """Whether a process holds a lease of a version, as far as this user may see; makes no file."""
    try:
        descriptor = os.open(root / LEASES / version, _READ)
    except OSError:
        return False
    try:
        return not lock_within(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s)
    finally:
        os.close(descriptor)


def trash(path: Path, root: Path) -> Path:
    """Move a path aside, where `purge_trash` removes it; return its new path. Call with its version's lock held."""
    aside = _trash_path(path, root)
    try:
        os.rename(path, aside)
    except OSError as error:
        raise from_os_error(error, path) from error
    return aside


def replace_set(new: Path, final: Path, root: Path) -> bool:
    """Exchange what stands at `final` for a new folder in one step, and move it aside; False where the file system
    cannot exchange. Call with the version's lock held. Raises OSError.
    """
    aside = _trash_path(final, root)
    descriptor = os.open(new, _READ | os.O_DIRECTORY)
    try:
        # The new folder takes the other's future name first, so that no kill leaves a set that is in use to be taken
        # for an unfinished copy. Its flock keeps it from `purge_trash` meanwhile.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(new, aside)
        done = False
        try:
            done = exchange_names(aside, final)
        finally:
            if not done:
                os.rename(aside, new)
    finally:
        os.close(descriptor)
    return done


def _trash_path(path: Path, root: Path) -> Path:
    # Named as `store/publish.py` names its folders.
    name = f"{path.name}.old.{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}"
    return root / STAGING_DIR / name


def purge_trash(root: Path, version: str = "") -> None:
    """Remove what was moved aside, of one version or of all, but for what another process is removing already, and
    for sets that were replaced while their version was leased: whoever reads them keeps them until the lease ends.
    """
    for path in (root / STAGING_DIR).glob(f"{version}*.old.*"):
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
    for journal in (root / STAGING_DIR).glob(f"{version}*.journal"):
        if not journal.with_suffix(".partial").exists():
            with contextlib.suppress(OSError):
                journal.unlink()


def free_bytes(root: Path) -> int:
    """Return the bytes this user may write to the disk of `root`, or of its nearest parent. Raises ClusterError."""
    try:
        while not root.is_dir() and root != root.parent:
            root = root.parent
        status = os.statvfs(root)
    except OSError as error:
        raise from_os_error(error, root) from error
    return status.f_bavail * status.f_frsize


def needed_bytes(files: Iterable[FileEntry]) -> int:
    """Return the bytes that files take on a disk of 4 KiB blocks, plus the margin."""
    return sum((entry.bytes + 4095) // 4096 * 4096 for entry in files) + MARGIN_BYTES
