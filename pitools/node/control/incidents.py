"""Incidents: a drain of ours from its evidence to the node's return, as a journal of entries that is folded.

An intent is written before Slurm is called, and the outcome after: a controller that is killed in between finds the
intent, and in the node's reason, which holds the incident's id, whether it was carried out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core import journal
from pitools.core.output import printable
from pitools.core.record import Record
from pitools.node import spool
from pitools.node.types import Action

REASON_PREFIX = "pit node"
"""With which each of our reasons begins: `pit node [n07-20261126191236] gpu-count: gpus: 7`."""

_OWN_REASON = re.compile(rf"{REASON_PREFIX} \[([A-Za-z0-9._-]+-\d+)\] ([a-z0-9-]+)")
_OF_OPENED = (
    "incident",
    "node",
    "check",
    "evidence_at",
    "message",
    "action",
    "boot_id",
    "hardware",
    "part",
    "is_event",
)
_INCIDENT_AND_NODE = re.compile(r'"incident":"([^"]*)","node":"([^"]*)"')
_SIGNS = re.compile(r"""['"\\]|\[(?=[^\s\[\]@]+@)""")  # of a shell; and `[user@time]`, with which Slurm ends a reason
_MAX_REASON = 200  # bytes: Slurm's tools cut longer ones in their tables


class EntryKind(StrEnum):
    """What an entry of the journal says."""

    OPENED = "opened"  # the incident begins: the node is to be drained
    DRAINED = "drained"  # Slurm drained it, or has it drained again: the incident is open
    RELAPSED = "relapsed"  # a check fails again, or asks for more, while the node is drained
    RECOVERED = "recovered"  # its check passes, and none fails that drains, from now on
    BENCHING = "benching"  # the node is asked for its bench
    RETURNING = "returning"  # the node is to be resumed
    RETURNED = "returned"  # Slurm resumed it: the incident is over
    ESCALATED = "escalated"  # left to a person
    RELEASED = "released"  # a person, or another tool, resumed the node, or drained it anew: the incident is over


class IncidentEntry(Record, frozen=True, kw_only=True, tag="pit.node-incident-entry/1"):
    """A line of the journal. at: RFC 3339. message: why. check: of `opened`, as are the others where nothing is said.

    action, part (what the finding is about: its table and subject), boot_id, hardware, is_event: also of `relapsed`,
    where its finding asks for more than was asked for, or fails after that was done.
    evidence_at: of `opened`, when that was seen that drains; of `recovered`, when the node was checked; of `returning`,
    `returned` and `released`, up to when evidence is dealt with, "" for `at`. All by the node's clock.
    """

    at: str
    kind: EntryKind
    incident: str
    node: str
    check: str = ""
    action: Action = "none"
    evidence_at: str = ""
    message: str = ""
    boot_id: str = ""
    hardware: dict[str, str] = {}
    is_event: bool = False
    part: str = ""


Phase = Literal["opening", "drained", "recovered", "returning", "over"]


class Incident(Record, frozen=True, kw_only=True, tag="pit.node-incident/1"):
    """An incident, folded from its entries.

    phase: opening (the drain is intended), drained, recovered (since the report of `recovered_at` its check passes, and
    none fails that drains), returning (the return is intended) or over. asked_at: since when its bench is awaited.
    outcome: kind of the entry that ended it. dealt_at: evidence up to then, by the node's clock, is dealt with, "" for
    over_at. is_escalated: only a person may return it, and for_person is why. is_incomplete: a damaged line of the
    journal is, or may be, its.
    """

    incident: str
    node: str
    check: str
    action: Action
    opened_at: str
    evidence_at: str
    message: str
    boot_id: str = ""
    hardware: dict[str, str] = {}
    is_event: bool = False
    part: str = ""
    phase: Phase = "opening"
    drained_at: str = ""
    recovered_at: str = ""
    asked_at: str = ""
    over_at: str = ""
    dealt_at: str = ""
    outcome: str = ""
    is_escalated: bool = False
    for_person: str = ""
    is_incomplete: bool = False

    @property
    def reason(self) -> str:
        """The reason of the node's drain: printable, and short enough for Slurm's tables."""
        text = f"{REASON_PREFIX} [{self.incident}] {self.check}: {self.message}"
        text = _SIGNS.sub(" ", printable(text))
        return text.encode()[:_MAX_REASON].decode(errors="ignore")

    def owns(self, reason: str) -> bool:
        """Return whether a node's reason is this one's, unchanged: else somebody took the drain over.

        Where the first entry was lost, and its message with it, the id alone is compared.
        """
        is_same = not self.message or reason.split() == self.reason.split()
        return is_same and incident_of_reason(reason)[0] == self.incident


def incident_of_reason(reason: str) -> tuple[str, str]:
    """Return the incident and the check that a node's reason names; ("", "") for a reason of somebody else."""
    match = _OWN_REASON.match(reason)
    return (match[1], match[2]) if match else ("", "")


def fold(lines: Iterable[IncidentEntry | journal.DamagedLine]) -> dict[str, Incident]:
    """Return the incidents by id, in the order in which they began; one that lacks its first entry begins with another.

    A damaged line may be of each incident that is open there, unless it still names its own. A node has one that is
    open: where another begins, the line that ended it was lost.
    """
    incidents: dict[str, Incident] = {}
    newest: dict[str, str] = {}  # by node
    for line in lines:
        if isinstance(line, journal.DamagedLine):
            names = _incidents_named(line.data)
            for one in incidents.values():
                if one.phase != "over" and (not names or one.incident in names):
                    incidents[one.incident] = msgspec.structs.replace(one, is_incomplete=True)
            continue
        is_first = line.kind is EntryKind.OPENED
        if line.incident not in incidents:
            opened = {name: getattr(line, name) for name in _OF_OPENED} | ({} if is_first else {"message": ""})
            incidents[line.incident] = Incident(opened_at=line.at, is_incomplete=not is_first, **opened)
            before = incidents.get(newest.get(line.node, ""))
            if before and before.phase != "over":
                changes = _changes(msgspec.structs.replace(line, kind=EntryKind.RELEASED, evidence_at=""))
                incidents[before.incident] = msgspec.structs.replace(before, **changes)
            newest[line.node] = line.incident
        if not is_first:
            one = incidents[line.incident]
            incidents[line.incident] = msgspec.structs.replace(one, **_changes(line), **_demand(line, one))
    return incidents


def _incidents_named(data: bytes) -> set[str]:
    """Return the incidents that a damaged line names: none if it is no text, or its names do not agree."""
    text = data.decode(errors="replace")
    names = _INCIDENT_AND_NODE.findall(text) if text.isprintable() and "\ufffd" not in text else []
    agree = all(incident.rpartition("-")[0] == node for incident, node in names)
    return {incident for incident, _ in names} if agree else set()


def _changes(entry: IncidentEntry) -> dict[str, object]:
    match entry.kind:
        case EntryKind.DRAINED:
            return {"phase": "drained", "drained_at": entry.at, "over_at": "", "outcome": ""}
        case EntryKind.RELAPSED:
            return {"phase": "drained", "recovered_at": "", "asked_at": ""}
        case EntryKind.RECOVERED:
            return {"phase": "recovered", "recovered_at": entry.evidence_at, "asked_at": ""}
        case EntryKind.BENCHING:
            return {"asked_at": entry.at}
        case EntryKind.RETURNING:
            return {"phase": "returning", "dealt_at": entry.evidence_at}
        case EntryKind.ESCALATED:
            return {"is_escalated": True, "for_person": entry.message}
        case EntryKind.RETURNED | EntryKind.RELEASED:
            dealt = {"dealt_at": entry.evidence_at} if entry.evidence_at or entry.kind is EntryKind.RELEASED else {}
            return {"phase": "over", "over_at": entry.at, "outcome": str(entry.kind), **dealt}
    return {}


def _demand(entry: IncidentEntry, before: Incident) -> dict[str, object]:
    """Return what a relapse asks for. Of a part that is gone since, and before a boot, the serial number is kept."""
    if entry.kind is not EntryKind.RELAPSED or entry.action == "none":
        return {}
    known = before.hardware if entry.boot_id == before.boot_id else {}
    hardware = {**known, **entry.hardware}
    asked = {name: getattr(entry, name) for name in ("action", "part", "boot_id", "is_event")}
    return {**asked, "hardware": hardware}


def new_id(node: str, at: str, incidents: Collection[str]) -> str:
    """Return an id for a new incident of a node: its name and the time, to the second, as `n07-20261126191236`.

    So no id is used again after a journal was lost, nor by another controller. incidents: the ids that there are.
    """
    number = int("".join(sign for sign in at[:19] if sign.isdecimal()))
    while (name := f"{node}-{number}") in incidents:
        number += 1
    return name


class Journal(NamedTuple):
    """The incidents by id, in the order in which they began, and what is wrong with lines of the journal."""

    incidents: dict[str, Incident]
    problems: list[str]


def read_incidents(path: Path) -> Journal:
    """Return the incidents of a journal. A damaged line stays there, and is left out.

    Raises PitError, also for a journal that others than this user and root can write to.
    """
    for part in (path.parent, path):
        if part.exists():
            spool.require_usable(part, "journal of incidents")
    lines = journal.read_lines(path, IncidentEntry)
    damaged = [line for line in lines if isinstance(line, journal.DamagedLine)]
    problems = []
    if damaged:
        numbers = ", ".join(str(line.number) for line in damaged[:5]) + ", ..." * (len(damaged) > 5)
        problem = f"{len(damaged)} damaged, left out: line {numbers}: {damaged[0].problem}"
        remedy = "drained nodes of which it may be are left to a person"
        problems = [f"{path}: {problem}; {remedy}; to see it: sed -n {damaged[0].number}p {path}"]
    return Journal(fold(lines), problems)


def append_entry(path: Path, entry: IncidentEntry) -> None:
    """Append an entry, fsynced. The journal's lock is the caller's. Raises PitError."""
    journal.append_record(path, entry, mode=0o644)
