"""The staging root on a node: layout, safety checks, and the lock of each version.

<root>/objects/<version>/         complete sets, published by rename, never changed in place
<root>/.tmp/<version>.partial/    being copied, or left by an interrupted copy to be resumed; <version>.journal beside;
                                  <version>.<node>.partial on a network file system, whose flock may be each node's own
<root>/.tmp/<version>.old.…/      moved aside; removed by any process that gets its flock once the lease is free
<root>/.locks/<version>           flock LOCK_EX of the process that changes that version; its text is the owner and
                                  progress
<root>/.leases/<version>          flock LOCK_SH of each reader; its mtime is the last use; a job's prolog locks the byte
                                  at the job's id (`lease.py`)
<root>/.records/<version>.json    the source, and whether the set is pinned (`records.py`)
<root>/.quarantine/…              damaged sets without a source; never used or removed automatically
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, TryLater
from pitools.core.fs import exchange_names, from_os_error, fs_type, make_parents, remove_tree
from pitools.core.locks import (
    PROBE_S,
    describe_owner,
    has_byte_lock,
    is_world_readable,
    lock_within,
    open_readable_lock_file,
    publish_owner,
    read_lock_owner,
)
from pitools.core.locks import LockOwner as LockOwner
from pitools.core.locks import ReportProgress as ReportProgress
from pitools.core.trust import find_untrusted, other_writers, trusted_users, user_name
from pitools.core.units import format_duration
from pitools.stage.sources.local import OBJECTS as OBJECTS
from pitools.store.manifest import FileEntry
from pitools.store.publish import BUILD_DIR

LOCKS, LEASES, RECORDS, QUARANTINE = ".locks", ".leases", ".records", ".quarantine"
# The folders of a shared root that other users may read. The others stay private: they hold partial and damaged data,
# and lock files, which any user who can open them could lock to block the owner.
_SHARED_DIRS = (OBJECTS, LEASES, RECORDS)
_PRIVATE_DIRS = (BUILD_DIR, QUARANTINE, LOCKS)
# File systems of local disks and memory; others, such as nfs and lustre, are reached over a network.
LOCAL_FILE_SYSTEMS = {"tmpfs", "ext4", "xfs", "btrfs", "overlay"}
# For folders and the manifest, and to keep the disk from filling up completely.
MARGIN_BYTES = 8 << 20
_ELSEWHERE_HINT = "choose another --to"
_OWNER_HINT = f"only that user or root can change this cache; or {_ELSEWHERE_HINT}"
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def staged_path(root: Path, version: str) -> Path:
    """Return the folder of a staged version."""
    return root / OBJECTS / version


def staged_identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the set at `path` is replaced; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def partial_path(root: Path, version: str) -> Path:
    """Return the folder of this node's partial copy of a version."""
    # Two nodes that each hold the version's lock must not write to one folder.
    node = "" if fs_type(root) in LOCAL_FILE_SYSTEMS else f".{os.uname().nodename}"
    return root / BUILD_DIR / f"{version}{node}.partial"


def journal_path(root: Path, version: str) -> Path:
    """Return the journal of this node's partial copy of a version."""
    return partial_path(root, version).with_suffix(".journal")


