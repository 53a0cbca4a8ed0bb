"""Philly (Microsoft, ATC'19): cluster_job_log, a JSON list of jobs with their attempts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from typing import Any

from pitools.place.simulate.traces.row import TraceRow, parse_naive_time

_SPACE = " \t\r\n,"


def rows(text: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of each item of the list, parsed one by one. Raises ValueError."""
    decoder = json.JSONDecoder()
    offset = text.index("[") + 1 if text.lstrip().startswith("[") else 0
    if not offset:
        raise ValueError("not a list (expected a list of jobs)")
    line, counted = 1, 0
    while True:
        while offset < len(text) and text[offset] in _SPACE:
            offset += 1
        line, counted = line + text.count("\n", counted, offset), offset
        if offset >= len(text):
            raise ValueError(f"line {line}: truncated")
        if text[offset] == "]":
            return
        try:
            raw, offset = decoder.raw_decode(text, offset)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {error.lineno}: {error.msg}") from error
        yield line, raw


def row(raw: Any) -> TraceRow | None:
    """Return a job, with the run time of all its attempts; None if it never ran or held no GPU. Raises ValueError."""
    if not isinstance(raw, dict) or not isinstance(raw.get("attempts"), list):
        raise ValueError("not a job with attempts")
    job_id, run_s, gpus, began_s = raw.get("jobid"), 0.0, 0, inf
    if not isinstance(job_id, str) or not job_id:
        raise ValueError(f"jobid is {job_id!r}")
    for attempt in raw["attempts"]:
        try:
            start, end, detail = attempt["start_time"], attempt["end_time"], attempt["detail"]
            attempt_gpus = sum(len(node["gpus"]) for node in detail)
        except (KeyError, TypeError) as error:
            raise ValueError(f"an attempt of {job_id} is incomplete: {error}") from error
        if start in (None, "None") or end in (None, "None"):
            continue  # as published where an attempt was ended before it ran, or ran on at the end of the log
        start_s = parse_naive_time(start, "start_time")
        began_s, ran_s = min(began_s, start_s), parse_naive_time(end, "end_time") - start_s
        if ran_s < 0:
            raise ValueError(f"an attempt of {job_id} ends before it starts")
        run_s, gpus = run_s + ran_s, max(gpus, attempt_gpus)
    submit_s = parse_naive_time(raw.get("submitted_time", ""), "submitted_time")
    if not run_s or not gpus:
        return None
    return TraceRow(
        job_id=job_id,
        submit_s=submit_s,
        gpus=gpus,
        run_s=run_s,
        owner=str(raw.get("user") or ""),
        queue=str(raw.get("vc") or ""),
        account=str(raw.get("vc") or ""),
        wait_s=max(0.0, began_s - submit_s),
    )
