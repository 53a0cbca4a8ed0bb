"""`pit place plan`: where a request could run, and when."""

from __future__ import annotations

import click

from pitools.commands.options import DATA_HELP, format_option, parse_pairs, request_argument

PLAN_COLUMNS = ("name", "site", "partition", "nodes", "ranks", "time", "bytes_per_node", "runs")


@click.command()
@request_argument
@click.option("--site", "names", metavar="NAME", multiple=True, help="Only these; without, every site with a Slurm.")
@click.option("--data", metavar="NAME=PATH", multiple=True, help=DATA_HELP)
@click.option("--explain", is_flag=True, help="Show also what does not fit, and why each was not chosen.")
@click.option("--best", is_flag=True, help="Print the plan of the best alone, for `pit launch run -`.")
@click.option("--max-age", default="30s", show_default=True, metavar="TIME", help="Of what a site said before.")
@click.option("--timeout", default="10s", show_default=True, metavar="TIME", help="For all sites together.")
@format_option
@click.pass_context
def plan(
    ctx: click.Context,
    request: str,
    names: tuple[str, ...],
    data: tuple[str, ...],
    explain: bool,
    best: bool,
    max_age: str,
    timeout: str,
    form: str,
) -> None:
    """Show where REQUEST (a TOML file) could run, the first results first; nothing is submitted.

    Exit 1 where it fits nowhere, 75 where a site that it might fit did not answer.
    """
    import shutil
    import sys
    from pathlib import Path

    from pitools.core import units
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.launch import request as requests
    from pitools.place.clusters import snapshot
    from pitools.place.estimate import report
    from pitools.place.estimate.plan import PlacementRequest, plan_placement

    timeout_s = units.parse_duration(timeout)
    if not timeout_s:
        raise UsageError(f"--timeout {timeout}: nobody can answer in that time", hint="write 10s or more")
    path = Path(request)
    wanted = requests.fill_datasets(requests.load_request(path), parse_pairs(data, "--data"))
    sites, broken = snapshot.load_sites(names)
    found = plan_placement(
        PlacementRequest(request=wanted, origin=str(path), text=path.read_text()),
        sites,
        timeout_s=timeout_s,
        max_age_s=units.parse_duration(max_age),
    )
    skipped = (*broken, *found.skipped)
    for note in (*found.notes, *(f"{one.site} is skipped: {one.reason}" for one in skipped)):
        click.echo(f"pit: {note}", err=True)
    rows = report.rank_candidates(found, broken)
    if best:
        if found.best and found.best.plan:
            with Output(form, PLAN_COLUMNS) as out:
                out(found.best.plan)
    elif Output(form).form == "table":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        for line in report.plan_table(rows, all_candidates=explain or not found.best, width=width):
            click.echo(line)
    else:
        with Output(form) as out:
            for row in rows:
                out(row)
    if not found.best:
        for row in (row for row in rows if best and row.partition):
            click.echo(f"pit: {row.site}/{row.partition}: {row.reason}", err=True)
        where = "nowhere" if found.is_complete and not broken else "none of what has answered"
        click.echo(f"pit: {wanted.name} fits {where}", err=True)
        ctx.exit(75 if broken or not found.is_complete else 1)
    if (others := sum(not row.rank for row in rows)) and Output(form).form == "table" and not explain and not best:
        click.echo(f"pit: {others} more do not fit: --explain says why", err=True)
