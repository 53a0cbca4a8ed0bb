"""Make the request that limits judge from the resources of a job and its site's dialect."""

from __future__ import annotations

import re

from pitools.limits.records import JobRequest
from pitools.site.dialect import JobSpec
from pitools.site.schema import Site
from pitools.slurm.fields import parse_mib

_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def job_request(job: JobSpec, site: Site, user: str = "") -> JobRequest:
    """Return what the job's sbatch flags at this site ask of Slurm. Memory is unknown where no flag requests it."""
    dialect = site.dialect
    gpus = job.nodes * job.gpus_per_node if dialect.gpus != "none" else 0
    memory = parse_mib(job.memory) if dialect.memory == "ask" else None
    kind = site.partitions[job.partition].gpu if dialect.gpu_type and job.partition in site.partitions else ""
    gres = {name: gpus for name in ("gres/gpu", f"gres/gpu:{kind}" if kind else "") if name and gpus}
    flags = {flag.partition("=")[0] for flag in (*dialect.extra, *job.extra)}
    return JobRequest(
        user=user,
        partition=job.partition,
        account=job.account if dialect.account else "",
        qos=job.qos if dialect.qos else "",
        nodes=job.nodes,
        cpus=job.nodes * job.tasks_per_node * job.cpus_per_task,
        memory_mib=None if memory is None else job.nodes * memory,
        gres=gres,
        time_s=job.time_s,
        tasks=_tasks(job.array),
        is_exclusive=dialect.exclusive or "--exclusive" in flags,
        in_reservation="--reservation" in flags,
    )


def _tasks(array: str) -> int:
    """Return the number of tasks of `--array`, such as `0-9:2,12%4`; 1 without one."""
    parts = (_TASKS.fullmatch(part) for part in array.partition("%")[0].split(","))
    return sum(len(range(int(m[1]), int(m[2] or m[1]) + 1, int(m[3] or 1))) for m in parts if m) or 1
