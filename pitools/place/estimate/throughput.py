"""How fast a request runs on a partition: as our own runs' step logs say, or the site file."""

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

_MAX_RUNS = 20  # of one request, the newest
_TAIL_BYTES = 1 << 18  # of a step log: its last thousand steps


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was seen to run. samples_per_node_s: a second and node. samples: of the whole run, None where none
    ended."""

    samples_per_node_s: float
    step_s: float = 0.0
    samples: float | None = None


class _Job(msgspec.Struct):
    nodes: int
    partition: str


class _PlannedRequest(msgspec.Struct):
    args: dict[str, Any] = {}


class _RecordedPlan(msgspec.Struct):
    """What is needed here of a plan.json, whichever version wrote it."""

    name: str
    site: str
    job: _Job
    request: _PlannedRequest


def measured_throughput(request: Request, site: Site) -> dict[str, Throughput]:
    """Partition → rate, from the newest runs of this name at this site; none where its runs cannot be seen from here.

    A run of other `args` tells the rate, but not how much there is to do, unless `steps` is what differs.
    """
    try:
        root = Path(expand_placeholders(site.paths.runs)).absolute()
        names = sorted(name for name in os.listdir(root) if re.fullmatch(rf"{request.name}-\d{{8}}-\d{{6}}-\w+", name))
    except (OSError, PitError):
        return {}
    rates: dict[str, list[Throughput]] = {}
    for name in reversed(names[-_MAX_RUNS:]):
        if found := _of_run(root / name, request, site):
            rates.setdefault(found[0], []).append(found[1])
    return {partition: _combine(seen) for partition, seen in rates.items()}


def _combine(seen: list[Throughput]) -> Throughput:
    whole = [rate.samples for rate in seen if rate.samples]
    return Throughput(
        samples_per_node_s=median(rate.samples_per_node_s for rate in seen),
        step_s=median(rate.step_s for rate in seen),
        samples=whole[0] if whole else None,
    )


def _of_run(run_dir: Path, request: Request, site: Site) -> tuple[str, Throughput] | None:
    try:
        plan = decode_json((run_dir / "plan.json").read_bytes(), _RecordedPlan)
        last = run_folder.last_attempt(run_dir)
        if plan.site != site.name or not last:
            return None
        ranks = len(list((last / "steps").glob("*.jsonl")))
        steps = _read_last_steps(last / "steps" / "0.jsonl")
    except (OSError, msgspec.DecodeError, PitError):
        return None  # a run that cannot be read says nothing of speed
    settled = [step.wall_s for step in steps if step.step > 0 and step.wall_s > 0]
    if not settled or not steps[-1].samples:
        return None
    step_s, batch = median(settled), steps[-1].samples * ranks
    ended = run_folder.last_exit(run_dir)
    whole = ended is not None and ended.exit_code == 0
    share = _work_ratio(request.args, plan.request.args)
    samples = batch * (steps[-1].step + 1) * share if whole and share else None
    return plan.job.partition, Throughput(
        samples_per_node_s=batch / step_s / plan.job.nodes, step_s=step_s, samples=samples
    )


def _work_ratio(wanted: dict[str, Any], done: dict[str, Any]) -> float:
    """How much of the work of a run with the arguments `done` is to do with `wanted`; 0.0 where that is not known."""
    steps = wanted.get("steps"), done.get("steps")
    if {**wanted, "steps": 0} != {**done, "steps": 0}:
        return 0.0
    if steps[0] == steps[1]:
        return 1.0
    return steps[0] / steps[1] if isinstance(steps[0], int) and isinstance(steps[1], int) and steps[1] else 0.0


def _read_last_steps(path: Path) -> list[Step]:
    """The last whole lines of a step log."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    return [decode_json(line, Step) for line in (lines if size <= _TAIL_BYTES else lines[1:])]


def relative_speeds(rates: Mapping[str, Throughput], declared: Mapping[str, float]) -> dict[str, float]:
    """Pool → speed on one scale: that of the measured, set so that none is slower than its site declares.

    rates: of the pools that were measured; declared: of all pools.
    """
    # Whoever asks for two hours has the slowest in mind.
    scale = min((rate.samples_per_node_s / declared[pool] for pool, rate in rates.items()), default=1.0)
    return {
        pool: rates[pool].samples_per_node_s / scale if pool in rates else speed for pool, speed in declared.items()
    }
