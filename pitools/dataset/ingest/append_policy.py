"""What an append asks of the version that it begins with, and of what comes of it: silent regressions stop here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.dataset.check.finding import Finding
from pitools.store import version_state
from pitools.store.resolve import discarded, resolve

HELD_S = 7 * 86400.0  # at most: a killed ingest keeps `gc` from the parent for so long
# What is behind it most often, by what drifts.
_LOOK = {
    "mean": "same units, joint order and calibration?",
    "deviation": "same units, and the same kind of motion?",
    "range": "same units, and no spikes?",
    "brightness": "same exposure and light, and nothing before the camera?",
    "constant": "is that joint or sensor connected?",
    "nan": "did a sensor drop out?",
    "length": "same rate, and episodes cut at the same events?",
    "task": "are instructions spelled as before?",
    "schema": "--schema FILE renames, casts and resizes",
}


class Drifted(DataError):
    """What was added is not like what was there."""


def to_append(text: str) -> Path:
    """The folder of the version that is named. Raises UsageError for one that nobody is to begin with, and as
    `resolve`."""
    path = resolve(text)
    if why := discarded(path):
        raise UsageError(f"it is {why}", where=str(path), hint="append to another version, or take that back")
    return path


@contextmanager
def held(parent: Path | None) -> Iterator[None]:
    """Keep `gc` from the parent for the length of the block. Raises NoSpace, DataError when it is not there, or
    its quarantine cannot be read."""
    with ExitStack() as stack:
        if parent:
            try:
                stack.enter_context(version_state.lease(parent, HELD_S, "an append"))
            except ClusterError as error:  # in a root of somebody else's, whose `gc` cannot be told
                print(f"pit: {error.where}: `gc` cannot be kept from it: {error.what}", file=sys.stderr)
            version_state.quarantine(parent)  # one that cannot be read is told now, not when all is made
        yield


def judge(findings: Sequence[Finding], parent: Path, *, refuse: bool) -> None:
    """Say how what was added differs from the parent. Raises Drifted for faults that are to be refused."""
    for finding in findings:
        ask = _LOOK.get(finding.check.removesuffix("-drift"), "")
        numbers = f": {finding.got}; expected: {finding.expected}" if finding.got else ""
        print(f"pit: {finding.level}: {finding.reason}{numbers}; {ask}", file=sys.stderr)
    faults = [finding for finding in findings if finding.level == "fault"]
    if faults and refuse:
        raise Drifted(
            f"what is added is not like the parent: {len(faults)} faults, the first: {faults[0].reason}",
            where=str(parent),
            hint="look at the recordings; --accept-drift takes them as they are, and makes nothing again",
        )


def carry_quarantine(parent: Path, final: Path) -> None:
    """Keep from training in the version to be what is kept from it in its parent: those episodes have the same numbers.

    Raises DataError for a record that cannot be read, NoSpace or ClusterError.
    """
    known = version_state.quarantine(parent)
    if known and not final.exists():
        version_state.set_quarantine(final, known)
        what = "it" if known.whole else f"{len(known.episodes)} of the parent's episodes"
        print(f"pit: {what} stays in quarantine, as in the parent", file=sys.stderr)
