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
    "network": "NCCL_DEBUG=WARN in the request's env, and whether the same pair of nodes fails again",
    "memory": "the job's MaxRSS (sacct -j) and its limit",
    "storage": "whether the node and other nodes can write the path now",
    "hang": "the stacks of the ranks, in the attempt's stacks/",
    "preempted": "Slurm's state of the job (sacct -j)",
    "cancelled": "Slurm's state of the job (sacct -j)",
    "time-limit": "Slurm's state of the job (sacct -j)",
    "user": "whether the next attempt fails at the same place",
    "unknown": "Slurm's state of the job (sacct -j), and the ranks' complete logs",
    "finished": "a message of the program that its last step is done",
}


def explain_run(run_dir: Path) -> Iterator[str]:
    """Yield the lines about a run: each attempt and its cause, the last one with its evidence. Raises DataError."""
    made = run_folder.attempt_dirs(run_dir)
    early = unstarted_jobs.unstarted_causes(run_dir)
    for number, unbegun_for in early:
        yield f"job {number}: {headline(unbegun_for)}"
        yield from (f"  {_evidence_line(one, '')}" for one in unbegun_for.evidence)
    if not made and not early:
        yield "no attempt has started"
    for path in made:
        try:
            cause = run_folder.read_record(path / "cause.json", Cause)
        except DataError as error:
            yield f"attempt {path.name}: cause.json is {error.message}"
            continue
        if cause is None:
            ended = (path / "exit.json").exists()
            yield f"attempt {path.name}: {'ended, not diagnosed yet' if ended else 'not ended yet'}"
        elif path == made[-1]:
            yield from explain_cause(cause, _read_started(path))
        else:
            yield f"attempt {path.name}: {headline(cause)}"


def past_attempts(run_dir: Path, already_reported: set[str]) -> Iterator[str]:
    """Yield a line for each attempt that is followed by another, and each job that ended without one.

    already_reported: their names, `attempt <n>` or `job <k>`; names in it are skipped, new names are added.
    """
    for number, early in unstarted_jobs.unstarted_causes(run_dir):
        if (name := f"job {number}") not in already_reported:
            already_reported.add(name)
            yield f"{name}: {headline(early, MAX_SHOWN)}"
    for path in run_folder.attempt_dirs(run_dir):
        if (name := f"attempt {path.name}") in already_reported:
            continue
        with contextlib.suppress(DataError, OSError):
            cause, decided = (
                run_folder.read_record(path / "cause.json", Cause),
                run_folder.read_record(path / "decision.json", Decision),
            )
            if cause and decided:
                already_reported.add(name)
                if decided.action not in ("done", "stop"):  # the run's verdict reports those
                    yield f"{name}: {headline(cause, MAX_SHOWN)}: {decided.action}"


def headline(cause: Cause, width: int = _WIDTH) -> str:
    """Return one line: kind, confidence, reason. width: the most characters of the reason."""
    return f"{cause.kind} ({cause.confidence}): {one_line(cause.reason, width)}"


def explain_cause(cause: Cause, started: str = "") -> Iterator[str]:
    """Yield the lines about one attempt. started: its start time; if given, times are in seconds since then."""
    yield f"attempt {cause.attempt}: {headline(cause)}"
    gained = f", {cause.saved_steps} saved" if cause.saved_steps else ""
    yield f"  reached step {cause.steps - 1}{gained}" if cause.steps else f"  no step in the step log{gained}"
    if cause.nodes:
        yield f"  at fault: {', '.join(cause.nodes)}"
    lines = cause.evidence[:_MAX_EVIDENCE_LINES]
    notes = [*(_evidence_note(one, cause) for one in lines), ""]
    for one, note, then in zip(lines, notes, notes[1:], strict=False):
        yield "  " + _evidence_line(one, started)
        if note and note != then:  # consecutive lines with the same note share it, below the last
            yield f"      {note}"
    if len(cause.evidence) > _MAX_EVIDENCE_LINES:
        yield f"  … and {len(cause.evidence) - _MAX_EVIDENCE_LINES} more, in attempts/{cause.attempt}/cause.json"
    if cause.confidence != "certain":
        yield f"  more certain with: {_MORE_EVIDENCE[cause.kind]}"


def _evidence_line(one: Evidence, started: str) -> str:
    since = log_timestamps.seconds_between(started, one.t)
    when = f"{since:+9.1f} s" if since is not None else one.t[11:23] or "       —  "
    who = " ".join(part for part in (f"rank {one.rank}" if one.rank is not None else "", one.node) if part)
    return f"{when}  {who + ': ' if who else ''}{one_line(one.text, _WIDTH)}  [{one.source}]"


def _evidence_note(one: Evidence, cause: Cause) -> str:
    if cause.kind == "finished":
        return ""
    if one.role in _ROLE_TEXT:
        return _ROLE_TEXT[one.role]
    if one == cause.evidence[0] and one.kind == cause.kind:
        return patterns.exit_reason(one.rule) or "this decided the cause"
    return ""


def _read_started(path: Path) -> str:
    try:
        start = run_folder.read_record(path / "start.json", AttemptStart)
    except DataError:
        return ""
    return start.started if start else ""
