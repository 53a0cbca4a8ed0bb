"""Private folders of a user on one machine: their content is trusted, so no other user may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pitools.core.errors import ClusterError
from pitools.core.fs import from_os_error


def xdg_dir(variable: str, fallback: str) -> Path:
    """Return a base folder of the XDG specification: the variable's value if absolute, else `fallback` in the home.

    A user without a home, as in a container, gets `/~/…`, which does not exist.
    """
    value = Path(os.environ.get(variable, ""))
    home = os.path.expanduser("~")  # noqa: PTH111 - it stays "~" where there is none
    return value if value.is_absolute() else Path("/", home, fallback)


def ensure_private_dir(
    path: Path,
    description: str = "other users can write to this folder (expected only you: its files decide where jobs go)",
) -> Path:
    """Create a folder if missing, check that only this user can write there, and return it.

    Its parent may be root's and sticky, as /tmp is. description: the error's text. Raises ClusterError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        for part in (path.parent, path):
            status, is_parent = part.lstat(), part != path
            if status.st_uid != os.geteuid() and not (is_parent and status.st_uid == 0):
                raise ClusterError(
                    description, where=str(part), hint="it belongs to another user: name a folder of your own"
                )
            open_to_others = status.st_mode & 0o022 and not (is_parent and status.st_mode & stat.S_ISVTX)
            if not stat.S_ISDIR(status.st_mode) or open_to_others:
                raise ClusterError(description, where=str(part), hint=f"check its content, then: chmod go-w {part}")
    except OSError as error:
        raise from_os_error(error, path) from error
    return path
