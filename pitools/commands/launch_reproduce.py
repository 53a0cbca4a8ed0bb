"""`pit launch reproduce`, `diff` and `move`: a run once more, two runs side by side, and a run somewhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import sites
from pitools.commands.options import ONCE, format_option, run_argument, site_option
from pitools.commands.run_lookup import run_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pitools.launch.reproduce.facts import Difference

DIFFERENCE_COLUMNS = ("part", "key", "a", "b")
MOVED_COLUMNS = ("run_id", "to", "site", "job_id", "step", "run_dir")


@click.command()
@run_argument()
@click.option(
    "--site",
    "site_name",
    metavar="NAME",
    default=[""],
    shell_complete=sites,
    help="Where to run it; default: where it was.",
    **ONCE,
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
    from pitools.site.load import load

    run_dir = _find(run, site_name)
    site = load(site_name or load_plan(run_dir).site)
    planned, found = rerun.plan(run_dir, site, same_nodes=same_nodes)
    _show(found, form)
    weighty = [one for one in found if one.part not in rerun.HARMLESS]
    if dry_run:
        ctx.exit(1 if weighty else 0)
    if weighty and not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{len(weighty)} things differ", where=str(run_dir), hint="look at them, then add --yes")
        click.confirm(f"{len(weighty)} things differ. Run it all the same?", abort=True, err=True)
    made = rerun.start(planned, site)
    click.echo(f"pit: run {Path(made).name} in {made}", err=True)
    with Output(form) as out:
        out(rerun.Repeated(run_id=run_dir.name, to=Path(made).name, site=site.name, run_dir=made))


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

    runs = [_find(run, site_name) for run in (a, b)]
    if patch:
        lines = list(compare.patch(*runs))
        click.echo("".join(lines), nl=False)
        ctx.exit(1 if lines else 0)
    found = compare.compare(*runs)
    _show(found, form)
    ctx.exit(1 if found else 0)


@click.command()
@run_argument()
@click.option(
    "--site", "site_name", metavar="NAME", shell_complete=sites, required=True, help="Where it is to go on.", **ONCE
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
    from pitools.site.load import load

    run_dir = _find(run, "")
    site, other = load(load_plan(run_dir).site), load(site_name)
    moved = move_run.move(run_dir, site, other, stop_s=units.seconds(stop_within))
    click.echo(f"pit: it goes on at {moved.site} as {moved.to}, from step {moved.step}", err=True)
    with Output(form, MOVED_COLUMNS) as out:
        out(moved)


def _show(found: Sequence[Difference], form: str) -> None:
    from pitools.core.output import Output

    with Output(form, DIFFERENCE_COLUMNS) as out:
        for one in found:
            out(one)
    if not found:
        click.echo("pit: nothing differs", err=True)


def _find(run: str, site_name: str) -> Path:
    """A run's folder; no site is PIT_SITE's, or `local`."""
    import os

    return run_folder(run, site_name or os.environ.get("PIT_SITE", "local"))
