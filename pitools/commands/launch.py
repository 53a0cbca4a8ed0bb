"""`pit launch`: a training job on a site, as a folder you can follow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import format_option, pairs, site_option

if TYPE_CHECKING:
    from pitools.launch.plan import Plan
    from pitools.run.folder import Run
    from pitools.site.model import Site

PLAN_COLUMNS = ("name", "site", "partition", "nodes", "ranks", "time", "bytes_per_node", "runs")
RUN_COLUMNS = ("run_id", "site", "job_id", "state", "exit_code", "nodes", "created")


@click.group()
def group() -> None:
    """Run a training job on a site, as a folder you can follow."""


@group.command()
@click.argument("request")
@site_option
@click.option("--data", metavar="NAME=PATH", multiple=True, help="Fill in a dataset of the request.")
@click.option("--nodes", type=click.IntRange(1), help="Instead of the request's.")
@format_option
def plan(request: str, site_name: str, data: tuple[str, ...], nodes: int | None, form: str) -> None:
    """Show what `run` would do with REQUEST (a TOML file), as a record that `run -` accepts."""
    from pitools.core.output import Output
    from pitools.site.load import load

    with Output(form, PLAN_COLUMNS) as out:
        out(_plan(request, load(site_name), data, nodes))


@group.command()
@click.argument("request")
@site_option
@click.option("--data", metavar="NAME=PATH", multiple=True, help="Fill in a dataset of the request.")
@click.option("--nodes", type=click.IntRange(1), help="Instead of the request's.")
@click.option("--wait", is_flag=True, help="Return when the run has ended; exit 1 unless it completed.")
@format_option
@click.pass_context
def run(
    ctx: click.Context, request: str, site_name: str, data: tuple[str, ...], nodes: int | None, wait: bool, form: str
) -> None:
    """Run REQUEST, a TOML file, or - for a plan on stdin. Returns at once, or with --wait at the end."""
    from pitools.core.errors import TryLater
    from pitools.core.output import Output
    from pitools.launch import submit
    from pitools.run import folder
    from pitools.site.load import load
    from pitools.slurm.states import is_finished

    if request == "-":
        _refuse_flags(ctx, "site_name", "data", "nodes")
        planned = _plan_from_stdin()
    else:
        planned = _plan(request, load(site_name), data, nodes)
    site = load(planned.site)
    run_dir = submit.run(planned, site)
    click.echo(f"pit: run {run_dir.name} in {run_dir}", err=True)
    ended = _follow(run_dir, site, planned.request.args.get("steps")) if wait else None
    with Output(form, RUN_COLUMNS) as out:
        out(ended or _now(run_dir, site))
    if ended and not is_finished(ended.state):
        raise TryLater(f"Slurm no longer knows job {ended.job_id}, and the run left no word", where=str(run_dir))
    if ended and ended.state != "COMPLETED":
        failed = folder.first_failure(run_dir)
        who = f"rank {failed[1]} on {failed[2]} ended first, with {failed[0]}; " if failed else ""
        click.echo(f"pit: the run {ended.state.lower()}; {who}see: pit launch logs {run_dir}", err=True)
        ctx.exit(1)


@group.command("list")
@site_option
@format_option
def list_(site_name: str, form: str) -> None:
    """List the runs of a site, oldest first; Slurm is asked once for all that have not ended."""
    from pitools.core.errors import DataError, TryLater
    from pitools.core.output import Output
    from pitools.launch import status
    from pitools.run import folder
    from pitools.site.load import load

    site = load(site_name)
    found: list[Path] = []
    broken: DataError | None = None
    for path in folder.runs(_runs(site)):
        try:
            if status.plan_of(path).site == site.name:
                found.append(path)
        except DataError as error:  # one broken folder must not hide the others
            broken = error
    try:
        runs = status.show_all(found, site)
    except TryLater as error:
        click.echo(f"pit: by their folders alone: {error}", err=True)
        runs = status.show_all(found, site, ask=False)
    with Output(form, RUN_COLUMNS) as out:
        for run in runs:
            out(run)
    if broken:
        raise broken


@group.command()
@click.argument("run")
@site_option
@click.option("--steps", is_flag=True, help="Show what its step log adds up to instead.")
@format_option
@click.pass_context
def show(ctx: click.Context, run: str, site_name: str, steps: bool, form: str) -> None:
    """Show a run, by id or folder, as it is now."""
    from pitools.core.output import Output
    from pitools.launch import status

    run_dir, site = _find(run, site_name)
    if steps:
        summary = status.summary(run_dir)
        if summary is None:
            click.echo("pit: the run has no step log (pitools.run.steps.StepLog writes one)", err=True)
            ctx.exit(1)
        with Output(form) as out:
            out(summary)
        return
    with Output(form, RUN_COLUMNS) as out:
        out(status.show(run_dir, site))


@group.command()
@click.argument("run")
@site_option
@click.option("--rank", type=click.IntRange(0), help="Default: the rank that failed first, else 0.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends or you interrupt.")
def logs(run: str, site_name: str, rank: int | None, follow: bool) -> None:
    """Print one rank's output of the last attempt; before the ranks start, the job's own."""
    from pitools.launch import logs
    from pitools.run import folder

    run_dir, site = _find(run, site_name)
    if rank is None:
        failed = folder.first_failure(run_dir)
        rank = failed[1] if failed else 0
    for text in logs.read(run_dir, site, rank, follow=follow):
        click.echo(text, nl=False)


@group.command()
@click.argument("run")
@site_option
@format_option
def cancel(run: str, site_name: str, form: str) -> None:
    """End a run; safe to repeat."""
    from pitools.core.output import Output
    from pitools.launch import status

    run_dir, site = _find(run, site_name)
    status.cancel(run_dir, site)
    with Output(form, RUN_COLUMNS) as out:
        out(status.show(run_dir, site))


def _plan(request: str, site: Site, data: tuple[str, ...], nodes: int | None) -> Plan:
    from msgspec.structs import replace

    from pitools.launch import plan
    from pitools.launch import request as requests

    path = Path(request)
    wanted = requests.with_data(requests.load(path), pairs(data, "--data"))
    if nodes:
        wanted = replace(wanted, nodes=nodes)
    return plan.make(wanted, site, str(path), request_text=path.read_text())


def _plan_from_stdin() -> Plan:
    import sys

    import msgspec

    from pitools.core.errors import UsageError
    from pitools.launch import request
    from pitools.launch.plan import Plan

    try:
        planned = msgspec.json.decode(sys.stdin.read(), type=Plan)
    except msgspec.DecodeError as error:
        raise UsageError(f"not a plan: {error}", where="stdin", hint="pipe it from `pit launch plan`") from error
    request.check(planned.request, "stdin")
    return planned


def _now(run_dir: Path, site: Site) -> Run:
    """The run just begun; a Slurm that took it and then falls silent is no failure."""
    from pitools.core.errors import TryLater
    from pitools.launch import status

    try:
        return status.show(run_dir, site)
    except TryLater:
        return status.show(run_dir, site, ask=False)


def _refuse_flags(ctx: click.Context, *names: str) -> None:
    """A plan is resolved: flags that would change it are not ignored but refused."""
    from pitools.core.errors import UsageError

    for name in names:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = "--" + name.removesuffix("_name")
            raise UsageError(f"{flag} cannot change a plan", where="launch run -", hint=f"give {flag} to `launch plan`")


def _runs(site: Site) -> Path:
    from pitools.site.template import fill

    return Path(fill(site.paths.runs)).absolute()


def _find(run: str, site_name: str) -> tuple[Path, Site]:
    """A run's folder and the site it is on, which its plan knows better than a flag."""
    from pitools.launch import status
    from pitools.run import folder
    from pitools.site.load import load

    run_dir = folder.find(_runs(load(site_name)), run)
    return run_dir, load(status.plan_of(run_dir).site)


def _follow(run_dir: Path, site: Site, steps: object) -> Run:
    """Wait for the run, with a bar of its steps. Ctrl-C ends a local run; a Slurm job goes on without us."""
    from pitools.core.progress import bar
    from pitools.launch import status

    try:
        with bar(run_dir.name, steps if isinstance(steps, int) else 0, unit="steps") as advance:
            return status.wait(run_dir, site, advance)
    except KeyboardInterrupt:
        if site.scheduler == "none":
            status.cancel(run_dir, site)
            click.echo("pit: the run is being cancelled", err=True)
        else:
            click.echo(f"pit: the job goes on; end it with: pit launch cancel {run_dir}", err=True)
        raise
