"""`pit monitor`: what the fleet does with its hours."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS: dict[str, tuple[str, str, str]] = {
    "goodput": ("monitor_goodput", "goodput", "Show where the allocated time of runs went, state by state."),
    "usage": ("monitor_usage", "usage", "Report what jobs used, and what it cost: by user, account, QOS, site or tag."),
    "export": ("monitor_export", "export", "Export metrics of all sites to Prometheus."),
    "rules": ("monitor_rules", "rules", "Print Prometheus' rules of SLOs and alerts, or write Grafana's dashboards."),
    "check": ("monitor_rules", "check", "Judge the SLOs now, and notify; for cron."),
    "report": ("monitor_report", "report", "Write a day, or a run, as one HTML file."),
    "watch": ("monitor_watch", "watch", "All sites, queues, runs and alerts on one screen."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """What the fleet does with its hours: usage, goodput, metrics, alerts and a live view, over all sites."""
