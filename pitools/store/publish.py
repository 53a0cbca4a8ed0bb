"""A folder that is whole or absent: built under a hidden name on the same file system, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core.files import os_error, sync_dir

TEMPORARY = ".tmp"


@contextmanager
def unfinished(root: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `<root>/.tmp/`; whatever was not published is gone at the exit, and so are folders made
    on the way to it.

    Folders that a killed process of this host left there are removed first. Raises NoSpace or ClusterError.
    """
    home = root / TEMPORARY
    made = [folder for folder in (home, *home.parents) if not folder.exists()] or [home]
    try:
        _sweep(home)
        temporary, lock = _create(home, name)
    except OSError as error:
        _remove_empty(made)
        raise os_error(error, root) from error
    try:
        yield temporary
    except OSError as error:
        raise os_error(error, root) from error
    finally:
        os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(made)


def publish(temporary: Path, final: Path) -> bool:
    """Sync a filled folder's names and rename it to `final`; False when another process had published `final` first.

    The files' own bytes are for the writer to sync. Raises NoSpace or ClusterError.
    """
    try:
        for folder, _, _ in os.walk(temporary):
            sync_dir(Path(folder))
        made = [final.parent] if not final.parent.exists() else []
        final.parent.mkdir(parents=True, exist_ok=True)
        # rename(2) onto a folder that is not empty fails: that is how a lost race shows.
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.is_dir():
                _remove_empty(made)
                raise
            return False
        sync_dir(final.parent)
    except OSError as error:
        raise os_error(error, final) from error
    return True


def _create(home: Path, name: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock, by which others see that its maker lives."""
    for attempts_left in reversed(range(10)):
        temporary = home / f"{name}.{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            home.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process removed the empty `.tmp`, or swept this folder, in between
            if not attempts_left:
                raise
            continue
        if _is_ours(lock) and temporary.exists():
            return temporary, lock
        os.close(lock)
    raise FileNotFoundError(errno.ENOENT, "another process keeps removing it", str(home))


def _is_ours(lock: int) -> bool:
    """Whether nobody is sweeping the folder. Where locks are not supported nobody sweeps either."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _sweep(home: Path) -> None:
    """Remove unfinished folders of this host whose maker is dead: the kernel dropped its lock when it died."""
    for folder in home.glob(f"*.{socket.gethostname()}.*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that this process made, innermost first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
