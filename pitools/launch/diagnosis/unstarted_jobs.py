"""Jobs that ended before their first attempt: why, and where that is kept.

jobs/<k>/cause.json             of the run's k-th job
unstarted/<k>/cause.json          of a local run's k-th supervisor: a local run has no `jobs/`
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pitools.core.errors import DataError, PitError
from pitools.core.hostlist import expand
from pitools.launch import fingerprint
from pitools.launch.diagnosis import log_scan, patterns, tracebacks
from pitools.launch.diagnosis.bounded_read import one_line, read_tail
from pitools.launch.submission import local_process, submissions
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, CauseKind, Evidence
from pitools.slurm.records import AccountingRow

_MAX_READ_BYTES = 64 << 10
_MAX_LINES = 200
_NO_OUTPUT = 53  # slurmstepd's code, told as a signal, for a job whose output it cannot open
_SCRIPT = re.compile(r"^\S*slurm_script: line \d+: ")  # the batch script, as bash names it
# Slurm's word for a job that never began an attempt → cause, in words.
_START_LINES: dict[str, tuple[CauseKind, str]] = {
    "CANCELLED": ("cancelled", "the job was cancelled before it began"),
    "PREEMPTED": ("preempted", "the job was preempted before it began"),
    "NODE_FAIL": ("node", "a node failed before the job began"),
    "BOOT_FAIL": ("node", "a node did not boot"),
    "TIMEOUT": ("time-limit", "the time limit came before the job began an attempt"),
    "OUT_OF_MEMORY": ("memory", "the job script ran out of memory"),
}


def cause_path(run_dir: Path, ref: run_folder.JobRef) -> Path:
    """Return the file that says why a job began no attempt."""
    # Not in `jobs/`, by which a job knows that it has to ask for leave.
    at = run_dir / "unstarted" / str(ref.number) if ref.host else submissions.job_dir(run_dir, ref.number)
    return at / "cause.json"


def unstarted_causes(run_dir: Path) -> list[tuple[int, Cause]]:
    """Return the jobs of a run that are known to have begun no attempt, as (number, why), oldest first."""
    found = []
    for at in (*run_dir.glob("jobs/*/cause.json"), *run_dir.glob("unstarted/*/cause.json")):
        with contextlib.suppress(DataError, OSError):
            if at.parent.name.isdecimal() and (cause := run_folder.read_record(at, Cause)):
                found.append((int(at.parent.name), cause))
    return sorted(found, key=lambda one: one[0])


class _OutputEnd(NamedTuple):
    """What a job's output says of its end. rule: the table's name for it, "" for a line that it does not know."""

    source: str
    line: str
    kind: CauseKind = "unknown"
    rule: str = ""
    is_local: bool = False


def diagnose_unstarted(
    run_dir: Path, ref: run_folder.JobRef, accounting: AccountingRow | None, state: str, *, python: str
) -> Cause:
    """Return why a job ended that began no attempt, from Slurm's word for it and from the job's own output.

    state: the job's, where told is None. python: the interpreter of the run's plan. A program that is not there is the
    run's own fault as long as no attempt of it has ever begun; after that it is the node's, the first time.
    """
    state, code = (accounting.state, accounting.exit_code or None) if accounting else (state, None)
    if state in _START_LINES:
        kind, reason = _START_LINES[state]
        return Cause(attempt="", kind=kind, confidence="certain", reason=reason, state=state, exit_code=code)
    said = _read_output_end(run_dir, ref)
    if said is None and accounting and accounting.signal == _NO_OUTPUT:
        what = f"the node cannot write to {run_dir}: see paths.runs of the site, and whether it is mounted"
        said = _OutputEnd("sacct", what, "user", "job-output")
    reason = "the job ended before its first attempt" + (f", with exit code {code}" if code else "")
    if said is None:
        return Cause(attempt="", kind="unknown", confidence="guess", reason=reason, state=state, exit_code=code)
    kind = "user" if said.kind == "unknown" and code in (126, 127) else said.kind
    where = "; see paths.python of the site" if said.line.startswith(f"{python}: ") else ""
    made = Cause(
        attempt="",
        kind=kind,
        confidence="guess" if kind == "unknown" else "likely",
        state=state,
        exit_code=code,
        reason=f"{reason}: {said.line}{where}",
        fingerprint=fingerprint.fingerprint_exit(fingerprint.normalize_message(said.line)),
        evidence=(Evidence(t="", source=said.source, text=said.line, kind=kind, rule=said.rule),),
    )
    node = _first_node(accounting)
    if kind == "user" and run_folder.attempt_dirs(run_dir) and not _repeats_previous(run_dir, ref, made):
        what = f"{made.reason}; other jobs of the run could begin"
        return replace(made, kind="node", nodes=node, reason=what)
    return replace(made, nodes=node) if said.is_local else made


def _repeats_previous(run_dir: Path, ref: run_folder.JobRef, cause: Cause) -> bool:
    """Whether the job before this one ended in the same way, without an attempt too."""
    return any(
        number == ref.number - 1 and one.fingerprint == cause.fingerprint for number, one in unstarted_causes(run_dir)
    )


def _first_node(told: AccountingRow | None) -> tuple[str, ...]:
    """The node on which a job's script ran; () where that is not known."""
    with contextlib.suppress(PitError):
        return tuple(expand(told.node_list)[:1]) if told and told.node_list else ()
    return ()


def _read_output_end(run_dir: Path, ref: run_folder.JobRef) -> _OutputEnd | None:
    """What the output of a job says of its end: the last line that the table knows, a traceback, or the last line."""
    name = local_process.output_name(ref.number) if ref.host else f"slurm-{ref.job_id}.out"
    text = read_tail(run_dir / name, _MAX_READ_BYTES)
    if text is None:
        return None
    own = text.text
    chain = tracebacks.last_traceback(own)
    for line in reversed(own[chain[0].offset if chain else 0 :].splitlines()[-_MAX_LINES:]):
        if known := patterns.match_job_output(line):
            return _OutputEnd(name, one_line(_SCRIPT.sub("", line)), known.kind, known.name, known.blames_node)
    if chain:
        raised, one = tracebacks.explaining_exception(chain)  # in our own code: never the user's
        return _OutputEnd(name, one_line(f"{raised.error}: {raised.message}"), one.kind if one else "unknown")
    line = log_scan.last_line(own)
    return _OutputEnd(name, _SCRIPT.sub("", line)) if line else None
