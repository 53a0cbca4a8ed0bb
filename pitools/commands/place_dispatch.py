"""`pit place run|tick|watch|list|cancel|declare-lost`: one queue over several sites."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import complete_files
from pitools.commands.options import rows_format_option

if TYPE_CHECKING:
    from pitools.launch.request import Request
    from pitools.place.dispatch.journal import QueueJob
    from pitools.place.dispatch.status import TickResult
    from pitools.place.dispatch.tick import Dispatcher
    from pitools.site.schema import Site

_TICK_EVERY_S = 5.0


@click.command()
@click.argument("requests", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "--site", "sites", multiple=True, envvar="PIT_SITES", metavar="NAME", help="May run there; else anywhere."
)
@click.option("--owner", metavar="NAME", help="Owner in the records of `list`, and key of the run-time history.")
@click.option("--wait", is_flag=True, help="Tick until all have ended; exit 1 unless all completed.")
@rows_format_option
@click.pass_context
def run(
    ctx: click.Context, requests: tuple[str, ...], sites: tuple[str, ...], owner: str | None, wait: bool, form: str
) -> None:
    """Put REQUESTS (TOML files, or - for names of such files on stdin) in the queue that several sites serve."""
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store, watch
    from pitools.place.estimate import plan
    from pitools.site import template

    place = store.queue_dir()
    loaded = _sites(sites)
    wanted = [_check_request(path, loaded) for path in _paths(requests)]
    plan.require_feasible([request for request, _, _ in wanted], loaded)
    owner_name = owner or template.expand_placeholders("{user}")
    jobs = store.enqueue(
        place, [store.make_request(request, may, user=owner_name, request_text=text) for request, may, text in wanted]
    )
    site_status = status.read_site_status(place)
    rows = [status.job_row(job, site_status) for job in jobs]
    if wait:
        ids = [job.job_id for job in jobs]
        news = watch.Messages(own_jobs=ids)

        def is_over(ticked: TickResult) -> bool:
            _print_lines(news.new_messages(ticked))
            return watch.finished_rows(place, ids) is not None

        watch.tick_until(_make_dispatcher(place, repeats=True), _TICK_EVERY_S, is_over)
        rows = watch.finished_rows(place, ids) or rows
    with Output(form, status.JOB_COLUMNS) as out:
        for row in rows:
            out(row)
    if wait and any(row.state != "done" for row in rows):
        ctx.exit(1)


@click.command()
@rows_format_option
@click.pass_context
def tick(ctx: click.Context, form: str) -> None:
    """Query all sites, decide, and submit, once. For cron: while another tick runs, this one ends at once, with exit 0.

    A problem is printed by the tick that finds it, not by later ones; `pit place list` shows it as long as it lasts.
    Exit 0 if a site is up or busy. Else 75 if one did not answer, and 3 or 4 for wrong site files or failed actions.
    """
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store, watch

    place = store.queue_dir()
    last = status.read_site_status(place)
    if not (last.ticked_at or any(job for part in ("jobs", "done") for job in (place / part).iterdir())):
        click.echo(f"pit: the queue in {place} is new, and empty; if it should not be, mount its disk", err=True)
    news = watch.Messages(last)
    ticked = _make_dispatcher(place).tick()
    if ticked is None:
        click.echo("pit: another tick is at work", err=True)
        return
    with Output(form, status.SITE_COLUMNS) as out:
        for row in ticked.sites.sites:
            out(row)
    _print_lines(news.new_messages(ticked))
    ctx.exit(ticked.exit_code)


@click.command()
@click.option("--every", default=f"{_TICK_EVERY_S:g}s", show_default=True, metavar="TIME", help="How often to tick.")
@click.option("--until-empty", is_flag=True, help="End when every job is over.")
@rows_format_option
def watch(every: str, until_empty: bool, form: str) -> None:
    """Run ticks repeatedly, and show the queue live; in a pipe, print one record for every change.

    As TSV, jobs and sites have the same columns; as a table in a pipe, each change is a line of text. An unreadable job
    is reported on stderr; with --until-empty, it is an error if no other job is left.
    """
    import sys

    from pitools.core import units
    from pitools.core.output import Output
    from pitools.place.dispatch import store, watch

    place = store.queue_dir()
    ticker, changes = _make_dispatcher(place, repeats=True), watch.ChangedRows()
    every_s = units.parse_duration(every)
    printed: set[str] = set()

    def is_enough(ticked: TickResult) -> bool:
        broken = [text for text in ticked.sites.broken if text not in printed]
        printed.update(broken)
        is_empty = until_empty and not ticked.jobs
        if is_empty and (unread := store.read_jobs(place)[1]):
            raise unread[0]
        _print_lines(broken)
        return is_empty

    if form not in ("auto", "table") or not sys.stdout.isatty():
        with Output("jsonl" if form == "auto" else form, ends_with_reader=True) as out:

            def lines(ticked: TickResult) -> bool:
                records = changes.changed(ticked, place)
                if form == "table":
                    for line in watch.change_lines(records):
                        click.echo(line)
                else:
                    for row in records:
                        out(watch.to_change_row(row) if form == "tsv" else row)
                return is_enough(ticked)

            watch.tick_until(ticker, every_s, lines)
        return
    from rich.live import Live

    latest: list[str] = []
    with Live(auto_refresh=False) as live:

        def drawn(ticked: TickResult) -> bool:
            latest.extend(watch.change_lines(changes.changed(ticked, place)))
            del latest[:-10]
            live.update(watch.live_table(ticked, latest), refresh=True)
            return is_enough(ticked)

        watch.tick_until(ticker, every_s, drawn)


@click.command("list")
@click.option("--all", "every", is_flag=True, help="Also the jobs that are over.")
@rows_format_option
def list_command(every: bool, form: str) -> None:
    """List the queue, oldest first: where each job is, or why it waits. Shows the last tick's state; queries no site.

    Sites that were not up in the last tick, and jobs that cannot be read, are printed on stderr.
    """
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store

    place = store.queue_dir()
    site_status = status.read_site_status(place)
    jobs, broken = store.read_jobs(place)
    if every:
        over, more = store.read_jobs(place, done=True)
        jobs, broken = over + jobs, more + broken
    with Output(form, status.JOB_COLUMNS) as out:
        for job in jobs:
            out(status.job_row(job, site_status))
    _print_lines(f"{row.site}: {row.state} since {row.since}: {row.reason}" for row in site_status.not_up.values())
    _print_lines(str(error) for error in broken[1:])
    if broken:
        raise broken[0]


@click.command()
@click.argument("job_ids", nargs=-1, required=True)
@rows_format_option
def cancel(job_ids: tuple[str, ...], form: str) -> None:
    """Withdraw jobs from the queue and from every site, with this tick or the next; safe to repeat."""
    from pitools.place.dispatch import store

    place = store.queue_dir()
    jobs = [store.find_job(place, job_id) for job_id in job_ids]
    _mark_and_tick(place, [(job, ["cancel"]) for job in jobs], form)


@click.command()
@click.argument("site")
@click.argument("job_ids", nargs=-1, required=True)
@rows_format_option
@click.pass_context
def declare_lost(ctx: click.Context, site: str, job_ids: tuple[str, ...], form: str) -> None:
    """Declare that jobs' tickets at SITE, which does not answer, will not run: the jobs are submitted elsewhere.

    A ticket is cancelled when the site answers again; that it has not run by then is your responsibility. If the site
    answers first, is busy, or its file is wrong, the ticket stays the job's, and the exit code is 1.
    """
    from pitools.core.errors import UsageError, suggest
    from pitools.place.dispatch import status, store

    place, marks = store.queue_dir(), []
    for job_id in job_ids:
        job = store.find_job(place, job_id)
        numbers = [ticket.number for ticket in job.live if ticket.site == site]
        if not numbers:
            hint = suggest(site, {ticket.site for ticket in job.live})
            raise UsageError(f'job "{job_id}" has no ticket at "{site}"', where="SITE", hint=hint)
        marks.append((job, [f"lost.{number}" for number in numbers]))
    jobs = _mark_and_tick(place, marks, form)
    row = status.read_site_status(place).not_up.get(site)
    reason = f"is {row.state}: {row.reason}" if row and row.state in ("busy", "misconfigured") else ""
    kept = [
        (job, ticket)
        for job in jobs
        for ticket in job.live
        if ticket.site == site and (reason or ticket.number not in job.declared_lost)
    ]
    for queue_job, ticket in kept:
        store.remove_lost_mark(queue_job, ticket.number)
    if row and row.state == "misconfigured":
        reason += '; mend its file; of a cluster that is gone, write one with kind = "ssh" and a host that is not there'
    _print_lines(f"{ticket.name} is not declared lost: {site} {reason or 'has answered'}" for _, ticket in kept)
    if kept:
        ctx.exit(1)


def _mark_and_tick(place: Path, marks: list[tuple[QueueJob, list[str]]], form: str) -> list[QueueJob]:
    """Write the marks of jobs that are not over, tick, print each job's row, and return the jobs."""
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store

    for job, names in marks:
        if not job.is_over:
            for name in names:
                store.write_mark(job, name)
    ticked = _make_dispatcher(place).tick()
    jobs = [store.find_job(place, job.job_id) for job, _ in marks]
    with Output(form, status.JOB_COLUMNS) as out:
        for job in jobs:
            out(status.job_row(job, status.read_site_status(place)))
    if ticked:
        _print_lines(f"{name}: {error}" for name, error in sorted(ticked.faults.items()))
    return jobs


