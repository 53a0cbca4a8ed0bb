"""Helios (SenseTime, SC'21): a CSV of jobs, as published, or with seconds instead of times."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from pitools.place.simulate.traces.row import TraceRow, parse_naive_time, parse_number, parse_whole, split_lines

Raw = dict[str | None, str]


def rows(text: str) -> Iterator[tuple[int, Raw]]:
    """Yield (line, columns by name) of each row."""
    reader = csv.DictReader(split_lines(text))
    for raw in reader:
        yield reader.line_num, raw


def row(raw: Raw) -> TraceRow | None:
    """Return a job; None for one that held no GPU or never ran. Raises ValueError."""
    if None in raw or None in raw.values():
        raise ValueError(f"{len(raw)} columns (expected as many as the header)")
    gpus = parse_whole(raw.get("gpus") or raw.get("gpu_num") or "", "gpus")
    run_s = parse_number(raw.get("duration_s") or raw.get("duration") or "", "duration_s")
    if "submit_time" in raw:
        submit_s = parse_naive_time(raw["submit_time"], "submit_time")
    else:
        submit_s = parse_number(raw.get("submit_s", ""), "submit_s")
    if not gpus or not run_s:
        return None
    guess, start = raw.get("predicted_rank_score", ""), raw.get("start_time", "")
    return TraceRow(
        job_id=raw["job_id"],
        submit_s=submit_s,
        gpus=gpus,
        run_s=run_s,
        owner=raw.get("user", ""),
        queue=raw.get("vc", raw.get("queue", "")),
        account=raw.get("vc", ""),
        rank_score=parse_number(guess, "predicted_rank_score") if guess else 0.0,
        wait_s=max(0.0, parse_naive_time(start, "start_time") - submit_s) if start else -1.0,
    )
