"""`pit monitor rules` and `check`: alerts and service level objectives (SLOs)."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath, rows_format_option, sites_option

SLO_COLUMNS = ("slo", "cluster", "tier", "resource", "burning", "budget_left", "burn_1h", "burn_1d", "reason")
_file_argument = click.argument(
    "file", type=LocalPath(), required=False, metavar="[FILE]", shell_complete=completion.complete_files
)


@click.command()
@_file_argument
@click.option("--example", is_flag=True, help="Print the shipped file, to copy and change.")
@click.option("--dashboards", type=LocalPath(), metavar="DIR", help="Write Grafana's dashboards there, not the rules.")
@click.option("--docs", default="", metavar="URL", help="With --dashboards: the site of scripts/docs, to link to.")
def rules(file: Path | None, example: bool, dashboards: Path | None, docs: str) -> None:
    """Print Prometheus' rules for a FILE of SLOs and alerts, or for the shipped one.

    Recording rules of each SLO's windows, alerts of several burn rates (PitSloBurn), and alerts for what is broken or
    stands still. Each alert has a runbook: the command to type next. They are of the metrics of `pit monitor export`.

    \b
    pit monitor rules --example > slos.toml
    pit monitor rules slos.toml > pit.rules.yml && promtool check rules pit.rules.yml
    pit monitor rules --dashboards dashboards/
    """
    from pitools.core.errors import UsageError
    from pitools.monitor.rules.generate import left_out, rules_text
    from pitools.monitor.rules.schema import SHIPPED, load_slos, unknown_tiers

    if example + (dashboards is not None) + (file is not None and dashboards is None) > 1:
        raise UsageError("FILE, --example and --dashboards exclude each other", where="pit monitor rules")
    if docs and dashboards is None:
        raise UsageError("--docs is for --dashboards", where="pit monitor rules")
    if example:
        click.echo(SHIPPED.read_text(), nl=False)
        return
    slos = load_slos(file)
    if dashboards is not None:
        from pitools.monitor.dashboards.grafana import write_dashboards

        for path in write_dashboards(dashboards, docs):
            click.echo(path)
        return
    for line in (*left_out(slos), *unknown_tiers(slos).values()):
        click.echo(f"pit: {line}", err=True)
    click.echo(rules_text(slos), nl=False)


@click.command()
@_file_argument
@click.option(
    "--prometheus",
    "url",
    envvar="PIT_PROMETHEUS",
    default="",
    metavar="URL",
    help="Ask this Prometheus, such as http://127.0.0.1:9090. [default: judge by the records of the sites' runs]",
)
@sites_option("A site to judge; repeatable. [default: all that Prometheus knows, or local]")
@click.option("--notify", is_flag=True, help='Start the hooks that listen for "slo", for what has changed.')
@rows_format_option
@click.pass_context
def check(ctx: click.Context, file: Path | None, url: str, sites: tuple[str, ...], notify: bool, form: str) -> None:
    """Judge the SLOs of FILE, or of the shipped file, now: a line for each error budget. Exit 1: one burns.

    With Prometheus by its metrics, also without our rules in it; an address that does not answer is exit 75. Without it
    by what the runs of each site recorded: no queue waits of other jobs, and less exact at a window's edges.

    For cron, --notify starts the `[[hooks]]` with on = ["slo"] of the sites' files and of ~/.config/pitools/hooks.toml
    once when an SLO begins to burn, burns faster, or has stopped.

    \b
    pit monitor check slos.toml --prometheus http://127.0.0.1:9090 --notify > /dev/null
    """
    from pitools.core.output import Output
    from pitools.monitor.rules import prometheus_api
    from pitools.monitor.rules.judge import judge_slos, prometheus_shares
    from pitools.monitor.rules.schema import SHIPPED, load_slos, unknown_tiers

    slos = load_slos(file)
    chosen = sites if ctx.get_parameter_source("sites") is not click.core.ParameterSource.DEFAULT else ()
    if url:
        shares = prometheus_shares(prometheus_api.check_url(url), chosen)
    else:
        from pitools.monitor.rules.from_records import record_shares

        longest_s = max((slo.period_s for slo in slos.slo), default=0)
        shares = record_shares(sites, longest_s, lambda line: click.echo(f"pit: {line}", err=True))
    states = judge_slos(slos, shares)
    with Output(form, SLO_COLUMNS) as out:
        for state in states:
            out(state)
    missing = sorted({*chosen} - {state.cluster for state in states}) or ([] if states else ["any site"])
    for name in missing:
        click.echo(f"pit: no SLO of {name} had an event in its period: does pit monitor export run?", err=True)
    for slo, line in unknown_tiers(slos).items():
        if slo not in {state.slo for state in states}:
            click.echo(f"pit: {line}", err=True)
    if notify:
        from pitools.launch.plan import user_hooks
        from pitools.monitor.rules import notify as notices
        from pitools.site.load import load_site, site_names

        own, known = user_hooks(), set(site_names())
        hooks = {name: load_site(name).hooks if name in known else () for name in {one.cluster for one in states}}
        for error in notices.notify(slos, file or SHIPPED, states, lambda name: (*hooks[name], *own)):
            click.echo(f"pit: {error}", err=True)
    ctx.exit(any(state.burning for state in states))
