"""The file of a site's checks, `/etc/pitools/node.toml`: checks, node types, and where reports go.

A check is data: rows of one table of facts, a key, and the values that are right. The shipped checks of `base.toml`
come first; a check of the same name in the site's file replaces one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from pitools.core import hostlist, strict_toml, trust
from pitools.core.errors import ConfigError, PitError, suggest
from pitools.node.check.problems import check_problem, contradiction, control_problem
from pitools.node.check.xid_checks import XidSource, xid_checks
from pitools.node.tables import TABLES
from pitools.node.types import Action, Level, Value

CONFIG_PATH = Path("/etc/pitools/node.toml")
Count = Annotated[int, msgspec.Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file."""


class Check(Section, frozen=True, kw_only=True):
    """A rule about the rows of one table of facts. All of its tests must hold.

    table, key: as in `pit node show --tables`. where: the rows meant: a value, a pattern with `*`, a regular expression
    for the whole value after `re:`, or a list of these. A row that could be meant, but lacks that value, fails nothing.
    types: node types that it is for; default: all. within: of a table of events, those that are not older.

    Tests of each row's value: min, max, equals, one_of, pattern (a regular expression for the whole text), max_increase
    and max_rate (`10/s`, `120/h`; never of a single event) since the last gathering of the same boot, is_same (in all
    rows). They say nothing of rows that are not there. Tests of the number of rows: count, min_count, max_count; with
    group_by, of the rows with equal values of these keys. burst: rows of a group that follow each other this closely
    count once. cleared_by: rows that a later row of their group with these values ends. max_groups: where more groups
    than that fail, it is the work of a job, and none does.

    level, action: of a failure. is_shadow: reported, never acted upon. old_names: names that it had, whose drains it
    still owns. source: who recommends it. hint: what an operator does next.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]*\Z")]
    table: str
    key: str = ""
    where: dict[str, Value | tuple[Value, ...]] = {}
    types: tuple[str, ...] = ()
    within: str = ""
    min: float | None = None
    max: float | None = None
    equals: Value = None
    one_of: tuple[Value, ...] = ()
    pattern: str = ""
    max_increase: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_rate: str = ""
    is_same: Literal[True] | None = None
    count: Count | None = None
    min_count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_count: Count | None = None
    max_groups: Count | None = None
    group_by: tuple[str, ...] = ()
    burst: str = ""
    cleared_by: dict[str, Value | tuple[Value, ...]] = {}
    level: Level = "critical"
    action: Action = "drain"
    is_shadow: bool = False
    old_names: tuple[str, ...] = ()
    source: str = ""
    hint: str = ""


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


class XidOptions(Section, frozen=True, kw_only=True):
    """What an Xid leads to. source: whose opinion of `check/xid.toml` counts."""

    source: XidSource = "pitools"


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
    xid: XidOptions = XidOptions()


def load_config(path: Path | None = None) -> NodeConfig:
    """Load a site's file, with the shipped checks before its own; those alone if the default file is missing.

    Raises ConfigError with the key, and the nearest known name, also if others could change the file: it names programs
    to run.
    """
    if path is None and not CONFIG_PATH.exists():
        return load_shipped()
    trust.require_trusted(path or CONFIG_PATH, "file of node checks")
    own = _load(path or CONFIG_PATH)
    base = load_shipped(own.xid.source)
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


def load_shipped(source: XidSource = "pitools") -> NodeConfig:
    """Load the shipped checks alone, which tests find valid. source: whose opinion of Xids counts."""
    path = Path(__file__).with_name("base.toml")
    tables = strict_toml.read_toml(path)
    tables["check"] += xid_checks(source)
    return strict_toml.convert_tables(tables, NodeConfig, str(path))


def _load(path: Path) -> NodeConfig:
    """Load a site's own file."""
    tables, text = strict_toml.read_toml_and_text(path)
    try:
        config = strict_toml.convert_tables(tables, NodeConfig, str(path))
    except ConfigError as error:
        raise _with_name_of_check(error, tables) from error
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
    if problem := control_problem(config.control):
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


def _with_name_of_check(error: ConfigError, tables: dict[str, Any]) -> ConfigError:
    """Return the error with the name of the check that it is in."""
    number = re.match(r"check\[(\d+)\]", error.key)
    check = tables["check"][int(number[1])] if number else None
    if not isinstance(check, dict) or "name" not in check:
        return error
    message = f'check "{check["name"]}": {error.message}'
    return ConfigError(message, where=error.where, hint=error.hint, key=error.key)


def checks_for(config: NodeConfig, node: str) -> list[Check]:
    """Return the checks that are for a node, by its name. Raises ConfigError if the file of NHC cannot be read."""
    types = {name for name, one in config.types.items() if node in _expand(one.nodes)}
    checks = [check for check in config.check if not check.types or types.intersection(check.types)]
    if config.nhc.file:
        from pitools.node.check.nhc.lines import read_nhc  # which needs this module

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
