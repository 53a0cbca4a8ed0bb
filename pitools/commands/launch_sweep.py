"""`pit launch sweep …`, and the sweeps of `pit launch run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath, format_option, parse_named_paths, site_option
from pitools.launch.run_lookup import runs_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pitools.core.errors import PitError
    from pitools.launch.sweep.points import Point
    from pitools.launch.sweep.sweep_folder import SweepPoint
    from pitools.launch.sweep.sweep_table import SweepRow
    from pitools.site.schema import Site

_COLUMNS = ("state", "steps", "loss", "steps_per_s", "goodput", "cause", "site", "run_id")


class SweepOptions(NamedTuple):
    """The options of `pit launch run` for sweeps. name: template of the runs' names. at_a_time: 0 for no limit."""

    name: str | None
    sweep: str | None
    at_a_time: int


def run_sweep(
    ctx: click.Context,
    request: Path,
    site_names: tuple[str, ...],
    data: tuple[str, ...],
    nodes: int | None,
    points: Sequence[Point],
    options: SweepOptions,
    wait: bool,
    form: str,
) -> None:
    """Launch the points of a sweep that have no run yet, and print the sweep's table."""
    from pitools.commands.launch_run import warn_of_unusable
    from pitools.core.progress import progress_bar
    from pitools.launch import request as requests
    from pitools.launch.sweep import launch_sweep, sweep_folder
    from pitools.launch.sweep import points as sweep_points
    from pitools.site.load import load_site

    sites = [load_site(name) for name in dict.fromkeys(site_names)]
    loaded = requests.load_request(request, points[0])
    digest = sweep_folder.request_digest(request.read_text(), tuple(site.name for site in sites))
    name = options.sweep or f"{loaded.name}-{digest[:6]}"
    require_sweep_name(name)
    sweep_dir = sweep_folder.sweeps_dir(runs_dir(sites[0])) / name
    points_on_disk = sweep_folder.read_points(sweep_dir)
    recorded = sweep_folder.points_by_id(points_on_disk)
    template = options.name or sweep_points.default_template(points)
    planned, index = [], sweep_folder.next_index(points_on_disk)
    for point in points:
        known = recorded.get(sweep_points.point_id(point))
        number = known.index if known else index
        index += known is None
        site = next((site for site in sites if known and site.name == known.site), sites[number % len(sites)])
        plan = sweep_points.plan_point(
            request, site, point, data=parse_named_paths(data, "--data"), nodes=nodes or 0, name=template, index=number
        )
        planned.append(launch_sweep.PlannedPoint(point, site, plan))
    warn_of_unusable(planned[0].plan)
    sweep_folder.open_sweep(sweep_dir, request, digest, tuple(site.name for site in sites), sites[0].paths.runs_access)
    with progress_bar(sweep_dir.name, len(planned), unit="runs") as advance:
        result = launch_sweep.launch_points(sweep_dir, planned, at_a_time=options.at_a_time, advance=advance)
    known_text = f", {result.existing} were launched before" if result.existing else ""
    click.echo(f"pit: sweep {sweep_dir.name}: {result.launched} runs launched{known_text}", err=True)
    if result.existing and (note := _note_on_existing(result.points)):
        click.echo(f"pit: {note}", err=True)
    click.echo(f"pit: compare them: pit launch sweep show {sweep_dir}", err=True)
    if wait:
        _wait_for_runs(result.points, {site.name: site for site in sites})
    rows = _rows(result.points)
    _show_rows(rows, form)
    if wait and any(row.state != "COMPLETED" for row in rows):
        ctx.exit(1)


def _note_on_existing(points: Sequence[SweepPoint]) -> str:
    """Return what may surprise in a sweep that is launched again: other code, and runs that stopped; "" if nothing."""
    import contextlib

    from pitools.core.errors import DataError
    from pitools.launch.provenance.code_copy import read_listing
    from pitools.launch.recovery.apply_decision import read_verdict

    notes = []
    with contextlib.suppress(DataError, OSError):  # runs without a copy of their code
        if len({read_listing(Path(point.run_dir)).digest for point in (points[0], points[-1])}) > 1:
            notes.append(
                "the code has changed since the sweep began: its runs differ in it; another sweep: --sweep NAME"
            )
    stopped = []
    for point in points:
        with contextlib.suppress(DataError, OSError):
            verdict = read_verdict(Path(point.run_dir))
            stopped += [point] if verdict and verdict.state == "stopped" else []
    if stopped:
        run = Path(stopped[0].run_dir).name
        notes.append(f"{len(stopped)} runs were stopped and are not launched again: pit launch resume {run} --force")
    return "; ".join(notes)


def require_sweep_name(name: str) -> None:
    """Raise UsageError for a name that a sweep's folder cannot have."""
    import re

    from pitools.core.errors import UsageError

    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name):
        raise UsageError(f'sweep "{name}": invalid name (expected a-z, 0-9, - and _)', where="--sweep")


