"""Limits that jobs share, counted from the queue, and the request that a job's flags make."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pitools.limits.judge import judge
from pitools.limits.records import JobRequest, LimitState
from pitools.limits.request import job_request
from pitools.limits.shared import counted_jobs, shared_limits, usage_of_jobs
from pitools.site.dialect import JobSpec
from pitools.site.schema import Dialect, Site, SitePartition
from pitools.slurm.records import Association, Partition, Qos, SlurmJob

ROWS = (
    Association(cluster="x", account="lab", user="me", grp_tres={"node": "3"}),
    Association(cluster="x", account="lab", parent="dept"),
    Association(cluster="x", account="dept", parent="root", grp_tres={"gres/gpu": "16"}),
    Association(cluster="x", account="infra", parent="dept"),
)
STATE = LimitState(
    cluster="x",
    enforced=("limits",),
    associations=ROWS,
    qos=(Qos(qos="normal", max_tres_per_user={"gres/gpu": "8"}, grp_jobs=3), Qos(qos="part", grp_tres={"node": "4"})),
    partitions=(Partition(partition="gpu", state="up", qos="part", nodes=8, cpus=512, tres={"gres/gpu": "64"}),),
)
JOB = JobRequest(user="me", account="lab", partition="gpu", qos="normal", nodes=2, gres={"gres/gpu": 8}, time_s=600)


def job(number: int, **values: Any) -> SlurmJob:
    plain = {"state": "RUNNING", "user": "me", "account": "lab", "qos": "normal", "partition": "gpu", "nodes": 1}
    return SlurmJob(**{"job_id": str(number), "raw_id": str(number), "gres": "gres/gpu:4", **plain, **values})


QUEUE = [
    job(1),
    job(2, user="you", account="infra"),
    job(3, user="you", account="other", qos="low"),
    job(4, state="PENDING"),
    job(5, user="you", account="other", qos="normal", partition="cpu"),
]


def test_whose_jobs_count_against_a_limit() -> None:
    """The QOS of the partition: all jobs there; of the job: its user's anywhere; an account: those below it."""
    counted = {
        (limit.level.name, limit.name, limit.tres): [row.job_id for row in QUEUE if counts(row)]
        for limit in shared_limits(JOB, STATE)
        if limit.tres and (counts := counted_jobs(limit.level.keys[limit.rule.scope], STATE))
    }
    assert counted == {
        ('QOS "part"', "GrpTRES", "node"): ["1", "2", "3", "4"],
        ('QOS "normal"', "MaxTRESPU", "gres/gpu"): ["1", "4"],
        ('account "dept"', "GrpTRES", "gres/gpu"): ["1", "2", "4"],
    }


def test_use_counted_from_the_queue() -> None:
    """Where slurmctld hides its counts, squeue's jobs give nodes, GPUs and jobs; the verdict follows."""
    usage = {(row.qos, row.account, row.user): row for row in usage_of_jobs([JOB], STATE, QUEUE)}
    assert (usage["normal", "", ""].jobs, usage["normal", "", ""].submitted) == (3, 4)
    assert usage["", "dept", ""].tres == {"node": 2, "gres/gpu": 8}
    assert usage["part", "", ""].tres["node"] == 3
    verdict = judge(JOB, LimitState(**{**_fields(STATE), "usage": tuple(usage.values())}))
    assert [(binding.limit, binding.used) for binding in verdict.bindings] == [
        ("GrpJobs", 3),
        ("MaxTRESPU=gres/gpu", 4),
    ]


def test_the_use_of_each_shared_limit() -> None:
    """Each limit of several jobs once, the replaced ones not."""
    usage = tuple(usage_of_jobs([JOB], STATE, QUEUE))
    rows = shared_limits(JOB, LimitState(**{**_fields(STATE), "usage": usage}))
    assert [(row.origin, row.label, row.value, row.used) for row in rows] == [
        ('QOS "normal"', "GrpJobs", 3, 3),
        ('QOS "part"', "GrpTRES=node", 4, 3),
        ('QOS "normal"', "MaxTRESPU=gres/gpu", 8, 4),
        ('account "dept"', "GrpTRES=gres/gpu", 16, 8),
    ]


def _fields(state: LimitState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in LimitState.__struct_fields__}


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ({}, {"gres": {"gres/gpu": 8}, "memory_mib": 131072, "account": "lab", "qos": "high"}),
        ({"gpu_type": True}, {"gres": {"gres/gpu": 8, "gres/gpu:h100": 8}}),
        ({"gpus": "none", "account": False, "qos": False}, {"gres": {}, "account": "", "qos": ""}),
        ({"memory": "all", "exclusive": True}, {"memory_mib": None, "is_exclusive": True}),
        ({"extra": ("--reservation=x",)}, {"in_reservation": True, "tasks": 8, "is_exclusive": False}),
    ],
)
def test_a_request_is_what_the_sites_flags_ask(dialect: dict[str, Any], expected: dict[str, Any]) -> None:
    """What has no flag at the site is not asked of Slurm there."""
    site = Site(name="s", dialect=Dialect(**dialect), partitions={"gpu": SitePartition(gpu="h100")})
    spec = JobSpec(name="t", nodes=2, tasks_per_node=2, cpus_per_task=3, gpus_per_node=4, memory="64G", partition="gpu")
    request = job_request(_with(spec, account="lab", qos="high", array="0-9:2,12,20-21%3"), site, "me")
    assert (request.cpus, request.nodes, request.time_s, request.user) == (12, 2, 3600, "me")
    assert {name: getattr(request, name) for name in expected} == expected


def _with(spec: JobSpec, **values: Any) -> JobSpec:
    return JobSpec(**{**{name: getattr(spec, name) for name in JobSpec.__struct_fields__}, **values})


def test_an_exclusive_job_takes_whole_nodes() -> None:
    """slurmctld counts all CPUs and GPUs of its nodes, once it has chosen them; a partition may make it so."""
    qos = Qos(qos="normal", max_tres={"cpu": "100", "gres/gpu": "7"})
    partition = Partition(partition="gpu", state="up", nodes=4, cpus=256, tres={"gres/gpu": "16"})
    state = LimitState(cluster="x", enforced=("limits",), qos=(qos,), partitions=(partition,))
    request = JobRequest(user="me", partition="gpu", qos="normal", nodes=2, cpus=4, time_s=600, is_exclusive=True)
    whole = [("MaxTRES=cpu", 128), ("MaxTRES=gres/gpu", 8)]
    assert [(binding.limit, binding.asked) for binding in judge(request, state).bindings] == whole
    only = msgspec.structs.replace(partition, over_subscribe="EXCLUSIVE")
    state, request = (
        msgspec.structs.replace(state, partitions=(only,)),
        msgspec.structs.replace(request, is_exclusive=False),
    )
    assert [(binding.limit, binding.asked) for binding in judge(request, state).bindings] == whole
