"""`pit launch list|show|logs|cancel`: what runs are there, and how are they."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.finding import run_folder, runs_of
from pitools.commands.options import format_option, run_argument, site_option

if TYPE_CHECKING:
    from pitools.site.model import Site

RUN_COLUMNS = ("run_id", "state", "cause", "steps", "attempt", "job_id", "nodes", "exit_code", "site", "created")


@click.command("list")
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
    for path in folder.runs(runs_of(site)):
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
    if not runs:
        click.echo(f"pit: no runs of {site.name} in {runs_of(site)}", err=True)
    if broken:
        raise broken


@click.command()
@run_argument()
@site_option
@click.option("--steps", is_flag=True, help="Show what its step log adds up to instead.")
@format_option
@click.pass_context
def show(ctx: click.Context, run: str, site_name: str, steps: bool, form: str) -> None:
    """Show a run, by id or folder, as it is now."""
    from pitools.core.output import Output
    from pitools.launch import status

    run_dir, site = find(run, site_name)
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


@click.command()
@run_argument()
@site_option
@click.option("--rank", type=click.IntRange(0), help="Default: the rank that failed first, else 0.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends or you interrupt.")
@click.option("--all", "whole", is_flag=True, help="Also the lines that submitit writes before and after it.")
def logs(run: str, site_name: str, rank: int | None, follow: bool, whole: bool) -> None:
    """Print one rank's output of the last attempt; before the ranks start, the job's own."""
    from pitools.launch import logs
    from pitools.run import folder

    run_dir, site = find(run, site_name)
    if rank is None:
        failed = folder.first_failure(run_dir)
        rank = failed[1] if failed else 0
    is_empty = True
    for text in logs.read(run_dir, site, rank, follow=follow, whole=whole):
        click.echo(text, nl=False)
        is_empty = is_empty and not text
    if is_empty:
        click.echo(f"pit: rank {rank} has said nothing; see: pit launch show {run_dir.name}", err=True)


@click.command()
@run_argument()
@site_option
@format_option
def cancel(run: str, site_name: str, form: str) -> None:
    """End a run for good, and its jobs; safe to repeat. One that is over is left as it is."""
    from pitools.core.output import Output
    from pitools.launch import status

    run_dir, site = find(run, site_name)
    given = status.cancel(run_dir, site)
    if given:
        ended = "has finished" if given.state == "finished" else "was stopped"
        click.echo(f"pit: it {ended} before, {given.t}: {given.reason}", err=True)
    with Output(form, RUN_COLUMNS) as out:
        out(status.show(run_dir, site))


def find(run: str, site_name: str) -> tuple[Path, Site]:
    """A run's folder and the site it is on, which its plan knows better than a flag."""
    from pitools.launch import status
    from pitools.site.load import load

    run_dir = run_folder(run, site_name)
    return run_dir, load(status.plan_of(run_dir).site)
