"""Make checks of the table of Xids and SXids, by our opinion or that of another source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from pitools.core import strict_toml
from pitools.node.types import ACTIONS, Action

XidSource = Literal["pitools", "nvidia", "gcm", "azure", "aws"]

_WITHIN = "24h"
_RESET_CLEARS = {"kind": "xid", "code": 154, "action": "None"}
_HINTS: dict[Action, str] = {
    "drain": "reset the GPU (nvidia-smi --gpu-reset -i ADDRESS) or reboot the node",
    "reboot": "reboot the node; if it comes again, have the hardware inspected",
    "repair": "have the GPU repaired or replaced",
}


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the table, whose first comment explains it."""


class Source(_Struct, frozen=True, kw_only=True):
    """Who says what: the actions that its words stand for. other: the word for codes that have none."""

    about: str
    actions: dict[str, Action]
    other: str = ""


class Xid(_Struct, frozen=True, kw_only=True):
    """Codes of the driver that are alike in all columns."""

    codes: tuple[int, ...]
    name: str
    form: str = ""
    action: Action = "none"
    where: dict[str, Any] = {}
    nvidia: str = ""
    gcm: str = ""
    azure: str = ""
    aws: str = ""
    hint: str = ""


class SXid(_Struct, frozen=True, kw_only=True):
    """Codes of NVSwitches that are alike in all columns."""

    codes: tuple[int, ...]
    name: str
    action: Action
    class_: str = msgspec.field(name="class")
    gpud: str


class XidTable(_Struct, frozen=True, kw_only=True):
    """The file xid.toml. check: rules that take more than one line, as they are in a site's file."""

    sources: dict[str, Source]
    xid: tuple[Xid, ...]
    sxid: tuple[SXid, ...]
    check: tuple[dict[str, Any], ...]


@lru_cache(maxsize=1)
def read_xid_table() -> XidTable:
    """Read the shipped table."""
    path = Path(__file__).with_name("xid.toml")
    return strict_toml.convert_tables(strict_toml.read_toml(path), XidTable, str(path))


def xid_checks(source: XidSource = "pitools") -> list[dict[str, Any]]:
    """Return the checks of Xids and SXids, each as a table of a site's file. source: whose actions they have."""
    table = read_xid_table()
    actions = [(code, one, _action_of(one, source, table)) for one in table.xid for code in one.codes]
    checks = [_check(code, one, action, table) for code, one, action in actions if action != "none"]
    draining = [(code, one) for code, one, action in actions if ACTIONS.index(action) >= ACTIONS.index("drain")]
    severe = [code for code, one in draining if "is_fatal" not in one.where]
    repeat = {
        "name": "xid-fatal-repeat",
        "where": {"kind": "xid", "code": severe, "state": ""},
        "within": _WITHIN,
        "group_by": ["device", "code"],
        "burst": "3min",
        "max_count": 4,
        "action": "repair",
        "source": "NVSentinel: the same fatal Xid of the same GPU five times in 24 h",
        "hint": _HINTS["repair"],
    }
    if source != "pitools" and (word := table.sources[source].other):
        checks.append(_other_codes(source, word, table))
    return [*checks, {"table": "kernel_log", **repeat}, *table.check, *_sxid_checks(table)]


def _action_of(xid: Xid, source: XidSource, table: XidTable) -> Action:
    if source == "pitools":
        return xid.action
    word = getattr(xid, source) or table.sources[source].other
    return table.sources[source].actions[word] if word else "none"


def _check(code: int, xid: Xid, action: Action, table: XidTable) -> dict[str, Any]:
    words = {name: getattr(xid, name) or source.other for name, source in table.sources.items()}
    opinions = ", ".join(f"{name} {word}" for name, word in words.items() if word)
    hint = xid.hint or _HINTS.get(action, "see whether it comes again")
    check: dict[str, Any] = {
        "name": f"xid-{code}-{xid.form}" if xid.form else f"xid-{code}",
        "table": "kernel_log",
        "where": {"kind": "xid", "code": code, **xid.where},
        "within": _WITHIN,
        "group_by": ["device"],
        "max_count": 0,
        "level": _level(action),
        "action": action,
        "source": opinions,
        "hint": f"{xid.name}: {hint}",
    }
    return {**check, "cleared_by": _RESET_CLEARS} if action == "drain" else check


def _other_codes(source: str, word: str, table: XidTable) -> dict[str, Any]:
    """Return the check of codes that are not in the table, of which a source has an opinion all the same."""
    action = table.sources[source].actions[word]
    return {
        "name": "xid-other",
        "table": "kernel_log",
        "where": {"kind": "xid"},
        "within": _WITHIN,
        "key": "code",
        "one_of": [code for one in table.xid for code in one.codes],
        "group_by": ["device"],
        "cleared_by": _RESET_CLEARS,
        "level": _level(action),
        "action": action,
        "source": f"{source} {word}",
        "hint": _HINTS[action],
    }


def _sxid_checks(table: XidTable) -> list[dict[str, Any]]:
    """Return a check of the lines that say Fatal, and one for each class whose codes are severer, or say less."""
    rows: dict[str, tuple[dict[str, Any], Action]] = {
        "sxid-fatal": ({"is_fatal": True}, "drain"),
        "sxid-always-fatal": ({"code": _codes(table, "reboot")}, "reboot"),
        "sxid-watch": ({"code": _codes(table, "watch")}, "watch"),
    }
    return [
        {
            "name": name,
            "table": "kernel_log",
            "where": {"kind": "sxid", **where},
            "within": _WITHIN,
            "group_by": ["device", "code"],
            "max_count": 0,
            "level": _level(action),
            "action": action,
            "source": "NVIDIA Fabric Manager guide DU-09883-001 v1.3",
            "hint": "the fabric is at fault, not a GPU: reset all GPUs and switches, or reboot the node",
        }
        for name, (where, action) in rows.items()
    ]


def _codes(table: XidTable, action: Action) -> list[int]:
    return [code for one in table.sxid if one.action == action for code in one.codes]


def _level(action: Action) -> str:
    return "warning" if action in ("none", "watch") else "critical"
