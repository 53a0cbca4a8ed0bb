"""The commands of `pit capacity`."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import complete_sites
from pitools.commands.options import rows_format_option, warnings_as_notes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pitools.capacity.what_if import WhatIf
    from pitools.place.simulate.model import Scenario, Trace

_FILE = click.Path(dir_okay=False, path_type=Path)
_CLASS_COLUMNS = (
    "team", "tier", "gpus", "jobs", "jobs_per_day", "share", "run_p50_s", "run_p95_s", "limit_use", "wait_p95_s",
    "growth_per_week", "burstiness",
)  # fmt: skip
_ANSWER_COLUMNS = (
    "what_if", "group", "jobs", "wait_p50_s", "wait_p95_s", "wait_p95_low_s", "wait_p95_high_s", "utilisation",
    "goodput", "cost", "unfinished",
)  # fmt: skip
_PERIOD_COLUMNS = (
    "period", "group", "jobs", "wait_p95_s", "forecast_s", "naive_s", "forecast_error", "naive_error",
)  # fmt: skip
_SUMMARY_COLUMNS = (
    "group", "periods", "forecast_error", "naive_error", "better", "forecast_within", "naive_within",
)  # fmt: skip


def _parse_growth(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    try:
        growth = None if text is None else float(text)
    except ValueError:
        raise click.BadParameter(f'"{text}" is no number (expected as 0.02 for 2 %)') from None
    if growth is not None and not -1 < growth <= 1:
        raise click.BadParameter(f"{growth:g} is not above -1 and at most 1")
    return growth


_trace_argument = click.argument("trace", type=_FILE)
_skip_bad_option = click.option("--skip-bad", is_flag=True, help="Skip and count invalid rows.")
_growth_option = click.option(
    "--growth",
    callback=_parse_growth,
    metavar="X",
    help="Weekly growth of each day's jobs from its place in TRACE on, as 0.02 for 2 %. [default: none]",
)
_days_option = click.option(
    "--days", type=click.IntRange(1, 3650), default=91, show_default=True, metavar="N", help="Days of synthetic jobs."
)


@click.command()
@_trace_argument
@_skip_bad_option
@rows_format_option
def workload(trace: Path, skip_bad: bool, form: str) -> None:
    """Show the jobs of TRACE by team, tier (QOS or queue) and size, the class with the most GPU hours first.

    TRACE is a trace as for `pit place simulate`, such as the output of `sacct -P`; - is stdin. LIMIT USE is the median
    share of the time limit that a job ran; BURSTINESS the variance of the hourly submissions over their mean, 1 where
    jobs are independent of each other.

    \b
      export SLURM_TIME_FORMAT=%s
      sacct -aDXP -S 2026-07-01 -o JobID,User,Account,QOS,Submit,Start,State,ElapsedRaw,TimelimitRaw,AllocTRES > q
      pit capacity workload q
    """
    from pitools.capacity.workload import describe_workload
    from pitools.core.output import Output

    with Output(form, _CLASS_COLUMNS) as out:
        for each in describe_workload(_read(trace, skip_bad)):
            out(each)


@click.command()
@_trace_argument
@_days_option
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the draw.")
@_growth_option
@_skip_bad_option
def model(trace: Path, days: int, seed: int, growth: float | None, skip_bad: bool) -> None:
    """Write synthetic jobs with the shape of TRACE, as the output of `sacct -P`.

    \b
      pit capacity model q --days 28 | pit place simulate - --scenario sites.toml
    """
    from pitools.capacity.synthesize import as_sacct, synthesize
    from pitools.core.errors import DataError

    jobs = _read(trace, skip_bad)
    made = synthesize(jobs, days=days, seed=seed, growth_per_week=_choose_growth(jobs, growth))
    if not len(made):
        raise DataError(f"no jobs in {days} days", where=jobs.name, hint="give more --days, or another --seed")
    for line in as_sacct(made):
        click.echo(line)


@click.command()
@_trace_argument
@click.option("--scenario", "file", type=_FILE, metavar="FILE", help="TOML file of today's pools.")
@click.option(
    "--site",
    "names",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_sites,
    help="Or the partitions of these sites.",
)
@click.option("--if", "texts", multiple=True, metavar="CHANGES", help="What-if; repeatable; today is always answered.")
@click.option(
    "--reach", "goals", multiple=True, metavar="GOAL", help='The cheapest what-ifs that reach "GROUP p50|p95 TIME".'
)
@click.option("--policy", default="federation", show_default=True, metavar="NAME", help="As of `pit place simulate`.")
@_days_option
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=5, show_default=True, metavar="N", help="Synthetic periods."
)
@_growth_option
@click.option("--png", type=_FILE, metavar="FILE", help="Draw the answers into a PNG file.")
@_skip_bad_option
@rows_format_option
@click.pass_context
def ask(
    ctx: click.Context,
    trace: Path,
    file: Path | None,
    names: tuple[str, ...],
    texts: tuple[str, ...],
    goals: tuple[str, ...],
    policy: str,
    days: int,
    seeds: int,
    growth: float | None,
    png: Path | None,
    skip_bad: bool,
    form: str,
) -> None:
    """Simulate today and what-ifs on the same synthetic jobs; print one record per what-if and group of jobs.

    Figures are medians over the seeds, but for the lowest and highest. A wait is all the time in which a job does not
    run, until its end. A tier is a QOS or queue, a team an account. With --site, priorities and preemption are those of
    the QOS there; a partition whose nodes are in a larger one, too, is no pool, nor one without GPUs where others have
    some. A job may run in any pool that is large enough. A what-if is one or more changes, separated by commas;
    a name with spaces or commas is written "in quotes":

    \b
      gpus POOL +64           more, or fewer, GPUs
      away POOL 10d 2d        no job runs from day 10 on, for two days; announced
      down POOL 10d 2d        the same unannounced: running jobs go on from their last checkpoints
      tier TIER 1             another priority of a tier; higher ones start first
      preempt TIER TIER       jobs of the first evict those of the second, which go on from their last checkpoints
      team NAME x2, load x1.2 more jobs of a team, or of all
      limit 12h               longest time limit; longer jobs queue again for the rest of their work
      rent POOL 128 2.5       a last pool, paid per started hour of a job; federation fills the others first

    \b
      pit capacity ask q --site alpha --if "gpus alpha/gpu +64" --if "rent cloud 64 2.5, limit 1d"
      pit capacity ask q --site alpha --if "gpus alpha/gpu +64" --if "limit 1d" --reach "tier urgent p95 30m"

    With --reach the what-ifs are combined, at most six: printed are today and the cheapest combination that reaches
    every goal with every seed. If none does: today, and a combination that comes nearer, if any; exit 1. UNFINISHED are
    jobs that fit no pool, or never end; not those that still wait when the period is over.
    """
    from pitools.capacity.ask import Period, require_inside, simulate_all, summarize_outcomes
    from pitools.capacity.cheapest import find_cheapest, parse_goal
    from pitools.capacity.what_if import apply_changes
    from pitools.capacity.workload import names_of
    from pitools.core import progress
    from pitools.core.errors import DataError, UsageError
    from pitools.core.output import Output
    from pitools.place.simulate import replay

    if goals and not texts:
        raise UsageError("nothing to combine", where="--reach", hint='give what can be bought: --if "gpus POOL +64"')
    if not all(map(str.strip, texts)):
        raise UsageError("no change", where='--if ""', hint="today is always answered: leave it out")
    if png and (png.suffix != ".png" or not png.parent.is_dir()):  # checked before minutes of replaying
        raise UsageError("expected a name that ends in .png, in a folder that exists", where=f"--png {png}")
    replay.require_policy(policy)
    reach = [parse_goal(goal) for goal in goals]
    today, jobs = _today(file, names), _read(trace, skip_bad)
    group_names = names_of(jobs)
    worlds = [apply_changes(text, today, group_names) for text in dict.fromkeys(("", *texts))]
    period = Period(days=days, growth_per_week=_choose_growth(jobs, growth), policy=policy)
    require_inside(worlds, period)
    _tell_assumptions(jobs, today, worlds, file, policy)
    cheapest: list[str] | None = None
    with progress.progress_bar("replaying", 0 if reach else len(worlds) * seeds, unit="periods") as bar:
        if reach:
            cheapest, outcomes = find_cheapest(jobs, today, texts, reach, period, seeds=seeds, advance=bar)
        else:
            outcomes = simulate_all(jobs, worlds, period, seeds=seeds, advance=bar)
    for text, lacking in Counter(outcome.what_if for outcome in outcomes if not outcome.waits).items():
        problem = f"{text or 'today'}: no jobs in the period of {lacking} of {seeds} seeds"
        if lacking == seeds:
            raise DataError(problem, where=jobs.name, hint="give more --days")
        click.echo(f"pit: {problem}: waits are those of the others", err=True)
    answers = list(summarize_outcomes(outcomes))
    with Output(form, _ANSWER_COLUMNS) as out:
        for answer in answers:
            out(answer)
    if png:
        from pitools.capacity.plots import draw_answers

        draw_answers(answers, png)
    if unfinished := max(outcome.unfinished for outcome in outcomes if not outcome.what_if):
        click.echo(f"pit: jobs that fit no pool of today, or never end: {unfinished}; their wait is infinite", err=True)
    for text, load in {outcome.what_if: outcome.load for outcome in outcomes if outcome.load > 1}.items():
        problem = f"the jobs are {load:.2f} times what all GPUs can do: the queue grows, and waits with --days"
        click.echo(f"pit: {text or 'today'}: {problem}", err=True)
    if reach and cheapest is None:
        click.echo("pit: neither today nor any combination of the what-ifs reaches every goal", err=True)
        ctx.exit(1)
    if reach:
        click.echo(f"pit: the cheapest that reaches every goal: {', '.join(cheapest or ()) or 'today'}", err=True)


@click.command()
@_trace_argument
@click.option("--days", type=click.IntRange(1, 366), default=7, show_default=True, metavar="N", help="Of a period.")
@click.option("--periods", is_flag=True, help="Print every forecast instead of the summary.")
@_skip_bad_option
@rows_format_option
@click.pass_context
def backtest(ctx: click.Context, trace: Path, days: int, periods: bool, skip_bad: bool, form: str) -> None:
    """Forecast the p95 wait of each period of TRACE from those before, and compare it with the real one.

    TRACE needs real waits: `sacct -P` with Submit and Start, SWF, or a log of alibaba, Helios or Philly as published.
    One record for all jobs, and for each tier, if the trace has several, with 100 known waits in each of two periods in
    a row. Forecast: the median of up to three periods before; naive: the period before; both as known when the period
    begins, with jobs that wait still counted by their wait until then. Exit 1 if the median error of the forecast for
    all jobs is not below that of naive.
    """
    from pitools.capacity.backtest import backtest as run_backtest
    from pitools.capacity.backtest import summarize_backtest
    from pitools.core.output import Output

    jobs = _read(trace, skip_bad)
    forecasts = list(run_backtest(jobs, days=days))
    summaries = summarize_backtest(forecasts, jobs.name)
    with Output(form, _PERIOD_COLUMNS if periods else _SUMMARY_COLUMNS) as out:
        for record in forecasts if periods else summaries:
            out(record)
    if summaries[0].forecast_error >= summaries[0].naive_error:
        ctx.exit(1)


def _read(trace: Path, skip_bad: bool) -> Trace:
    import msgspec

    from pitools.capacity.workload import without_early_jobs
    from pitools.place.simulate.trace import read_trace

    every = read_trace(Path("/dev/stdin") if str(trace) == "-" else trace, skip_bad=skip_bad)
    jobs = msgspec.structs.replace(without_early_jobs(every), name=str(trace))
    reasons = every.left_out.items()
    for number, what in (
        *((len(each), f"jobs that {why}{f' ({sum(each):.0f} GPU hours)' * any(each)}") for why, each in reasons),
        (every.skipped, "invalid rows"),
        (len(every) - len(jobs), "jobs submitted long before the others"),
    ):
        if number:
            click.echo(f"pit: left out {number} {what}", err=True)
    return jobs


def _choose_growth(jobs: Trace, growth: float | None) -> float:
    """Return the weekly growth; say that of the log where none is given, if it is a quarter from end to end."""
    from pitools.capacity.workload import clock_s, growth_per_week
    from pitools.place.simulate.model import DAY_S

    moments = clock_s(jobs)
    measured = growth_per_week(moments, moments[0], moments[-1])
    weeks = (moments[-1] - moments[0]) / (7 * DAY_S)
    if growth is None and measured is not None and not 1 / 1.25 < (1 + measured) ** weeks < 1.25:
        problem = f"the jobs of {jobs.name} change by {measured:+.1%} a week"
        click.echo(f"pit: {problem}, which is not counted on: give --growth, of 0 or other", err=True)
    return growth or 0.0


def _tell_assumptions(jobs: Trace, today: Scenario, worlds: Sequence[WhatIf], file: Path | None, policy: str) -> None:
    """Print on stderr what the answers rest on. Raises UsageError for a what-if that its policy ignores."""
    from pitools.capacity.ask import MAX_MISSING, warm_up
    from pitools.capacity.synthesize import whole_days
    from pitools.capacity.workload import names_of
    from pitools.core.errors import UsageError, suggest
    from pitools.place.simulate import replay

    names = names_of(jobs)
    if (days_of_trace := whole_days(jobs)[1]) < 14:
        problem = f"whole days in the trace: {days_of_trace} (expected 14 or more, two of each weekday)"
        click.echo(f"pit: {problem}: seeds differ little, and the bands are too narrow", err=True)
    warm_up_days, missing = warm_up(jobs)
    if missing > MAX_MISSING:
        problem = f"{missing:.0%} of the jobs' GPU time is more than {warm_up_days} days after their submission"
        click.echo(f"pit: {problem}: utilisation and waits are too low", err=True)
    if unlimited := sum(not limit_s for limit_s in jobs.limit_s):
        click.echo(f"pit: {unlimited} jobs have no time limit: drawn, as by `pit place simulate`", err=True)
    if file:
        named = {*today.tiers, *today.preempts, *chain.from_iterable(today.preempts.values())}
        for tier in sorted(named - set(names.tiers)):
            click.echo(f'pit: no jobs of the tier "{tier}" of {file} ({suggest(tier, names.tiers)})', err=True)
    pools = {pool.pool: pool.price for world in worlds for pool in world.scenario.pools}
    if any(pools.values()) and not all(pools.values()):
        unpriced = ", ".join(pool for pool, price in pools.items() if not price)
        click.echo(f"pit: no price: {unpriced}; their GPUs count as free", err=True)
    if len(today.pools) > 1:
        problem = "a job may run in any pool that is large enough: partitions and kinds of GPU are not told apart"
        click.echo(f"pit: {problem}", err=True)
    if policy == replay.OWN_POLICY and any(world.scenario.preempts for world in worlds):
        problem = "preemption does nothing under this policy, which queues jobs outside of the pools"
        if any(world.scenario.preempts != today.preempts for world in worlds):
            raise UsageError(problem, where=f"--policy {policy}", hint="leave --policy out")
        click.echo(f"pit: --policy {policy}: {problem}", err=True)


def _today(file: Path | None, names: tuple[str, ...]) -> Scenario:
    from pitools.core.errors import UsageError

    if bool(file) == bool(names):
        raise UsageError("today's pools: give --scenario or --site, one of them", where="pit capacity ask")
    if file:
        from pitools.place.simulate.scenario import read_scenario

        return read_scenario(file)
    from pitools.capacity.today import today_of_sites

    with warnings_as_notes():
        return today_of_sites(names)
