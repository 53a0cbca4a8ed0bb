"""The file of a site's checks, `/etc/pitools/node.toml`: checks, node types, and where reports go.

A check is data: rows of one table of facts, a key, and the values that are right. The shipped checks of `base.toml`
come first; a check of the same name in the site's file replaces one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from pitools.core import hostlist, strict_toml, trust, units
from pitools.core.errors import ConfigError, PitError, suggest
from pitools.node.check.problems import check_problem, contradiction
from pitools.node.check.rule import RENAMED, Check
from pitools.node.check.xid_checks import xid_checks
from pitools.node.tables import TABLES

CONFIG_PATH = Path("/etc/pitools/node.toml")
_DURATIONS = ("max_age", "merge_within", "max_evidence_age", "max_report_age", "stable_for", "returns_within")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file."""


class NodeType(Section, frozen=True, kw_only=True):
    """Nodes that are alike. nodes: a host list, `gpu[001-064]`, of names as Slurm has them."""

    nodes: str


class Nhc(Section, frozen=True, kw_only=True):
    """A configuration of LBNL's Node Health Check, whose lines are checks, too. file: `/etc/nhc/nhc.conf`; "": none."""

    file: str = ""


class Control(Section, frozen=True, kw_only=True):
    """What the controller may do. act: false prints what it would do.

    max_share_leaf, max_share_partition: of a leaf switch's or a partition's nodes, at most this share is drained by
    the controller at a time, at least one node; max_share_hour: of all nodes, in one hour. They never hold back a
    return. max_evidence_age: older evidence drains nothing. max_report_age: an older report of a node is none.
    stable_for: how long the checks of a drained node must pass before it returns. bench_before_return: then the
    node also measures its CPU, memory, disk (a file in `state`) and GPUs, with its next report, and is left to a
    person if one is wrong, slow for this node, or without a result for an hour. max_returns, returns_within: a node
    that returned so often in this time is left to a person.
    """

    act: bool = False
    max_share_leaf: float = 0.25
    max_share_partition: float = 0.1
    max_share_hour: float = 0.05
    max_evidence_age: str = "1h"
    max_report_age: str = "15m"
    stable_for: str = "10m"
    bench_before_return: bool = False
    max_returns: int = 3
    returns_within: str = "7d"


class NodeConfig(Section, frozen=True, kw_only=True):
    """The whole file. spool: shared folder, where each node writes its report. state: a folder on the node's own disk.

    python: an interpreter with pitools, read by `scripts/pit-healthcheck`. disable: shipped checks that are not made.
    """

    spool: str = ""
    state: str = "/var/lib/pitools/node"
    python: str = ""
    types: dict[str, NodeType] = {}
    disable: tuple[str, ...] = ()
    check: tuple[Check, ...] = ()
    nhc: Nhc = Nhc()
    control: Control = Control()


def load_config(path: Path | None = None) -> NodeConfig:
    """Load a site's file, with the shipped checks before its own; those alone if the default file is missing.

    Raises ConfigError with the key, and the nearest known name, also if others could change the file: it names programs
    to run.
    """
    if path is None and not CONFIG_PATH.exists():
        return load_shipped()
    trust.require_trusted(path or CONFIG_PATH, "file of node checks")
    own = _load(path or CONFIG_PATH)
    base = load_shipped()
    known = {name for check in base.check for name in (check.name, *check.old_names)}
    for name in own.disable:
        if name not in known:
            where = str(path or CONFIG_PATH)
            raise ConfigError(f'no shipped check "{name}"', where=where, hint=suggest(name, known), key="disable")
    left_out = {check.name for check in own.check}.union(own.disable)
    shipped = tuple(check for check in base.check if left_out.isdisjoint((check.name, *check.old_names)))
    if problem := contradiction(shipped + own.check):
        raise ConfigError(problem, where=str(path or CONFIG_PATH), key="check")
    return msgspec.structs.replace(own, check=shipped + own.check)


def load_shipped() -> NodeConfig:
    """Load the shipped checks alone, which tests find valid."""
    path = Path(__file__).with_name("base.toml")
    tables = strict_toml.read_toml(path)
    tables["check"] += xid_checks()
    return strict_toml.convert_tables(tables, NodeConfig, str(path))


