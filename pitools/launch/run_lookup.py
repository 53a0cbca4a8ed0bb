"""Find a run's folder by its id, at any site: ids are unique."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pitools.core.errors import ClusterError
    from pitools.site.schema import Site


def runs_dir(site: Site) -> Path:
    """Return the folder of a site's runs."""
    from pitools.site.template import expand_placeholders

    return Path(expand_placeholders(site.paths.runs)).absolute()


def missing_runs_dir(site: Site) -> ClusterError | None:
    """Return the error of a site whose folder of runs is not on this host; None if it is."""
    from pitools.core.errors import ClusterError

    path = runs_dir(site)
    if os.path.lexists(path):  # an unreadable one has an error of its own
        return None
    hint = f"mount it; or, before the first run: mkdir -p {path}"
    return ClusterError(f"no folder of runs of site {site.name} on this host", where=str(path), hint=hint)


def find_run_dir(run: str, site_name: str) -> Path:
    """Return a run's folder, given its path or id. An id is searched at the site first, then at all other sites.

    Raises RunNotFound with similar ids, UsageError, DataError.
    """
    from pitools.run import run_folder as folder
    from pitools.site.load import load_site

    try:
        return folder.find_run(runs_dir(load_site(site_name)), run)
    except folder.RunNotFound as error:
        roots = runs_dirs_of_other_sites(site_name) if run and Path(run).name == run else []
        for root in roots:
            with contextlib.suppress(OSError):  # unreadable to this user
                if (root / run / "plan.json").is_file():
                    return (root / run).resolve()
        where = f"{error.where}, and those of {len(roots)} more sites" if roots else error.where
        ids = error.suggestions or folder.suggest_ids(run, [name for root in roots for name in _run_names(root)])
        raise folder.RunNotFound(error.message, where=where, hint=_hint(ids), suggestions=ids) from error


def _hint(ids: Sequence[str]) -> str:
    if len(ids) > 1:
        return f"{len(ids)} runs match; the newest: {ids[0]}"
    return f'did you mean "{ids[0]}"?' if ids else "list them: pit launch list --site NAME"


def _run_names(root: Path) -> list[str]:
    from pitools.core.errors import PitError
    from pitools.run import run_folder as folder

    try:
        return [path.name for path in folder.run_dirs(root)]
    except PitError:  # another site's folder, which this user may not read
        return []


def runs_dirs_of_other_sites(site_name: str) -> list[Path]:
    """Return the folders of runs of all sites but this one. A wrong site file is left out."""
    from pitools.core.errors import PitError
    from pitools.site.load import load_site, site_names

    dirs = []
    for name in site_names():
        with contextlib.suppress(PitError):  # another site's file may be wrong
            if name != site_name:
                dirs.append(runs_dir(load_site(name)))
    return dirs
