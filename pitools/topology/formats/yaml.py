"""topology.yaml of Slurm 25.05 and later, read and written: several topologies, of which one is taken.

A torus stands in it from 26.05, with x running fastest: dims {x, y, z} are a fabric's (z, y, x).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pitools.core.errors import ConfigError, UsageError, suggest
from pitools.slurm.records import Switch
from pitools.topology.fabric_model import Fabric, Leaf, block_fabric, torus_fabric
from pitools.topology.formats.conf import (
    block_sizes,
    checked_name,
    expand_names,
    fold_nodes,
    link_length,
    make_switch,
    switch_lines,
    tree_from_switches,
)

_KINDS = ("tree", "block", "torus3d", "flat", "ring")
_MAX_NODES = 1_000_000  # values in a file: a few lines of aliases can stand for billions
_MAX_DEPTH = 100  # collections within each other; libyaml's own composer overflows the stack
_LENGTH = re.compile(r"#.*?\blength=(\S+)")
_PLAIN = re.compile(r"[A-Za-z][\w./,\[\]-]*")
_WORDS = frozenset({"yes", "no", "true", "false", "on", "off", "null", "y", "n"})

Table = dict[str, Any]  # a mapping of the file; under "" the line it begins in


def read_yaml(text: str, where: str, name: str = "") -> Fabric:
    """The fabric of the topology `name`, as a partition's Topology= says, else of the cluster's default.

    Raises ConfigError or DataError naming line and switch, UsageError for a name that is not there.
    """
    every = [_table(entry, where) for entry in _list(_parsed(text, where), where)]
    if not every:
        raise ConfigError("it holds no topology", where=where)
    known = {_text(entry, "topology", where): entry for entry in every}
    if name and name not in known:
        raise UsageError(f'no topology "{name}"', where=where, hint=suggest(name, known))
    default = [entry for entry in every if str(entry.get("cluster_default", "")).lower() in ("true", "yes", "on")]
    entry = known[name] if name else (default or every)[0]
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise ConfigError(f"a topology has one of {', '.join(_KINDS)}", where=_at(entry, where))
    if kinds == ["flat"]:
        return Fabric(kind="flat")
    if kinds == ["ring"]:
        raise ConfigError("ring topologies are not read", where=_at(entry, where), hint="choose another: FILE#NAME")
    body = _table(entry[kinds[0]], where)
    if kinds == ["tree"]:
        return _tree(body, where, text.split("\n"))
    return _blocks(body, where) if kinds == ["block"] else _torus(body, where)


def write_yaml(fabric: Fabric, name: str = "default") -> str:
    """The topology.yaml of a fabric. Raises UsageError for a torus that is not of three dimensions."""
    return "\n".join(["---", f"- topology: {_scalar(name)}", "  cluster_default: true", *_body(fabric)]) + "\n"


def _body(fabric: Fabric) -> list[str]:
    if fabric.torus:
        if len(fabric.torus.dims) != 3:
            raise UsageError(f"a torus of {len(fabric.torus.dims)} dimensions", hint="Slurm's torus3d has three")
        sizes = ", ".join(f"{axis}: {size}" for axis, size in zip("zyx", fabric.torus.dims, strict=True))
        held = _scalar(",".join(fabric.torus.nodes))  # in order, which folding would lose
        return [
            "  torus3d:",
            "    toruses:",
            "      - name: torus",
            f"        dims: {{{sizes}}}",
            f"        nodes: {held}",
        ]
    if not fabric.leaves:
        return ["  flat: true"]
    if fabric.kind == "block":
        sizes = ", ".join(map(str, fabric.block_sizes))
        lines = ["  block:", *([f"    block_sizes: [{sizes}]"] if sizes else []), "    blocks:"]
        return lines + [
            f"      - block: {_scalar(leaf.path[-1])}\n        nodes: {_scalar(fold_nodes(leaf.nodes))}"
            for leaf in fabric.leaves
        ]
    keys = {"Nodes": "nodes", "Switches": "children"}
    lines = ["  tree:", "    switches:"]
    for switch_name, key, what in switch_lines(fabric):
        length = fabric.lengths.get(switch_name)
        lines.append(f"      - switch: {_scalar(switch_name)}" + (f"  # length={length!r}" if length else ""))
        lines.append(f"        {keys[key]}: {_scalar(what)}")
    return lines


def _tree(body: Table, where: str, lines: Sequence[str]) -> Fabric:
    switches: list[Switch] = []
    places: dict[str, str] = {}
    lengths: dict[str, float] = {}
    for entry in _entries(body, "switches", {"switch", "nodes", "children", "link_speed"}, where):
        at = _at(entry, where)
        name = _require_new(_text(entry, "switch", where), places, at)
        if length := _LENGTH.search("".join(lines[entry[""] - 1 : entry[""]])):
            lengths[name] = link_length(length[1], at)
        switches.append(make_switch(name, _text(entry, "nodes", where, ""), _text(entry, "children", where, ""), at))
    return tree_from_switches(switches, lengths, places)


def _blocks(body: Table, where: str) -> Fabric:
    places: dict[str, str] = {}
    blocks = []
    for entry in _entries(body, "blocks", {"block", "nodes"}, where):
        name = _require_new(_text(entry, "block", where), places, _at(entry, where))
        held = expand_names(_text(entry, "nodes", where, ""), _at(entry, where))
        blocks.append(Leaf(path=(name,), nodes=tuple(held)))
    sizes = [str(size) for size in _list(body.get("block_sizes", []), where)]
    return block_fabric(blocks, block_sizes(sizes, _at(body, where)), places)


def _torus(body: Table, where: str) -> Fabric:
    entries = _entries(body, "toruses", {"name", "dims", "nodes", "regions", "placements"}, where)
    if len(entries) != 1:
        raise ConfigError(f"{len(entries)} toruses in one topology", where=_at(body, where), hint="one can be read")
    entry, at = entries[0], _at(entries[0], where)
    dims = _vector(entry, "dims", where)
    if "regions" not in entry:
        return torus_fabric(dims, expand_names(_text(entry, "nodes", where), at), at)
    placed: dict[tuple[int, ...], str] = {}
    for region in _entries(entry, "regions", {"anchor", "dims", "nodes"}, where):
        anchor, size = _vector(region, "anchor", where), _vector(region, "dims", where)
        held = torus_fabric(size, expand_names(_text(region, "nodes", where), at), _at(region, where))
        nodes = iter(held.torus.nodes if held.torus else ())
        for z, y, x in _places(size):
            place = tuple((a + b) % max(size, 1) for a, b, size in zip(anchor, (z, y, x), dims, strict=True))
            if placed.setdefault(place, node := next(nodes)) != node:
                raise ConfigError(f'nodes "{placed[place]}" and "{node}" in one place', where=_at(region, where))
    return torus_fabric(dims, [placed[place] for place in sorted(placed)], at)


def _places(dims: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(z, y, x) for z in range(dims[0]) for y in range(dims[1]) for x in range(dims[2])]


def _vector(entry: Table, key: str, where: str) -> tuple[int, int, int]:
    """(z, y, x) of a mapping of x, y and z."""
    found = [_text(_table(entry.get(key, {}), where), axis, where) for axis in "zyx"]
    if not all(size.isdecimal() and len(size) < 5 for size in found):
        raise ConfigError(f"{key} has {', '.join(found)}", where=_at(entry, where), hint="{x: 4, y: 4, z: 2}")
    z, y, x = map(int, found)
    return z, y, x


def _parsed(text: str, where: str) -> Any:
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError("nested too deep", where=f"{where}:{event.start_mark.line + 1}")
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"not YAML: {getattr(error, 'problem', None) or 'unreadable'}", where=at) from error
    left = [_MAX_NODES]

    def plain(node: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ConfigError(f"more than {_MAX_NODES} values", where=where)
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            if any(not isinstance(key, yaml.ScalarNode) for key, _ in node.value):
                raise ConfigError("a key is no text", where=f"{where}:{node.start_mark.line + 1}")
            return {"": node.start_mark.line + 1, **{str(key.value): plain(value) for key, value in node.value}}
        return str(node.value) if node else []

    try:
        return plain(root)
    except RecursionError as error:
        raise ConfigError("nested too deep", where=where) from error


def _entries(body: Table, key: str, known: Collection[str], where: str) -> list[Table]:
    entries = [_table(entry, where) for entry in _list(body.get(key, []), where)]
    for entry in entries:
        for word in entry:
            if word and word not in known:
                raise ConfigError(f'unknown key "{word[:80]}"', where=_at(entry, where), hint=suggest(word, known))
    return entries


def _require_new(name: str, places: dict[str, str], at: str) -> str:
    checked_name(name, at)
    if name in places:
        raise ConfigError(f'"{name}" is there twice, first at {places[name]}', where=at)
    places[name] = at
    return name


def _table(value: Any, where: str) -> Table:
    if not isinstance(value, dict):
        raise ConfigError(f"{str(value)[:80]!r} is no mapping", where=where, hint="see topology.yaml(5)")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{str(value)[:80]!r} is no list", where=where, hint="see topology.yaml(5)")
    return value


def _text(entry: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f'no "{key}"' if value is None else f'"{key}" is no text', where=_at(entry, where))
    return value


def _at(entry: Mapping[str, Any], where: str) -> str:
    return f"{where}:{entry['']}" if "" in entry else where


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else json.dumps(text)
