"""`pit perf stragglers`: ranks that are slower than the others."""

from __future__ import annotations

import click

from pitools.commands.options import format_option, run_argument, site_option

COLUMNS = ("node", "rank", "cause", "effect", "excess_s", "p", "steps", "ranks")


@click.command()
@run_argument()
@click.option(
    "--min-effect",
    type=click.FloatRange(min=0),
    default=0.03,
    show_default=True,
    help="Least excess, as a share of a step.",
)
@site_option
@format_option
@click.pass_context
def stragglers(ctx: click.Context, run: str, min_effect: float, site_name: str, form: str) -> None:
    """Find ranks that are slower than the others of their run, by the step logs of its last attempt.

    Prints a line for each, with its node and what takes longer: input, compute, host, or network. A run of nodes that
    are alike to within 1 % gives one in fewer than 1 of 100 cases; by 2 %, in 2 or 3. Exit 1: there is a slow rank.

    \b
    pit perf stragglers RUN --format hosts
    """
    from pitools.core.output import Output
    from pitools.launch.run_lookup import find_run_dir
    from pitools.perf.stragglers import find_stragglers, read_rank_times

    times = read_rank_times(find_run_dir(run, site_name))
    found = find_stragglers(times, min_effect=min_effect)
    with Output(form, COLUMNS) as out:
        for straggler in found:
            out(straggler)
    if not found:
        steps = len(times.parts["compute"])
        click.echo(f"pit: no slow rank among {len(times.ranks)}, over {steps} steps", err=True)
    ctx.exit(bool(found))
