"""`pit tenancy report`: shares, budgets and use of teams."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import LocalPath, rows_format_option, sites_option
from pitools.commands.tenancy_plan import at_site, raise_last


@click.command()
@sites_option("A site, as `pit site list` names it; repeatable.")
@click.option("--since", metavar="TIME", help="From so long ago (7d), or a date, UTC. [default: --until's month]")
@click.option("--until", metavar="TIME", help="Until then. [default: now]")
@click.option(
    "--by",
    type=click.Choice(["user", "site", "month"]),
    multiple=True,
    help="A row not only for each team, but for each user, site or calendar month (UTC) of it; repeatable.",
)
@click.option("--store", "path", type=LocalPath(dir_okay=False), metavar="FILE", help="Keep the accounting there.")
@rows_format_option
def report(
    sites: tuple[str, ...], since: str | None, until: str | None, by: tuple[str, ...], path: Path | None, form: str
) -> None:
    """Report what teams used against their shares: hours, charge, budgets left, fair share and waits.

    Of all GPU hours at the sites (CPU hours, if no site has GPUs: see resource), share is the part that a team's shares
    grant, use the part that it used, with the teams below. Hours, charge and cost are of a team's own jobs, so that
    rows add up. Charged hours are weighed by the UsageFactor that the job's QOS has now, as budgets are. The accounting
    is what `sacct -a` shows to you, kept in the store of pit monitor usage.

    \b
      pit tenancy report --site alpha --site beta
      pit tenancy report --site alpha --by user --since 30d
      pit tenancy report --site alpha --by month --since 2026-01-01 --until 2026-07-01 --format csv
    """
    from pitools.core.errors import PitError, UsageError
    from pitools.core.output import Output
    from pitools.monitor.usage import ingest, store
    from pitools.monitor.usage.period import parse_period
    from pitools.monitor.usage.report import usage_rows
    from pitools.site.connect import client
    from pitools.site.load import load_site
    from pitools.tenancy.report import TeamRow, read_shares, report_rows

    windows = parse_period(since, until, is_monthly="month" in by)
    loaded = [load_site(name) for name in dict.fromkeys(sites)]
    currencies = {each.currency for each in loaded if any(p.price_per_node_hour for p in each.partitions.values())}
    if len(currencies) > 1 and "site" not in by:
        raise UsageError(f"the sites have several currencies: {', '.join(sorted(currencies))}", hint="--by site")
    errors: list[PitError] = []
    granted = {}
    with store.open_store(path or store.default_path()) as opened:
        for site in loaded:
            try:
                granted[site.name] = read_shares(client(site).transport)
                ingest.ingest_site(opened, site, client(site).transport, windows[0].begin)
            except PitError as error:  # the others are reported, and what was read before
                errors.append(at_site(error, site.name))
        reported = [site for site in loaded if site.name in granted]
        keys = ",".join(("account", *sorted({*by} - {"month"})))
        with Output(form, [name for name in TeamRow.__struct_fields__ if name not in {"site", "user"} - {*by}]) as out:
            for window in windows if reported else ():
                groups, details = (
                    usage_rows(opened, reported, window.begin, window.end, each)
                    for each in (keys, "account,site,user,qos")
                )
                for row in report_rows(window.text, groups, details, granted, by=by, is_current=window.is_current):
                    out(row)
    raise_last(errors)