def require_safe(root: Path, *, reading: bool = False) -> None:
    """Refuse a root that another user owns or can write to, or whose folders are such. Raises ClusterError.

    Also one that another user could replace: where everybody, or a group that is not this user's, may write to a folder
    above it. With a sticky bit, as /tmp has, everybody may. Folders above may be another user's, but not in /tmp.

    reading: nothing will be written, so the owner of a shared root is trusted too.
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
                if reason := _unsafe_reason(status, trusted):
                    hint = _OWNER_HINT if status.st_uid not in trusted else f"{_ELSEWHERE_HINT}, or remove that"
                    raise ClusterError(reason, where=str(folder), hint=hint)
                # In a sticky folder, such as /tmp, other users may add names but cannot replace ours.
                is_sticky = folder is root and status.st_mode & stat.S_ISVTX
                if not is_sticky and (writer := other_writers(status, allow_group=False)):
                    message = f"the folder can be written by {writer} (expected its owner alone)"
                    raise ClusterError(message, where=str(folder), hint=f"chmod go-w {folder}, or {_ELSEWHERE_HINT}")
        _require_safe_above(root.absolute(), trusted)
    except OSError as error:
        raise from_os_error(error, root) from error


def _require_safe_above(root: Path, trusted: set[int]) -> None:
    for path in (root, *root.parents):
        with contextlib.suppress(FileNotFoundError):  # the nearest that exists
            untrusted = find_untrusted(
                path, trusted | trusted_users(), group_above=True, owners_above=True, inside=True
            )
            break
    if not untrusted:
        return
    above, status, writer = untrusted
    reason = (
        f"can be written by {writer}, who could replace" if writer else f"user {user_name(status.st_uid)} could replace"
    )
    fix = f"chmod {'+t' if status.st_mode & stat.S_IWOTH else 'g-w'} {above}, or " if writer else ""
    raise ClusterError(f"{reason} the root {root}", where=str(above), hint=f"{fix}choose another --to")


def _unsafe_reason(status: os.stat_result, trusted: set[int]) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return "a symbolic link or a file (expected a folder)"
    if status.st_uid not in trusted:
        return f"the folder is owned by another user (uid {status.st_uid})"
    return ""


def create_root(root: Path, *, shared: bool = False) -> None:
    """Create the root's missing folders, for this user alone: data keeps the privacy of its source.

    shared: make them, also existing ones, readable and leasable for all users; otherwise modes stay. Raises
    ClusterError.
    """
    require_safe(root)  # before creating anything
    try:
        make_parents(root, 0o755)  # whatever the umask: nobody else may write there
        _make_folder(root, shared=shared, change_mode=shared)
        is_open = shared or is_world_readable(root / OBJECTS)
        for name in _SHARED_DIRS:
            _make_folder(root / name, shared=is_open, change_mode=shared)
        for name in _PRIVATE_DIRS:
            _make_folder(root / name, shared=False, change_mode=shared)
    except OSError as error:
        raise from_os_error(error, root) from error
    require_safe(root)  # again: another user may have created a folder meanwhile


def _make_folder(folder: Path, *, shared: bool, change_mode: bool) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not change_mode:
            return
    if change_mode or shared:
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
    """Hold a version's lock to stage or repair it; yield `report_progress(done_bytes, bytes)`, which waiters read.

    While another process holds the lock, `on_wait` is called with its owner once a second. At the end trash is removed;
    a partial copy is kept, to be resumed. Raises TryLater on time-out, ClusterError.
    """
    try:
        with _lock_file(root, version) as descriptor:
            if not lock_within(
                descriptor, fcntl.LOCK_EX, timeout_s=timeout_s, on_wait=lambda: on_wait(read_lock_owner(descriptor))
            ):
                message = f"another process has been staging this version for {format_duration(timeout_s)}"
                hint = f"the owner is {describe_owner(read_lock_owner(descriptor))}: run this again later"
                raise TryLater(message, where=str(staged_path(root, version)), hint=hint)
            with publish_owner(descriptor) as report_progress:
                yield report_progress
                with contextlib.suppress(OSError):
                    touch_lease(root, version)
    finally:
        purge_trash(root, version)


@contextmanager
def try_version_lock(root: Path, version: str) -> Iterator[bool]:
    """Hold a version's lock if it is free; yield whether it was. Raises ClusterError."""
    with _lock_file(root, version) as descriptor:
        if lock_within(descriptor, fcntl.LOCK_EX, timeout_s=PROBE_S):
            with publish_owner(descriptor):
                yield True
        else:
            yield False


