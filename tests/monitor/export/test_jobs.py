"""What rows of squeue become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from slurm_texts import CLOCK_S, SEP, job_text

from pitools.core.errors import ClusterError
from pitools.monitor.export import jobs
from pitools.site.schema import Site

LEAVES = ("n[01-04]", "n[05-08]", "n[09-12]")


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    """A site with tiers and prices."""
    return make_site()


def gauges(site: Site, *texts: str, leaves: tuple[str, ...] | None = None) -> dict[Any, float]:
    rows = jobs.parse_rows("".join(texts), SEP)
    return {key: values[0] for key, values in jobs.job_gauges(rows, CLOCK_S, site, leaves).items()}


def test_jobs_are_counted_by_task_and_partition(site: Site) -> None:
    """Each pending task counts; a job of several partitions counts once; ended jobs do not."""
    array = job_text(State="PENDING", JobArrayID="9_[0-4:2,7,8-9%2]", NodeList="", Reason="Priority")
    several = job_text(State="PENDING", Partition="gpu,cpu", NodeList="", Reason="Nodes required for job are DOWN")
    found = gauges(site, array, several, job_text(), job_text(State="COMPLETED"))
    assert found["pit_jobs", ("gpu", "pending")] == 6
    assert found["pit_jobs", ("several", "pending")] == found["pit_jobs", ("gpu", "running")] == 1
    assert found["pit_pending_gpus", ("gpu",)] == 6 * 8
    assert found["pit_pending_reason_jobs", ("NodesNotAvailable",)] == 1
    assert ("pit_jobs", ("gpu", "completed")) not in found


def test_the_queue_age_leaves_out_who_does_not_wait_for_resources(site: Site) -> None:
    """Held, dependent, later and throttled jobs are left out; a QOS that no tier names stands for itself."""
    texts = [
        job_text(State="PENDING", NodeList="", Reason=reason, QOS=qos, EligibleTime=since)
        for reason, qos, since in (
            ("Resources", "urgent", "2026-11-26T23:19:00"),
            ("Priority", "urgent", "2026-11-26T23:15:00"),
            ("JobHeldUser", "urgent", "N/A"),
            ("Dependency", "normal", "2026-11-26T20:00:00"),
            ("BeginTime", "normal", "2026-11-26T20:00:00"),
            ("JobArrayTaskLimit", "normal", "2026-11-26T20:00:00"),
            ("QOSMaxJobsPerUserLimit", "guest", "2026-11-26T23:10:00"),
        )
    ]
    found = {key[1]: value for key, value in gauges(site, *texts).items() if key[0] == "pit_queue_age_seconds"}
    assert found == {("high",): 300, ("guest",): 600}


@pytest.mark.parametrize(
    ("node_list", "ratio"), [("n[01-04]", 1), ("n[01,05]", 2), ("n[01-02,05,09]", 3), ("n[01-05,09]", 1.5)]
)
def test_the_spread_is_leaves_over_the_fewest(site: Site, node_list: str, ratio: float) -> None:
    """Four nodes fit one leaf, six need two."""
    found = gauges(site, job_text(NodeList=node_list, NumNodes="9"), leaves=LEAVES)
    assert found["pit_job_leaf_spread_ratio", ("max",)] == ratio
    assert found["pit_job_leaf_spread_jobs", ()] == 1


def test_an_unknown_spread_is_absent(site: Site) -> None:
    """Without a fabric there is no number of jobs, and of a node outside it none is judged."""
    assert not [key for key in gauges(site, job_text()) if "spread" in key[0]]
    found = gauges(site, job_text(NodeList="n[01,99]"), leaves=LEAVES)
    assert [key for key in found if "spread" in key[0]] == [("pit_job_leaf_spread_jobs", ())]


def test_waits_and_cost_are_of_the_time_since_the_query_before(site: Site) -> None:
    """A start counts once; a job that ended between costs until its end; of the first query nothing counts."""
    started = job_text(StartTime="2026-11-26T23:19:30")  # 30 s before the clock
    ended = job_text(State="COMPLETED", EndTime="2026-11-26T23:19:10", **{"tres-alloc": "cpu=8,node=2,gres/gpu=4"})
    same_second = job_text(StartTime="2026-11-26T23:20:00")
    rows = jobs.parse_rows(started + ended + same_second + job_text(State="CANCELLED", NumNodes="0"), SEP)
    counts = jobs.job_counts(rows, CLOCK_S - 60, CLOCK_S, site)
    waits = counts["pit_queue_wait_seconds", ("usual",)]
    assert (sum(waits[:-1]), waits[-1]) == (1, 19.5 * 60)
    # Two nodes at 2.00 an hour: 30 s whole, and 10 s of half of their GPUs.
    assert counts["pit_cost_total", ("gpu", "USD")] == [pytest.approx(2 * 2.0 * (30 + 10 * 0.5) / 3600)]
    assert sum(jobs.job_counts(rows, CLOCK_S, CLOCK_S + 60, site)["pit_queue_wait_seconds", ("usual",)][:-1]) == 1
    assert not any(map(sum, jobs.job_counts(rows, 0, CLOCK_S, site).values()))


@pytest.mark.parametrize(
    ("changes", "node_hours"),
    [
        ({"tres-alloc": "cpu=8,node=2,gres/gpu=3"}, 0.75),
        ({"tres-alloc": "cpu=8,node=2,gres/gpu:a100=2,gres/gpu:h100=3", "tres-per-node": ""}, 1.25),
        ({"tres-alloc": "cpu=8,node=2,gres/gpu=99"}, 2),
        ({"tres-alloc": "cpu=8,node=2", "tres-per-node": ""}, 0),
        ({"State": "SUSPENDED"}, 0),
    ],
)
def test_a_job_pays_its_share_of_gpus(site: Site, changes: dict[str, str], node_hours: float) -> None:
    """At most its nodes; nothing for a job without GPUs on nodes with them, or while it is suspended."""
    rows = jobs.parse_rows(job_text(**changes), SEP)
    counts = jobs.job_counts(rows, CLOCK_S - 60, CLOCK_S, site)
    assert counts.get(("pit_cost_total", ("gpu", "USD")), [0])[0] == pytest.approx(node_hours * 2.0 / 60)


def test_gpus_that_are_no_tres_are_read_from_the_request(site: Site) -> None:
    """Where gres/gpu is not tracked, GPUs a node times nodes."""
    text = job_text(
        State="PENDING", NodeList="", NumNodes="3", **{"tres-alloc": "cpu=8,node=3", "tres-per-node": "gres:gpu:2"}
    )
    assert gauges(site, text)["pit_pending_gpus", ("gpu",)] == 6


@pytest.mark.parametrize(
    "text", [job_text()[:-1], job_text(StartTime="noon"), job_text(JobArrayID="9_[a]"), "7\n" + job_text()]
)
def test_a_damaged_answer_is_refused(text: str) -> None:
    """A cut row, a time that is none: nothing is counted of such an answer."""
    with pytest.raises(ClusterError):
        jobs.parse_rows(text, SEP)