def _wait_for_runs(points: Sequence[SweepPoint], sites: dict[str, Site]) -> None:
    """Follow the runs of each site until all have ended; continue interrupted ones."""
    import threading

    from pitools.launch.monitor import follow_runs

    def follow(site: Site) -> None:
        paths = [Path(point.run_dir) for point in points if point.site == site.name]
        for run in follow_runs.changed_runs(follow_runs.poll_runs(paths, site, _note)):
            _note(f"{run.run_id}: {run.state.lower()}{f', {run.cause}' if run.cause else ''}")

    threads = [threading.Thread(target=follow, args=(site,), daemon=True) for site in sites.values()]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
    except KeyboardInterrupt:
        _note("the runs continue; to end them: pit launch sweep cancel SWEEP")
        raise


def _note(text: str) -> None:
    click.echo(f"pit: {text}", err=True)


def _report_to(errors: list[PitError]) -> Callable[[Path, PitError], None]:
    """Return a function that prints the error of one of several records, and adds it to `errors`."""

    def report_error(path: Path, error: PitError) -> None:
        errors.append(error)
        _note(f"{path.name}: {error}")

    return report_error


def _exit_if_any(ctx: click.Context, errors: Sequence[PitError]) -> None:
    """Exit with the code of the last error; all have been printed."""
    if errors:
        ctx.exit(errors[-1].exit_code)


def _rows(points: Sequence[SweepPoint]) -> list[SweepRow]:
    from pitools.core.errors import PitError
    from pitools.launch.sweep import sweep_table
    from pitools.site.load import load_site

    sites = {}
    for name in dict.fromkeys(point.site for point in points):
        try:
            sites[name] = load_site(name)
        except PitError as error:
            _note(f"site {name}: {error}")
    return sweep_table.sweep_rows(points, sites, lambda path, error: _note(f"{path.name}: {error}"))


def _show_rows(rows: Sequence[SweepRow], form: str) -> None:
    """Print rows; tables have a column for each key of the points, and for each metric."""
    from pitools.core.output import Output

    keys = dict.fromkeys(f"point.{key}" for row in rows for key in row.point)
    metrics = dict.fromkeys(f"metrics.{name}" for row in rows for name in row.metrics)
    with Output(form, ("name", *keys, *_COLUMNS[:3], *metrics, *_COLUMNS[3:])) as out:
        for row in rows:
            out(row)


