"""Explain a cause as text: the reason, the evidence by time, its consequences, and what would make it more certain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pitools.core.errors import DataError
from pitools.launch.diagnosis import log_timestamps, patterns, unstarted_jobs
from pitools.launch.diagnosis.bounded_read import MAX_SHOWN, one_line
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Cause, Decision, Evidence

_WIDTH = 160
_MAX_EVIDENCE_LINES = 24
_ROLE_TEXT = {
    "cascade": "consequence: another rank had ended",
    "end": "consequence: the remaining ranks were terminated",
    "warning": "earlier: a signal",
}
_MORE_EVIDENCE = {
    "node": "the node's log around that time (dmesg, slurmd), and whether the node fails again",
    "gpu": "`dmesg` and `nvidia-smi -q` of the node",
    "preflight": "`pit node bench --pairs` in a job of these nodes",
    "network": "NCCL_DEBUG=WARN in the request's env, and whether the same pair of nodes fails again",
    "memory": "the job's MaxRSS (sacct -j) and its limit",
    "storage": "whether the node and other nodes can write the path now",
    "hang": "the stacks of the ranks, in the attempt's stacks/",
    "preempted": "Slurm's state of the job (sacct -j)",
    "cancelled": "Slurm's state of the job (sacct -j)",
    "time-limit": "Slurm's state of the job (sacct -j)",
    "program": "whether the next attempt fails at the same place",
    "unknown": "Slurm's state of the job (sacct -j), and the ranks' complete logs",
    "succeeded": "a message of the program that its last step is done",
}


def explain_run(run_dir: Path) -> Iterator[str]:
    """Yield the lines about a run: each attempt and its cause, the last one with its evidence. Raises DataError."""
    attempts = run_folder.attempt_dirs(run_dir)
    unstarted = unstarted_jobs.unstarted_causes(run_dir)
    for number, unstarted_cause in unstarted:
        yield f"job {number}: {headline(unstarted_cause)}"
        yield from (f"  {_evidence_line(piece, '')}" for piece in unstarted_cause.evidence)
    if not attempts and not unstarted:
        yield "no attempt has started"
    for path in attempts:
        try:
            cause = run_folder.read_record(path / "cause.json", Cause)
        except DataError as error:
            yield f"attempt {path.name}: cause.json is {error.message}"
            continue
        if cause is None:
            ended = (path / "exit.json").exists()
            yield f"attempt {path.name}: {'ended, not diagnosed yet' if ended else 'not ended yet'}"
        elif path == attempts[-1]:
            yield from explain_cause(cause, _read_started(path))
        else:
            yield f"attempt {path.name}: {headline(cause)}"


def past_attempts(run_dir: Path, already_reported: set[str]) -> Iterator[str]:
    """Yield a line for each attempt that is followed by another, and each job that ended without one.

    already_reported: their names, `attempt <n>` or `job <k>`; names in it are skipped, new names are added.
    """
    for number, unstarted_cause in unstarted_jobs.unstarted_causes(run_dir):
        if (name := f"job {number}") not in already_reported:
            already_reported.add(name)
            yield f"{name}: {headline(unstarted_cause, MAX_SHOWN)}"
    for path in run_folder.attempt_dirs(run_dir):
        if (name := f"attempt {path.name}") in already_reported:
            continue
        with contextlib.suppress(DataError, OSError):
            cause, decision = (
                run_folder.read_record(path / "cause.json", Cause),
                run_folder.read_record(path / "decision.json", Decision),
            )
            if cause and decision:
                already_reported.add(name)
                if decision.action not in ("done", "stop"):  # the run's verdict reports those
                    yield f"{name}: {headline(cause, MAX_SHOWN)}: {decision.action}"


def headline(cause: Cause, width: int = _WIDTH) -> str:
    """Return one line: kind, confidence, reason. width: the most characters of the reason."""
    return f"{cause.kind} ({cause.confidence}): {one_line(cause.reason, width)}"


def explain_cause(cause: Cause, started: str = "") -> Iterator[str]:
    """Yield the lines about one attempt. started: its start time; if given, times are in seconds since then."""
    yield f"attempt {cause.attempt}: {headline(cause)}"
    saved = f", {cause.saved_steps} saved" if cause.saved_steps else ""
    yield f"  reached step {cause.steps - 1}{saved}" if cause.steps else f"  no step in the step log{saved}"
    if cause.nodes:
        yield f"  at fault: {one_line(', '.join(cause.nodes))}"
    if cause.kind == "hang":
        yield f"  stacks of its ranks: attempts/{cause.attempt}/stacks/, in the run's folder"
    pieces = cause.evidence[:_MAX_EVIDENCE_LINES]
    notes = [*(_evidence_note(piece, cause) for piece in pieces), ""]
    for piece, note, next_note in zip(pieces, notes, notes[1:], strict=False):
        yield "  " + _evidence_line(piece, started)
        if note and note != next_note:  # consecutive lines with the same note share it, below the last
            yield f"      {note}"
    if len(cause.evidence) > _MAX_EVIDENCE_LINES:
        yield f"  … and {len(cause.evidence) - _MAX_EVIDENCE_LINES} more, in attempts/{cause.attempt}/cause.json"
    if cause.confidence != "certain":
        yield f"  more certain with: {_MORE_EVIDENCE[cause.kind]}"


def _evidence_line(piece: Evidence, started: str) -> str:
    seconds = log_timestamps.seconds_between(started, piece.t)
    time_text = f"{seconds:+9.1f} s" if seconds is not None else piece.t[11:23] or "       —  "
    origin = " ".join(part for part in (f"rank {piece.rank}" if piece.rank is not None else "", piece.node) if part)
    prefix = f"{one_line(origin)}: " if origin else ""
    return f"{time_text}  {prefix}{one_line(piece.text, _WIDTH)}  [{one_line(piece.source)}]"


def _evidence_note(piece: Evidence, cause: Cause) -> str:
    if cause.kind == "succeeded":
        return ""
    if piece.role in _ROLE_TEXT:
        return _ROLE_TEXT[piece.role]
    if piece == cause.evidence[0] and piece.kind == cause.kind:
        return patterns.exit_reason(piece.rule) or "this decided the cause"
    return ""


def _read_started(path: Path) -> str:
    try:
        start = run_folder.read_record(path / "start.json", AttemptStart)
    except DataError:
        return ""
    return start.started if start else ""