def _load(path: Path) -> NodeConfig:
    """Load a site's own file."""
    tables, text = strict_toml.read_toml_and_text(path)
    try:
        config = strict_toml.convert_tables(tables, NodeConfig, str(path))
    except ConfigError as error:
        raise _explain(error, tables) from error
    names: set[str] = set()
    for check in config.check:
        if problem := check_problem(check, config.types):
            raise ConfigError(f'check "{check.name}": {problem}', where=str(path), key="check")
        if check.name in names:
            raise ConfigError(f'two checks "{check.name}"', where=str(path), key="check")
        names.add(check.name)
    for key in ("state", "python"):
        if (value := tables.get(key, "")) != _read_by_script(text, key):
            hint = f'a line of its own, before all tables: {key} = "{value}"'
            raise ConfigError("pit-healthcheck cannot read it in this form", where=str(path), hint=hint, key=key)
    for key, folder in (("spool", config.spool), ("state", config.state)):
        if folder and not Path(folder).is_absolute():
            raise ConfigError(f'{key}: "{folder}" (expected an absolute path)', where=str(path), key=key)
    if problem := _control_problem(config.control):
        raise ConfigError(problem, where=str(path), key="control")
    for name, node_type in config.types.items():
        try:
            hostlist.expand(node_type.nodes)
        except PitError as error:
            raise ConfigError(error.message, where=str(path), hint=error.hint, key=f"types.{name}.nodes") from error
    return config


def _read_by_script(text: str, key: str) -> str:
    """Return the value of a key as `scripts/pit-healthcheck` reads it, with sed."""
    top = re.split(r"^[^\S\n]*\[", text, maxsplit=1, flags=re.MULTILINE)[0]
    line = rf"""^[^\S\n]*{key}[^\S\n]*=[^\S\n]*("([^"\n]*)"|'([^'\n]*)')"""
    return "\n".join(match[2] or match[3] or "" for match in re.finditer(line, top, re.MULTILINE))


def _control_problem(control: Control) -> str:
    """Return what is wrong with the controller's limits; "" if nothing is."""
    for name in ("max_share_leaf", "max_share_partition", "max_share_hour"):
        if not 0 < getattr(control, name) <= 1:
            return f"{name} is {getattr(control, name)} (expected a share, above 0 and at most 1)"
    for name in ("max_evidence_age", "max_report_age", "stable_for", "returns_within"):
        try:
            if units.parse_duration(getattr(control, name)) <= 0 and name != "stable_for":
                return f'{name} is "{getattr(control, name)}" (expected more than 0)'
        except PitError as error:
            return f"{name}: {error.message} (expected 10m, 2h or 7d)"
    if control.max_returns < 0:
        return f"max_returns is {control.max_returns} (expected at least 0)"
    return ""


def _explain(error: ConfigError, tables: dict[str, Any]) -> ConfigError:
    """Return the error with the name of the check that it is in, and what its key takes."""
    name, value = error.key.rpartition(".")[2], _value_at(tables, error.key)
    message, hint = error.message, error.hint
    if name in RENAMED or (isinstance(value, str) and value in RENAMED):
        hint = f'did you mean "{RENAMED.get(name) or RENAMED[value]}"?'
    elif name == "name":
        hint = 'lower-case letters, digits and hyphens: "my-check"'
    elif isinstance(value, str) and name in ("min", "max", "max_increase"):
        hint = f"a number without quotes{_in_bytes(value)}"
    elif isinstance(value, int | float) and name in _DURATIONS:
        hint = f'a duration in quotes: "{value}s" or "10m"'
    elif "." in error.key and name in ("spool", "state", "python", "disable"):
        hint = f"{name} belongs above all tables"
    number = re.match(r"check\[(\d+)\]", error.key)
    check = tables["check"][int(number[1])] if number else None
    if isinstance(check, dict) and "name" in check:
        message = f'check "{check["name"]}": {message}'
    return ConfigError(message, where=error.where, hint=hint, key=error.key)


def _in_bytes(text: str) -> str:
    try:
        return f": {units.parse_size(text)} bytes"
    except PitError:
        return ""


def _value_at(tables: Any, key: str) -> Any:
    """Return the value at `check[0].min`; None if there is none."""
    for part in re.findall(r"[^.\[\]]+", key):
        try:
            tables = tables[int(part) if isinstance(tables, list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return tables


def checks_for(config: NodeConfig, node: str) -> list[Check]:
    """Return the checks that are for a node, by its name. Raises ConfigError if the file of NHC cannot be read."""
    types = {name for name, one in config.types.items() if node in _expand(one.nodes)}
    checks = [check for check in config.check if not check.types or types.intersection(check.types)]
    if config.nhc.file:
        from pitools.node.check.nhc.lines import read_nhc  # milliseconds, which most sites need not pay

        checks += [check for line in read_nhc(Path(config.nhc.file), node) for check in line.checks]
    return checks


@lru_cache(maxsize=64)
def _expand(nodes: str) -> frozenset[str]:
    return frozenset(hostlist.expand(nodes))


def names_of(checks: list[Check]) -> dict[str, set[str]]:
    """Return by table what the checks name to be read: the paths of `files`, and so on."""
    names: dict[str, set[str]] = {}
    for check in checks:
        if key := TABLES[check.table].named:
            named: Any = check.where[key]
            names.setdefault(check.table, set()).update([named] if isinstance(named, str) else map(str, named))
    return names
