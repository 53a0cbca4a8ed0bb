"""`pit launch reproduce`, `diff` and `move`: a run once more, two runs side by side, and a run somewhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import complete_sites
from pitools.commands.options import SINGLE_VALUE, format_option, run_argument, site_option
from pitools.commands.run_lookup import find_run_dir

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
    help="Where to run it; default: where it was.",
    **SINGLE_VALUE,
)
@click.option("--same-nodes", is_flag=True, help="On just the nodes that it had.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask where something differs.")
@click.option("--dry-run", is_flag=True, help="Only show what differs; exit 1 where something does.")
@format_option
@click.pass_context
def reproduce(
    ctx: click.Context, run: str, site_name: str, same_nodes: bool, yes: bool, dry_run: bool, form: str
) -> None:
    """Run RUN (id or folder) again, from its own copy of the code and the same data; what differs is shown first.

    `a` is what it was made from, `b` what it would be now. Other nodes, and other variables of your shell, are shown
    and not asked about.
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
            raise UsageError(f"{len(blocking)} things differ", where=str(run_dir), hint="look at them, then add --yes")
        click.confirm(f"{len(blocking)} things differ. Run it all the same?", abort=True, err=True)
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
@click.option("--patch", is_flag=True, help="Print the code's differences instead, as a unified diff.")
@format_option
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, site_name: str, patch: bool, form: str) -> None:
    """Every difference between the runs A and B: request, code, environment, data, site, nodes, outcome.

    Exit 1 where there is any.
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
    help="Where it is to go on.",
    **SINGLE_VALUE,
)
@click.option("--stop-within", default="10m", show_default=True, metavar="TIME", help="What it may take to save.")
@format_option
def move(run: str, site_name: str, stop_within: str, form: str) -> None:
    """Let RUN (id or folder) save and end, and go on at another site from its newest good checkpoint.

    What fails on the way is taken back, and the run goes on where it was. Safe to repeat.
    """
    from pitools.core import units
    from pitools.core.output import Output
    from pitools.launch.move import move_run
    from pitools.launch.plan import load_plan
    from pitools.site.load import load_site

    run_dir = _find_run_dir(run, "")
    site, target_site = load_site(load_plan(run_dir).site), load_site(site_name)
    result = move_run.move_run(run_dir, site, target_site, stop_s=units.parse_duration(stop_within))
    click.echo(f"pit: it goes on at {result.site} as {result.new_run_id}, from step {result.step}", err=True)
    with Output(form, MOVE_COLUMNS) as out:
        out(result)


def _print_differences(differences: Sequence[Difference], form: str) -> None:
    from pitools.core.output import Output

    with Output(form, DIFFERENCE_COLUMNS) as out:
        for difference in differences:
            out(difference)
    if not differences:
        click.echo("pit: nothing differs", err=True)


def _find_run_dir(run: str, site_name: str) -> Path:
    """A run's folder; no site is PIT_SITE's, or `local`."""
    import os

    return find_run_dir(run, site_name or os.environ.get("PIT_SITE", "local"))