def _paths(requests: tuple[str, ...]) -> list[Path]:
    """Return the named files; for `-`, the names on stdin."""
    import sys

    paths: list[Path] = []
    for name in requests:
        paths += [Path(line) for line in sys.stdin.read().splitlines() if line] if name == "-" else [Path(name)]
    return paths


def _sites(names: tuple[str, ...]) -> list[Site]:
    """Return the named sites, or all that can run jobs; print why others cannot, or raise that if they are named."""
    from pitools.core.errors import ConfigError
    from pitools.launch.tickets import shared_fs
    from pitools.launch.tickets.remote import paths
    from pitools.place.clusters import snapshot

    loaded, skipped = snapshot.load_sites(names)
    usable = []
    for site in loaded:
        try:
            if site.connection.kind == "ssh":
                paths.require_paths(site)
            else:
                shared_fs.runs_dir(site)
            usable.append(site)
        except ConfigError as error:
            if names:
                raise
            skipped.append(snapshot.skipped_site(site.name, error))
    _print_lines(f"{skip.site} is skipped: {skip.reason}" for skip in skipped)
    return usable


def _check_request(path: Path, sites: list[Site]) -> tuple[Request, tuple[str, ...], str]:
    """Return a request and the sites that could run it. Raises the errors of all sites if none can."""
    from pitools.commands.launch_run import warn_of_unusable
    from pitools.core.errors import ConfigError, PitError
    from pitools.launch import plan
    from pitools.launch import request as requests

    wanted = requests.fill_datasets(requests.load_request(path), {})
    able: list[str] = []
    refusals = []
    for site in sites:
        try:
            launch_plan = plan.make_plan(wanted, site, str(path))
            plan.require_workdir(launch_plan, site)
            if not able:
                warn_of_unusable(launch_plan)
            able.append(site.name)
        except PitError as error:
            refusals.append(f"{site.name}: {error.message}")
    if not able:
        raise ConfigError("no site could take it", where=str(path), hint="; ".join(refusals) or "name one with --site")
    return wanted, tuple(able), path.read_text()


def _make_dispatcher(place: Path, *, repeats: bool = False) -> Dispatcher:
    from pitools.place.dispatch.tick import Dispatcher
    from pitools.place.policy import PolicyParams, decide

    return Dispatcher(place, partial(decide, policy=PolicyParams()), repeats=repeats)


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines on stderr."""
    for line in lines:
        click.echo(f"pit: {line}", err=True)
