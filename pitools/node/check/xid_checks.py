"""Make checks of the table of Xids and SXids, `xid.toml`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import strict_toml
from pitools.node.types import Action, is_at_least

_MAX_AGE = "24h"
_RESET_CLEARS = {"kind": "xid", "code": 154, "action": "None"}
_HINTS: dict[Action, str] = {
    "drain": "reset the GPU (nvidia-smi --gpu-reset -i ADDRESS) or reboot the node",
    "reboot": "reboot the node; if it comes again, have the hardware inspected",
    "repair": "have the GPU repaired or replaced",
}
_SOURCES = {"nvidia": "", "gcm": "CRITICAL", "azure": "", "aws": ""}  # and the word for a code without one


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the table, whose first comment explains it."""


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
    """Codes of NVSwitches that are alike."""

    codes: tuple[int, ...]
    name: str
    action: Action


class XidTable(_Struct, frozen=True, kw_only=True):
    """The file xid.toml. check: rules that are not of one code, as they are in a site's file."""

    xid: tuple[Xid, ...]
    sxid: tuple[SXid, ...]
    check: tuple[dict[str, Any], ...]


@lru_cache(maxsize=1)
def read_xid_table() -> XidTable:
    """Read the shipped table."""
    path = Path(__file__).with_name("xid.toml")
    return strict_toml.convert_tables(strict_toml.read_toml(path), XidTable, str(path))


def xid_checks() -> list[dict[str, Any]]:
    """Return the checks of Xids and SXids, each as a table of a site's file."""
    table = read_xid_table()
    checks = [_code_check(code, one) for one in table.xid if one.action != "none" for code in one.codes]
    fatal = [one for one in table.xid if is_at_least(one.action, "drain") and "is_fatal" not in one.where]
    repeat: dict[str, Any] = {
        "name": "xid-fatal-repeat",
        "where": {"kind": "xid", "code": [code for one in fatal for code in one.codes], "state": ""},
        "group_by": ["device", "code"],
        "merge_within": "3min",
        "max_count": 4,
        "action": "repair",
        "source": "NVSentinel: the same fatal Xid of the same GPU five times in 24 h",
        "hint": _HINTS["repair"],
    }
    unknown: dict[str, Any] = {
        "name": "xid-unknown",
        "where": {"kind": "xid"},
        "key": "code",
        "any_of": sorted({code for one in table.xid for code in one.codes}),
        "action": "report",
        "source": "gcm CRITICAL; NVIDIA's catalog of 2025-10 has no such code",
        "hint": "look it up in NVIDIA's XID catalog, and add a check for it",
    }
    return [*checks, *map(_event_check, (repeat, unknown)), *table.check, *map(_event_check, _sxid_checks(table))]


def _code_check(code: int, xid: Xid) -> dict[str, Any]:
    words = {name: getattr(xid, name) or default for name, default in _SOURCES.items()}
    fields = {
        "name": f"xid-{code}-{xid.form}" if xid.form else f"xid-{code}",
        "where": {"kind": "xid", "code": code, **xid.where},
        "group_by": ["device"],
        "max_count": 0,
        "action": xid.action,
        "source": ", ".join(f"{name} {word}" for name, word in words.items() if word),
        "hint": f"{xid.name}: {xid.hint or _HINTS.get(xid.action, 'see whether it comes again')}",
    }
    return _event_check({**fields, "cleared_by": _RESET_CLEARS} if xid.action == "drain" else fields)


def _sxid_checks(table: XidTable) -> list[dict[str, Any]]:
    """Return a check of the lines that say Fatal, and one for each class whose codes are severer, or say less."""
    rows: dict[str, tuple[dict[str, Any], Action]] = {
        "sxid-fatal": ({"is_fatal": True}, "drain"),
        "sxid-always-fatal": ({"code": _codes(table, "reboot")}, "reboot"),
        "sxid-notable": ({"code": _codes(table, "report")}, "report"),
    }
    return [
        {
            "name": name,
            "where": {"kind": "sxid", **where},
            "group_by": ["device", "code"],
            "max_count": 0,
            "action": action,
            "source": "NVIDIA Fabric Manager guide DU-09883-001 v1.3",
            "hint": "the fabric is at fault, not a GPU: reset all GPUs and switches, or reboot the node",
        }
        for name, (where, action) in rows.items()
    ]


def _codes(table: XidTable, action: Action) -> list[int]:
    return [code for one in table.sxid if one.action == action for code in one.codes]


def _event_check(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a check of the last day's log: critical where it drains."""
    level = "critical" if is_at_least(fields["action"], "drain") else "warning"
    return {"table": "kernel_log", "max_age": _MAX_AGE, "level": level, **fields}
