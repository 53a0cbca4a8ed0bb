"""Quarantine faulty episodes: a record beside the version, which itself never changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import DataError
from pitools.dataset.check.finding import Finding
from pitools.store import version_state
from pitools.store.version_state import Quarantine

_MAX_REASONS = 20


def quarantine_episodes(path: Path, findings: Iterable[Finding]) -> Quarantine | None:
    """Quarantine the version in folder `path`: all of it for damage, else the episodes with faults.

    Returns the record; episodes in quarantine before stay there. Returns None, and changes nothing, without such
    findings. Raises NoSpace, ClusterError, or TryLater while another process changes it.
    """
    version_reasons: list[str] = []
    episodes: dict[int, list[str]] = {}
    for finding in findings:
        if finding.level == "damage":
            version_reasons.append(f"{finding.reason}{f' ({finding.file})' if finding.file else ''}")
        elif finding.level == "fault" and finding.episode is not None:
            episodes.setdefault(finding.episode, []).append(finding.reason)
    if not version_reasons and not episodes:
        return None
    with version_state.quarantine_lock(path):
        existing = _read_quarantine(path)
        for number, reasons in existing.episodes.items():
            episodes.setdefault(number, []).extend(reasons)
        record = Quarantine(
            whole_version=bool(version_reasons) or existing.whole_version,
            reasons=_first_reasons([*version_reasons, *existing.reasons]),
            set_at=timestamps.now_rfc3339(),
            set_by=version_state.current_user(),
            episodes={number: _first_reasons(reasons) for number, reasons in sorted(episodes.items())},
        )
        version_state.set_quarantine(path, record)
    return record


def _read_quarantine(path: Path) -> Quarantine:
    try:
        recorded = version_state.read_quarantine(path)
    except DataError:  # the old record is unreadable
        recorded = Quarantine(
            whole_version=True, set_at="", set_by="", reasons=("the record of an earlier quarantine was damaged",)
        )
    return recorded or Quarantine(whole_version=False, set_at="", set_by="")


def _first_reasons(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))[:_MAX_REASONS]


def lift_quarantine(path: Path) -> Quarantine | None:
    """Remove the quarantine of the version in folder `path`. Returns the removed record, or None.

    Raises NoSpace, ClusterError, or DataError for an unreadable record.
    """
    existing = version_state.read_quarantine(path)
    if existing is not None:
        with version_state.quarantine_lock(path):
            version_state.set_quarantine(path, None)
    return existing
