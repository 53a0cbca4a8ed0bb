"""One call that judges an attempt, and keeps what it found beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from pitools.core.errors import DataError, PitError
from pitools.launch.diagnosis import classify, evidence
from pitools.run import run_folder
from pitools.run.attempt_records import Cause
from pitools.slurm.records import AccountingRow

_CONFIDENCE_ORDER = {"guess": 0, "likely": 1, "certain": 2}


def diagnose_attempt(
    run_dir: Path, attempt: Path, *, accounting: AccountingRow | None = None, in_job: bool = False
) -> Cause:
    """Why an attempt ended, from its folder and, if given, from Slurm's accounting of its job.

    Writes `cause.json`, where a cause is replaced only by a more certain one; returns the one that then stands. in_job:
    asked by the job itself, whose node may be gone a moment later: what is written is then synced. Never raises for
    what the folder holds or lacks.
    """
    before = _read_cause(attempt)
    cause = _diagnose(run_dir, attempt, accounting)
    cause = _raise_confidence_if_repeated(run_dir, attempt, cause)
    if before and _confidence_rank(before) >= _confidence_rank(cause):
        return before
    with contextlib.suppress(PitError):  # the next look judges again
        run_folder.write_record(attempt / "cause.json", cause, durable=in_job)
    return cause


def _diagnose(run_dir: Path, attempt: Path, accounting: AccountingRow | None) -> Cause:
    cause = classify.classify(evidence.gather_evidence(run_dir, attempt, slurm=accounting))
    if cause.kind in ("unknown", "network") and cause.confidence != "certain":
        deep = classify.classify(evidence.gather_evidence(run_dir, attempt, slurm=accounting, deep=True))
        cause = deep if _confidence_rank(deep) >= _confidence_rank(cause) else cause
    return cause


def _confidence_rank(cause: Cause) -> int:
    return 0 if cause.kind == "unknown" else 1 + _CONFIDENCE_ORDER[cause.confidence]


def _read_cause(attempt: Path) -> Cause | None:
    try:
        return run_folder.read_record(attempt / "cause.json", Cause)
    except (DataError, OSError):
        return None


def _is_program_missing(cause: Cause) -> bool:
    """Whether a node is blamed that did not find a program, and said no more: what it cannot read is another matter."""
    rules = {one.rule for one in cause.evidence}
    return cause.kind == "node" and bool(rules & {"code-126", "code-127"}) and "program-unreadable" not in rules


def _is_staging_refused(cause: Cause) -> bool:
    """Whether a node's own disk could not be staged to, for another reason than room."""
    return cause.kind == "storage" and any(one.rule == "stage-refused" for one in cause.evidence)


def _raise_confidence_if_repeated(run_dir: Path, attempt: Path, cause: Cause) -> Cause:
    """A user's failure that is the attempt before's again, and no step gained: certain.

    And a program that, one after the other, two nodes could not start is not theirs, nor is a place to stage to that
    cannot be used twice.
    """
    order = run_folder.attempt_dirs(run_dir)
    last = _read_cause(order[order.index(attempt) - 1]) if attempt in order[1:] else None
    same = last is not None and bool(cause.fingerprint) and cause.fingerprint == last.fingerprint
    if last and same and _is_program_missing(cause) and _is_program_missing(last) and cause.nodes != last.nodes:
        what = f"{cause.reason}; and before on {', '.join(last.nodes)}"
        return msgspec.structs.replace(cause, kind="user", nodes=(), reason=what)
    if last and same and not cause.progressed and _is_staging_refused(cause) and _is_staging_refused(last):
        where = f" on {', '.join(last.nodes)}" if last.nodes else ""
        what = f"{cause.reason}; and before{where}: see paths.nvme of the site"
        return msgspec.structs.replace(cause, kind="user", nodes=(), reason=what)
    if cause.kind == "user" and cause.confidence != "certain" and same and not cause.progressed:
        return msgspec.structs.replace(cause, confidence="certain", reason=f"{cause.reason}; the same as before")
    return cause
