"""The dashboards, as a table: each with its rows, and each row with its panels.

In expressions {C} stands for the selected clusters, and Q for two quantiles. The metrics are those of
`pit monitor export`, and what `pit monitor rules` records.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pitools.monitor.rules.measures import site_sum

Steps = tuple[tuple[float | None, str], ...]
"""Colours from a value on; the first is the base, None."""


class Panel(NamedTuple):
    """A panel. unit: Grafana's name of it. width: of 24 columns. text: what it shows, and the command for more."""

    title: str
    unit: str
    expr: str
    legend: str = "{{cluster}}"
    text: str = ""
    steps: Steps = ()
    stacked: bool = False
    width: int = 8
    kind: Literal["timeseries", "stat", "bargauge"] = "timeseries"


class Row(NamedTuple):
    """A row. section: of docs/monitor.md, as in its address."""

    title: str
    section: str
    panels: tuple[Panel, ...]


_GOOD: Steps = ((None, "red"), (0.6, "yellow"), (0.85, "green"))
_LEFT: Steps = ((None, "red"), (0, "yellow"), (0.25, "green"))
_HIT: Steps = ((None, "red"), (0.2, "yellow"), (0.5, "green"))
_UP: Steps = ((None, "red"), (1, "green"))
_SHARE: Steps = ((None, "green"), (0.1, "yellow"), (0.25, "red"))


def _up_to(limit: float) -> Steps:
    return ((None, "green"), (limit, "red"))


def _now(metric: str, *by: str) -> str:
    return site_sum(", ".join(("cluster", *by)), f"{metric}{{C}}")


def _in(window: str, metric: str, *by: str) -> str:
    return site_sum(", ".join(("cluster", *by)), f"increase({metric}{{C}}[{window}])")


def _at_once(metric: str, *by: str) -> str:
    return site_sum(", ".join(("cluster", *by)), f"rate({metric}{{C}}[$__rate_interval])")


def _quantile(metric: str, *by: str) -> str:
    return f"histogram_quantile(Q, {_in('6h', f'{metric}_bucket', *by, 'le')})"


def _legend(*by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in ("cluster", *by))


def _where(expr: str, matcher: str) -> str:
    return expr.replace("{C}", f"{{C, {matcher}}}")


_SECONDS = "pit_run_resource_seconds_total"
_LOST = 'state=~"lost|recovery|idle|straggler|input"'
_BUDGET = "{{slo}} {{cluster}} {{tier}}{{resource}}"
_NODES = _now("pit_nodes")
_GONE = 'state=~"drained|down"'
_STAGED = _in("6h", "pit_stage_bytes_total")

_goodput = Panel("Goodput", "percentunit", "pit_goodput_ratio{C}", _legend("resource"), "Of the runs of a day.", _GOOD)
_states = Panel(
    "What allocated GPUs and nodes did",
    "short",
    _at_once(_SECONDS, "resource", "state"),
    _legend("resource", "state"),
    "Those of runs of pit launch, in each state of the ledger. More: pit monitor goodput RUN",
    stacked=True,
    width=16,
)
_gpus = Panel("GPUs", "short", _now("pit_gpus", "state"), _legend("state"), stacked=True)
_nodes = Panel("Nodes", "short", _now("pit_nodes", "state"), _legend("state"), stacked=True)
_queue = Panel(
    "Oldest pending job", "s", "pit_queue_age_seconds{C}", _legend("tier"), "More: pit site exec SITE -- squeue"
)
_waits = Panel("Wait of jobs that started in 6 h", "s", _quantile("pit_queue_wait_seconds", "tier"), _legend("tier"))
_recoveries = Panel(
    "Recoveries in an hour",
    "short",
    _in("1h", "pit_recoveries_total", "cause"),
    _legend("cause"),
    "Times that a run went on after a fault. More: pit launch why RUN",
    stacked=True,
)
_price = ("partition", "currency")
_cost = Panel("Cost in an hour", "short", _in("1h", "pit_cost_total", *_price), _legend(*_price), stacked=True)


def _free(what: str) -> Panel:
    expr = _where(_now(f"pit_partition_{what.lower()}", "partition"), 'state="idle"')
    return Panel(f"Free {what}", "short", expr, _legend("partition"), "More: pit place list", kind="bargauge")


