"""`pit monitor report`: a day, or a run, as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath, run_argument


@click.command()
@run_argument(required=False)
@click.option("--day", metavar="DATE", help="All runs of this day (UTC): today, yesterday, or 2026-11-26.")
@click.option("--to", "target", type=LocalPath(), required=True, metavar="FILE.html", help="The file to write.")
@click.option(
    "--site",
    "sites",
    metavar="NAME",
    multiple=True,
    shell_complete=completion.complete_sites,
    help="Of a day: its sites; repeatable. [default: all with a folder of runs]",
)
def report(run: str | None, day: str | None, target: Path, sites: tuple[str, ...]) -> None:
    """Write a report of RUN, or of a day, as one HTML file, which loads nothing and runs no script.

    Of a day: goodput and losses, use by user, waits, runs and why they stopped, recoveries, incidents of nodes,
    staging. Of a run: its goodput, attempts, loss over steps, slow ranks, and what limits it.

    The report holds what this user may read. The file is private (0600); one that it replaces keeps its mode.

    \b
    pit monitor report --day yesterday --to day.html
    """
    from pitools.commands.launch_monitor import find_run_and_site
    from pitools.core.errors import UsageError
    from pitools.core.trust import user_name
    from pitools.monitor.report import write

    if (run is None) == (day is None):
        raise UsageError("expected either RUN or --day", where="pit monitor report", hint="--day today")
    if target.suffix not in (".html", ".htm"):
        raise UsageError(f'"{target}": not an HTML file (expected FILE.html)', where="--to")
    if run is not None:
        from pitools.monitor.report.run import run_page

        run_dir, site = find_run_and_site(run, sites[0] if sites else "local")
        write.write_private(target, run_page(run_dir, site))
        return
    import os

    from pitools.monitor.report.day import read_day
    from pitools.monitor.report.day_page import day_page

    found = read_day(write.report_sites(sites), write.parse_day(day or ""))
    write.write_private(target, day_page(found, user_name(os.geteuid())))
    for note in found.notes:
        click.echo(f"pit: note: {note}", err=True)
