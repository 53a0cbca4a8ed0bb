"""Diagnose jobs that ended before their first attempt.

jobs/<k>/cause.json             the cause, of the run's k-th job
unstarted/<k>/cause.json        the cause, of a local run's k-th supervisor: a local run has no `jobs/`
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
_NO_OUTPUT = 53  # slurmstepd reports this, as a signal, for a job whose output it cannot open
_SCRIPT = re.compile(r"^\S*slurm_script: line \d+: ")  # bash's prefix of errors of the batch script
# Slurm's state of a job without an attempt → kind and reason of the cause.
_STATE_CAUSES: dict[str, tuple[CauseKind, str]] = {
    "CANCELLED": ("cancelled", "the job was cancelled before its first attempt"),
    "PREEMPTED": ("preempted", "the job was preempted before its first attempt"),
    "NODE_FAIL": ("node", "a node failed before the first attempt"),
    "BOOT_FAIL": ("node", "a node did not boot"),
    "TIMEOUT": ("time-limit", "the job reached its time limit before its first attempt"),
    "OUT_OF_MEMORY": ("memory", "the job script ran out of memory"),
}


def cause_path(run_dir: Path, ref: run_folder.JobRef) -> Path:
    """Return the path of the cause of a job that ended before its first attempt."""
    # A local run gets no folder `jobs/`: that folder means that jobs need a grant.
    folder = run_dir / "unstarted" / str(ref.job_number) if ref.host else submissions.job_dir(run_dir, ref.job_number)
    return folder / "cause.json"


def unstarted_causes(run_dir: Path) -> list[tuple[int, Cause]]:
    """Return the jobs of a run that ended without an attempt, as (number, cause), oldest first."""
    causes = []
    for path in (*run_dir.glob("jobs/*/cause.json"), *run_dir.glob("unstarted/*/cause.json")):
        with contextlib.suppress(DataError, OSError):
            if path.parent.name.isdecimal() and (cause := run_folder.read_record(path, Cause)):
                causes.append((int(path.parent.name), cause))
    return sorted(causes, key=lambda item: item[0])


class _OutputEnd(NamedTuple):
    """The line of a job's output that explains its end. rule: of patterns.toml, "" if none matches."""

    source: str
    line: str
    kind: CauseKind = "unknown"
    rule: str = ""
    blames_node: bool = False


def diagnose_unstarted(
    run_dir: Path, ref: run_folder.JobRef, accounting: AccountingRow | None, state: str, *, python: str
) -> Cause:
    """Return why a job ended before its first attempt, from Slurm's accounting and the job's own output.

    state: the job's state, used if accounting is None. python: the interpreter of the run's plan.
    A missing program is of kind `program` if the run has never had an attempt; otherwise of kind `node`, unless the
    previous job ended in the same way.
    """
    state, code = (accounting.state, accounting.exit_code or None) if accounting else (state, None)
    if state in _STATE_CAUSES:
        kind, reason = _STATE_CAUSES[state]
        return Cause(attempt="", kind=kind, confidence="certain", reason=reason, state=state, exit_code=code)
    output_end = _read_output_end(run_dir, ref)
    if output_end is None and accounting and accounting.signal == _NO_OUTPUT:
        problem = f"the node cannot write to {run_dir}: see paths.runs of the site, and whether it is mounted"
        output_end = _OutputEnd("sacct", problem, "program", "job-output")
    reason = "the job ended before its first attempt" + (f", with exit code {code}" if code else "")
    if output_end is None:
        return Cause(attempt="", kind="unknown", confidence="guess", reason=reason, state=state, exit_code=code)
    kind = "program" if output_end.kind == "unknown" and code in (126, 127) else output_end.kind
    hint = _python_hint(output_end.line, python)
    cause = Cause(
        attempt="",
        kind=kind,
        confidence="guess" if kind == "unknown" else "likely",
        state=state,
        exit_code=code,
        reason=f"{reason}: {output_end.line}{hint}",
        fingerprint=fingerprint.fingerprint_exit(fingerprint.normalize_message(output_end.line)),
        evidence=(Evidence(t="", source=output_end.source, text=output_end.line, kind=kind, rule=output_end.rule),),
    )
    node = _first_node(accounting)
    if kind == "program" and run_folder.attempt_dirs(run_dir) and not _repeats_previous(run_dir, ref, cause):
        problem = f"{cause.reason}; other jobs of the run have started attempts"
        return replace(cause, kind="node", nodes=node, reason=problem)
    return replace(cause, nodes=node) if output_end.blames_node else cause


def _python_hint(line: str, python: str) -> str:
    """Return what to change if a line of the job's output says that its interpreter is missing or lacks pitools."""
    if line.startswith(f"{python}: "):
        return "; see `python` of the request, and paths.python of the site"
    if re.search(r"No module named '?(pitools|msgspec)\b", line):
        return f"; {python} has no pitools: see `python` of the request, and paths.python of the site"
    return ""


def _repeats_previous(run_dir: Path, ref: run_folder.JobRef, cause: Cause) -> bool:
    """Whether the previous job ended in the same way, also before its first attempt."""
    return any(
        number == ref.job_number - 1 and previous.fingerprint == cause.fingerprint
        for number, previous in unstarted_causes(run_dir)
    )


def _first_node(accounting: AccountingRow | None) -> tuple[str, ...]:
    """Return the node on which a job's script ran; () if unknown."""
    with contextlib.suppress(PitError):
        return tuple(expand(accounting.node_list)[:1]) if accounting and accounting.node_list else ()
    return ()


def _read_output_end(run_dir: Path, ref: run_folder.JobRef) -> _OutputEnd | None:
    """Return the end of a job's output: the last line that matches a pattern, a traceback, or the last line."""
    name = local_process.output_name(ref.job_number) if ref.host else f"slurm-{ref.job_id}.out"
    text = read_tail(run_dir / name, _MAX_READ_BYTES)
    if text is None:
        return None
    output = text.text
    chain = tracebacks.last_traceback(output)
    for line in reversed(output[chain[0].offset if chain else 0 :].splitlines()[-_MAX_LINES:]):
        if pattern := patterns.match_job_output(line):
            return _OutputEnd(name, one_line(_SCRIPT.sub("", line)), pattern.kind, pattern.name, pattern.blames_node)
    if chain:
        raised, rule = tracebacks.explaining_exception(chain)  # of pitools: not of kind `program`
        return _OutputEnd(name, one_line(f"{raised.error}: {raised.message}"), rule.kind if rule else "unknown")
    line = log_scan.last_line(output)
    return _OutputEnd(name, _SCRIPT.sub("", line)) if line else None
