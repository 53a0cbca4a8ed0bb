"""Find the folders of a site's runs, of all users: their plans name the versions that they read."""

from __future__ import annotations

import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path

from pitools.core.errors import ClusterError
from pitools.site.load import load_site
from pitools.site.template import expand_placeholders

USER_PLACEHOLDER = "{user}"


def run_roots(name: str) -> list[Path]:
    """Return the run folders of all users of a site, as `pit launch` creates them.

    Empty where no user has one, or no folder of runs is here that the site gives by a relative path. Unreadable ones
    are included. Raises ClusterError where the site's storage, or its folder of runs, is not here: it may not be
    mounted, and invisible runs may reference any version.
    """
    text = load_site(name).paths.runs
    parts = Path(text).parts
    personal = next((i for i, part in enumerate(parts) if USER_PLACEHOLDER in part), len(parts))
    base = Path(expand_placeholders(str(Path(*parts[:personal]))))
    if personal == len(parts):
        roots = [base.absolute()]
    else:
        try:
            people = sorted(person for person in os.listdir(base) if _is_users_dir(person, parts[personal]))
        except OSError as error:
            raise _missing_root_error(base, name) from error
        roots = [base / person / Path(*parts[personal + 1 :]) for person in people]
    is_missing = personal == len(parts) and not _exists_or_unreadable(base)
    if base.is_absolute() and (is_missing or not base.parent.is_dir()):
        raise _missing_root_error(base, name)
    return [folder for folder in roots if _exists_or_unreadable(folder)]


def _is_users_dir(person: str, part: str) -> bool:
    return fnmatchcase(person, part.replace(USER_PLACEHOLDER, "*")) and not person.startswith(".")


def _exists_or_unreadable(folder: Path) -> bool:
    try:
        return stat.S_ISDIR(folder.stat().st_mode)  # from Python 3.14 on, is_dir raises no PermissionError
    except PermissionError:
        return True
    except OSError:
        return False


def _missing_root_error(folder: Path, site: str) -> ClusterError:
    hint = "run this where the site's runs are visible, name the sites whose runs read these datasets (--site), or "
    hint += "leave all out: --no-site-runs"
    return ClusterError(f"folders of runs of site {site}: not visible here", where=str(folder), hint=hint)
