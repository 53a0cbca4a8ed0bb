"""`pit perf stragglers`: ranks that are slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import format_option, run_argument, site_option

if TYPE_CHECKING:
    from pitools.perf.stragglers import Straggler

COLUMNS = ("node", "rank", "cause", "effect", "excess_s", "p", "steps", "ranks")


@click.command()
@run_argument()
@click.option(
    "--min-effect",
    type=click.FloatRange(min=0, max=1),
    default=0.03,
    show_default=True,
    help="Least excess, as a share of a step.",
)
@site_option
@format_option
@click.pass_context
def stragglers(ctx: click.Context, run: str, min_effect: float, site_name: str, form: str) -> None:
    """Find ranks that are slower than the others of their run, by the step logs of its last attempt.

    Prints a line for each, with its node and what takes longer: input, compute, host, or network. Nodes with other GPUs
    or CPUs, by Slurm, are compared among themselves. A run of nodes that are alike to within 2 % gives one in fewer
    than 1 of 100 cases; of many nodes with a normal deviation of 1 %, in 3. The nodes of a run of yours of the last day
    are noted for `pit node list`, as weakly suspected. Exit 1: there is a slow rank.

    \b
    pit perf stragglers RUN --format hosts
    """
    from pitools.core.output import Output
    from pitools.launch.diagnosis.slow_ranks import hardware_classes
    from pitools.launch.run_lookup import find_run_dir
    from pitools.perf.stragglers import find_stragglers, read_rank_times
    from pitools.site.load import load_site

    run_dir = find_run_dir(run, site_name)
    times = read_rank_times(run_dir)
    classes, note = hardware_classes(set(times.nodes.values()), load_site(site_name))
    if note:
        click.echo(f"pit: note: {note}", err=True)
    found = find_stragglers(times, min_effect=min_effect, classes=classes)
    with Output(form, COLUMNS) as out:
        for straggler in found:
            out(straggler)
    if reported := _report(run_dir, found):
        click.echo(f"pit: {', '.join(sorted(reported))}: noted as suspected, see: pit node list", err=True)
    if not found:
        steps = len(times.parts["compute"])
        click.echo(f"pit: no slow rank among {len(times.ranks)}, over {steps} steps", err=True)
    if not times.parts["network"].any():
        problem = "no rank logs its time in collectives (comm_s): ranks that wait for a slow one look as slow as it"
        click.echo(f"pit: note: {problem}; see: pit perf trace {run}", err=True)
    ctx.exit(bool(found))


def _report(run_dir: Path, found: Sequence[Straggler]) -> set[str]:
    """Report the nodes of slow ranks to the run's site, and return those that it suspects from now on."""
    from pitools.core.errors import PitError
    from pitools.launch.diagnosis.slow_ranks import report_stragglers
    from pitools.launch.plan import load_plan
    from pitools.node.site_suspicion import suspicions_of_site
    from pitools.site.load import load_site

    try:
        site = load_site(load_plan(run_dir).site) if found else None
    except PitError:  # a copied run, or one of a site that is not known here
        return set()
    reported = report_stragglers(site, run_dir, found) if site else set()
    return reported & suspicions_of_site(site).keys() if site and reported else set()  # not without a spool
