"""`pit place run|tick|watch|list|cancel`: one queue over several sites."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.completion import files
from pitools.commands.options import format_option

if TYPE_CHECKING:
    from pitools.launch.request import Request
    from pitools.place.dispatch.status import Ticked
    from pitools.place.dispatch.tick import Ticker
    from pitools.site.schema import Site

_EVERY_S = 5.0


@click.command()
@click.argument("requests", nargs=-1, required=True, shell_complete=files)
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

    place = store.root()
    known = _sites(sites)
    wanted = [_checked(path, known) for path in _paths(requests)]
    survey.refuse_what_never_fits([request for request, _, _ in wanted], known)
    who = owner or template.fill("{user}")
    jobs = store.add(place, [store.ask(request, may, owner=who, request_text=text) for request, may, text in wanted])
    seen = status.sites(place)
    rows = [status.row_of(job, seen) for job in jobs]
    if wait:
        ids = [job.job_id for job in jobs]
        news = follow.News(mine=ids)

        def is_over(ticked: Ticked) -> bool:
            _tell(news.of(ticked))
            return follow.ended(place, ids) is not None

        follow.rounds(_ticker(place), _EVERY_S, is_over)
        rows = follow.ended(place, ids) or rows
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

    place = store.root()
    news = follow.News(status.sites(place))
    ticked = _ticker(place).tick()
    if ticked is None:
        click.echo("pit: another tick is at work", err=True)
        return
    changes = follow.Changes()
    with Output(form, status.SITE_COLUMNS) as out:
        for row in changes.of(ticked, place):
            if isinstance(row, status.SiteRow):
                out(row)
    _tell(news.of(ticked))
    if ticked.is_deaf:
        codes = {error.exit_code for error in ticked.faults.values()}
        ctx.exit(codes.pop() if len(codes) == 1 else TryLater.exit_code)


@click.command()
@click.option("--every", default=f"{_EVERY_S:g}s", show_default=True, metavar="TIME", help="How often to tick.")
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
    place = store.root()
    ticker, changes = _ticker(place), follow.Changes()
    every_s = units.seconds(every)
    told: set[str] = set()

    def is_enough(ticked: Ticked) -> bool:
        broken = [text for text in ticked.sites.broken if text not in told]
        told.update(broken)
        is_empty = until_empty and not ticked.jobs
        if is_empty and (unread := store.jobs(place)[1]):
            raise unread[0]
        _tell(broken)
        return is_empty

    if form not in ("auto", "table") or not sys.stdout.isatty():
        with Output("jsonl" if form == "auto" else form) as out:

            def lines(ticked: Ticked) -> bool:
                found = changes.of(ticked, place)
                if form == "table":
                    for line in follow.sentences(found):
                        click.echo(line)
                else:
                    for row in found:
                        out(follow.change(row) if form == "tsv" else row)
                return is_enough(ticked)

            follow.rounds(ticker, every_s, lines)
        return
    from rich.live import Live

    latest: list[str] = []
    with Live(auto_refresh=False) as live:

        def drawn(ticked: Ticked) -> bool:
            latest.extend(follow.sentences(changes.of(ticked, place)))
            del latest[:-10]
            live.update(follow.picture(ticked, latest), refresh=True)
            return is_enough(ticked)

        follow.rounds(ticker, every_s, drawn)


@click.command("list")
@click.option("--all", "every", is_flag=True, help="Also the jobs that are over.")
@format_option
def list_jobs(every: bool, form: str) -> None:
    """List the queue, oldest first: each job, where it is, and why it waits. Asks no site.

    On stderr: the sites that the last tick found silent, or where something went wrong.
    """
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store

    place = store.root()
    seen = status.sites(place)
    found, broken = store.jobs(place)
    if every:
        over, more = store.jobs(place, done=True)
        found, broken = over + found, more + broken
    with Output(form, status.JOB_COLUMNS) as out:
        for job in found:
            out(status.row_of(job, seen))
    _tell(f"{row.site}: since {row.since}: {row.why}" for row in seen.dark.values())
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
    from pitools.core.errors import UsageError, nearest
    from pitools.core.output import Output
    from pitools.place.dispatch import status, store

    place = store.root()
    jobs = [store.find(place, job_id) for job_id in job_ids]
    for job in jobs:
        if site and site not in {ticket.site for ticket in job.live}:
            hint = nearest(site, {ticket.site for ticket in job.live})
            raise UsageError(f'job "{job.job_id}" has no ticket at "{site}"', where="--lost", hint=hint)
        if not job.is_over:
            for name in [f"lost.{ticket.n}" for ticket in job.live if ticket.site == site] if site else ["cancel"]:
                store.mark(job, name)
    ticked = _ticker(place).tick()
    with Output(form, status.JOB_COLUMNS) as out:
        for job in jobs:
            out(status.row_of(found := store.find(place, job.job_id), status.sites(place)))
            for ticket in found.live:
                if site and ticket.site == site and ticket.n not in found.lost:
                    click.echo(f"pit: {ticket.name} is not given up: {site} has answered for it", err=True)
    if ticked:
        _tell(f"{name}: {error}" for name, error in sorted(ticked.faults.items()))


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

    known, skipped = snapshot.sites(names)
    found = []
    for site in known:
        try:
            if site.reach.kind == "ssh":
                paths.require(site)
            found.append(site)
        except ConfigError as error:
            if names:
                raise
            skipped.append(snapshot.skip(site.name, error))
    _tell(f"{one.site} is skipped: {one.reason}" for one in skipped)
    return found


def _checked(path: Path, sites: list[Site]) -> tuple[Request, tuple[str, ...], str]:
    """A request that at least one of the sites could take, and those sites. Raises what is wrong with all of them."""
    from pitools.commands.launch_run import warn_of_discarded
    from pitools.core.errors import ConfigError, PitError
    from pitools.launch import plan
    from pitools.launch import request as requests

    wanted = requests.with_data(requests.load(path), {})
    able: list[str] = []
    refusals = []
    for site in sites:
        try:
            made = plan.make(wanted, site, str(path))
            plan.require_workdir(made, site)
            if not able:
                warn_of_discarded(made)
            able.append(site.name)
        except PitError as error:
            refusals.append(f"{site.name}: {error.what}")
    if not able:
        raise ConfigError("no site could take it", where=str(path), hint="; ".join(refusals) or "name one with --site")
    return wanted, tuple(able), path.read_text()


def _ticker(place: Path) -> Ticker:
    from pitools.place.dispatch.tick import Ticker
    from pitools.place.policy import Columns, Policy, decide

    columns = Columns()
    return Ticker(place, lambda now_s, jobs, pools, held: decide(now_s, jobs, pools, held, Policy(), columns))


def _tell(lines: Iterable[str]) -> None:
    """Say these on stderr."""
    for line in lines:
        click.echo(f"pit: {line}", err=True)
