"""Compare the runs of a sweep: a row for each point, from its run's folder, and each Slurm's states and accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pitools.core.errors import PitError, TryLater, UsageError, suggest
from pitools.core.record import Record
from pitools.launch.monitor import status
from pitools.launch.request import typed_value
from pitools.launch.sweep.points import Point
from pitools.launch.sweep.sweep_folder import SweepPoint
from pitools.ledger.run_ledger import SHORT_TIMEOUT_S, ledgers_of
from pitools.run import run_folder, steps
from pitools.site.schema import Site


class SweepRow(Record, frozen=True, kw_only=True, tag="pit.sweep-row/1"):
    """One point of a sweep and its run's state.

    state: as of `pit launch show`; NOT_LAUNCHED without the run's folder. loss, metrics: the last logged ones.
    steps_per_s: by the median step of the last attempt. goodput: as of `pit monitor goodput`. loss, steps_per_s,
    goodput: None without a step log.
    """

    name: str
    point: Point
    state: str
    steps: int
    loss: float | None
    steps_per_s: float | None
    goodput: float | None
    cause: str
    site: str
    run_id: str
    metrics: dict[str, float | None] = {}


def sweep_rows(points: Sequence[SweepPoint], sites: Mapping[str, Site], report: status.ReportError) -> list[SweepRow]:
    """Return the rows of points. report: gets the error of a run that cannot be read, and of a site that is unknown,
    and what of the goodput is without accounting."""
    records: dict[str, run_folder.RunRecord] = {}
    goodputs: dict[str, float | None] = {}
    for name in dict.fromkeys(point.site for point in points):
        run_dirs = [Path(point.run_dir) for point in points if point.site == name]
        run_dirs = [run_dir for run_dir in run_dirs if (run_dir / "plan.json").exists()]
        if name not in sites:
            continue
        try:
            runs = status.run_statuses(run_dirs, sites[name], report_error=report)
        except PitError as error:
            report(Path(name), error)
            runs = status.run_statuses(run_dirs, sites[name], query_slurm=False, report_error=report)
        records |= {run.run_dir: run for run in runs}
        logged = [run_dir for run_dir in run_dirs if any(run_dir.glob("attempts/*/steps/*.jsonl"))]
        ledgers = ledgers_of(sites[name], logged, timeout_s=SHORT_TIMEOUT_S)
        goodputs |= {str(run_dir): ledger.goodput for run_dir, ledger in ledgers.items()}
        late = sum(not ledger.is_accounted for ledger in ledgers.values() if ledger.goodput is not None)
        if late and sites[name].scheduler == "slurm":
            report(Path(name), TryLater(f"goodput of {late} runs is without accounting"))
    return [_row(point, records.get(point.run_dir), goodputs.get(point.run_dir)) for point in points]


def _row(point: SweepPoint, run: run_folder.RunRecord | None, goodput: float | None) -> SweepRow:
    run_dir = Path(point.run_dir)
    logs = steps.read_run_steps(run_dir)
    missing = "UNKNOWN" if run_dir.exists() else "NOT_LAUNCHED"
    return SweepRow(
        name=point.name,
        point=point.point,
        state=run.state if run else missing,
        steps=run.steps if run else 0,
        loss=logs[max(logs)].loss if logs else None,
        steps_per_s=_steps_per_s(run_dir),
        goodput=goodput,
        cause=run.cause if run else "",
        site=point.site,
        run_id=run_dir.name,
        metrics=steps.last_metrics(logs),
    )


def _steps_per_s(run_dir: Path) -> float | None:
    attempt = run_folder.last_attempt(run_dir)
    read, _ = steps.read_steps_after(attempt / "steps" / "0.jsonl", 0) if attempt else ([], 0)
    times = sorted(step.wall_s for step in (read[1:] or read))
    return 1 / times[len(times) // 2] if times and times[len(times) // 2] > 0 else None


def column_names(rows: Sequence[SweepRow]) -> list[str]:
    """Return the names that `cell` knows: the fields, the keys of the points, and the metrics."""
    return [*SweepRow.__struct_fields__, *dict.fromkeys(name for row in rows for name in (*row.point, *row.metrics))]


def cell(row: SweepRow, name: str) -> Any:
    """Return a row's value of a key of its point, of a field, or of a metric; None without it."""
    if name in row.point:
        return typed_value(row.point[name])
    return getattr(row, name) if name in SweepRow.__struct_fields__ else row.metrics.get(name)


def sort_rows(rows: Sequence[SweepRow], key: str) -> list[SweepRow]:
    """Return the rows by a field, a key of their points or a metric, `-KEY` for the reverse; missing values are last.

    Raises UsageError for an unknown key.
    """
    name = key.removeprefix("-")
    keys = column_names(rows)
    if name not in keys:
        raise UsageError(f'no column "{name}"', where="--sort", hint=suggest(name, keys))

    def value(row: SweepRow) -> object:
        value = cell(row, name)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    present = [row for row in rows if value(row) is not None]
    is_text = any(isinstance(value(row), str) for row in present)
    ordered = sorted(present, key=lambda row: str(value(row)) if is_text else value(row), reverse=key != name)  # type: ignore[arg-type, return-value]
    return [*ordered, *(row for row in rows if value(row) is None)]
