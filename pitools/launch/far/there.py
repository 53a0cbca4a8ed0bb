"""Where things are on the far side: its paths, with its user's name in them."""

from __future__ import annotations

import re
import sys

from pitools.core.errors import ConfigError
from pitools.site import files
from pitools.site.connect import client
from pitools.site.model import Site

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,150}")
_users: dict[tuple[str, str], str] = {}
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")


def runs(site: Site) -> str:
    """The folder of runs, as the site's nodes see it. Raises ConfigError."""
    return _path(site, "runs", site.paths.runs)


def run_dir(site: Site, name: str) -> str:
    """The folder of a ticket. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a run", hint="letters, digits, - _ and .; at most 151")
    return f"{runs(site)}/{name}"


def data(site: Site) -> str:
    """The folder of datasets; "" where the nodes read them where they are here. Raises ConfigError."""
    if not site.paths.data and site.reach.kind == "local":
        return ""
    return _path(site, "data", site.paths.data)


def python(site: Site) -> str:
    """The interpreter there. Raises ConfigError where the site file names none."""
    if not site.paths.python and site.reach.kind == "local":
        return sys.executable
    return _path(site, "python", site.paths.python)


def user(site: Site) -> str:
    """Whom commands run as there; asked once. Raises Unreachable."""
    key = (site.reach.host, site.slurm.conf)
    if key not in _users:
        found = client(site).user()
        if not _USER.fullmatch(found):
            raise ConfigError(f"{found!r} is not a user's name", where=f"id -un on {site.reach.host}")
        _users[key] = found
    return _users[key]


def _path(site: Site, key: str, text: str) -> str:
    where = f"paths.{key} of site {site.name}"
    if "{user}" in text:
        text = text.replace("{user}", user(site))
    if "{" in text or not text.startswith("/"):
        what = f"{text!r} is no place on the far side"
        raise ConfigError(what, where=where, hint="it shares no files with this machine: write the path in full")
    return files.path(text)
