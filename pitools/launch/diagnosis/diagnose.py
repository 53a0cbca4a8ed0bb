"""Diagnose an attempt, and write the cause into its folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from pitools.core.errors import DataError, PitError
from pitools.launch.diagnosis import classify, evidence
from pitools.run import run_folder
from pitools.run.attempt_records import DOUBT, Cause
from pitools.slurm.records import AccountingRow


def diagnose_attempt(
    run_dir: Path, attempt: Path, *, accounting: AccountingRow | None = None, in_job: bool = False
) -> Cause:
    """Return why an attempt ended, from its folder and, if given, from Slurm's accounting of its job.

    Writes `cause.json` unless the cause in it is at least as certain, which is then returned.
    in_job: called by the job itself, whose node may fail at any moment: the file is synced.
    Never raises for files that are missing or damaged.
    """
    previous = _read_cause(attempt)
    cause = _diagnose(run_dir, attempt, accounting)
    cause = _revise_if_repeated(run_dir, attempt, cause)
    if previous and _doubt(previous) <= _doubt(cause):
        return previous
    with contextlib.suppress(PitError):  # the next call diagnoses it again
        run_folder.write_record(attempt / "cause.json", cause, durable=in_job)
    return cause


def _diagnose(run_dir: Path, attempt: Path, accounting: AccountingRow | None) -> Cause:
    cause = classify.classify(evidence.gather_evidence(run_dir, attempt, slurm=accounting))
    if cause.kind in ("unknown", "network") and cause.confidence != "certain":
        deep = classify.classify(evidence.gather_evidence(run_dir, attempt, slurm=accounting, deep=True))
        cause = deep if _doubt(deep) <= _doubt(cause) else cause
    return cause


def _doubt(cause: Cause) -> int:
    return 1 + max(DOUBT.values()) if cause.kind == "unknown" else DOUBT[cause.confidence]


def _read_cause(attempt: Path) -> Cause | None:
    try:
        return run_folder.read_record(attempt / "cause.json", Cause)
    except (DataError, OSError):
        return None


def _is_program_missing(cause: Cause) -> bool:
    """Whether a node is blamed for a program that it did not find, rather than could not read."""
    rules = {piece.rule for piece in cause.evidence}
    return cause.kind == "node" and bool(rules & {"code-126", "code-127"}) and "program-unreadable" not in rules


def _is_staging_refused(cause: Cause) -> bool:
    """Whether staging could not use a node's own disk, for a reason other than free space."""
    return cause.kind == "storage" and any(piece.rule == "stage-refused" for piece in cause.evidence)


def _revise_if_repeated(run_dir: Path, attempt: Path, cause: Cause) -> Cause:
    """Return the cause, revised if the failure is the previous attempt's.

    A repeated failure of kind `program` without progress is certain. A program that two nodes in a row cannot start,
    and a staging folder that two attempts in a row cannot use, are of kind `program`, not `node` or `storage`.
    """
    attempts = run_folder.attempt_dirs(run_dir)
    is_task = "." in attempt.name  # of an array: the attempt before it is another task's
    previous = _read_cause(attempts[attempts.index(attempt) - 1]) if attempt in attempts[1:] and not is_task else None
    is_repeated = previous is not None and bool(cause.fingerprint) and cause.fingerprint == previous.fingerprint
    if (
        previous
        and is_repeated
        and _is_program_missing(cause)
        and _is_program_missing(previous)
        and cause.nodes != previous.nodes
    ):
        reason = f"{cause.reason}; previously on {', '.join(previous.nodes)}"
        return msgspec.structs.replace(cause, kind="program", nodes=(), reason=reason)
    if (
        previous
        and is_repeated
        and not cause.progressed
        and _is_staging_refused(cause)
        and _is_staging_refused(previous)
    ):
        location = f" on {', '.join(previous.nodes)}" if previous.nodes else ""
        reason = f"{cause.reason}; previously{location}: see paths.nvme of the site"
        return msgspec.structs.replace(cause, kind="program", nodes=(), reason=reason)
    if cause.kind == "program" and cause.confidence != "certain" and is_repeated and not cause.progressed:
        return msgspec.structs.replace(cause, confidence="certain", reason=f"{cause.reason}; repeated")
    return cause
