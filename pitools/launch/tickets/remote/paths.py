"""Expand the site file's paths at a remote site, and detect whether a site is remote: shares no file system."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

from pitools.core.errors import ConfigError
from pitools.launch.plan import Plan
from pitools.site import remote_files
from pitools.site.connect import client
from pitools.site.schema import Site

_TICKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,150}")
_user_cache: dict[tuple[str, str], str] = {}
_USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")


def remote_runs_dir(site: Site) -> str:
    """Return the folder of runs on the site's nodes. Raises ConfigError."""
    return _expand_path(site, "runs", site.paths.runs)


def ticket_dir(site: Site, name: str) -> str:
    """Return the run folder of a ticket. Raises ConfigError."""
    if not _TICKET_NAME.fullmatch(name):
        raise ConfigError(f"invalid run name: {name!r} (expected letters, digits, - _ and .; at most 151)")
    return f"{remote_runs_dir(site)}/{name}"


def remote_datasets_dir(site: Site, user: str = "") -> str:
    """Return the folder of datasets; "" if the nodes read them at their local paths. Raises ConfigError.

    user: our name at the site, "" to query it.
    """
    if not site.paths.data and site.connection.kind == "local":
        return ""
    return _expand_path(site, "data", site.paths.data, user)


def remote_python(site: Site) -> str:
    """Return the site's Python interpreter. Raises ConfigError if the site file names none."""
    if not site.paths.python and site.connection.kind == "local":
        return sys.executable
    return _expand_path(site, "python", site.paths.python)


def require_paths(site: Site) -> None:
    """Raise ConfigError for a site file without the paths that every run needs. Makes no remote call."""
    for key, text in (("runs", site.paths.runs), ("python", site.paths.python)):
        _require_absolute(site, key, text)


def is_remote(plan: Plan, site: Site) -> bool:
    """Return whether a site is remote: a file in the local folder of runs is not visible at the site.

    Raises Unreachable.
    """
    folder = Path(plan.runs_dir)
    if site.connection.kind == "local":
        return False
    try:
        if remote_runs_dir(site) != plan.runs_dir or not folder.parent.is_dir():
            return True
    except ConfigError:  # a relative path, which has a meaning only on this machine
        return False
    try:
        folder.mkdir(exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".seen.") as mark:
            return not remote_files.existing(site, [mark.name])
    except OSError:
        return True


def remote_user(site: Site) -> str:
    """Return the user that commands run as at the site; cached. Raises Unreachable."""
    key = (site.connection.host, site.slurm.conf)
    if key not in _user_cache:
        user = client(site).user()
        if not _USER_NAME.fullmatch(user):
            raise ConfigError(f"invalid user name: {user!r}", where=f"id -un on {site.connection.host}")
        _user_cache[key] = user
    return _user_cache[key]


def _expand_path(site: Site, key: str, text: str, user: str = "") -> str:
    _require_absolute(site, key, text)
    expanded = text.replace("{user}", user or remote_user(site)) if "{user}" in text else text
    return remote_files.require_remote_path(expanded)


def _require_absolute(site: Site, key: str, text: str) -> None:
    if "{" in text.replace("{user}", "") or not text.startswith("/"):
        raise ConfigError(
            f'invalid remote path: "{text}" (expected an absolute path; {{user}} is expanded)',
            where=f"paths.{key} of site {site.name}",
            hint=f'{key} = "/shared/{{user}}/{key}" in its [paths]',
        )
