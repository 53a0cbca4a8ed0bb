"""Check the parent of an append, and the drift of the result."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.dataset.check.finding import Finding
from pitools.store import version_state
from pitools.store.resolve import resolve_version, unusable_reason

PARENT_LEASE_S = 7 * 86400.0  # at most: a killed ingest keeps `gc` from the parent for so long
# What to compare with the parent's recordings: the most frequent cause of each kind of drift.
_DRIFT_HINTS = {
    "mean": "check units, joint order and calibration",
    "deviation": "check units, and the kind of motion",
    "range": "check units, and spikes",
    "brightness": "check exposure, light and the view of the camera",
    "constant": "check that the joint or sensor is connected",
    "nan": "check for a sensor that dropped out",
    "length": "check the rate, and the events at which episodes are cut",
    "instruction": "check the spelling of instructions",
    "schema": "--transform FILE renames, casts and resizes",
}


class DriftError(DataError):
    """The added episodes drift from the parent's."""


def resolve_parent(text: str, root: Path) -> Path:
    """Return the folder of the named version. Raises UsageError for a retired or quarantined one, or one of another
    root, whose `gc` would not know of the append, and as `resolve_version`."""
    path = resolve_version(text)
    parent_root = path.resolve().parent.parent
    if parent_root != root.resolve():
        problem = f"parent: of another root (expected one of {root})"
        raise UsageError(problem, where=str(path), hint=f"--to {parent_root}")
    if reason := unusable_reason(path):
        raise UsageError(f"parent: {reason}", where=str(path), hint="append to another version, or undo that")
    return path


@contextmanager
def parent_lease(parent: Path | None) -> Iterator[None]:
    """Hold a lease on the parent for the block. Raises NoSpace, or DataError for a missing version or unreadable
    quarantine."""
    with ExitStack() as stack:
        if parent:
            try:
                stack.enter_context(version_state.leased_version(parent, PARENT_LEASE_S, "an append"))
            except ClusterError as error:  # the root of another user is not writable
                print(f"pit: {error.where}: no lease, `gc` may remove the parent: {error.message}", file=sys.stderr)
            version_state.read_quarantine(parent)  # fail on an unreadable quarantine now, not after the ingest
        yield


def require_no_drift(findings: Sequence[Finding], parent: Path, *, accept_drift: bool) -> None:
    """Print the drift from the parent. Raises DriftError for faults, unless `accept_drift`."""
    for finding in findings:
        hint = _DRIFT_HINTS.get(finding.check.removesuffix("-drift"), "")
        numbers = f": {finding.got}; expected: {finding.expected}" if finding.got else ""
        print(f"pit: {finding.level}: {finding.reason}{numbers}; {hint}", file=sys.stderr)
    faults = [finding for finding in findings if finding.level == "fault"]
    if faults and not accept_drift:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise DriftError(
            f"the added episodes drift from the parent: {count}, the first: {faults[0].reason}",
            where=str(parent),
            hint="inspect the recordings; --accept-drift publishes them unchanged and reuses the finished shards",
        )


def inherit_quarantine(parent: Path, final: Path) -> None:
    """Copy the parent's quarantine to the new version, whose first episodes have the same numbers.

    Raises DataError for an unreadable record, NoSpace or ClusterError.
    """
    quarantine = version_state.read_quarantine(parent)
    if quarantine and not final.exists():
        version_state.set_quarantine(final, quarantine)
        subject = "the version" if quarantine.whole_version else f"{len(quarantine.episodes)} of the parent's episodes"
        print(f"pit: {subject} stays in quarantine, as in the parent", file=sys.stderr)
