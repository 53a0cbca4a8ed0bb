"""Lock checkpoints for reading and folders for saving, by OFD locks, which end with their process.

Readers lock a checkpoint's own manifest, so that the lock moves with it. On a file system without locks, readers read
unlocked, and leftovers of other processes are not removed. Where locks are each node's own (Lustre with `localflock`,
NFS with `nolock`), a process of another node may remove what is read here: a link beside it keeps it
(`retention.named_steps`).
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from pitools.checkpoint.store.manifest import MANIFEST_FILE
from pitools.core.errors import DataError, TryLater
from pitools.core.fs import from_os_error
from pitools.core.locks import flock_within, lock_bytes

WRITER_LOCK = ".writer"
# The ranks of a killed attempt may take some seconds to die.
_TIMEOUT_S = 30.0
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Descriptors of `writer_lock` in this process: forked children close them.
_held_descriptors: set[int] = set()
_GONE_HINT = "another process removed or quarantined it; pit checkpoint list"


@contextmanager
def read_lock(step_dir: Path, *, timeout_s: float = _TIMEOUT_S) -> Iterator[None]:
    """Keep a checkpoint from being removed while the block runs. Raises DataError when it is gone, TryLater."""
    path = step_dir / MANIFEST_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), hint=_GONE_HINT) from error
    try:
        if _lock(descriptor, fcntl.LOCK_SH, timeout_s) is False:
            raise TryLater("checkpoint: locked for removal by another process", where=str(step_dir), hint=_GONE_HINT)
        # Checked under the lock: a removal may have been faster, and none can begin from here on.
        if not _is_same_file(descriptor, path):
            raise DataError("checkpoint: removed by another process", where=str(step_dir), hint=_GONE_HINT)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_lock(step_dir: Path) -> Iterator[bool]:
    """Yield whether a checkpoint exists and has no readers; none can begin while the block runs. Raises OSError."""
    path = step_dir / MANIFEST_FILE
    try:
        # For writing, as an exclusive OFD lock requires.
        descriptor = os.open(path, os.O_RDWR | _FLAGS)
    except FileNotFoundError:
        descriptor = -1
    try:
        yield descriptor >= 0 and _lock(descriptor, fcntl.LOCK_EX) is not False and _is_same_file(descriptor, path)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def writer_lock(folder: Path, *, timeout_s: float = _TIMEOUT_S, saves: bool = True) -> Iterator[bool]:
    """Lock a folder for the one process that saves there; yield False on a file system without locks.

    saves: False for a process that only removes; it does not become the one that `is_own_node` compares. Raises
    TryLater when another process holds the lock, NoSpace, ClusterError.
    """
    path = folder / WRITER_LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
    except OSError as error:
        raise from_os_error(error, path) from error
    # If the caller never closes it, this runs at interpreter exit, when module globals are gone.
    pid, getpid, close, descriptors = os.getpid(), os.getpid, os.close, _held_descriptors
    try:
        is_locked = _lock(descriptor, fcntl.LOCK_EX, timeout_s)
        if is_locked is False:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            hint = "to continue the run, end its older attempt: pit launch cancel RUN; "
            hint += "to evaluate, keep one by a link (ln -s step_<n> eval), and read its payload by torch or orbax"
            raise TryLater(f"{owner} saves checkpoints here", where=str(folder), hint=hint)
        if saves:
            _write_owner(descriptor)
        _close_in_children()
        _held_descriptors.add(descriptor)
        yield is_locked is True
    finally:
        descriptors.discard(descriptor)
        if getpid() == pid:
            close(descriptor)


def is_own_node(folder: Path) -> bool:
    """Return whether the last process that saved here was on this node, or none has locked the folder."""
    try:
        owner = (folder / WRITER_LOCK).read_text(errors="replace").strip()
    except OSError:
        return True
    return not owner or owner.endswith(f" on {socket.gethostname()}")


@lru_cache(maxsize=1)
def _close_in_children() -> None:
    """Close locks in forked children: a data loader's worker that outlives a killed rank would keep its lock."""

    def after() -> None:
        while _held_descriptors:
            os.close(_held_descriptors.pop())

    os.register_at_fork(after_in_child=after)


def _lock(descriptor: int, mode: int, timeout_s: float = 0.0) -> bool | None:
    return flock_within(descriptor, mode, timeout_s=timeout_s, take=lock_bytes)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _write_owner(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError:  # the lock holds on a full disk too
        pass
