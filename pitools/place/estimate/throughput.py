"""Measure how fast a request runs on a partition, from the step logs of earlier runs; else from the site file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pitools.core.errors import PitError
from pitools.core.record import decode_json
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.run.steps import Step
from pitools.site.schema import Site
from pitools.site.template import expand_placeholders

_MAX_RUNS = 20  # the newest runs of a request
_TAIL_BYTES = 1 << 18  # about a thousand steps at the end of a step log


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Measured throughput. samples_per_node_s: samples per second and node. samples: of a complete run; None without
    one.
    """

    samples_per_node_s: float
    step_s: float = 0.0
    samples: float | None = None


class _Job(msgspec.Struct):
    nodes: int
    partition: str


class _PlannedRequest(msgspec.Struct):
    args: dict[str, Any] = {}


class _RecordedPlan(msgspec.Struct):
    """The fields of a plan.json that are needed here, of any version."""

    name: str
    site: str
    job: _Job
    request: _PlannedRequest


def measured_throughput(request: Request, site: Site) -> dict[str, Throughput]:
    """Return partition → throughput, from the newest runs of this name at the site; {} if run folders are not readable.

    A run with other `args` gives the rate, but gives the number of samples only if `steps` alone differs.
    """
    try:
        root = Path(expand_placeholders(site.paths.runs)).absolute()
        names = sorted(
            name for name in os.listdir(root) if re.fullmatch(rf"{request.name}-\d{{8}}-\d{{6}}-\w+(\.\d+)?", name)
        )
    except (OSError, PitError):
        return {}
    rates: dict[str, list[Throughput]] = {}
    for name in reversed(names[-_MAX_RUNS:]):
        if run_rate := _read_run(root / name, request, site):
            rates.setdefault(run_rate[0], []).append(run_rate[1])
    return {partition: _combine(run_rates) for partition, run_rates in rates.items()}


def _combine(rates: list[Throughput]) -> Throughput:
    samples = [rate.samples for rate in rates if rate.samples]
    return Throughput(
        samples_per_node_s=median(rate.samples_per_node_s for rate in rates),
        step_s=median(rate.step_s for rate in rates),
        samples=samples[0] if samples else None,
    )


def _read_run(run_dir: Path, request: Request, site: Site) -> tuple[str, Throughput] | None:
    try:
        plan = decode_json((run_dir / "plan.json").read_bytes(), _RecordedPlan)
        last = run_folder.last_attempt(run_dir)
        if plan.site != site.name or not last:
            return None
        ranks = len(list((last / "steps").glob("*.jsonl")))
        steps = _read_last_steps(last / "steps" / "0.jsonl")
    except (OSError, msgspec.DecodeError, PitError):
        return None  # unreadable run: no measurement
    step_times_s = [step.wall_s for step in steps if step.step > 0 and step.wall_s > 0]
    if not step_times_s or not steps[-1].rank_samples:
        return None
    step_s, batch = median(step_times_s), steps[-1].rank_samples * ranks
    exit_record = run_folder.last_exit(run_dir)
    is_complete = exit_record is not None and exit_record.exit_code == 0
    work_ratio = _work_ratio(request.args, plan.request.args)
    samples = batch * (steps[-1].step + 1) * work_ratio if is_complete and work_ratio else None
    return plan.job.partition, Throughput(
        samples_per_node_s=batch / step_s / plan.job.nodes, step_s=step_s, samples=samples
    )


def _work_ratio(requested: dict[str, Any], done: dict[str, Any]) -> float:
    """Return the work with `requested` arguments ÷ the work with `done`; 0.0 if unknown."""
    steps = requested.get("steps"), done.get("steps")
    if {**requested, "steps": 0} != {**done, "steps": 0}:
        return 0.0
    if steps[0] == steps[1]:
        return 1.0
    return steps[0] / steps[1] if isinstance(steps[0], int) and isinstance(steps[1], int) and steps[1] else 0.0


def _read_last_steps(path: Path) -> list[Step]:
    """Return the last complete records of a step log."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    return [decode_json(line, Step) for line in (lines if size <= _TAIL_BYTES else lines[1:])]


def relative_speeds(rates: Mapping[str, Throughput], site_speeds: Mapping[str, float]) -> dict[str, float]:
    """Return pool → relative speed: measured ones, scaled so that no pool is slower than its site file states.

    rates: of the measured pools. site_speeds: of all pools, from the site files.
    """
    # The requested time is assumed to fit the slowest measured pool.
    scale = min((rate.samples_per_node_s / site_speeds[pool] for pool, rate in rates.items()), default=1.0)
    return {
        pool: rates[pool].samples_per_node_s / scale if pool in rates else speed for pool, speed in site_speeds.items()
    }
