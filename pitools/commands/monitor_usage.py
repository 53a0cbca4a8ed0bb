"""`pit monitor usage`: what jobs used, from Slurm's accounting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

import click

from pitools.commands.options import LocalPath, rows_format_option, sites_option

COLUMNS = (
    "group",
    "jobs",
    "gpu_hours",
    "node_hours",
    "cpu_hours",
    "useful_hours",
    "efficiency",
    "cost",
    "currency",
    "cost_per_useful_hour",
    "wait_p50_s",
    "wait_p95_s",
    "waste_hours",
)


@click.command()
@sites_option("A site, as `pit site list` names it; repeatable.")
@click.option("--since", default="7d", show_default=True, metavar="TIME", help="From so long ago, or RFC 3339, UTC.")
@click.option("--until", metavar="TIME", help="Until then. [default: now]")
@click.option(
    "--by",
    type=click.Choice(["user", "account", "qos", "partition", "site", "tag"]),
    multiple=True,
    help="A row for each, or for each combination if repeated; by default one row of all jobs.",
)
@click.option("--store", "path", type=LocalPath(dir_okay=False), metavar="FILE", help="Keep the accounting there.")
@click.option(
    "--from",
    "source",
    type=click.File("rb"),
    metavar="FILE",
    help="Read this output of `sacct -P` as the site's, in this machine's time zone, instead of Slurm; - is stdin.",
)
@rows_format_option
def usage(
    sites: tuple[str, ...],
    since: str,
    until: str | None,
    by: tuple[str, ...],
    path: Path | None,
    source: BinaryIO | None,
    form: str,
) -> None:
    """Report what jobs used: hours, cost, useful hours, waste by its cause, efficiency, and waits.

    First reads what is new in the sites' accounting into a store, a file of yours: what `sacct -a` shows to you. Hours
    are those between --since and --until, as `sreport` counts them. Useful are jobs that completed or run, less what
    the ledgers of pitools' runs lost. The tag is model=TAG in a job's comment, or the name of its run.

    \b
      pit monitor usage --site alpha --by user
      pit monitor usage --site alpha --site beta --since 2026-11-01 --until 2026-12-01 --by account --format csv
      sacct -aXDP -S 2026-01-01 -o JobIDRaw,JobID,User,Account,State,Submit,Start,End,ElapsedRaw,AllocTRES > jobs
      pit monitor usage --from jobs --since 2026-01-01 --by user
    """
    from pitools.core.errors import ClusterError, PitError, TryLater, UsageError
    from pitools.core.output import Output
    from pitools.monitor.usage import ingest, report, store
    from pitools.monitor.usage.period import parse_period
    from pitools.site.connect import client
    from pitools.site.load import load_site

    (window,) = parse_period(since, until, asks_sacct=not source)
    if source and len(sites) != 1:
        raise UsageError(f"--from is the accounting of one site (--site names {len(sites)})")
    loaded = [load_site(name) for name in dict.fromkeys(sites)]
    failed: list[PitError] = []
    with store.open_store(path or store.default_path()) as opened:
        for site in loaded:
            try:
                if source:
                    done = ingest.ingest_file(opened, site.name, source, source.name)
                else:
                    done = ingest.ingest_site(opened, site, client(site).transport, window.begin)
            except (ClusterError, TryLater) as error:  # the others are reported, and what was read before
                failed.append(error)
            else:
                if done.bad or source or sys.stderr.isatty():  # cron would mail it each time
                    click.echo(f"pit: {done}", err=True)
        with Output(form, COLUMNS if by else COLUMNS[1:]) as out:
            for row in report.usage_rows(opened, loaded, window.begin, window.end, ",".join(dict.fromkeys(by))):
                out(row)
    for other in failed[1:]:
        click.echo(f"pit: {other}", err=True)
    if failed:
        raise failed[0].with_hint("the report has of it what was read before")
