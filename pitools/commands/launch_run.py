"""`pit launch plan|run`: make a plan from a request, and run it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.launch_monitor import echo_goodput, show_runs
from pitools.commands.options import (
    LocalPath,
    data_option,
    format_option,
    parse_named_paths,
    request_argument,
    site_option,
    sites_option,
)
from pitools.core.record import decode_json

if TYPE_CHECKING:
    from pitools.launch.plan import Plan
    from pitools.launch.sweep.points import Point
    from pitools.run.run_folder import RunRecord
    from pitools.site.schema import Site

_LIMITS_WAIT_S = 2.0
PLAN_COLUMNS = ("name", "site", "partition", "nodes", "ranks", "time", "bytes_per_node", "runs_dir")


SET_HELP = "A key or parameter of the request; several values, `lr=1e-3,3e-4` or `seed=0..3` (3 too), make a sweep."


@click.command()
@request_argument
@site_option
@data_option()
@click.option("--nodes", type=click.IntRange(1), help="Instead of the request's.")
@click.option(
    "--set",
    "sets",
    metavar="KEY=VALUE",
    multiple=True,
    shell_complete=completion.complete_request_keys,
    help="A key or parameter of the request, instead of its own.",
)
@format_option
def plan(
    request: str, site_name: str, data: tuple[str, ...], nodes: int | None, sets: tuple[str, ...], form: str
) -> None:
    """Show the plan that `run` would make from REQUEST (a TOML file). `run -` accepts it on stdin.

    Queries the site's limits: exit code 4 for a job that sbatch would refuse, a note for one that would wait for them.
    `pit place plan` checks its nodes, too.
    """
    from pitools.core.output import Output
    from pitools.launch.limit_check import check_limits
    from pitools.launch.plan import require_workdir
    from pitools.launch.sweep.points import parse_point
    from pitools.site.load import load_site

    site = load_site(site_name)
    job_plan = _make_plan(request, site, data, nodes, parse_point(sets))
    require_workdir(job_plan, site)
    for line in check_limits(job_plan, site):
        click.echo(f"pit: note: {line}", err=True)
    with Output(form, PLAN_COLUMNS) as out:
        out(job_plan)


@click.command()
@request_argument
@sites_option("The site, as `pit site list` names it; several share a sweep's runs.")
@data_option()
@click.option("--nodes", type=click.IntRange(1), help="Instead of the request's.")
@click.option(
    "--set",
    "sets",
    metavar="KEY=VALUES",
    multiple=True,
    shell_complete=completion.complete_request_keys,
    help=SET_HELP,
)
@click.option("--points", type=LocalPath(dir_okay=False), help="A sweep's points: JSON Lines, or CSV with a header.")
@click.option("--name", metavar="TEMPLATE", help="Run's name, or template of a sweep's. [default: {name}-{index}]")
@click.option("--sweep", metavar="NAME", help="Name of the sweep. [default: the request's name and digest]")
@click.option("--at-a-time", type=click.IntRange(1), help="Most first jobs of one array that run at once.")
@click.option("--max-points", type=click.IntRange(1), default=1000, show_default=True, help="Refuse a larger sweep.")
@click.option("--wait", is_flag=True, help="Wait until the run or sweep has ended; exit 1 unless all finished.")
@format_option
@click.pass_context
def run(
    ctx: click.Context,
    request: str,
    sites: tuple[str, ...],
    data: tuple[str, ...],
    nodes: int | None,
    sets: tuple[str, ...],
    points: Path | None,
    name: str | None,
    sweep: str | None,
    at_a_time: int | None,
    max_points: int,
    wait: bool,
    form: str,
) -> None:
    """Run REQUEST (a TOML file, or - for a plan on stdin). Returns after the submission, or with --wait at the end.

    With several values of a key, it is a sweep: a folder of runs, one for each point. Run the same command again to
    launch the points that have no run yet.
    """
    if request != "-":
        from pitools.launch.sweep.points import make_points, parse_sets, read_points

        all_points = make_points(parse_sets(sets), read_points(points) if points else (), max_points)
        if len(all_points) > 1 or points or sweep or len(sites) > 1:
            from pitools.commands.launch_sweep import SweepOptions, run_sweep

            options = SweepOptions(name, sweep, at_a_time or 0)
            run_sweep(ctx, Path(request), sites, data, nodes, all_points, options, wait, form)
            return
        if at_a_time:
            from pitools.core.errors import UsageError

            raise UsageError("a single run (expected a sweep)", where="--at-a-time", hint="--set lr=1e-3,3e-4")
        _run_one(ctx, request, sites[0], data, nodes, all_points[0], name, wait, form)
        return
    _reject_flags(ctx, "sites", "data", "nodes", "sets", "points", "name", "sweep", "at_a_time", "max_points")
    _run_one(ctx, request, sites[0], (), None, {}, None, wait, form)


def _run_one(
    ctx: click.Context,
    request: str,
    site_name: str,
    data: tuple[str, ...],
    nodes: int | None,
    point: Point,
    name: str | None,
    wait: bool,
    form: str,
) -> None:
    """Run one request or plan."""
    from pitools.core.daemon_pool import DaemonPool
    from pitools.core.errors import TryLater
    from pitools.launch.limit_check import UNKNOWN, limits_for_ever
    from pitools.launch.submission import submit
    from pitools.run import run_folder
    from pitools.run.attempt_records import first_failure
    from pitools.site.load import load_site

    if request == "-":
        planned = _plan_from_stdin()
    else:
        planned = _make_plan(request, load_site(site_name), data, nodes, point, name)
    site = load_site(planned.site)
    limits = DaemonPool(1, "limits").submit(limits_for_ever, planned, site)
    run_dir = submit.submit_run(planned, site)
    try:
        lines = limits.result(_LIMITS_WAIT_S)
    except TimeoutError:  # the job is submitted: whoever waits for it should not wait for a note
        lines = [f"{UNKNOWN}: no answer within {_LIMITS_WAIT_S:g} s after the submission"]
    for line in lines:
        click.echo(f"pit: note: {line}", err=True)
    click.echo(f"pit: run {run_dir.name} in {run_dir}", err=True)
    ended = _follow(run_dir, site, planned.request.args.get("steps")) if wait else None
    show_runs(form, [ended or _current_record(run_dir, site)])
    if ended:
        echo_goodput(run_dir, site)
    if ended and not ended.is_over:
        raise TryLater(f"job {ended.job_id} is not in Slurm, and the run has no verdict", where=str(run_dir))
    if ended and ended.state != "COMPLETED":
        attempt = run_folder.last_attempt(run_dir)
        failed = first_failure(attempt) if attempt else None
        first_rank = f"rank {failed.rank} on {failed.node} ended first, with {failed.exit_code}; " if failed else ""
        click.echo(f"pit: the run was stopped: {ended.cause}: {ended.reason}", err=True)
        click.echo(f"pit: {first_rank}see: pit launch why {run_dir}", err=True)
        ctx.exit(1)


def _make_plan(
    request: str, site: Site, data: tuple[str, ...], nodes: int | None, point: Point, name: str | None = None
) -> Plan:
    from pitools.launch.sweep import points

    job_plan = points.plan_point(
        Path(request), site, point, data=parse_named_paths(data, "--data"), nodes=nodes or 0, name=name or "{name}"
    )
    warn_of_unusable(job_plan)
    return job_plan


def warn_of_unusable(plan: Plan) -> None:
    """Print a note for each dataset version of a plan that should not be used, a missing script, and unusable hooks."""
    import re

    from pitools.core.errors import PitError
    from pitools.launch import hooks
    from pitools.store.resolve import warning_for

    for data in plan.data:
        if text := warning_for(Path(data.source)):
            click.echo(f"pit: note: dataset {data.name}: {text}", err=True)
    for hook in plan.hooks:
        try:
            hooks.find_program(hook, Path(plan.request.workdir))
        except PitError as error:
            click.echo(f"pit: note: hook {hook.command[0]}: {error.message}", err=True)
    script = re.match(r"\s*python[\d.]*\s+([\w./-]+\.py)(?!\S)", plan.request.command)
    if script and not Path(plan.request.workdir, script[1]).exists():
        click.echo(f"pit: note: command: there is no {script[1]} in {plan.request.workdir}", err=True)


def _plan_from_stdin() -> Plan:
    import sys

    import msgspec

    from pitools.core.errors import UsageError
    from pitools.launch import request
    from pitools.launch.plan import Plan

    text = sys.stdin.read()
    if not text.strip():
        raise UsageError("plan: empty input", where="stdin", hint="pit launch plan REQUEST | pit launch run -")
    try:
        planned = decode_json(text, Plan)
    except msgspec.DecodeError as error:
        raise UsageError(f"not a plan: {error}", where="stdin", hint="pipe it from `pit launch plan`") from error
    request.check_request(planned.request, "stdin")
    return planned


def _current_record(run_dir: Path, site: Site) -> RunRecord:
    """Return the record of the run just started, from its folder alone if Slurm does not answer."""
    from pitools.core.errors import PitError
    from pitools.launch.monitor import status

    try:
        return status.run_status(run_dir, site)
    except PitError:  # the job is submitted: an error now would have a script launch it again
        return status.run_status(run_dir, site, query_slurm=False)


def _reject_flags(ctx: click.Context, *names: str) -> None:
    """Raise UsageError for options that would change a plan from stdin: it is already resolved."""
    from pitools.core.errors import UsageError

    for name in names:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = {"sites": "--site", "sets": "--set"}.get(name, "--" + name.replace("_", "-"))
            raise UsageError(f"{flag} cannot change a plan", where="launch run -", hint=f"give {flag} to `launch plan`")


def _follow(run_dir: Path, site: Site, steps: object) -> RunRecord:
    """Wait for the run, with a progress bar of its steps. Ctrl-C cancels a local run; a Slurm job continues."""
    from pitools.core.progress import progress_bar
    from pitools.launch.monitor import wait
    from pitools.launch.recovery import cancel_run

    try:
        with progress_bar(run_dir.name, steps if isinstance(steps, int) else 0, unit="steps") as advance:
            return wait.wait_for_run(run_dir, site, advance, lambda line: click.echo(f"pit: {line}", err=True))
    except KeyboardInterrupt:
        if site.scheduler == "none":
            cancel_run.cancel_run(run_dir, site)
            click.echo("pit: the run is being cancelled", err=True)
        else:
            click.echo(f"pit: the job continues; to end it: pit launch cancel {run_dir}", err=True)
        raise
