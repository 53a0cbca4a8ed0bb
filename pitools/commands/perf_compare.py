"""`pit perf compare` and `watch`: two runs against each other, and series of measurements over time."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath, rows_format_option, site_option
from pitools.commands.perf import find_source

COMPARE_COLUMNS = ("verdict", "effect", "effect_low", "effect_high", "a_median", "b_median", "a_points", "b_points")
WATCH_COLUMNS = ("site", "partition", "device", "measure", "verdict", "effect", "changed_at", "source", "changed", "q")
_min_effect = click.option(
    "--min-effect",
    type=click.FloatRange(min=0),
    default=0.02,
    show_default=True,
    help="Least relative change that counts.",
)


@click.command()
@click.argument("a", metavar="A", shell_complete=completion.complete_runs)
@click.argument("b", metavar="B", shell_complete=completion.complete_runs)
@click.option("--higher-is-better", is_flag=True, help="The numbers of files are rates, not times.")
@_min_effect
@site_option
@rows_format_option
@click.pass_context
def compare(
    ctx: click.Context, a: str, b: str, higher_is_better: bool, min_effect: float, site_name: str, form: str
) -> None:
    """Compare B with A: two runs, by their steps, or two files of numbers, one a line, in the order of time.

    Of a run the steps of rank 0 count, without each attempt's first. Two runs can also differ by their nodes: for a
    change of code, give files with the medians of several runs a side. By a 99 % interval B is a regression (exit 1),
    an improvement, the same, or inconclusive (all exit 0).

    \b
    pit perf compare main.txt branch.txt --higher-is-better
    """
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.perf.regression.compare import compare as compare_values
    from pitools.perf.regression.sources import read_numbers

    paths = [find_source(source, site_name) for source in (a, b)]
    runs = sum(path.is_dir() for path in paths)
    if runs == 1:
        raise UsageError(f"{a} and {b}: a run and a file (expected two runs, or two files of numbers)")
    if runs and higher_is_better:
        raise UsageError("the times of runs are better if lower", where="--higher-is-better")
    result = compare_values(
        *(read_numbers(path) for path in paths),
        names=(a, b),
        measure="step_s" if runs else "",
        better="higher" if higher_is_better else "lower",
        min_effect=min_effect,
    )
    with Output(form, COMPARE_COLUMNS) as out:
        out(result)
    if result.effect_low is None:
        click.echo(f"pit: {result.a_points} and {result.b_points} numbers are too few to say: measure more", err=True)
    elif result.verdict == "inconclusive":
        click.echo("pit: the interval has both a change that counts and none: measure more, in turn", err=True)
    ctx.exit(result.verdict == "regression")


@click.command()
@click.argument("store", type=LocalPath())
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar="RUN|FILE",
    shell_complete=completion.complete_runs,
    help="First add a run's median step, once, at its first step's time; or a file of points.",
)
@click.option("--since", metavar="TIME", default="14d", show_default=True, help="Report steps of this last time: 14d.")
@click.option("--plot", type=LocalPath(), metavar="FILE", help="Also a picture: FILE.png, .svg or .pdf.")
@_min_effect
@site_option
@rows_format_option
@click.pass_context
def watch(
    ctx: click.Context,
    store: Path,
    added: tuple[str, ...],
    since: str,
    plot: Path | None,
    min_effect: float,
    site_name: str,
    form: str,
) -> None:
    """Find regressions in the series of a store, a file that is made by the first --add.

    A series is a measure at one site, partition and device. Files to add are CSV or JSON Lines with measure, value and
    t (RFC 3339), and if known site, partition, device, source, software and better (lower or higher). A healthy series,
    also of AR(1) noise, gives a step in about 1 of 100 cases, and of all alarms some 5 % are false; long memory, drifts
    and runs on two kinds of nodes in turn give more. Exit 1: there is a regression.

    \b
    pit perf watch perf.sqlite --add RUN --plot perf.png
    """
    from datetime import UTC, datetime, timedelta

    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.core.timestamps import to_rfc3339
    from pitools.core.units import parse_duration
    from pitools.perf.regression.sources import read_points
    from pitools.perf.regression.store import add_points, read_series
    from pitools.perf.regression.watch import judge_series, plot_series

    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f'"{plot.name}" (expected .png, .svg or .pdf)', where="--plot")
    try:
        begin = to_rfc3339(datetime.now(UTC) - timedelta(seconds=parse_duration(since)))
    except OverflowError as error:
        raise UsageError(f"{since} ago is before the year 1 (expected such as 14d)", where="--since") from error
    if added:
        count = add_points(store, [point for source in added for point in read_points(find_source(source, site_name))])
        click.echo(f"pit: {count} new points", err=True)
    series = read_series(store)
    verdicts = judge_series(series, min_effect=min_effect, since=begin)
    with Output(form, WATCH_COLUMNS) as out:
        for verdict in verdicts:
            out(verdict)
    if plot is not None:
        plot_series(series, verdicts, plot)
    ctx.exit(any(verdict.verdict == "regression" for verdict in verdicts))
