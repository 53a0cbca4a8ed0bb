"""Folders of one user on one machine: what is kept there is believed, so nobody else may write it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pitools.core.errors import ClusterError
from pitools.core.fs import from_os_error


def xdg_dir(variable: str, fallback: str) -> Path:
    """A base folder of the XDG specification: the variable's, if it is an absolute path, or one in the home folder.

    A user of a container may have no home, and then has no such folder.
    """
    said = Path(os.environ.get(variable, ""))
    home = os.path.expanduser("~")  # noqa: PTH111 - it stays "~" where there is none
    return said if said.is_absolute() else Path("/", home, fallback)


def ensure_private_dir(
    path: Path, description: str = "what is kept here decides where jobs go, and others can write to it"
) -> Path:
    """This folder, made if it is missing, once it is certain that only this user writes there.

    Where it lies may be root's, and sticky as /tmp is. Raises ClusterError, which says `description`.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        for part in (path.parent, path):
            found, above = part.lstat(), part != path
            if found.st_uid != os.geteuid() and not (above and found.st_uid == 0):
                raise ClusterError(description, where=str(part), hint="it is another user's: name a folder of your own")
            open_to_others = found.st_mode & 0o022 and not (above and found.st_mode & stat.S_ISVTX)
            if not stat.S_ISDIR(found.st_mode) or open_to_others:
                raise ClusterError(description, where=str(part), hint=f"look who did, then: chmod go-w {part}")
    except OSError as error:
        raise from_os_error(error, path) from error
    return path
