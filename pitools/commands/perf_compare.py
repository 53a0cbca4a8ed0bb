"""`pit perf compare` and `watch`: two runs against each other, and series of measurements over time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath, rows_format_option, site_option
from pitools.commands.perf import find_source
from pitools.commands.perf_repeat import confirm_regressions

if TYPE_CHECKING:
    from pitools.perf.regression.selection import Selected, Selector

COMPARE_COLUMNS = (
    "verdict",
    "effect",
    "effect_low",
    "effect_high",
    "a_median",
    "b_median",
    "a_points",
    "b_points",
    "measure",
    "device",
)
WATCH_COLUMNS = ("site", "partition", "device", "measure", "verdict", "effect", "changed_at", "source", "changed", "q")
_min_effect = click.option(
    "--min-effect",
    type=click.FloatRange(min=0, max=1),
    default=0.02,
    show_default=True,
    help="Least relative change that counts.",
)


@click.command()
@click.argument("a", metavar="A", shell_complete=completion.complete_runs)
@click.argument("b", metavar="B", shell_complete=completion.complete_runs)
@click.option("--higher-is-better", is_flag=True, help="The numbers of files are rates, not times.")
@click.option("--store", type=LocalPath(), metavar="FILE", help="Select points of this store of `watch`, not runs.")
@_min_effect
@site_option
@rows_format_option
@click.pass_context
def compare(
    ctx: click.Context,
    a: str,
    b: str,
    higher_is_better: bool,
    store: Path | None,
    min_effect: float,
    site_name: str,
    form: str,
) -> None:
    """Compare B with A: two runs, commits or sites, or two files of numbers, one a line, in the order of time.

    commit:SHA is the runs of this commit at --site, without uncommitted changes; site:NAME those of a site. With a
    comma both, and name:REQUEST. Requests that both sides ran on the same device are compared by the medians of their
    runs. Of one run a side the steps of rank 0 count, without each attempt's first: it can also differ by its nodes. By
    a 99 % interval B is a regression (exit 1), an improvement, the same, or inconclusive (all exit 0).

    \b
    pit perf compare commit:1f0c2e7 commit:9b31d04 --site alpha
    pit perf compare main.txt branch.txt --higher-is-better
    """
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.perf.regression.compare import compare as compare_values
    from pitools.perf.regression.selection import compare_selected, parse_selector
    from pitools.perf.regression.sources import read_numbers

    selectors = [None if Path(text).exists() else parse_selector(text) for text in (a, b)]
    if store and not all(selectors):
        raise UsageError(f"{a} and {b} (expected two of commit:SHA, site:NAME)", where="--store")
    if any(selectors):
        if higher_is_better:
            raise UsageError("the measurements say themselves what is better", where="--higher-is-better")
        sides = [_select(text, chosen, store, site_name) for text, chosen in zip((a, b), selectors, strict=True)]
        by_site = any(chosen and chosen.site for chosen in selectors)
        results = compare_selected(*sides, names=(a, b), by_site=by_site, min_effect=min_effect)
    else:
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
        results = [result]
        if runs:
            _note_other_requests(*paths)
    with Output(form, COMPARE_COLUMNS) as out:
        for result in results:
            out(result)
    for result in results:
        if result.effect_low is None:
            text = f"{result.a_points} and {result.b_points} numbers are too few to say: measure more, 20 steps a side"
            click.echo(f"pit: {result.measure}{': ' * bool(result.measure)}{text}", err=True)
    if any(result.verdict == "inconclusive" and result.effect_low is not None for result in results):
        click.echo("pit: the interval allows both a change that counts and none: measure more, in turn", err=True)
    ctx.exit(any(result.verdict == "regression" for result in results))


def _note_other_requests(a: Path, b: Path) -> None:
    """Print what two runs were asked for differently, which their times may differ by; not for folders without plan."""
    from pitools.core.errors import PitError
    from pitools.launch.reproduce.compare import compare_runs

    with contextlib.suppress(PitError):
        found = [each for each in compare_runs(a, b) if each.part in ("request", "data") and each.key != "name"]
        if found:
            text = ", ".join(f"{each.key} {each.a or 'none'} and {each.b or 'none'}" for each in found)
            click.echo(f"pit: note: the requests of these runs differ: {text}", err=True)


def _select(text: str, selector: Selector | None, store: Path | None, site_name: str) -> list[Selected]:
    """Return what one side of a comparison selects. Raises UsageError for a file, and where nothing is selected."""
    from pitools.core.errors import UsageError
    from pitools.launch.run_lookup import runs_dir
    from pitools.perf.regression.selection import select_points, select_run, select_runs
    from pitools.perf.regression.store import read_series
    from pitools.run.run_folder import run_dirs
    from pitools.site.load import load_site

    if selector is None:
        if not (path := find_source(text, site_name)).is_dir():
            raise UsageError(f"{text}: a file (expected a run, commit:SHA or site:NAME)")
        return select_run(path)
    if store:
        found, where = select_points(selector, (point for one in read_series(store) for point in one.points)), store
    else:
        where = runs_dir(load_site(selector.site or site_name))
        found, dirty = select_runs(selector, run_dirs(where))
        if dirty:
            click.echo(f"pit: {text}: {dirty} runs with uncommitted changes are left out", err=True)
    if not found:
        hint = "runs with uncommitted changes have no commit" if store else "pit launch list shows runs"
        raise UsageError(f"{text}: nothing measured", where=str(where), hint=hint)
    return found


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
@click.option("--since", metavar="TIME", default="14d", show_default=True, help="Report changes no older than this.")
@click.option("--confirm", is_flag=True, help="Repeat runs to confirm regressions: at most 3, each by 2 to 8 runs.")
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
    confirm: bool,
    plot: Path | None,
    min_effect: float,
    site_name: str,
    form: str,
) -> None:
    """Find regressions in the series of a store, a file that is made by the first --add.

    A series is a measure at one site, partition and device. Files to add are CSV or JSON Lines with measure, value and
    t (RFC 3339), and if known site, partition, device, source, software and better (lower or higher). A healthy series
    gives a step in fewer than 1 of 100 cases, with long memory or two kinds of nodes in turn in 2 to 13. A step below
    1.5 standard deviations of the noise is inconclusive: compare runs. Exit 1: there is a regression.

    --confirm repeats the first run after the step on its nodes: in turn with the last one before it if the code alone
    differs, else against the points before. A regression that these runs do not show is `unconfirmed`, and no exit 1.
    Each runs for 50 steps. The results are stored by the first run after the step, which is tried once.

    \b
    pit perf watch perf.sqlite --add RUN --confirm
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
        since_s = parse_duration(since)
        begin = to_rfc3339(datetime.now(UTC) - timedelta(seconds=since_s))
    except OverflowError as error:
        raise UsageError(f"{since} ago is before the year 1 (expected such as 14d)", where="--since") from error
    if since_s <= 0:
        raise UsageError(f"{since} reports no change (expected such as 14d)", where="--since")
    if added:
        count = add_points(store, [point for source in added for point in read_points(find_source(source, site_name))])
        click.echo(f"pit: {count} new points", err=True)
    series = read_series(store)
    verdicts = judge_series(series, min_effect=min_effect, since=begin)
    if confirm:
        verdicts = confirm_regressions(store, series, verdicts, min_effect, site_name)
    with Output(form, WATCH_COLUMNS) as out:
        for verdict in verdicts:
            out(verdict)
    if plot is not None:
        plot_series(series, verdicts, plot)
    ctx.exit(any(verdict.verdict == "regression" for verdict in verdicts))
