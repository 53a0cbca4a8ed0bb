"""Paths at a site that shares no files with this machine, its user's name filled in; and whether a site shares none."""

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
    """The folder of runs, as the site's nodes see it. Raises ConfigError."""
    return _expand_path(site, "runs", site.paths.runs)


def ticket_dir(site: Site, name: str) -> str:
    """The folder of a ticket. Raises ConfigError."""
    if not _TICKET_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a run", hint="letters, digits, - _ and .; at most 151")
    return f"{remote_runs_dir(site)}/{name}"


def remote_datasets_dir(site: Site) -> str:
    """The folder of datasets; "" where the nodes read them where they are here. Raises ConfigError."""
    if not site.paths.data and site.connection.kind == "local":
        return ""
    return _expand_path(site, "data", site.paths.data)


def remote_python(site: Site) -> str:
    """The interpreter there. Raises ConfigError where the site file names none."""
    if not site.paths.python and site.connection.kind == "local":
        return sys.executable
    return _expand_path(site, "python", site.paths.python)


def require_paths(site: Site) -> None:
    """Raise ConfigError where the site file does not name the paths that every run there needs. Asks nobody."""
    for key, text in (("runs", site.paths.runs), ("python", site.paths.python)):
        _require_absolute(site, key, text)


def is_remote(plan: Plan, site: Site) -> bool:
    """Whether a site shares no files with this machine: what is put into its folder of runs here is not seen there.

    Raises Unreachable.
    """
    folder = Path(plan.runs)
    if site.connection.kind == "local":
        return False
    try:
        if remote_runs_dir(site) != plan.runs or not folder.parent.is_dir():
            return True
    except ConfigError:  # it has no full path, so it is here or nowhere
        return False
    try:
        folder.mkdir(exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".seen.") as mark:
            return not remote_files.existing(site, [mark.name])
    except OSError:
        return True


def remote_user(site: Site) -> str:
    """Whom commands run as there; asked once. Raises Unreachable."""
    key = (site.connection.host, site.slurm.conf)
    if key not in _user_cache:
        found = client(site).user()
        if not _USER_NAME.fullmatch(found):
            raise ConfigError(f"{found!r} is not a user's name", where=f"id -un on {site.connection.host}")
        _user_cache[key] = found
    return _user_cache[key]


def _expand_path(site: Site, key: str, text: str) -> str:
    _require_absolute(site, key, text)
    return remote_files.require_remote_path(text.replace("{user}", remote_user(site)) if "{user}" in text else text)


def _require_absolute(site: Site, key: str, text: str) -> None:
    if "{" in text.replace("{user}", "") or not text.startswith("/"):
        raise ConfigError(
            f'"{text}" is no path there (expected one in full; {{user}} is filled in)',
            where=f"paths.{key} of site {site.name}",
            hint=f'{key} = "/shared/{{user}}/{key}" in its [paths]',
        )
