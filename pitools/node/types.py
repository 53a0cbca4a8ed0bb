"""The records that the rooms of node share: facts of a node, a finding about them, and a node's report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pitools.core.record import Record
from pitools.core.timestamps import seconds_between

Value = str | int | float | bool | None
"""A value of a fact. None: this value cannot be read, though others of its row can."""

Row = dict[str, Value]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""The name of a node, or of a run: a file can be called so."""

Level = Literal["warning", "critical"]
Action = Literal["none", "report", "drain-after-job", "drain", "reboot", "repair"]
State = Literal["passed", "failed", "unknown"]

ACTIONS: tuple[Action, ...] = ("none", "report", "drain-after-job", "drain", "reboot", "repair")
"""From mild to severe. `report`: reported, and kept as suspicion. `drain`, `reboot` and `repair` drain the node; the
last two also say what it needs before it may return. `drain-after-job`: drained as well, at once: jobs that
already run on a drained node finish, and no new one starts; but before the drain no prolog or preflight refuses one."""

BENCH_CHECK = "node_bench"
"""The check of a finding that a bench before the return made; no check of a file can have this name."""


class FactTable(Record, frozen=True, kw_only=True, tag="pit.fact-table/1"):
    """The facts of one kind about a node, read from one source: `mounts`, a row for each mount, and so on.

    source: the file, program or library. read_at: RFC 3339, UTC. uptime_s: CLOCK_MONOTONIC at that time, which nobody
    sets; 0 if unknown. cost_s: how long reading took. unknown: why it could not be read, or not beyond these rows; ""
    if it could, even if there are no rows.
    """

    table: str
    source: str
    read_at: str
    cost_s: float
    rows: tuple[Row, ...] = ()
    unknown: str = ""
    uptime_s: float = 0.0


class NodeFacts(Record, frozen=True, kw_only=True, tag="pit.node-facts/1"):
    """All facts of a node at one time. boot_id: the kernel's, "" if unknown. tables: by name.

    failed: of those kept for the next gathering, findings of this boot that drain, whose checks have not passed since.
    """

    node: str
    boot_id: str
    gathered_at: str
    tables: dict[str, FactTable]
    failed: tuple[Finding, ...] = ()


class Finding(Record, frozen=True, kw_only=True, tag="pit.node-finding/1"):
    """The result of one check for one subject of a node, as a GPU or a mount; a check that passed has one, without.

    action: what to do if it failed. is_shadow: reported, never acted upon. evidence_at: when the facts were read, or
    when the kernel logged the event. hint: what an operator does next, of one that failed. is_event: of something that
    happened, and is not seen any more once its evidence is old. table: of the facts that it is about.
    """

    node: str
    check: str
    state: State
    level: Level
    action: Action
    subject: str = ""
    message: str = ""
    evidence_at: str
    is_shadow: bool = False
    hint: str = ""
    is_event: bool = False
    table: str = ""


def is_at_least(action: Action, mildest: Action) -> bool:
    """Return whether an action is as severe as another one, or severer."""
    return ACTIONS.index(action) >= ACTIONS.index(mildest)


def draining(findings: Iterable[Finding], least: Action = "drain-after-job") -> list[Finding]:
    """Return the findings for which a node is to be drained. least: the mildest action that counts."""
    return [one for one in findings if one.state == "failed" and not one.is_shadow and is_at_least(one.action, least)]


def age_s(at: str, now: str, *, of_future: float = float("inf")) -> float:
    """Return how long ago a time was, in seconds; infinity for one that cannot be read.

    of_future: the age of a time that is in the future by more than 5 min, as after a clock was set back.
    """
    passed_s = seconds_between(at, now)
    if passed_s is None:
        return float("inf")
    return passed_s if passed_s >= -300.0 else of_future


class NodeReport(Record, frozen=True, kw_only=True, tag="pit.node-report/1"):
    """What a node found about itself: a file of the spool. hardware: serial numbers by device; a new one is a repair.

    findings: those that failed or are unknown. passed: names of the checks that passed.
    """

    node: str
    boot_id: str
    checked_at: str
    hardware: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()
    passed: tuple[str, ...] = ()


class TableRow(Record, frozen=True, kw_only=True, tag="pit.node-table/1"):
    """A line of `pit node show`: a table of facts about this node. rows: None if it is unknown, for that reason."""

    node: str
    table: str
    rows: int | None
    cost_s: float
    source: str
    unknown: str = ""


class FactRow(Record, frozen=True, kw_only=True, tag="pit.node-fact/1"):
    """A line of `pit node show --facts TABLE`."""

    node: str
    table: str
    values: Row


class KeyRow(Record, frozen=True, kw_only=True, tag="pit.node-key/1"):
    """A line of `pit node show --tables`: a key of a table, as checks name it. type: text, number or boolean."""

    table: str
    key: str
    meaning: str
    type: str = ""
