"""Where the runs of a site are, whose plans name the versions that they read: everybody's, not ours alone."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

from pitools.core.errors import ClusterError
from pitools.site.load import load
from pitools.site.template import fill

USER = "{user}"


def of_site(name: str) -> list[Path]:
    """The folders of runs of a site's users, as `pit launch` makes them; none where nobody has one yet.

    One that cannot be looked into is among them. Raises ClusterError where the site's storage is not there: what cannot
    be seen from here may name any version.
    """
    text = load(name).paths.runs
    parts = Path(text).parts
    personal = next((i for i, part in enumerate(parts) if USER in part), len(parts))
    base = Path(fill(str(Path(*parts[:personal]))))
    if personal == len(parts):
        found = [base.absolute()]
    else:
        try:
            people = sorted(person for person in os.listdir(base) if _is_ones(person, parts[personal]))
        except OSError as error:
            raise _not_there(base, name) from error
        found = [base / person / Path(*parts[personal + 1 :]) for person in people]
    if base.is_absolute() and not base.parent.is_dir():
        raise _not_there(base, name)
    return [folder for folder in found if _may_be_there(folder)]


def _is_ones(person: str, part: str) -> bool:
    return fnmatchcase(person, part.replace(USER, "*")) and not person.startswith(".")


def _may_be_there(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except PermissionError:
        return True


def _not_there(folder: Path, site: str) -> ClusterError:
    hint = "run this where the site's runs can be seen, or say which keep a version: --runs FOLDER"
    return ClusterError(f"the runs of site {site} cannot be seen from here", where=str(folder), hint=hint)
