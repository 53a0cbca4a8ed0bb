"""What the command is told: which sites, which day; and where the page goes."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from pitools.core.errors import ClusterError, PitError, UsageError
from pitools.core.fs import from_os_error, write_atomic
from pitools.launch.run_lookup import missing_runs_dir
from pitools.site import load
from pitools.site.schema import Site


def parse_day(name: str, now: datetime | None = None) -> date:
    """Return the day of `today`, `yesterday` or `2026-11-26`, in UTC. Raises UsageError."""
    today = (now or datetime.now(UTC)).date()
    if name in ("today", "yesterday"):
        return today - timedelta(days=name == "yesterday")
    try:
        day = date.fromisoformat(name)
    except ValueError as error:
        raise UsageError(f'"{name}": not a day (expected today, yesterday or 2026-11-26)', where="--day") from error
    if day > today:
        raise UsageError(f"{name}: has not begun (expected {today} or earlier, in UTC)", where="--day")
    return day


def report_sites(names: Sequence[str]) -> list[Site]:
    """Return these sites; without names, all with a folder of runs here. Raises UsageError, ConfigError for a name."""
    if names:
        return [load.load_site(name) for name in dict.fromkeys(names)]
    sites = []
    for name in load.site_names():
        try:
            site = load.load_site(name)
        except PitError:  # an example, or another user's
            continue
        if not missing_runs_dir(site):
            sites.append(site)
    return sites


def write_private(path: Path, page: str) -> None:
    """Write a page that only this user may read; a replaced file keeps its mode. Raises NoSpace, ClusterError."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else 0o600
        if path.exists() and not path.is_file():
            raise ClusterError("not a regular file", where=str(path), hint="--to FILE.html")
        write_atomic(path, page, mode=0o600, durable=False)
        path.chmod(mode)
    except OSError as error:
        raise from_os_error(error, path) from error
