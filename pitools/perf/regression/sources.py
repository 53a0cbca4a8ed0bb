"""Read measurements from runs and files."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.core.record import decode_json
from pitools.core.timestamps import to_rfc3339
from pitools.perf.regression.store import Point
from pitools.run import run_folder
from pitools.run.steps import Step, read_steps_after


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a run's rank 0, without the first of each attempt, which compiles; and its plan and provenance."""

    steps: list[Step]
    plan: dict[str, Any]
    provenance: dict[str, Any]
    ranks: int


def read_run(run_dir: Path) -> RunSteps:
    """Read a run. Raises DataError without a logged step."""
    steps: list[Step] = []
    ranks = 0
    for attempt in run_folder.attempt_dirs(run_dir):
        steps += read_steps_after(attempt / "steps" / "0.jsonl", 0)[0][1:]
        ranks = max(ranks, len(list((attempt / "steps").glob("[0-9]*.jsonl"))))
    if not steps:
        hint = "write steps with pitools.run.steps.StepLog"
        raise DataError("no step log of 2 steps or more", where=str(run_dir), hint=hint)
    return RunSteps(
        steps=steps,
        plan=read_json(run_dir / "plan.json"),
        provenance=read_json(run_dir / "provenance.json"),
        ranks=ranks,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's object; an empty one without a file. Raises DataError."""
    try:
        return decode_json(path.read_bytes(), dict[str, Any]) if path.exists() else {}
    except msgspec.DecodeError as error:
        raise DataError(str(error), where=str(path)) from error


def _read_text(path: Path) -> str:
    """Return a file's text. Raises DataError."""
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise DataError("not text (expected UTF-8)", where=str(path)) from error


def read_numbers(path: Path) -> list[float]:
    """Return a run's step times in seconds, or the numbers of a file, one a line. Raises DataError with the line."""
    if path.is_dir():
        return [step.wall_s for step in read_run(path).steps]
    numbers = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if text := line.partition("#")[0].strip():
            try:
                numbers.append(float(text))
            except ValueError as error:
                hint = "one number a line; a comment begins with #"
                raise DataError(f'"{text}" (expected a number)', where=f"{path}:{number}", hint=hint) from error
    return numbers


def read_points(path: Path) -> list[Point]:
    """Return a run's median step time as a point, or the points of a CSV or JSON Lines file. Raises DataError."""
    if path.is_dir():
        return [point_of_run(path)]
    text = _read_text(path)
    is_json = text.lstrip().startswith("{")
    points = []
    try:
        rows: list[Any] = text.splitlines() if is_json else list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", where=str(path)) from error
    for number, row in enumerate(rows, 1 if is_json else 2):
        try:
            if is_json:
                point = decode_json(row, Point)
            else:
                point = msgspec.convert({name: cell for name, cell in row.items() if cell}, Point, strict=False)
            t = datetime.fromisoformat(point.t)
            if t.tzinfo is None or not abs(point.value) < float("inf"):
                raise DataError(f"t = {point.t}, value = {point.value} (expected a time with its zone, and a number)")
            points.append(msgspec.structs.replace(point, t=to_rfc3339(t)))
        except (msgspec.ValidationError, msgspec.DecodeError, ValueError, OverflowError, DataError) as error:
            raise DataError(str(error), where=f"{path}:{number}", hint="measure,value,t") from error
    return points


def point_of_run(run_dir: Path) -> Point:
    """Return a run's median step time as a point. Raises DataError."""
    run = read_run(run_dir)
    job, request = run.plan.get("job", {}), run.plan.get("request", {})
    environment = run.provenance.get("environment", {})
    digests = [run.provenance.get("code", ""), environment.get("digest", "")]
    gpus = job.get("gpus_per_node", 0)
    kind = request.get("gpu", "") or ("gpu" if gpus else "cpu")
    return Point(
        measure=f"{run.plan.get('name', run_dir.name)}/step_s",
        value=median(step.wall_s for step in run.steps),
        t=run.steps[0].t,  # not the last's: a run that goes on, added again, is the same point
        site=run.plan.get("site", ""),
        partition=job.get("partition", ""),
        device=f"{job.get('nodes', 1)}x{gpus or job.get('tasks_per_node', 1)} {kind}",
        source=run_dir.name,
        software="+".join(digest[:12] for digest in digests if digest),
    )
