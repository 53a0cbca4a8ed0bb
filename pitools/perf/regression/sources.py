"""Read measurements from runs and files."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.core.timestamps import to_rfc3339
from pitools.perf.regression.store import Point
from pitools.run import run_folder
from pitools.run.steps import Step, read_steps_after

T = TypeVar("T")


class _Job(msgspec.Struct, frozen=True):
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    partition: str = ""


class _Request(msgspec.Struct, frozen=True):
    gpu: str = ""


class RunPlan(msgspec.Struct, frozen=True):
    """What of a run's plan.json says what its steps measure."""

    name: str = ""
    site: str = ""
    job: _Job = _Job()
    request: _Request = _Request()


class _Git(msgspec.Struct, frozen=True):
    commit: str = ""
    dirty: bool = False


class _Environment(msgspec.Struct, frozen=True):
    digest: str = ""


class RunOrigin(msgspec.Struct, frozen=True):
    """What of a run's provenance.json names its software."""

    code: str = ""
    git: _Git = _Git()
    environment: _Environment = _Environment()


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a run's rank 0, without the first of each attempt, which compiles, and any without a duration.

    Of a step that a later attempt repeats, the first time counts: points that are stored do not change.
    """

    steps: list[Step]
    plan: RunPlan
    origin: RunOrigin
    ranks: int


def read_run(run_dir: Path) -> RunSteps:
    """Read a run. Raises DataError without a logged step."""
    steps: dict[int, Step] = {}
    ranks = 0
    for attempt in run_folder.attempt_dirs(run_dir):
        for step in read_steps_after(attempt / "steps" / "0.jsonl", 0)[0][1:]:
            if step.wall_s > 0:
                steps.setdefault(step.step, step)
        ranks = max(ranks, len(list((attempt / "steps").glob("[0-9]*.jsonl"))))
    if not steps:
        hint = "write steps with pitools.run.steps.StepLog; a run that waits has none: pit launch status"
        raise DataError("no step log of 2 steps or more", where=str(run_dir), hint=hint)
    return RunSteps(
        steps=list(steps.values()),
        plan=read_json(run_dir / "plan.json", RunPlan),
        origin=read_json(run_dir / "provenance.json", RunOrigin),
        ranks=ranks,
    )


def read_json(path: Path, kind: type[T]) -> T:
    """Return a file's object; one of defaults without a file. Raises DataError, and OSError for a FIFO too."""
    try:
        with open_regular(path) as file:
            return decode_json(file.read(), kind)
    except FileNotFoundError:
        return kind()
    except msgspec.DecodeError as error:
        raise DataError(str(error), where=str(path)) from error


def _read_text(path: Path) -> str:
    """Return a file's text, without the mark that Excel puts before it. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8-sig")
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
        table = csv.DictReader(io.StringIO(text))
        rows: list[Any] = text.splitlines() if is_json else list(table)
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", where=str(path)) from error
    if not is_json and (missing := {"measure", "value", "t"} - set(table.fieldnames or ())):
        hint = "a first line such as measure,value,t,site,source; plain numbers are for pit perf compare"
        raise DataError(f"no column {', '.join(sorted(missing))}", where=f"{path}:1", hint=hint)
    for number, row in enumerate(rows, 1 if is_json else 2):
        if is_json and not row.strip():
            continue
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
    job = run.plan.job
    commit = "" if run.origin.git.dirty else run.origin.git.commit
    digests = [run.origin.code, run.origin.environment.digest, commit]
    kind = run.plan.request.gpu or ("gpu" if job.gpus_per_node else "cpu")
    return Point(
        measure=f"{run.plan.name or run_dir.name}/step_s",
        value=median(step.wall_s for step in run.steps),
        t=run.steps[0].t,  # not the last's: a run that goes on, added again, is the same point
        site=run.plan.site,
        partition=job.partition,
        device=f"{job.nodes}x{job.gpus_per_node or job.tasks_per_node} {kind}",
        source=run_dir.name,
        software="+".join(digest[:12] for digest in digests).rstrip("+"),
    )
