"""`pit place plan`: where a request could run, and when."""

from __future__ import annotations

import click

from pitools.commands.options import data_option, format_option, parse_named_paths, request_argument

PLAN_COLUMNS = ("name", "site", "partition", "nodes", "ranks", "time", "bytes_per_node", "runs_dir")


@click.command()
@request_argument
@click.option(
    "--site",
    "names",
    envvar="PIT_SITES",
    metavar="NAME",
    multiple=True,
    help="Plan for this site; repeatable; by default every site with Slurm.",
)
@data_option()
@click.option("--explain", is_flag=True, help="Also show partitions that do not fit, and why each was not chosen.")
@click.option("--best", is_flag=True, help="Print only the best candidate's plan, for `pit launch run -`.")
@click.option("--max-age", default="30s", show_default=True, metavar="TIME", help="Maximum age of cached answers.")
@click.option(
    "--timeout",
    default="10s",
    show_default=True,
    metavar="TIME",
    help="Time limit for the queries of all sites together.",
)
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
    """Show where REQUEST (a TOML file) could run, the earliest expected end first; nothing is submitted.

    Exit 1 if it fits no site that answered; 75 if another did not answer; 3 or 4 if none answered, for wrong site files
    or refusals alone.
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

    if form == "hosts":
        raise UsageError("--format hosts: a plan has no nodes", hint="use --format jsonl")
    timeout_s = units.parse_duration(timeout)
    if not timeout_s:
        raise UsageError(f"--timeout {timeout}: too short for an answer", hint="write 10s or more")
    path = Path(request)
    wanted = requests.fill_datasets(requests.load_request(path), parse_named_paths(data, "--data"))
    sites, broken = snapshot.load_sites(names)
    placement = plan_placement(
        PlacementRequest(request=wanted, origin=str(path), text=path.read_text()),
        sites,
        timeout_s=timeout_s,
        max_age_s=units.parse_duration(max_age),
    )
    skipped = (*broken, *placement.skipped)
    for note in (*placement.notes, *(f"{site.site} is skipped: {site.reason}" for site in skipped)):
        click.echo(f"pit: {note}", err=True)
    rows = report.rank_candidates(placement, broken)
    if best:
        if placement.best and placement.best.plan:
            with Output(form, PLAN_COLUMNS) as out:
                out(placement.best.plan)
    elif Output(form).form == "table":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        for line in report.plan_table(rows, all_candidates=explain or not placement.best, width=width):
            click.echo(line)
    else:
        with Output(form) as out:
            for row in rows:
                out(row)
    if not placement.best:
        for row in (row for row in rows if best and row.partition):
            click.echo(f"pit: {row.site}/{row.partition}: {row.reason}", err=True)
        where = "none of what has answered" if skipped or not placement.is_complete else "nowhere"
        click.echo(f"pit: {wanted.name} fits {where}", err=True)
        ctx.exit(report.unfit_exit_code(placement, broken))
    if (unfit_count := sum(not row.rank for row in rows)) and Output(form).form == "table" and not explain and not best:
        click.echo(f"pit: {unfit_count} more do not fit: see --explain", err=True)
