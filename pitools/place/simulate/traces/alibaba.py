"""Alibaba's cluster-trace-gpu-v2023: a CSV of Kubernetes pods with the times of creation, scheduling and deletion."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from pitools.place.simulate.traces.row import TraceRow, parse_number, parse_whole, split_lines

Raw = dict[str | None, str]


def rows(text: str) -> Iterator[tuple[int, Raw]]:
    """Yield (line, columns by name) of each row."""
    reader = csv.DictReader(split_lines(text))
    for raw in reader:
        yield reader.line_num, raw


def row(raw: Raw) -> TraceRow | None:
    """Return a pod, a part of a GPU counted as one; None for one without GPUs or never scheduled. Raises ValueError."""
    if None in raw or None in raw.values():
        raise ValueError(f"{len(raw)} columns (expected as many as the header)")
    gpus = parse_whole(raw["num_gpu"], "num_gpu")
    if not gpus or not raw["scheduled_time"]:
        return None
    created_s = parse_number(raw["creation_time"], "creation_time")
    scheduled_s = parse_number(raw["scheduled_time"], "scheduled_time")
    run_s = parse_number(raw["deletion_time"], "deletion_time") - scheduled_s
    if not run_s:
        return None
    return TraceRow(
        job_id=raw["name"], submit_s=created_s, gpus=gpus, run_s=run_s, queue=raw["qos"], wait_s=scheduled_s - created_s
    )
