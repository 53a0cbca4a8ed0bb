"""`pit launch reproduce`, `diff` and `move`: repeat a run, compare two runs, continue a run at another site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import complete_sites
from pitools.commands.options import SINGLE_VALUE, format_option, run_argument, site_option
from pitools.launch.run_lookup import find_run_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pitools.launch.reproduce.facts import Difference

DIFFERENCE_COLUMNS = ("part", "key", "a", "b")
MOVE_COLUMNS = ("run_id", "new_run_id", "site", "job_id", "step", "run_dir")


@click.command()
@run_argument()
@click.option(
    "--site",
    "site_name",
    metavar="NAME",
    default=[""],
    shell_complete=complete_sites,
    help="The site to run at; default: the original one.",
    **SINGLE_VALUE,
)
@click.option("--same-nodes", is_flag=True, help="Request exactly the original nodes.")
@click.option("--yes", "-y", is_flag=True, help="Run without confirmation of the differences.")
@click.option("--dry-run", is_flag=True, help="Only show the differences; exit 1 if any needs confirmation.")
@format_option
@click.pass_context
def reproduce(
    ctx: click.Context, run: str, site_name: str, same_nodes: bool, yes: bool, dry_run: bool, form: str
) -> None:
    """Repeat RUN (id or folder) from its copy of the code and the same data, after showing the differences.

    Column `a` is the original run, `b` the new one. Differences of nodes and of shell variables need no confirmation,
    and do not count for --dry-run.
    """
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.launch.plan import load_plan
    from pitools.launch.reproduce import rerun
    from pitools.site.load import load_site

    run_dir = _find_run_dir(run, site_name)
    site = load_site(site_name or load_plan(run_dir).site)
    new_plan, differences = rerun.plan_rerun(run_dir, site, same_nodes=same_nodes)
    _print_differences(differences, form)
    blocking = [difference for difference in differences if difference.part not in rerun.HARMLESS_PARTS]
    if dry_run:
        ctx.exit(1 if blocking else 0)
    if blocking and not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{len(blocking)} differences", where=str(run_dir), hint="check them, then add --yes")
        click.confirm(f"{len(blocking)} differences. Run anyway?", abort=True, err=True)
    new_run_dir = rerun.start_rerun(new_plan, site)
    click.echo(f"pit: run {Path(new_run_dir).name} in {new_run_dir}", err=True)
    with Output(form) as out:
        out(
            rerun.RerunResult(
                run_id=run_dir.name, new_run_id=Path(new_run_dir).name, site=site.name, run_dir=new_run_dir
            )
        )


@click.command()
@run_argument("a")
@run_argument("b")
@site_option
@click.option("--patch", is_flag=True, help="Print a unified diff of the code instead.")
@format_option
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, site_name: str, patch: bool, form: str) -> None:
    """Show every difference between the runs A and B: request, code, environment, data, site, nodes, outcome.

    Exit 1 if there are any.
    """
    from pitools.launch.reproduce import compare

    runs = [_find_run_dir(run, site_name) for run in (a, b)]
    if patch:
        lines = list(compare.code_diff(*runs))
        click.echo("".join(lines), nl=False)
        ctx.exit(1 if lines else 0)
    differences = compare.compare_runs(*runs)
    _print_differences(differences, form)
    ctx.exit(1 if differences else 0)


@click.command()
@run_argument()
@click.option(
    "--site",
    "site_name",
    metavar="NAME",
    shell_complete=complete_sites,
    required=True,
    help="The site to continue at.",
    **SINGLE_VALUE,
)
@click.option(
    "--stop-within", default="10m", show_default=True, metavar="TIME", help="Time limit for RUN to save and end."
)
@format_option
def move(run: str, site_name: str, stop_within: str, form: str) -> None:
    """Let RUN (id or folder) save and end, and continue it at another site from its newest good checkpoint.

    If the move fails, it is undone, and the run continues at its first site. Safe to repeat.
    """
    from pitools.core import units
    from pitools.core.output import Output
    from pitools.launch.move import move_run
    from pitools.launch.plan import load_plan
    from pitools.site.load import load_site

    run_dir = _find_run_dir(run, "")
    site, target_site = load_site(load_plan(run_dir).site), load_site(site_name)
    result = move_run.move_run(run_dir, site, target_site, stop_s=units.parse_duration(stop_within))
    click.echo(f"pit: continues at {result.site} as {result.new_run_id}, from step {result.step}", err=True)
    with Output(form, MOVE_COLUMNS) as out:
        out(result)


def _print_differences(differences: Sequence[Difference], form: str) -> None:
    from pitools.core.output import Output

    with Output(form, DIFFERENCE_COLUMNS) as out:
        for difference in differences:
            out(difference)
    if not differences:
        click.echo("pit: no differences", err=True)


def _find_run_dir(run: str, site_name: str) -> Path:
    """Return a run's folder. site_name: "" for PIT_SITE, else `local`."""
    import os

    return find_run_dir(run, site_name or os.environ.get("PIT_SITE", "local"))