@contextmanager
def root_lock(root: Path, name: str, *, activity: str, timeout_s: float) -> Iterator[int]:
    """Hold the lock file `name` in a root's `.locks`, created if missing; yield its descriptor.

    activity: of its owner, for the error. Raises TryLater on time-out, ClusterError.
    """
    path = root / LOCKS / name
    try:
        descriptor = open_readable_lock_file(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        if not lock_within(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s):
            owner = read_lock_owner(descriptor)
            who = f"the owner is {describe_owner(owner)}" if owner.pid else "find the owner with lslocks"
            message = f"another process {activity} (waited {format_duration(timeout_s)})"
            raise TryLater(message, where=str(path), hint=f"{who}: run this again later")
        try:
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked processes have the descriptor too
    finally:
        os.close(descriptor)


@contextmanager
def _lock_file(root: Path, version: str) -> Iterator[int]:
    path = root / LOCKS / version
    try:
        # Also create the lease file, so that users who can only read have a file to lock.
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
        descriptor = os.open(root / LOCKS / version, _READ_FLAGS)
    except OSError:
        return None
    try:
        return None if lock_within(descriptor, fcntl.LOCK_SH, timeout_s=0) else read_lock_owner(descriptor)
    finally:
        os.close(descriptor)


def is_leased(root: Path, version: str, *, timeout_s: float = 0) -> bool:
    """Whether a process or a job's prolog holds a lease of a version, as far as this user can see. Creates no file."""
    try:
        descriptor = os.open(root / LEASES / version, _READ_FLAGS)
    except OSError:
        return False
    try:
        return not lock_within(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s) or has_byte_lock(
            descriptor, except_offset=0
        )
    finally:
        os.close(descriptor)


def trash(path: Path, root: Path) -> Path:
    """Move a path aside, for `purge_trash` to remove; return its new path. Call with its version's lock held."""
    trash_path = _trash_path(path, root)
    try:
        os.rename(path, trash_path)
    except OSError as error:
        raise from_os_error(error, path) from error
    return trash_path


def replace_set(new: Path, final: Path, root: Path) -> bool:
    """Exchange the set at `final` for a new folder in one step, and trash the old one; False when the file system
    cannot exchange names. Call with the version's lock held. Raises OSError.
    """
    if fs_type(root) not in LOCAL_FILE_SYSTEMS:
        return False  # the flock below may be invisible to a node that purges the trash
    trash_path = _trash_path(final, root)
    descriptor = os.open(new, _READ_FLAGS | os.O_DIRECTORY)
    try:
        # The new folder first takes the old one's trash name, so that a kill never leaves a leased set under the name
        # of a partial copy. Its flock protects it from `purge_trash` meanwhile.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(new, trash_path)
        exchanged = False
        try:
            exchanged = exchange_names(trash_path, final)
        finally:
            if not exchanged:
                os.rename(trash_path, new)
    finally:
        os.close(descriptor)
    return exchanged


def _trash_path(path: Path, root: Path) -> Path:
    # Named as `store/publish.py` names its folders.
    name = f"{path.name}.old.{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}"
    return root / BUILD_DIR / name


def purge_trash(root: Path, version: str = "") -> None:
    """Remove trash, of one version or of all, except folders that another process is removing and replaced sets that
    are still leased.
    """
    for path in (root / BUILD_DIR).glob(f"{version}*.old.*"):
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(path.lstat().st_mode):
                path.unlink()
                continue
            descriptor = os.open(path, _READ_FLAGS | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_leased(root, path.name.partition(".old.")[0]):
                    remove_tree(path)
            finally:
                os.close(descriptor)
    # A journal without a folder is left by a kill right after publishing: a new copy creates its folder first.
    for journal in (root / BUILD_DIR).glob(f"{version}*.journal"):
        if not journal.with_suffix(".partial").exists():
            with contextlib.suppress(OSError):
                journal.unlink()


def free_bytes(root: Path) -> int:
    """Return the bytes this user may write to the disk of `root`, or of its nearest existing parent. Raises
    ClusterError.
    """
    status = _statvfs(root)
    return status.f_bavail * status.f_frsize


def free_inodes(root: Path) -> int:
    """Return the number of files this user may create on the disk of `root`. Raises ClusterError."""
    status = _statvfs(root)
    return status.f_favail if status.f_files else sys.maxsize  # file systems without a table of inodes report 0


def _statvfs(root: Path) -> os.statvfs_result:
    try:
        while not root.is_dir() and root != root.parent:
            root = root.parent
        return os.statvfs(root)
    except OSError as error:
        raise from_os_error(error, root) from error


def needed_bytes(files: Iterable[FileEntry]) -> int:
    """Return the bytes that files take on a disk of 4 KiB blocks, plus the margin."""
    return sum((entry.bytes + 4095) // 4096 * 4096 for entry in files) + MARGIN_BYTES