def sweep_argument(function: Any) -> Any:
    """SWEEP, a name or a folder, that a shell can complete."""
    return click.argument("sweep", shell_complete=completion.complete_sweeps)(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Compare the runs of a sweep, plot them, and stop the worst. `pit launch run REQUEST --set` makes a sweep."""


@group.command()
@sweep_argument
@site_option
@click.option("--sort", metavar="COLUMN", help="A column, a key of the points or a metric; -COLUMN for the reverse.")
@click.option("--where", "conditions", metavar="CONDITIONS", default="", help="Such as 'lr<0.1,success>0.5'.")
@format_option
@click.pass_context
def show(ctx: click.Context, sweep: str, site_name: str, sort: str | None, conditions: str, form: str) -> None:
    """Show the runs of SWEEP (name or folder): point, state, loss, metrics, steps/s and goodput.

    Metrics are the last values of those that the program gave to its step log.
    """
    from pitools.launch.monitor.run_filter import filter_rows
    from pitools.launch.sweep import sweep_folder, sweep_table

    errors: list[PitError] = []
    rows = _rows(sweep_folder.read_points(find_sweep_dir(sweep, site_name), _report_to(errors)))
    rows = filter_rows(rows, conditions, sweep_table.column_names(rows), sweep_table.cell)
    _show_rows(sweep_table.sort_rows(rows, sort) if sort else rows, form)
    _exit_if_any(ctx, errors)


@group.command()
@sweep_argument
@site_option
@click.option("--to", "target", type=LocalPath(), required=True, metavar="FILE", help="An .svg or .png file.")
@click.option("--kind", type=click.Choice(["losses", "points"]), default="losses", show_default=True)
@click.pass_context
def plot(ctx: click.Context, sweep: str, site_name: str, target: Path, kind: str) -> None:
    """Plot SWEEP: the loss of each run over its steps, or parallel coordinates of its points, coloured by loss."""
    from pitools.launch.sweep import sweep_folder, sweep_plot

    errors: list[PitError] = []
    points = sweep_folder.read_points(find_sweep_dir(sweep, site_name), _report_to(errors))
    rows = _rows(points)
    if kind == "losses":
        sweep_plot.plot_losses(points, rows, target)
    else:
        sweep_plot.plot_points(rows, target)
    click.echo(f"pit: {target}", err=True)
    _exit_if_any(ctx, errors)


@group.command()
@sweep_argument
@site_option
@click.option("--rungs", required=True, metavar="STEPS", help="Numbers of steps at which to judge: 100,200,400.")
@click.option("--keep", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.5, show_default=True)
@click.option("--min", "smallest", metavar="METRIC", help="The smallest is the best. [default: loss]")
@click.option("--max", "largest", metavar="METRIC", help="The largest is the best.")
@click.option("--dry-run", is_flag=True, help="Decide only.")
@format_option
@click.pass_context
def halve(
    ctx: click.Context,
    sweep: str,
    site_name: str,
    rungs: str,
    keep: float,
    smallest: str | None,
    largest: str | None,
    dry_run: bool,
    form: str,
) -> None:
    """Cancel the runs of SWEEP whose loss or METRIC at a rung is not among the best share. Safe to repeat, as by cron.

    The loss at a rung is the mean of the last tenth of the steps before it; a metric's value is its last one, and a run
    without one is left alone. A run that was cancelled stays so.
    """
    from pitools.core.errors import PitError, UsageError, suggest
    from pitools.core.output import Output
    from pitools.launch.recovery import cancel_run
    from pitools.launch.sweep import halving, sweep_folder
    from pitools.run.steps import last_metrics, read_run_steps
    from pitools.site.load import load_site
    from pitools.slurm.states import is_final

    points = sweep_folder.read_points(find_sweep_dir(sweep, site_name))
    logs = [(point.name, Path(point.run_dir).name, read_run_steps(Path(point.run_dir))) for point in points]
    if smallest and largest:
        raise UsageError("--min and --max are both given", hint="leave one of them out")
    metric = largest or smallest or "loss"
    known = {"loss", *(name for _, _, logged in logs for name in last_metrics(logged))}
    if metric not in known:
        _note(f'no run has logged a metric "{metric}" yet: {suggest(metric, known)}')
    states = {row.run_id: row for row in _rows(points)}
    by_id = {Path(point.run_dir).name: point for point in points}
    errors: list[PitError] = []
    with Output(form) as out:
        for decision in halving.decide(logs, parse_rungs(rungs), keep, metric=metric, is_largest_best=bool(largest)):
            point = by_id[decision.run_id]
            if not is_final(states[decision.run_id].state):
                if decision.action == "stop" and not dry_run:
                    try:
                        cancel_run.cancel_run(Path(point.run_dir), load_site(point.site))
                    except PitError as error:  # the others of the rung are cancelled all the same
                        _report_to(errors)(Path(point.run_dir), error)
                        continue
                out(decision)
    _exit_if_any(ctx, errors)


def parse_rungs(text: str) -> list[int]:
    """Return the numbers of steps in `100,200,400`. Raises UsageError."""
    from pitools.core.errors import UsageError

    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f'"{text}": not a list of steps', where="--rungs", hint="--rungs 100,200,400")
    return [int(part) for part in parts]


@group.command()
@sweep_argument
@site_option
@format_option
@click.pass_context
def cancel(ctx: click.Context, sweep: str, site_name: str, form: str) -> None:
    """Cancel every run of SWEEP that has not ended. Safe to repeat."""
    from pitools.core.errors import PitError
    from pitools.launch.recovery import cancel_run
    from pitools.launch.sweep import sweep_folder
    from pitools.site.load import load_site

    errors: list[PitError] = []
    report_error = _report_to(errors)
    points = sweep_folder.read_points(find_sweep_dir(sweep, site_name), report_error)
    for point in points:
        try:
            if Path(point.run_dir).is_dir():
                cancel_run.cancel_run(Path(point.run_dir), load_site(point.site))
        except PitError as error:
            report_error(Path(point.name), error)
    _show_rows(_rows(points), form)
    _exit_if_any(ctx, errors)


@group.command("list")
@site_option
@format_option
@click.pass_context
def list_command(ctx: click.Context, site_name: str, form: str) -> None:
    """List the sweeps of a site, oldest first."""
    from pitools.core.errors import DataError
    from pitools.core.output import Output
    from pitools.launch.sweep import sweep_folder
    from pitools.site.load import load_site

    root = sweep_folder.sweeps_dir(runs_dir(load_site(site_name)))
    errors: list[PitError] = []
    report_error = _report_to(errors)
    sweeps = []
    for path in sorted(root.glob("*/sweep.json")):
        try:
            sweeps.append(sweep_folder.load_sweep(path.parent))
        except DataError as error:
            report_error(path.parent, error)
    if not sweeps and not errors:
        _note(f"no sweeps in {root}")
    with Output(form, ("name", "created", "sites", "request")) as out:
        for sweep in sorted(sweeps, key=lambda sweep: sweep.created):
            out(sweep)
    _exit_if_any(ctx, errors)


def find_sweep_dir(sweep: str, site_name: str) -> Path:
    """Return a sweep's folder: at the site first, then at any site. Raises UsageError."""
    from pitools.core.errors import PitError, UsageError
    from pitools.launch.sweep import sweep_folder
    from pitools.site.load import load_site, site_names

    try:
        return sweep_folder.find_sweep(runs_dir(load_site(site_name)), sweep)
    except UsageError:
        for name in site_names():
            try:
                return sweep_folder.find_sweep(runs_dir(load_site(name)), sweep)
            except (PitError, OSError):
                continue
        raise
