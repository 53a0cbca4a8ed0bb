"""Read the output of `sacct -P`, with its header line, and any columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pitools.core.errors import PitError
from pitools.place.simulate.model import HOUR_S
from pitools.place.simulate.traces.row import LeftOut, TraceRow, parse_naive_time, split_lines
from pitools.slurm.fields import count_gpus, none_to_empty, parse_count, parse_slurm_duration, parse_tres
from pitools.slurm.states import JOB_STATES, is_final, parse_job_state

_REQUIRED_COLUMNS = (("JobID",), ("Submit",), ("ElapsedRaw", "Elapsed"), ("AllocTRES", "ReqTRES"))  # one of each

_SKEW_S = 60  # between the clocks of machines
_COUNTED_KEY = "counted"  # a column of ours; sacct's begin with a capital


def lacking_columns(header: str) -> list[str]:
    """Return what a header line lacks of the columns that are read."""
    return [" or ".join(each) for each in _REQUIRED_COLUMNS if not set(each) & set(header.split("|"))]


def rows(text: str) -> Iterator[tuple[int, dict[str, str] | None]]:
    """Yield (line, columns by name) of each job, with None for another number of columns; skip steps.

    A job that `sacct -D` lists with each of its attempts has another id for the later ones.
    """
    first, *lines = split_lines(text)
    header = first.split("|")
    counted = "gres/gpu" if "gres/gpu" in text else "node"  # without GPUs, nodes: as a scenario of such sites
    first_submit: dict[str, str] = {}
    for line, cells in _records(lines, header):
        if len(cells) != len(header):
            yield line, None
        elif "." not in (raw := dict(zip(header, cells, strict=True), **{_COUNTED_KEY: counted}))["JobID"]:
            if first_submit.setdefault(raw["JobID"], raw["Submit"]) != raw["Submit"]:
                raw["JobID"] += f" of {raw['Submit']}"
            yield line, raw


def _records(lines: Sequence[str], header: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of each record; a job's name may hold separators and ends of lines.

    A record goes on until it is complete, or a line is complete by itself: so a torn one hides no other.
    """
    separators, begin, count = len(header) - 1, 0, 0
    for end, text in enumerate(lines, start=1):
        count += text.count("|")
        if count >= separators or end == len(lines) or lines[end].count("|") >= separators:
            cells = "\n".join(lines[begin:end]).split("|")
            if (more := len(cells) - len(header)) > 0 and "JobName" in header:
                name = header.index("JobName")
                cells[name : name + more + 1] = ["|".join(cells[name : name + more + 1])]
            if any(cells):
                yield begin + 2, cells
            begin, count = end, 0


def row(raw: dict[str, str] | None) -> TraceRow | LeftOut:
    """Return a job, unless it held no GPU (no node, without GPUs), is not over or never ran. Raises ValueError."""
    if raw is None:
        raise ValueError("another number of columns than the header")
    run_s = _duration_s(raw, "ElapsedRaw" if raw.get("ElapsedRaw") else "Elapsed")
    limit_s = _duration_s(raw, "TimelimitRaw", unit_s=60) or _duration_s(raw, "Timelimit")
    gpus = _gpus(raw)
    if run_s is None:
        raise ValueError("no run time")
    state = parse_job_state(raw.get("State", "COMPLETED"))
    if state == "PENDING":
        return LeftOut("wait still")
    if gpus and not (is_final(state) or state in ("REQUEUED", "RESIZING")):  # of what these ended
        why = f"are {state} still" if state in JOB_STATES else f"have the unknown state {state}"
        return LeftOut("run still" if state == "RUNNING" else why, gpus * run_s / HOUR_S)
    if not run_s or not gpus:
        return LeftOut("held no GPU" if run_s else "never ran")
    submit_s = parse_naive_time(raw["Submit"], "Submit")
    return TraceRow(
        job_id=raw["JobID"],
        submit_s=submit_s,
        gpus=gpus,
        run_s=run_s,
        limit_s=limit_s or 0.0,
        owner=none_to_empty(raw.get("User", "")) or none_to_empty(raw.get("Account", "")),
        job_name=raw.get("JobName", ""),
        queue=none_to_empty(raw.get("QOS", "")),
        account=none_to_empty(raw.get("Account", "")),
        wait_s=_wait_s(raw, submit_s),
    )


def _wait_s(raw: dict[str, str], submit_s: float) -> float:
    """Return the seconds from when the job could start to its start; -1 without a column Start. Raises ValueError."""
    start, eligible = (none_to_empty(raw.get(column, "")) for column in ("Start", "Eligible"))
    if not start:
        return -1.0
    since_s = parse_naive_time(eligible, "Eligible") if eligible else submit_s
    start_s = parse_naive_time(start, "Start")
    if start_s < submit_s - _SKEW_S:
        why = "if the clocks were set back, export with SLURM_TIME_FORMAT=%s"
        raise ValueError(f"Start is {start!r}, before Submit, {raw['Submit']!r} ({why})")
    return max(0.0, start_s - max(since_s, submit_s))


def _duration_s(raw: dict[str, str], column: str, unit_s: int = 1) -> int | None:
    text = raw.get(column, "")
    try:
        return parse_slurm_duration(text, unit_s)
    except PitError as error:
        raise ValueError(f"{column} is {text!r}, no duration") from error


def _gpus(raw: dict[str, str]) -> int:
    column = "AllocTRES" if none_to_empty(raw.get("AllocTRES", "")) else "ReqTRES"
    tres = parse_tres(raw.get(column, ""))
    try:
        return count_gpus(tres) if raw[_COUNTED_KEY] == "gres/gpu" else parse_count(tres.get("node", "")) or 0
    except PitError as error:
        raise ValueError(f"{column} is {raw[column]!r}, no number") from error
