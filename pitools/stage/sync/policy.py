"""The policy of `pit-stage sync`: which versions to keep at which root, as rules in strict TOML.

[[rules]]
from = "/shared/data"        # <from>/<name>/<version>/, or s3://bucket/prefix, as gs:// and az://, that holds the same
pattern = "pick*"            # names of datasets; default: all
newest = 2                   # versions of each
cap = "500GiB"               # of all versions that the rule keeps; the oldest are left out
to = "/nvme/{user}/pit"      # {node}, {user} filled in
disk = "/nvme"               # must be mounted; without this key no mount is required
nodes = "n[01-08]"           # nodes to which the rule applies; default: all
quota = "1TiB"               # of the whole root; the least recently used sets are evicted first
min_free = "100GiB"          # of its disk
shared = false               # all users may read the root: a site's shared cache
name = "pick"                # in records and metrics; default: the pattern
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from pitools.core import hostlist, strict_toml, units
from pitools.core.errors import ConfigError, UsageError
from pitools.site.load import bundled_dir
from pitools.site.template import expand_placeholders
from pitools.stage.cache.space import RootLimits
from pitools.stage.sources.find import is_url


class RuleTable(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"source": "from", "root": "to"}
):
    """A rule as written in the file."""

    source: str
    root: str
    disk: str = ""
    pattern: str = "*"
    newest: Annotated[int, msgspec.Meta(ge=1)] = 1
    cap: str = ""
    nodes: str = ""
    quota: str = ""
    min_free: str = ""
    shared: bool = False
    name: str = ""


class _PolicyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rules: tuple[RuleTable, ...] = ()


class Rule(NamedTuple):
    """What to keep at one root. source: folder or URL. disk: mount point that the root is on, None if not given.
    applies: on this node. cap_bytes: None for no cap.
    """

    name: str
    source: Path | str
    pattern: str
    newest: int
    cap_bytes: int | None
    root: Path
    disk: Path | None
    limits: RootLimits
    shared: bool
    applies: bool


class SyncPolicy(NamedTuple):
    """The rules of a file. id: distinguishes the policies of a root; constant for a path."""

    path: Path
    id: str
    node: str
    rules: tuple[Rule, ...]


def load_policy(path: Path) -> SyncPolicy:
    """Load a policy for this node and user. Raises ConfigError naming file, line and key."""
    tables = strict_toml.read_toml(path)
    rule_tables = tables.get("rules")
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    rules: list[Rule] = []
    for number, rule in enumerate(rule_tables if isinstance(rule_tables, list) else []):
        with _located(path, number):
            rules.append(_make_rule(strict_toml.convert_tables(rule, RuleTable, str(path)), node))
            _refuse_contradiction(rules[:-1], rules[-1])
    if not strict_toml.convert_tables(tables, _PolicyTable, str(path)).rules:
        example = bundled_dir("scripts") / "cron" / "stage.toml"
        raise ConfigError("no rule in the file", where=str(path), hint=f"write [[rules]], as in {example}")
    absolute = path.absolute()
    digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:8]
    return SyncPolicy(absolute, f"{_safe_name(path.stem)}-{digest}", node, tuple(rules))


def _make_rule(table: RuleTable, node: str) -> Rule:
    root_text = table.root
    with _error_key("from"):
        source = _parse_source(table.source)
    with _error_key("to"):
        if not root_text.startswith("/"):
            raise UsageError("not an absolute path", hint="cron has no working folder")
        if "{job}" in root_text:
            raise UsageError("{job} cannot be filled in: there is no job", hint="{node} and {user} can")
        root = Path(expand_placeholders(root_text, node=node))
    with _error_key("disk"):
        if table.disk and not root.is_relative_to(table.disk):
            raise UsageError("not a folder above the rule's root", hint='the mount point, such as "/nvme"')
    with _error_key("nodes"):
        names = hostlist.expand(table.nodes)
    sizes = {}
    for key in ("cap", "quota", "min_free"):
        with _error_key(key):
            sizes[key] = units.parse_size(text) if (text := getattr(table, key)) else None
    return Rule(
        name=table.name or table.pattern,
        source=source,
        pattern=table.pattern,
        newest=table.newest,
        cap_bytes=sizes["cap"],
        root=root,
        disk=Path(table.disk) if table.disk else None,
        limits=RootLimits(quota_bytes=sizes["quota"], min_free_bytes=sizes["min_free"] or 0),
        shared=table.shared,
        applies=not table.nodes or node in names or node.partition(".")[0] in names,
    )


def _parse_source(text: str) -> Path | str:
    if is_url(text):
        from pitools.stage.sources.object_store import client

        return client.parse_url(text).url
    if not text.startswith("/"):
        raise UsageError("not an absolute path", hint="cron has no working folder")
    return Path(text)


def _refuse_contradiction(earlier_rules: list[Rule], rule: Rule) -> None:
    for earlier in earlier_rules:
        if earlier.name == rule.name:
            message = f'key "name": two rules are called "{rule.name}"'
            raise ConfigError(message, hint='name = "…" tells them apart in records and metrics', key="name")
        if earlier.root == rule.root and (earlier.limits, earlier.shared) != (rule.limits, rule.shared):
            message = f'quota, min_free, shared: differ from those of rule "{earlier.name}" for the same root'
            raise ConfigError(message, hint="give the same values in all rules of a root")


@contextmanager
def _error_key(key: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise ConfigError(f'key "{key}": {error.message}', hint=error.hint, key=key) from error


@contextmanager
def _located(path: Path, number: int) -> Iterator[None]:
    """Add the file and line of a rule to its errors."""
    try:
        yield
    except ConfigError as error:
        line = _line(path, number, error.key)
        where = f"{path}:{line}, rule {number + 1}" if line else f"{path}, rule {number + 1}"
        raise ConfigError(error.message, where=where, hint=error.hint, key=error.key) from error


def _line(path: Path, number: int, key: str) -> int:
    """Return the line of a rule's key, else of its head; 0 if the rules are not written as [[rules]]."""
    lines = path.read_text(encoding="utf-8").splitlines()
    heads = [number for number, line in enumerate(lines) if re.match(r"\s*\[\[\s*rules\s*\]\]", line)]
    if number >= len(heads):
        return 0
    end = heads[number + 1] if number + 1 < len(heads) else len(lines)
    is_key = re.compile(rf"\s*{re.escape(key)}\s*=")
    return 1 + next((index for index in range(heads[number], end) if key and is_key.match(lines[index])), heads[number])


def _safe_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:40]
