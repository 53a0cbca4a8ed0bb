"""`pit place run|tick|watch|list|cancel`: one queue over several sites."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import complete_files
from pitools.commands.options import format_option

if TYPE_CHECKING:
    from pitools.launch.request import Request
    from pitools.place.dispatch.status import TickResult
    from pitools.place.dispatch.tick import Dispatcher
    from pitools.site.schema import Site

_TICK_EVERY_S = 5.0


@click.command()
@click.argument("requests", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "--site", "sites", multiple=True, envvar="PIT_SITES", metavar="NAME", help="May run there; else anywhere."
)
@click.option("--owner", metavar="NAME", help="Whose job `list` calls it; run times are learnt by it.")
@click.option("--wait", is_flag=True, help="Tick until all have ended; exit 1 unless all completed.")
@format_option
@click.pass_context
def run(
    ctx: click.Context, requests: tuple[str, ...], sites: tuple[str, ...], owner: str | None, wait: bool, form: str
) -> None:
    """Put REQUESTS (TOML files, or - for names of such files on stdin) in the queue that several sites serve."""
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store
    from pitools.place.dispatch import watch as follow
    from pitools.place.estimate import plan as survey
    from pitools.site import template

    place = store.queue_dir()
    known = _sites(sites)
    wanted = [_check_request(path, known) for path in _paths(requests)]
    survey.require_feasible([request for request, _, _ in wanted], known)
    who = owner or template.expand_placeholders("{user}")
    jobs = store.enqueue(
        place, [store.make_request(request, may, user=who, request_text=text) for request, may, text in wanted]
    )
    seen = status.read_site_status(place)
    rows = [status.job_row(job, seen) for job in jobs]
    if wait:
        ids = [job.job_id for job in jobs]
        news = follow.Messages(own_jobs=ids)

        def is_over(ticked: TickResult) -> bool:
            _print_lines(news.new_messages(ticked))
            return follow.finished_rows(place, ids) is not None

        follow.tick_until(_make_dispatcher(place), _TICK_EVERY_S, is_over)
        rows = follow.finished_rows(place, ids) or rows
    with Output(form, status.JOB_COLUMNS) as out:
        for row in rows:
            out(row)
    if wait and any(row.state != "done" for row in rows):
        ctx.exit(1)


@click.command()
@format_option
@click.pass_context
def tick(ctx: click.Context, form: str) -> None:
    """Look at every site, decide and submit, once. For cron: while another tick is at work it ends at once.

    What went wrong is told when it begins, and not at every tick: see `pit place list`. Exit 75 where no site answered.
    """
    from pitools.core.errors import TryLater
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store
    from pitools.place.dispatch import watch as follow

    place = store.queue_dir()
    news = follow.Messages(status.read_site_status(place))
    ticked = _make_dispatcher(place).tick()
    if ticked is None:
        click.echo("pit: another tick is at work", err=True)
        return
    changes = follow.ChangedRows()
    with Output(form, status.SITE_COLUMNS) as out:
        for row in changes.changed(ticked, place):
            if isinstance(row, status.SiteStatusRow):
                out(row)
    _print_lines(news.new_messages(ticked))
    if ticked.all_unreachable:
        codes = {error.exit_code for error in ticked.faults.values()}
        ctx.exit(codes.pop() if len(codes) == 1 else TryLater.exit_code)


@click.command()
@click.option("--every", default=f"{_TICK_EVERY_S:g}s", show_default=True, metavar="TIME", help="How often to tick.")
@click.option("--until-empty", is_flag=True, help="End when every job is over.")
@format_option
def watch(every: str, until_empty: bool, form: str) -> None:
    """Tick again and again, and show the queue live; in a pipe, one record for every change.

    As TSV, jobs and sites have the same columns; as a table in a pipe, each change is a line for people. A job that
    cannot be read is told on stderr; with --until-empty, where no other is left, it is an error.
    """
    import sys

    from pitools.core import units
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.place.dispatch import store
    from pitools.place.dispatch import watch as follow

    if form == "hosts":
        raise UsageError("--format hosts: the queue has no nodes to list", hint="--format jsonl")
    place = store.queue_dir()
    ticker, changes = _make_dispatcher(place), follow.ChangedRows()
    every_s = units.parse_duration(every)
    told: set[str] = set()

    def is_enough(ticked: TickResult) -> bool:
        broken = [text for text in ticked.sites.broken if text not in told]
        told.update(broken)
        is_empty = until_empty and not ticked.jobs
        if is_empty and (unread := store.read_jobs(place)[1]):
            raise unread[0]
        _print_lines(broken)
        return is_empty

    if form not in ("auto", "table") or not sys.stdout.isatty():
        with Output("jsonl" if form == "auto" else form) as out:

            def lines(ticked: TickResult) -> bool:
                found = changes.changed(ticked, place)
                if form == "table":
                    for line in follow.change_lines(found):
                        click.echo(line)
                else:
                    for row in found:
                        out(follow.to_change_row(row) if form == "tsv" else row)
                return is_enough(ticked)

            follow.tick_until(ticker, every_s, lines)
        return
    from rich.live import Live

    latest: list[str] = []
    with Live(auto_refresh=False) as live:

        def drawn(ticked: TickResult) -> bool:
            latest.extend(follow.change_lines(changes.changed(ticked, place)))
            del latest[:-10]
            live.update(follow.live_table(ticked, latest), refresh=True)
            return is_enough(ticked)

        follow.tick_until(ticker, every_s, drawn)


@click.command("list")
@click.option("--all", "every", is_flag=True, help="Also the jobs that are over.")
@format_option
def list_command(every: bool, form: str) -> None:
    """List the queue, oldest first: each job, where it is, and why it waits. Asks no site.

    On stderr: the sites that the last tick found silent, or where something went wrong.
    """
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store

    place = store.queue_dir()
    seen = status.read_site_status(place)
    found, broken = store.read_jobs(place)
    if every:
        over, more = store.read_jobs(place, done=True)
        found, broken = over + found, more + broken
    with Output(form, status.JOB_COLUMNS) as out:
        for job in found:
            out(status.job_row(job, seen))
    _print_lines(f"{row.site}: since {row.since}: {row.reason}" for row in seen.unreachable.values())
    if broken:
        raise broken[0]


@click.command()
@click.argument("job_ids", nargs=-1, required=True)
@click.option(
    "--lost", "site", metavar="SITE", help="Only its ticket at SITE, which says nothing of it: I know it will not run."
)
@format_option
def cancel(job_ids: tuple[str, ...], site: str | None, form: str) -> None:
    """Withdraw jobs from the queue and from every site, with this tick or the next; safe to repeat.

    With --lost, a job whose site is silent goes on elsewhere. Its ticket there is ended when the site comes back; that
    it has not run by then is what you answer for. Where the site answers first, nothing is given up.
    """
    from pitools.core.errors import UsageError, suggest
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store

    place = store.queue_dir()
    jobs = [store.find_job(place, job_id) for job_id in job_ids]
    for job in jobs:
        if site and site not in {ticket.site for ticket in job.live}:
            hint = suggest(site, {ticket.site for ticket in job.live})
            raise UsageError(f'job "{job.job_id}" has no ticket at "{site}"', where="--lost", hint=hint)
        if not job.is_over:
            for name in [f"lost.{ticket.number}" for ticket in job.live if ticket.site == site] if site else ["cancel"]:
                store.write_mark(job, name)
    ticked = _make_dispatcher(place).tick()
    with Output(form, status.JOB_COLUMNS) as out:
        for job in jobs:
            out(status.job_row(found := store.find_job(place, job.job_id), status.read_site_status(place)))
            for ticket in found.live:
                if site and ticket.site == site and ticket.number not in found.declared_lost:
                    click.echo(f"pit: {ticket.name} is not given up: {site} has answered for it", err=True)
    if ticked:
        _print_lines(f"{name}: {error}" for name, error in sorted(ticked.faults.items()))


def _paths(requests: tuple[str, ...]) -> list[Path]:
    """The files named, those of stdin where `-` stands."""
    import sys

    found: list[Path] = []
    for name in requests:
        found += [Path(line) for line in sys.stdin.read().splitlines() if line] if name == "-" else [Path(name)]
    return found


def _sites(names: tuple[str, ...]) -> list[Site]:
    """The sites of these names, or every one that can have jobs; of others it is said why not, or raised if named."""
    from pitools.core.errors import ConfigError
    from pitools.launch.tickets.remote import paths
    from pitools.place.clusters import snapshot

    known, skipped = snapshot.load_sites(names)
    found = []
    for site in known:
        try:
            if site.connection.kind == "ssh":
                paths.require_paths(site)
            found.append(site)
        except ConfigError as error:
            if names:
                raise
            skipped.append(snapshot.skipped_site(site.name, error))
    _print_lines(f"{one.site} is skipped: {one.reason}" for one in skipped)
    return found


def _check_request(path: Path, sites: list[Site]) -> tuple[Request, tuple[str, ...], str]:
    """A request that at least one of the sites could take, and those sites. Raises what is wrong with all of them."""
    from pitools.commands.launch_run import warn_of_unusable
    from pitools.core.errors import ConfigError, PitError
    from pitools.launch import plan
    from pitools.launch import request as requests

    wanted = requests.fill_datasets(requests.load_request(path), {})
    able: list[str] = []
    refusals = []
    for site in sites:
        try:
            made = plan.make_plan(wanted, site, str(path))
            plan.require_workdir(made, site)
            if not able:
                warn_of_unusable(made)
            able.append(site.name)
        except PitError as error:
            refusals.append(f"{site.name}: {error.message}")
    if not able:
        raise ConfigError("no site could take it", where=str(path), hint="; ".join(refusals) or "name one with --site")
    return wanted, tuple(able), path.read_text()


def _make_dispatcher(place: Path) -> Dispatcher:
    from pitools.place.dispatch.tick import Dispatcher
    from pitools.place.policy import JobTableBuilder, PolicyParams, decide

    columns = JobTableBuilder()
    return Dispatcher(place, lambda now_s, jobs, pools, held: decide(now_s, jobs, pools, held, PolicyParams(), columns))


def _print_lines(lines: Iterable[str]) -> None:
    """Say these on stderr."""
    for line in lines:
        click.echo(f"pit: {line}", err=True)
