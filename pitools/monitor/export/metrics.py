"""The table of all metrics: name, type, labels, bounds and help. Rules and dashboards are built on it.

Each series also has the label `cluster`, the site's name. No label holds a job, a user, an account or a node. Of the
values of a label at most LABEL_LIMITS are kept: the largest of gauges, the first of counters; the rest are "other",
their sum or, of ages, the largest.

A collector that fails, or has not succeeded for a while, exports nothing but its own three metrics: its old values are
dropped, so alerts on absence or on `pit_collector_success == 0` see an outage. What is unknown is absent, never 0.
Counters and histograms are kept in a state file, and never go down when the exporter is restarted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]
Collector = Literal["jobs", "nodes", "topology", "runs", "native"]

WAIT_BUCKETS_S = (10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 86400.0, 259200.0)
RECOVERY_BUCKETS_S = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
STAGE_BUCKETS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)

OTHER = "other"
LABEL_LIMITS = {
    "partition": 50,
    "state": 24,  # of jobs: Slurm's 24 states
    "reason": 30,
    "cause": 40,
    "tier": 20,
    "statistic": 3,
    "origin": 4,
    "resource": 2,
    "currency": 1,
    "collector": 6,
}
"""The most values of each label that a site exports; "other" is one more."""


class Metric(NamedTuple):
    """A family of metrics.

    name: with `_total` for a counter. collector: whose it is, "" for those about collectors. labels: without `cluster`.
    """

    name: str
    kind: Kind
    collector: Collector | Literal[""]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


METRICS = (
    # Of each collector.
    Metric("pit_collector_success", "gauge", "", ("collector",), "1 if the collector's last query succeeded, else 0."),
    Metric("pit_collector_duration_seconds", "gauge", "", ("collector",), "How long the collector's last query took."),
    Metric(
        "pit_collector_last_success_timestamp_seconds",
        "gauge",
        "",
        ("collector",),
        "When the collector's last successful query began; absent if there was none.",
    ),
    Metric("pit_exporter_cycle_timestamp_seconds", "gauge", "", (), "When the site's last cycle ended, well or not."),
    # squeue: two requests to slurmctld, of jobs and partitions.
    Metric(
        "pit_jobs",
        "gauge",
        "jobs",
        ("partition", "state"),
        'Unfinished jobs, a pending array task each as one; partition "several" for a pending job that names several.',
    ),
    Metric("pit_pending_reason_jobs", "gauge", "jobs", ("reason",), "Pending jobs by Slurm's reason."),
    Metric("pit_pending_gpus", "gauge", "jobs", ("partition",), "GPUs that pending jobs ask for."),
    Metric(
        "pit_queue_age_seconds",
        "gauge",
        "jobs",
        ("tier",),
        "How long the oldest job waits for resources; left out are held jobs, those before their begin or dependency, "
        "at their array's own limit, or that can never start. Absent if none waits. tier: of the site file; else the "
        "QOS.",
    ),
    Metric(
        "pit_queue_wait_seconds",
        "histogram",
        "jobs",
        ("tier",),
        "From a job's submission, or when Slurm requeued it, to its start.",
        WAIT_BUCKETS_S,
    ),
    Metric(
        "pit_job_leaf_spread_ratio",
        "gauge",
        "jobs",
        ("statistic",),
        "Leaf switches of a running job of several nodes, over the fewest that hold as many: median, p90, max of all. "
        "Absent without a fabric.",
    ),
    Metric("pit_job_leaf_spread_jobs", "gauge", "jobs", (), "Running jobs of several nodes in that."),
    Metric(
        "pit_cost_total",
        "counter",
        "jobs",
        ("partition", "currency"),
        "Cost of running jobs: nodes by price_per_node_hour of the site file, times the share of their GPUs.",
    ),
    # scontrol show node: two requests, of nodes and partitions.
    Metric(
        "pit_nodes",
        "gauge",
        "nodes",
        ("state",),
        "Nodes: allocated, mixed, idle, drained (accepts no new job) or down.",
    ),
    Metric(
        "pit_partition_nodes",
        "gauge",
        "nodes",
        ("partition", "state"),
        "The same by partition; a node counts in each of its partitions.",
    ),
    Metric("pit_gpus", "gauge", "nodes", ("state",), "GPUs: allocated; or free on a node that is idle, drained, down."),
    Metric(
        "pit_partition_gpus", "gauge", "nodes", ("partition", "state"), "The same by partition; a GPU counts in each."
    ),
    Metric(
        "pit_drained_gpus",
        "gauge",
        "nodes",
        ("cause",),
        "GPUs of drained or down nodes: by the check for which `pit node drain` drained them; maintenance, reboot, "
        "down, or other (a person or another program).",
    ),
    Metric("pit_drained_gpu_seconds_total", "counter", "nodes", ("cause",), "The same, over time."),
    # The folders of runs of `pit launch`, and sacct: no request to slurmctld.
    Metric("pit_runs", "gauge", "runs", ("state",), "Runs in accounting without a verdict: pending or running."),
    Metric("pit_runs_ended_total", "counter", "runs", ("cause",), "Runs in accounting that ended, by their cause."),
    Metric(
        "pit_run_resource_seconds_total",
        "counter",
        "runs",
        ("resource", "state"),
        "GPU-seconds of runs (node-seconds of those without GPUs), each in one state of `pit monitor goodput`.",
    ),
    Metric("pit_run_queue_seconds_total", "counter", "runs", (), "How long runs waited in the queue."),
    Metric(
        "pit_goodput_ratio",
        "gauge",
        "runs",
        ("resource",),
        "Productive over allocated seconds of the runs that ended in the last 24 h or go on.",
    ),
    Metric(
        "pit_held_idle_gpus",
        "gauge",
        "runs",
        (),
        "GPUs of runs whose ranks have made no step for 10 min. Only of runs with a step log: absent without any.",
    ),
    Metric(
        "pit_held_watched_gpus",
        "gauge",
        "runs",
        (),
        "GPUs of going runs with a step log, of which pit_held_idle_gpus can tell. Whether others are used is unknown.",
    ),
    Metric("pit_recoveries_total", "counter", "runs", ("cause",), "Times that a run went on after a fault, by cause."),
    Metric(
        "pit_recovery_seconds",
        "histogram",
        "runs",
        (),
        "From an attempt's end by a fault to the start of the next one's ranks, in the same or a new job.",
        RECOVERY_BUCKETS_S,
    ),
    Metric(
        "pit_stage_bytes_total",
        "counter",
        "runs",
        ("origin",),
        "Bytes of datasets staged for attempts: there already (node, linked), or copied (peer, source).",
    ),
    Metric("pit_stage_seconds", "histogram", "runs", (), "Wall time of staging a dataset on a node.", STAGE_BUCKETS_S),
)
BY_NAME = {metric.name: metric for metric in METRICS}
