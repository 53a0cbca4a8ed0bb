"""The folder that holds everything: claim it, lock it, empty it. A folder without the marker is never changed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from devcluster_parts.errors import BusyProblem, ClusterProblem
from devcluster_parts.layout import Layout, Settings
from devcluster_parts.process import write_atomically

SCHEMA = "pit.devcluster/1"
MARKER = "devcluster.json"
LOGS = "log"


@contextlib.contextmanager
def lock_root(root: Path, *, create: bool, timeout_s: float) -> Iterator[bool]:
    """Hold the root alone; yields False when it does not exist and `create` is False.

    Raises ClusterProblem for a folder without the marker, BusyProblem if another devcluster holds it for `timeout_s`.
    """
    fd = _lock(root, create=create, timeout_s=timeout_s)
    if fd is None:
        yield False
        return
    try:
        _check_marked(root)
        yield True
    finally:
        os.close(fd)


def is_ours(root: Path) -> bool:
    """Return False if there is no such folder. Raises ClusterProblem for one without the marker."""
    fd = _open(root, create=False)
    if fd is None:
        return False
    os.close(fd)
    _check_marked(root)
    return True


def _lock(root: Path, *, create: bool, timeout_s: float) -> int | None:
    end = time.monotonic() + timeout_s
    while True:
        fd = _open(root, create=create)
        if fd is None:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.lstat(root)):
                return fd
        except FileNotFoundError:
            pass  # `down` removed it between our opening and our lock
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(fd)
                raise BusyProblem("another devcluster is at work", where=str(root), hint="try again later") from None
            time.sleep(0.1)
        os.close(fd)


def _open(root: Path, *, create: bool) -> int | None:
    """A descriptor of the folder, once it is known to be the user's own; None when there is none."""
    if create:
        _check_parents(root)
        with contextlib.suppress(FileExistsError):
            root.mkdir(0o755)
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"is not a folder of our own, or is a symbolic link ({error.strerror})"
        raise ClusterProblem(what, where=str(root), hint="name another --root") from error
    _check_owned(root, fd)
    return fd


def _check_parents(root: Path) -> None:
    for parent in root.parents:
        try:
            mode = parent.stat().st_mode
        except OSError as error:
            raise ClusterProblem(
                f"cannot be used ({error.strerror})", where=str(parent), hint="make the parent folder first"
            ) from error
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ClusterProblem("anyone may replace what lies in it", where=str(parent), hint="name another --root")


def _check_owned(root: Path, fd: int) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        raise ClusterProblem(
            f"belongs to user {info.st_uid}, not to {os.geteuid()}", where=str(root), hint="name another --root"
        )
    if info.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise ClusterProblem(
            "others may write into it", where=str(root), hint=f"chmod go-w {root}, or name another --root"
        )


def _check_marked(root: Path) -> None:
    if all(name.startswith(f".{MARKER}.") for name in os.listdir(root)):
        return  # empty, or `up` was interrupted as it wrote the marker: nobody else's
    kept = _marker(root)
    if kept is None or kept.get("schema") != SCHEMA:
        raise ClusterProblem("holds files that devcluster did not write", where=str(root), hint="name another --root")


def _marker(root: Path) -> dict[str, object] | None:
    path = root / MARKER
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) else None


def read_settings(root: Path) -> Settings | None:
    """The settings of the clusters that live here; None when none do."""
    kept = (_marker(root) or {}).get("settings")
    if not isinstance(kept, dict):
        return None
    try:
        return Settings(**{**kept, "clusters": tuple(kept["clusters"])})
    except (TypeError, KeyError) as error:
        hint = "end it with the devcluster that started it"
        raise ClusterProblem(
            f"was written by another version ({error})", where=str(root / MARKER), hint=hint
        ) from error


def write_settings(root: Path, settings: Settings | None) -> None:
    """Write the marker, with the settings of the clusters in the folder."""
    text = json.dumps({"schema": SCHEMA, "settings": asdict(settings) if settings else None}, indent=1)
    write_atomically(root / MARKER, text + "\n")


def make_folders(layout: Layout) -> None:
    """Every folder the daemons expect, the nodes' NVMe folders included."""
    folders = [layout.records, layout.logs, layout.accounting, layout.sites]
    for cluster in layout.clusters:
        folders += [cluster.folder / "state", cluster.folder / "spool"]
        folders += [cluster.folder / "nvme" / node for node in cluster.nodes]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)


def remove_contents(root: Path, *, keep_logs: bool) -> None:
    """Remove everything, the marker last, so that an interrupted `down` can be repeated."""
    for name in os.listdir(root):
        if name != MARKER and not (keep_logs and name == LOGS):
            path = root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    if keep_logs:
        write_settings(root, None)
        return
    (root / MARKER).unlink(missing_ok=True)
    root.rmdir()
