"""Traces of jobs, read strictly: a hole or garbage is an error that names file and line."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pitools.core.errors import DataError
from pitools.place.simulate.model import Trace
from pitools.place.simulate.traces import alibaba, helios, philly, sacct, swf
from pitools.place.simulate.traces.row import LeftOut, TraceRow

TraceFormat = tuple[Callable[[str], Iterator[tuple[int, Any]]], Callable[[Any], TraceRow | LeftOut | None]]

_MAX_GPUS = 1_000_000
_MAX_RUN_S = 1e10  # three hundred years; what adds up stays exact to far below a second
_MAX_SUBMIT_S = 1e11
_SACCT = "SLURM_TIME_FORMAT=%s sacct -aDXPo JobID,User,Account,QOS,Submit,Start,State,ElapsedRaw,TimelimitRaw,AllocTRES"
_HINT = "--skip-bad leaves such rows out, and counts them"


def read_trace(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read the jobs of a CSV of Helios or alibaba, Philly's cluster_job_log, SWF, or the output of `sacct -P`; .gz too.

    The format is detected from the text. Jobs that never ran, held no GPU or are not over are counted
    by reason. skip_bad: count invalid rows too, instead of raising. Raises DataError naming file and line.
    """
    text = _text(path, skip_bad)
    rows, row = _detect_format(path, text)
    jobs: list[TraceRow] = []
    lines: dict[str, int] = {}
    left_out: dict[str, list[float]] = {}
    skipped = 0
    try:
        for line, raw in rows(text):
            try:
                job = row(raw)
                if job is None or isinstance(job, LeftOut):
                    reason, gpu_hours = job or LeftOut()
                    left_out.setdefault(reason, []).append(gpu_hours)
                    continue
                _check(job, lines)
            except (ValueError, KeyError, OverflowError) as error:
                if not skip_bad:
                    raise DataError(str(error), where=f"{path}:{line}", hint=_HINT) from error
                skipped += 1
                continue
            lines[job.job_id] = line
            jobs.append(job)
    except (ValueError, csv.Error, RecursionError) as error:  # not a row: the file itself
        raise DataError(str(error), where=str(path), hint="fetch it again") from error
    if not jobs:
        hint = "a trace is one job a row; see pit place simulate -h"
        raise DataError("no job that ran and held a GPU", where=str(path), hint=hint)
    jobs.sort(key=lambda job: job.submit_s)
    columns: dict[str, list[Any]] = dict(zip(TraceRow._fields, map(list, zip(*jobs, strict=True)), strict=True))
    columns["submit_s"] = [moment - jobs[0].submit_s for moment in columns["submit_s"]]
    name = path.name.partition(".")[0]
    return Trace(name=name, **columns, began_s=jobs[0].submit_s, skipped=skipped, left_out=left_out)


def _check(job: TraceRow, lines: dict[str, int]) -> None:
    """Raise ValueError for values that are invalid in every format. lines: job id → line of the jobs before."""
    if not job.job_id:
        raise ValueError("a row without a job id")
    if job.job_id in lines:
        raise ValueError(f"job {job.job_id}: duplicate of line {lines[job.job_id]}")
    if not 0 < job.gpus <= _MAX_GPUS:
        raise ValueError(f"job {job.job_id}: {job.gpus} GPUs (expected 1 to {_MAX_GPUS})")
    if not 0 < job.run_s <= _MAX_RUN_S:
        raise ValueError(f"job {job.job_id}: run time is {job.run_s:g} s (expected above 0, to {_MAX_RUN_S:g})")
    if not 0 <= job.limit_s <= _MAX_RUN_S:
        raise ValueError(f"job {job.job_id}: limit is {job.limit_s:g} s (expected 0 to {_MAX_RUN_S:g})")
    if abs(job.submit_s) > _MAX_SUBMIT_S:
        raise ValueError(f"job {job.job_id}: submitted at {job.submit_s:g} s (at most {_MAX_SUBMIT_S:g})")


def _detect_format(path: Path, text: str) -> TraceFormat:
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first.lstrip().startswith(("[", "{")):
        return philly.rows, philly.row
    if not (lacking := sacct.lacking_columns(first)):
        return sacct.rows, sacct.row
    if "job_id" in first.split(",") and "submit_time" in first:
        return helios.rows, helios.row
    if {"creation_time", "scheduled_time", "num_gpu"} <= set(first.split(",")):
        return alibaba.rows, alibaba.row
    if first.startswith(";") or len(first.split()) == 18:
        return swf.rows, swf.row
    if "|" in first or first.startswith("JobID"):
        problem = f'no column {", ".join(lacking)} (expected a header line, with "|" between)'
        raise DataError(problem, where=f"{path}:1", hint=_SACCT)
    hint = f"give a CSV of Helios or alibaba, Philly's cluster_job_log, SWF, or of: {_SACCT}"
    raise DataError("unknown trace format" if first else "empty (expected jobs)", where=f"{path}:1", hint=hint)


def _text(path: Path, skip_bad: bool) -> str:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig", "replace" if skip_bad else "strict")
    except UnicodeDecodeError as error:
        line, hint = data.count(b"\n", 0, error.start) + 1, "--skip-bad replaces what is not UTF-8"
        raise DataError(f"not UTF-8: {error.reason}", where=f"{path}:{line}", hint=hint) from error
    except FileNotFoundError as error:
        raise DataError("no such file", where=str(path)) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"unreadable: {error}", where=str(path)) from error