DASHBOARDS: dict[str, tuple[Row, ...]] = {
    "fleet": (
        Row(
            "Objectives and alerts",
            "alerts-and-slos",
            (
                Panel(
                    "Error budget left",
                    "percentunit",
                    "pit:slo_budget_remaining:ratio{C}",
                    _BUDGET,
                    "Below 0 the objective of the period is missed. More: pit monitor check",
                    _LEFT,
                    kind="bargauge",
                ),
                Panel(
                    "Firing alerts",
                    "short",
                    'count by (cluster, alertname) (ALERTS{C, alertname=~"Pit.*", alertstate="firing"}) or vector(0)',
                    _legend("alertname"),
                    "The runbook of each alert is the command to type next.",
                    _up_to(1),
                    kind="stat",
                ),
                Panel("Bad share in an hour", "percentunit", "pit:slo_bad:ratio_rate1h{C}", _BUDGET),
            ),
        ),
        Row("Goodput", "goodput", (_goodput, _states)),
        Row("Room and cost", "metrics", (_free("GPUs"), _free("nodes"), _cost)),
        Row("Queues and recoveries", "metrics", (_queue, _waits, _recoveries)),
    ),
    "site": (
        Row(
            "Collectors",
            "metrics",
            (
                Panel(
                    "Collectors that succeed",
                    "short",
                    "pit_collector_success{C}",
                    _legend("collector"),
                    "Without it, its metrics are absent. More: pit site check SITE --live",
                    _UP,
                    kind="bargauge",
                ),
                Panel("Time of a query", "s", "pit_collector_duration_seconds{C}", _legend("collector")),
                Panel(
                    "Age of the data",
                    "s",
                    "time() - pit_collector_last_success_timestamp_seconds{C}",
                    _legend("collector"),
                    steps=_up_to(600),
                ),
                Panel("Age of the cycle", "s", "time() - pit_exporter_cycle_timestamp_seconds{C}", steps=_up_to(300)),
            ),
        ),
        Row(
            "Jobs",
            "metrics",
            (
                Panel("Jobs", "short", _now("pit_jobs", "state"), _legend("state"), stacked=True),
                Panel(
                    "Pending jobs", "short", _now("pit_pending_reason_jobs", "reason"), _legend("reason"), stacked=True
                ),
                Panel(
                    "GPUs asked for", "short", _now("pit_pending_gpus", "partition"), _legend("partition"), stacked=True
                ),
                _queue,
                _waits,
                Panel("Leaf switches over the fewest", "short", "pit_job_leaf_spread_ratio{C}", _legend("statistic")),
                Panel("Running jobs of several nodes", "short", _now("pit_job_leaf_spread_jobs")),
            ),
        ),
        Row("Cost", "usage", (_cost._replace(width=24),)),
    ),
    "run": (
        Row(
            "Runs",
            "goodput",
            (
                Panel("Runs", "short", _now("pit_runs", "state"), _legend("state"), stacked=True),
                _goodput,
                Panel("GPUs without a step for 10 min", "short", _now("pit_held_idle_gpus"), steps=_up_to(8)),
                Panel("GPUs of runs with a step log", "short", _now("pit_held_watched_gpus")),
                _states,
                Panel(
                    "Lost hours in a day",
                    "h",
                    f"{_where(_in('1d', _SECONDS, 'state'), _LOST)} / 3600",
                    _legend("state"),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Recovery",
            "goodput",
            (
                _recoveries,
                Panel("Time to recover, in 6 h", "s", _quantile("pit_recovery_seconds")),
                Panel("Runs in the queue", "short", _at_once("pit_run_queue_seconds_total")),
                Panel(
                    "Runs ended in 1 d", "short", _in("1d", "pit_runs_ended_total", "cause"), _legend("cause"), width=24
                ),
            ),
        ),
    ),
    "node": (
        Row(
            "Nodes",
            "metrics",
            (
                _nodes,
                Panel(
                    "Nodes that are drained or down",
                    "percentunit",
                    f"({_where(_NODES, _GONE)} or {_NODES} * 0) / {_NODES}",
                    _legend(),
                    "More: pit node list --site SITE",
                    _SHARE,
                ),
                _gpus,
            ),
        ),
        Row(
            "Drained",
            "metrics",
            (
                Panel("Drained GPUs", "short", _now("pit_drained_gpus", "cause"), _legend("cause"), stacked=True),
                Panel(
                    "Drained GPU-hours in a day",
                    "h",
                    f"{_in('1d', 'pit_drained_gpu_seconds_total', 'cause')} / 3600",
                    _legend("cause"),
                    "More: pit node show NODE",
                    stacked=True,
                    width=16,
                ),
            ),
        ),
    ),
    "data": (
        Row(
            "Staging",
            "metrics",
            (
                Panel("Staged", "Bps", _at_once("pit_stage_bytes_total", "origin"), _legend("origin"), stacked=True),
                Panel(
                    "Share already on the node, in 6 h",
                    "percentunit",
                    _where(_STAGED, 'origin=~"node|linked"') + f" / {_STAGED}",
                    steps=_HIT,
                ),
                Panel("Time of staging, in 6 h", "s", _quantile("pit_stage_seconds")),
            ),
        ),
        Row(
            "What waits for data",
            "goodput",
            (
                Panel(
                    "GPUs and nodes that stage, or wait for input",
                    "short",
                    _where(_at_once(_SECONDS, "state"), 'state=~"staging|input"'),
                    _legend("state"),
                    "More: pit perf advise RUN",
                    stacked=True,
                    width=24,
                ),
            ),
        ),
    ),
}
