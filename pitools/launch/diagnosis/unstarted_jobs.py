"""Jobs that ended before their first attempt: why, and where that is kept.

jobs/<k>/cause.json             of the run's k-th job
unbegun/<k>/cause.json          of a local run's k-th supervisor: a local run has no `jobs/`
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
from pitools.launch.diagnosis.bounded_read import shown, tail
from pitools.launch.submission import local_process, submissions
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, Evidence, Kind
from pitools.slurm.records import Accounting

_READ = 64 << 10
_LINES = 200
_NO_OUTPUT = 53  # slurmstepd's code, told as a signal, for a job whose output it cannot open
_SCRIPT = re.compile(r"^\S*slurm_script: line \d+: ")  # the batch script, as bash names it
# Slurm's word for a job that never began an attempt → cause, in words.
_BEFORE: dict[str, tuple[Kind, str]] = {
    "CANCELLED": ("cancelled", "the job was cancelled before it began"),
    "PREEMPTED": ("preempted", "the job was preempted before it began"),
    "NODE_FAIL": ("node", "a node failed before the job began"),
    "BOOT_FAIL": ("node", "a node did not boot"),
    "TIMEOUT": ("time-limit", "the time limit came before the job began an attempt"),
    "OUT_OF_MEMORY": ("memory", "the job script ran out of memory"),
}


def path(run_dir: Path, ref: run_folder.JobRef) -> Path:
    """Return the file that says why a job began no attempt."""
    # Not in `jobs/`, by which a job knows that it has to ask for leave.
    at = run_dir / "unbegun" / str(ref.number) if ref.host else submissions.at(run_dir, ref.number)
    return at / "cause.json"


def causes(run_dir: Path) -> list[tuple[int, Cause]]:
    """Return the jobs of a run that are known to have begun no attempt, as (number, why), oldest first."""
    found = []
    for at in (*run_dir.glob("jobs/*/cause.json"), *run_dir.glob("unbegun/*/cause.json")):
        with contextlib.suppress(DataError, OSError):
            if at.parent.name.isdecimal() and (cause := run_folder.read(at, Cause)):
                found.append((int(at.parent.name), cause))
    return sorted(found, key=lambda one: one[0])


class _Said(NamedTuple):
    """What a job's output says of its end. rule: the table's name for it, "" for a line that it does not know."""

    source: str
    line: str
    kind: Kind = "unknown"
    rule: str = ""
    is_local: bool = False


def judge(run_dir: Path, ref: run_folder.JobRef, told: Accounting | None, state: str, *, python: str) -> Cause:
    """Return why a job ended that began no attempt, from Slurm's word for it and from the job's own output.

    state: the job's, where told is None. python: the interpreter of the run's plan. A program that is not there is the
    run's own fault as long as no attempt of it has ever begun; after that it is the node's, the first time.
    """
    state, code = (told.state, told.exit_code or None) if told else (state, None)
    if state in _BEFORE:
        kind, reason = _BEFORE[state]
        return Cause(attempt="", kind=kind, confidence="certain", reason=reason, state=state, exit_code=code)
    said = _said(run_dir, ref)
    if said is None and told and told.signal == _NO_OUTPUT:
        what = f"the node cannot write to {run_dir}: see paths.runs of the site, and whether it is mounted"
        said = _Said("sacct", what, "user", "job-output")
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
        fingerprint=fingerprint.of_end(fingerprint.normal(said.line)),
        evidence=(Evidence(t="", source=said.source, what=said.line, kind=kind, rule=said.rule),),
    )
    node = _first_node(told)
    if kind == "user" and run_folder.attempts(run_dir) and not _is_as_before(run_dir, ref, made):
        what = f"{made.reason}; other jobs of the run could begin"
        return replace(made, kind="node", nodes=node, reason=what)
    return replace(made, nodes=node) if said.is_local else made


def _is_as_before(run_dir: Path, ref: run_folder.JobRef, cause: Cause) -> bool:
    """Whether the job before this one ended in the same way, without an attempt too."""
    return any(number == ref.number - 1 and one.fingerprint == cause.fingerprint for number, one in causes(run_dir))


def _first_node(told: Accounting | None) -> tuple[str, ...]:
    """The node on which a job's script ran; () where that is not known."""
    with contextlib.suppress(PitError):
        return tuple(expand(told.node_list)[:1]) if told and told.node_list else ()
    return ()


def _said(run_dir: Path, ref: run_folder.JobRef) -> _Said | None:
    """What the output of a job says of its end: the last line that the table knows, a traceback, or the last line."""
    name = local_process.output(ref.number) if ref.host else f"slurm-{ref.job_id}.out"
    text = tail(run_dir / name, _READ)
    if text is None:
        return None
    own = text.text
    chain = tracebacks.last(own)
    for line in reversed(own[chain[0].at if chain else 0 :].splitlines()[-_LINES:]):
        if known := patterns.of_job(line):
            return _Said(name, shown(_SCRIPT.sub("", line)), known.kind, known.name, known.local)
    if chain:
        raised, one = tracebacks.kind_of(chain)  # in our own code: never the user's
        return _Said(name, shown(f"{raised.error}: {raised.message}"), one.kind if one else "unknown")
    line = log_scan.last_line(own)
    return _Said(name, _SCRIPT.sub("", line)) if line else None
