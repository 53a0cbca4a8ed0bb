"""What an SLO measures: expressions in PromQL, over the metrics of `pit monitor export`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal, NamedTuple

from pitools.core.units import exact_duration
from pitools.monitor.export.metrics import BY_NAME

if TYPE_CHECKING:
    from pitools.monitor.rules.schema import Slo

Measure = Literal["goodput", "queue-wait", "staging", "recovery"]


class MeasureInfo(NamedTuple):
    """A measure's metric. by: the labels of which each combination has an error budget of its own.

    bad: what is bad, for the alert's text. runbook: the command to type next, a template of Prometheus.
    """

    metric: str
    by: str
    bad: str
    runbook: str

    @property
    def buckets(self) -> tuple[float, ...]:
        """The upper bounds of a histogram's buckets, in seconds; empty for a counter."""
        return BY_NAME[self.metric].buckets


_RUNS = "pit launch list --site {{ $labels.cluster }} --where 'age<1d'"
MEASURES: dict[str, MeasureInfo] = {
    "goodput": MeasureInfo(
        "pit_run_resource_seconds_total", "cluster, resource", "of the accounted hours were not productive", _RUNS
    ),
    "queue-wait": MeasureInfo(
        "pit_queue_wait_seconds",
        "cluster, tier",
        "of the jobs waited longer than {within}",
        "pit site exec {{ $labels.cluster }} -- squeue --start",
    ),
    "staging": MeasureInfo("pit_stage_seconds", "cluster", "of the stagings took longer than {within}", _RUNS),
    "recovery": MeasureInfo("pit_recovery_seconds", "cluster", "of the recoveries took longer than {within}", _RUNS),
}


def site_sum(by: str, series: str) -> str:
    """Return the sum of series by labels. Of what several exporters say of one site, the greatest counts, once."""
    return f"sum by ({by}) (max without (instance, job) ({series}))"


def bad_share(slo: Slo, window_s: int) -> str:
    """Return the share that was bad in a window. Goodput: of the hours that have evidence, `unaccounted` has none."""
    info, window = MEASURES[slo.measure], exact_duration(window_s)
    if not info.buckets:
        bad = site_sum(info.by, f'rate({info.metric}{{state!~"productive|unaccounted"}}[{window}])')
        return bad + " / " + site_sum(info.by, f'rate({info.metric}{{state!="unaccounted"}}[{window}])')
    good, count = (site_sum(info.by, f"rate({_selector(slo, suffix)}[{window}])") for suffix in ("bucket", "count"))
    return f"1 - {good} / {count}"


def event_count(slo: Slo, window_s: int) -> str:
    """Return the number of an SLO's events in a window; of goodput, of its accounted hours."""
    info, window = MEASURES[slo.measure], exact_duration(window_s)
    if not info.buckets:
        return site_sum(info.by, f'increase({info.metric}{{state!="unaccounted"}}[{window}])') + " / 3600"
    return site_sum(info.by, f"increase({_selector(slo, 'count')}[{window}])")


def _selector(slo: Slo, suffix: Literal["bucket", "count"]) -> str:
    """Return a histogram's series of an SLO. le: as prometheus_client writes it, `3600.0`."""
    labels = [f"tier={json.dumps(slo.tier, ensure_ascii=False)}"] if slo.tier else []
    if suffix == "bucket":
        labels.append(f'le="{slo.within_s:.1f}"')
    return f"{MEASURES[slo.measure].metric}_{suffix}" + (f"{{{', '.join(labels)}}}" if labels else "")
