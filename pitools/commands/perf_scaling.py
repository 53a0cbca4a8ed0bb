"""`pit perf scaling`: step times over numbers of GPUs."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.options import rows_format_option, site_option
from pitools.commands.perf import find_source

if TYPE_CHECKING:
    from pitools.perf.scaling import Measured, ScalingKind

COLUMNS = ("layout", "kind", "gpus", "measured_s", "step_s", "low_s", "high_s", "efficiency", "limit", "note")


@click.command()
@click.argument("sources", metavar="FILE|RUN...", nargs=-1, required=True, shell_complete=completion.complete_runs)
@click.option("--at", type=click.IntRange(min=1), multiple=True, metavar="GPUS", help="Also predict this size.")
@click.option("--layout", help="Fit this layout alone.")
@click.option("--kind", type=click.Choice(["strong", "weak"]), help="If the work of a step is not in the table.")
@site_option
@rows_format_option
def scaling(
    sources: tuple[str, ...],
    at: tuple[int, ...],
    layout: str | None,
    kind: ScalingKind | None,
    site_name: str,
    form: str,
) -> None:
    """Fit step times over numbers of GPUs: what limits, and what more GPUs would give, with a 90 % band.

    FILE is CSV with gpus, step_s, layout (the parallelism without its data-parallel degree) and tokens_per_step. Of
    runs each rank is a GPU, the layout is the request's name, and the work the samples of all ranks. Each layout is
    fitted by itself. Two sizes give a range, to twice the larger; the limit's names are those that fit equally well.

    \b
    pit perf scaling steps.csv --layout TP=4 --at 64
    """
    from pitools.core.errors import UsageError, suggest
    from pitools.core.output import Output
    from pitools.perf.scaling import fit_scaling

    measured = sorted((point for source in sources for point in _read(source, site_name)), key=lambda each: each.layout)
    layouts = sorted({point.layout for point in measured})
    if layout is not None and layout not in layouts:
        raise UsageError(f'no rows of layout "{layout}"', where="--layout", hint=suggest(layout, layouts))
    with Output(form, COLUMNS) as out:
        for name, rows in groupby(measured, lambda point: point.layout):
            if layout in (None, name):
                for point in fit_scaling(list(rows), at, kind):
                    out(point)


def _read(source: str, site_name: str) -> list[Measured]:
    """Return the rows of a table, or a run's median step."""
    from statistics import median

    from pitools.perf.regression.sources import read_run
    from pitools.perf.scaling import Measured, read_measured

    path = find_source(source, site_name)
    if path.is_file():
        return read_measured(path)
    run = read_run(path)
    step_s = median(step.wall_s for step in run.steps)
    work = float(median(step.rank_samples for step in run.steps) * run.ranks)  # the last batch may be a partial one
    return [Measured(run.ranks, step_s, run.plan.name, work or None)]
