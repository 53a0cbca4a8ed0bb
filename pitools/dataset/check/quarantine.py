"""What is wrong is kept from training, and not removed: a record beside the version, which stays as it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.dataset.check.finding import Finding
from pitools.store import version_state
from pitools.store.version_state import Quarantine

_REASONS_AT_MOST = 20


def quarantine(path: Path, findings: Iterable[Finding]) -> Quarantine | None:
    """Keep the version in folder `path` from training: all of it where it is damaged, else the episodes with faults.

    What was in quarantine stays there, as another check may have looked closer. None, and nothing is changed, where
    nothing that was found asks for it. Raises NoSpace or ClusterError.
    """
    whole: list[str] = []
    episodes: dict[int, list[str]] = {}
    for finding in findings:
        if finding.level == "damage":
            whole.append(f"{finding.reason}{f' ({finding.file})' if finding.file else ''}")
        elif finding.level == "fault" and finding.episode is not None:
            episodes.setdefault(finding.episode, []).append(finding.reason)
    if not whole and not episodes:
        return None
    known = _known(path)
    for number, reasons in known.episodes.items():
        episodes.setdefault(number, []).extend(reasons)
    record = Quarantine(
        whole=bool(whole) or known.whole,
        reasons=_some([*whole, *known.reasons]),
        at=timestamps.now(),
        by=version_state.author(),
        episodes={number: _some(reasons) for number, reasons in sorted(episodes.items())},
    )
    version_state.set_quarantine(path, record)
    return record


def _known(path: Path) -> Quarantine:
    try:
        known = version_state.quarantine(path)
    except DataError:  # what it was cannot be known any more
        known = Quarantine(whole=True, at="", by="", reasons=("the record of an earlier quarantine was damaged",))
    return known or Quarantine(whole=False, at="", by="")


def _some(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))[:_REASONS_AT_MOST]


def release(path: Path) -> Quarantine | None:
    """Let the version in folder `path` be trained on again. What was lifted; None where nothing was.

    Raises NoSpace, ClusterError, or DataError where the record cannot be read.
    """
    known = version_state.quarantine(path)
    if known is not None:
        version_state.set_quarantine(path, None)
    return known
