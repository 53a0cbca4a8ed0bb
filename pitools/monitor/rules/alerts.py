"""Alerts that are no objectives: something is broken, or stands still. Each says what to type next."""

from __future__ import annotations

from typing import NamedTuple

from pitools.monitor.rules.measures import site_sum


class Alert(NamedTuple):
    """An alert, whose limit, duration and severity are in `slos.toml`.

    expr: with LIMIT for its limit, WINDOW for the limit as a duration. summary, runbook: templates of Prometheus; the
    runbook is the command to type next, also beside a running exporter. most: the highest limit, 1 of shares;
    Prometheus takes no window of 300 years.
    """

    expr: str
    summary: str
    runbook: str
    most: float = 1e9


_STAGED = site_sum("cluster", "increase(pit_stage_bytes_total[6h])")
_SITE = "{{ $labels.cluster }}"
_VALUE = "{{ $value | humanize }}"
_SHARE = "{{ $value | humanizePercentage }}"
_CHECK = f"pit site check {_SITE} --live"
_REASONS = f"pit site exec {_SITE} -- sinfo -R"
# A restart of the exporter, during which nothing is known, neither ends it nor begins it anew.
_AWAY = 'max by (cluster) (last_over_time(pit_collector_success{collector=~"jobs|nodes"}[5m])) == 0'

ALERTS = {
    "PitSiteUnreachable": Alert(_AWAY, f"Slurm of {_SITE} does not answer", _CHECK),
    "PitCollectorFailing": Alert(
        f"pit_collector_success == 0 unless on (cluster) {_AWAY}",
        f"The collector {{{{ $labels.collector }}}} of {_SITE} fails",
        _CHECK,
    ),
    "PitExporterStale": Alert(
        "max by (cluster) (last_over_time(pit_exporter_cycle_timestamp_seconds[7d])) < time() - LIMIT",
        f"No new metrics of {_SITE} for WINDOW (taken out on purpose: silence this for 7 days)",
        _CHECK,
    ),
    "PitNodesDrained": Alert(
        site_sum("cluster", 'pit_nodes{state=~"drained|down"}') + f" / {site_sum('cluster', 'pit_nodes')} > LIMIT",
        f"{_SHARE} of the nodes of {_SITE} are drained or down",
        _REASONS,
        most=1,
    ),
    "PitDrainedGpuHours": Alert(
        site_sum("cluster, cause", "increase(pit_drained_gpu_seconds_total[1d])") + " / 3600 > LIMIT",
        f"{_VALUE} GPU-hours of {_SITE} were drained in a day: {{{{ $labels.cause }}}}",
        _REASONS,
    ),
    "PitHeldIdleGpus": Alert(
        site_sum("cluster", "pit_held_idle_gpus") + " > LIMIT",
        f"{_VALUE} GPUs of {_SITE} are allocated and idle",
        f"pit launch list --site {_SITE} --where state=running",
    ),
    "PitQueueStuck": Alert(
        # nine tenths of the window are known: what was not seen to start, before or in a gap, may have started
        "max by (cluster, tier) (pit_queue_age_seconds) > LIMIT and on (cluster) count_over_time("
        '(max by (cluster) (pit_collector_success{collector="jobs"}) == 1)[WINDOW:1m]) * 60 >= 0.9 * LIMIT - 60'
        " unless max by (cluster, tier) (increase(pit_queue_wait_seconds_count[WINDOW])) > 0"
        " unless (max by (cluster, tier) (pit_queue_wait_seconds_count)"  # began with its first start: did not increase
        " unless max by (cluster, tier) (pit_queue_wait_seconds_count offset WINDOW)) > 0",
        f"No job of tier {{{{ $labels.tier }}}} at {_SITE} starts: the oldest waits for"
        " {{ $value | humanizeDuration }}",
        f"pit site exec {_SITE} -- squeue --start",
    ),
    "PitStageCacheCold": Alert(
        site_sum("cluster", 'increase(pit_stage_bytes_total{origin=~"node|linked"}[6h])') + f" / {_STAGED} < LIMIT"
        f" and {_STAGED} > 1e12",  # a new dataset, which no node has yet, is mostly less
        f"Only {_SHARE} of the staged bytes of {_SITE} were on the node's disk already",
        f"pit launch list --site {_SITE}",
        most=1,
    ),
    "PitRecoveries": Alert(
        site_sum("cluster, cause", "increase(pit_recoveries_total[1h])") + " > LIMIT",
        f"{_VALUE} recoveries of runs at {_SITE} in an hour: {{{{ $labels.cause }}}}",
        f"pit launch list --site {_SITE}",
    ),
}
