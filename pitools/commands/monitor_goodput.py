"""`pit monitor goodput`: where the allocated time of runs went."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import LocalPath, rows_format_option, run_argument, site_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pitools.core.errors import PitError
    from pitools.ledger.records import RunLedger
    from pitools.site.schema import Site


@click.command()
@run_argument("runs", metavar="RUN...", nargs=-1, required=True)
@site_option
@click.option("--plot", type=LocalPath(dir_okay=False), metavar="FILE", help="Also a picture: FILE.png, .svg or .pdf.")
@rows_format_option
def goodput(runs: tuple[str, ...], site_name: str, plot: Path | None, form: str) -> None:
    """Show the goodput of each RUN (id, folder, or the number of a Slurm job), and the seconds that each state took.

    Each GPU-second (or node-second) of an allocation is in exactly one state, from the step logs, checkpoints and
    attempts of the run and from sacct. Of a job of another program sacct knows no state: where jobstats has recorded
    how busy its GPUs were, busy time counts as productive, and `source` says so.
    """
    from pitools.core.output import Output
    from pitools.ledger.records import State

    ledgers = []
    columns = ("run_id", "goodput", "greatest_loss", "allocated_s", *(f"seconds.{state}" for state in State))
    with Output(
        form, (*columns, "calendar_goodput", "queue_s", "resource", "source", "site", "name"), ends_with_reader=not plot
    ) as out:
        for ledger in _ledgers(runs, site_name):
            ledgers.append(ledger)
            out(ledger)
            if ledger.bad_logs:
                click.echo(f"pit: note: {ledger.run_id}: step logs with bad lines or none: {ledger.bad_logs}", err=True)
    if plot:
        from pitools.ledger.plot import plot_ledgers

        plot_ledgers(ledgers, plot)


def _ledgers(runs: Sequence[str], site_name: str) -> Iterator[RunLedger]:
    """Yield the ledgers of runs and jobs, site by site, with one query of each Slurm."""
    from pitools.commands.launch_monitor import find_run_and_site
    from pitools.ledger.run_ledger import ledgers_of
    from pitools.site.load import load_site

    jobs = [run for run in runs if re.fullmatch(r"\d+([_+]\d+)?", run)]
    by_site: dict[str, tuple[Site, list[Path]]] = {}
    for run in runs:
        if run not in jobs:
            run_dir, site = find_run_and_site(run, site_name)
            by_site.setdefault(site.name, (site, []))[1].append(run_dir)
    errors: list[tuple[str, PitError]] = []
    for site, run_dirs in by_site.values():
        yield from ledgers_of(site, run_dirs, lambda *error: errors.append(error)).values()
    for run_id, error in errors:
        if run_id:
            raise error
        click.echo(f"pit: note: without Slurm's times: {error}", err=True)
    if jobs:
        yield from _job_ledgers(jobs, load_site(site_name))


def _job_ledgers(jobs: Sequence[str], site: Site) -> Iterator[RunLedger]:
    from pitools.core.errors import UsageError
    from pitools.ledger.run_ledger import job_ledger
    from pitools.site.connect import client

    slurm = client(site)
    rows, comments = slurm.accounting(jobs), slurm.admin_comments(jobs)
    for job_id in jobs:
        own = [row for row in rows if job_id in (row.raw_id, row.job_id, re.split(r"[_+]", row.job_id)[0])]
        if not own:
            raise UsageError(f"no job {job_id} in the accounting of {site.name}", hint="choose another with --site")
        if run := re.match(r"[\w.-]+-\d{8}-\d{6}-[0-9a-f]{6}", own[0].name):
            click.echo(f"pit: note: {job_id} is a job of a run: pit monitor goodput {run[0]}", err=True)
        for raw_id in dict.fromkeys(row.raw_id for row in own):
            starts = [row for row in own if row.raw_id == raw_id]
            yield job_ledger(starts, site=site.name, admin_comment=comments.get(raw_id, ""))
