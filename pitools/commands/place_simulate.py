"""`pit place simulate`: a trace, replayed on several sites under policies."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import rows_format_option, warnings_as_notes

COLUMNS = (
    "policy",
    "mean_jct_s",
    "p95_jct_s",
    "mean_wait_s",
    "slowdown",
    "utilisation",
    "jobs",
    "goodput",
    "max_wait_s",
    "load",
    "window",
    "wall_s",
)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("trace", type=_FILE)
@click.option("--scenario", "file", type=_FILE, metavar="FILE", help="TOML file of pools, load and failures.")
@click.option("--site", "names", multiple=True, metavar="NAME", help="Or simulate the partitions of these sites.")
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help="Policy; repeatable; by default ours and federation."
)
@click.option(
    "--load", "load_factor", type=click.FloatRange(0, min_open=True), metavar="X", help="Factor of the arrival rate."
)
@click.option(
    "--depth",
    type=click.IntRange(1),
    metavar="N",
    help="Pending jobs that a scheduler considers (bf_max_job_test); Slurm's default is 500.",
)
@click.option("--seed", type=int, metavar="N", help="Seed of limits, failures and tiers that the trace does not have.")
@click.option(
    "--tick", default="60s", show_default=True, metavar="TIME", help="Interval of our decisions; 0s: at each event."
)
@click.option(
    "--window",
    type=click.Choice(["all", "first-half", "second-half"]),
    default="all",
    show_default=True,
    help="Summarize only the jobs submitted in it; all are replayed.",
)
@click.option("--skip-bad", is_flag=True, help="Skip and count invalid rows.")
@click.option("--png", type=_FILE, metavar="FILE", help="Draw the results into a PNG file.")
@rows_format_option
def simulate(
    trace: Path,
    file: Path | None,
    names: tuple[str, ...],
    policies: tuple[str, ...],
    load_factor: float | None,
    depth: int | None,
    seed: int | None,
    tick: str,
    window: str,
    skip_bad: bool,
    png: Path | None,
    form: str,
) -> None:
    """Replay TRACE on several sites, each with its own EASY backfill; print one record per policy.

    TRACE is a Helios CSV, Philly's cluster_job_log, SWF, or the output of `sacct -P`; - is stdin. Without --scenario
    and --site: three sites of 192, 384 and 448 GPUs, of speeds 2, 1 and 0.5. The same input gives the same result.
    Policies: ours, slurm-m, slurm-m-space, federation, skypilot, most-free, soonest-end, round-robin, random.

    \b
      pit place simulate helios.csv --load 1.4 --policy ours --policy federation
      sacct -aDXP -S 2026-10-01 -o JobID,User,QOS,Submit,State,ElapsedRaw,TimelimitRaw,AllocTRES > month
      pit place simulate month --site alpha --site beta --policy ours --policy slurm-m --png month.png
    """
    import msgspec

    from pitools.core import progress, units
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.place.simulate import metrics, replay, scenario
    from pitools.place.simulate import trace as traces

    if file and names:
        raise UsageError("--scenario and --site exclude each other", hint="put the sites' pools into the file")
    if png and png.suffix != ".png":
        raise UsageError(f'"{png.name}" does not end in .png', where="--png")
    if png and not png.parent.is_dir():  # checked before minutes of replaying
        raise UsageError("no such folder", where=f"--png {png}", hint=f"mkdir -p {png.parent}")
    policies = tuple(dict.fromkeys(policies)) or (replay.OWN_POLICY, "federation")
    for name in policies:
        replay.require_policy(name)
    tick_s = float(units.parse_duration(tick))
    with warnings_as_notes():
        world = (
            scenario.read_scenario(file)
            if file
            else scenario.scenario_of_sites(names)
            if names
            else scenario.three_unequal()
        )
    changed = {
        key: value
        for key, value in (("load", load_factor), ("backfill_depth", depth), ("seed", seed))
        if value is not None
    }
    world = scenario.require_valid(msgspec.structs.replace(world, **changed), "--load")
    jobs = traces.read_trace(Path("/dev/stdin") if str(trace) == "-" else trace, skip_bad=skip_bad)
    results, summaries = [], []
    with (
        Output(form, COLUMNS, ends_with_reader=True) as out,
        progress.progress_bar("replaying", len(jobs) * len(policies), unit="jobs") as bar,
    ):
        for name in policies:
            result, wall_s = replay.replay(jobs, world, name, tick_s=tick_s, advance=bar)
            summaries.append(metrics.summarize(result, jobs, window, wall_s))  # type: ignore[arg-type]
            results.append(result)
            out(summaries[-1])
    for summary in summaries:
        if summary.unplaced or summary.starved:
            problem = f"{summary.unplaced} jobs fit no pool, {summary.starved} never started"
            click.echo(f"pit: {summary.policy}: {problem}; no mean counts them", err=True)
    if png:
        from pitools.place.simulate import plots

        plots.draw_results(results, summaries, png)
