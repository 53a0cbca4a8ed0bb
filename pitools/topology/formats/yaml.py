"""Read and write topology.yaml of Slurm 25.05 and later. Of its topologies, one is selected.

Slurm 26.05 adds the torus, with x fastest: its dims {x, y, z} are a fabric's (z, y, x).
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
    expand_names,
    fold_nodes,
    make_switch,
    parse_block_sizes,
    parse_link_length,
    require_valid_name,
    switch_lines,
    tree_from_switches,
)

_KINDS = ("tree", "block", "torus3d", "flat", "ring")
_MAX_VALUES = 1_000_000  # values in a file: a few lines of aliases can expand to billions
_MAX_DEPTH = 100  # nested collections: libyaml's composer overflows the stack
_LENGTH = re.compile(r"#.*?\blength=(\S+)")
_PLAIN_SCALAR = re.compile(r"[A-Za-z][\w./,\[\]-]*")
_YAML_KEYWORDS = frozenset({"yes", "no", "true", "false", "on", "off", "null", "y", "n"})

Table = dict[str, Any]  # a mapping of the file; the key "" is its first line number


def read_yaml(text: str, where: str, name: str = "") -> Fabric:
    """Return the fabric of the topology `name` (a partition's Topology=), by default the cluster's default.

    Raises ConfigError or DataError with line and switch, UsageError for an unknown name.
    """
    entries = [_mapping(entry, where) for entry in _list(_parse(text, where), where)]
    if not entries:
        raise ConfigError("no topology in the file", where=where)
    entry_by_name = {_text(entry, "topology", where): entry for entry in entries}
    if name and name not in entry_by_name:
        raise UsageError(f'no topology "{name}"', where=where, hint=suggest(name, entry_by_name))
    default = [entry for entry in entries if str(entry.get("cluster_default", "")).lower() in ("true", "yes", "on")]
    entry = entry_by_name[name] if name else (default or entries)[0]
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise ConfigError(f"{len(kinds)} kinds (expected one of {', '.join(_KINDS)})", where=_origin(entry, where))
    if kinds == ["flat"]:
        return Fabric(kind="flat")
    if kinds == ["ring"]:
        raise ConfigError("ring is not supported", where=_origin(entry, where), hint="select another: FILE#NAME")
    body = _mapping(entry[kinds[0]], where)
    if kinds == ["tree"]:
        return _read_tree(body, where, text.split("\n"))
    return _read_blocks(body, where) if kinds == ["block"] else _read_torus(body, where)


def write_yaml(fabric: Fabric, name: str = "default") -> str:
    """Return the topology.yaml of a fabric. Raises UsageError for a torus without exactly three dimensions."""
    return "\n".join(["---", f"- topology: {_scalar(name)}", "  cluster_default: true", *_body(fabric)]) + "\n"


def _body(fabric: Fabric) -> list[str]:
    if fabric.torus:
        if len(fabric.torus.dims) != 3:
            raise UsageError(
                f"a torus of {len(fabric.torus.dims)} dimensions (expected 3)", hint="Slurm has torus3d only"
            )
        sizes = ", ".join(f"{axis}: {size}" for axis, size in zip("zyx", fabric.torus.dims, strict=True))
        nodes = _scalar(",".join(fabric.torus.nodes))  # not folded: folding sorts the nodes
        return [
            "  torus3d:",
            "    toruses:",
            "      - name: torus",
            f"        dims: {{{sizes}}}",
            f"        nodes: {nodes}",
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
    for switch_name, key, names in switch_lines(fabric):
        length = fabric.lengths.get(switch_name)
        lines.append(f"      - switch: {_scalar(switch_name)}" + (f"  # length={length!r}" if length else ""))
        lines.append(f"        {keys[key]}: {_scalar(names)}")
    return lines


def _read_tree(body: Table, where: str, lines: Sequence[str]) -> Fabric:
    switches: list[Switch] = []
    origins: dict[str, str] = {}
    lengths: dict[str, float] = {}
    for entry in _entries(body, "switches", {"switch", "nodes", "children", "link_speed"}, where):
        origin = _origin(entry, where)
        name = _require_new(_text(entry, "switch", where), origins, origin)
        if length := _LENGTH.search("".join(lines[entry[""] - 1 : entry[""]])):
            lengths[name] = parse_link_length(length[1], origin)
        switches.append(
            make_switch(name, _text(entry, "nodes", where, ""), _text(entry, "children", where, ""), origin)
        )
    return tree_from_switches(switches, lengths, origins)


def _read_blocks(body: Table, where: str) -> Fabric:
    origins: dict[str, str] = {}
    blocks = []
    for entry in _entries(body, "blocks", {"block", "nodes"}, where):
        name = _require_new(_text(entry, "block", where), origins, _origin(entry, where))
        nodes = expand_names(_text(entry, "nodes", where, ""), _origin(entry, where))
        blocks.append(Leaf(path=(name,), nodes=tuple(nodes)))
    sizes = [str(size) for size in _list(body.get("block_sizes", []), where)]
    return block_fabric(blocks, parse_block_sizes(sizes, _origin(body, where)), origins)


def _read_torus(body: Table, where: str) -> Fabric:
    entries = _entries(body, "toruses", {"name", "dims", "nodes", "regions", "placements"}, where)
    if len(entries) != 1:
        raise ConfigError(f"{len(entries)} toruses in one topology (expected 1)", where=_origin(body, where))
    entry, origin = entries[0], _origin(entries[0], where)
    dims = _vector(entry, "dims", where)
    if "regions" not in entry:
        return torus_fabric(dims, expand_names(_text(entry, "nodes", where), origin), origin)
    placed: dict[tuple[int, ...], str] = {}
    for region in _entries(entry, "regions", {"anchor", "dims", "nodes"}, where):
        anchor, size = _vector(region, "anchor", where), _vector(region, "dims", where)
        part = torus_fabric(size, expand_names(_text(region, "nodes", where), origin), _origin(region, where))
        nodes = iter(part.torus.nodes if part.torus else ())
        for z, y, x in _positions(size):
            position = tuple((a + b) % max(size, 1) for a, b, size in zip(anchor, (z, y, x), dims, strict=True))
            if placed.setdefault(position, node := next(nodes)) != node:
                raise ConfigError(
                    f'nodes "{placed[position]}" and "{node}" at one position', where=_origin(region, where)
                )
    return torus_fabric(dims, [placed[place] for place in sorted(placed)], origin)


def _positions(dims: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(z, y, x) for z in range(dims[0]) for y in range(dims[1]) for x in range(dims[2])]


def _vector(entry: Table, key: str, where: str) -> tuple[int, int, int]:
    """Return (z, y, x) of a mapping of x, y and z."""
    sizes = [_text(_mapping(entry.get(key, {}), where), axis, where) for axis in "zyx"]
    if not all(size.isdecimal() and len(size) < 5 for size in sizes):
        problem = f"{key} is {', '.join(sizes)} (expected numbers below 10000)"
        raise ConfigError(problem, where=_origin(entry, where), hint="{x: 4, y: 4, z: 2}")
    z, y, x = map(int, sizes)
    return z, y, x


def _parse(text: str, where: str) -> Any:
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError("nested too deeply", where=f"{where}:{event.start_mark.line + 1}")
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        origin = f"{where}:{mark.line + 1}" if mark else where
        raise ConfigError(f"not YAML: {getattr(error, 'problem', None) or 'unreadable'}", where=origin) from error
    values_left = [_MAX_VALUES]

    def to_plain(node: Any) -> Any:
        values_left[0] -= 1
        if values_left[0] < 0:
            raise ConfigError(f"more than {_MAX_VALUES} values", where=where)
        if isinstance(node, yaml.SequenceNode):
            return [to_plain(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            if any(not isinstance(key, yaml.ScalarNode) for key, _ in node.value):
                raise ConfigError("a key is not text", where=f"{where}:{node.start_mark.line + 1}")
            return {"": node.start_mark.line + 1, **{str(key.value): to_plain(value) for key, value in node.value}}
        return str(node.value) if node else []

    try:
        return to_plain(root)
    except RecursionError as error:
        raise ConfigError("nested too deeply", where=where) from error


def _entries(body: Table, key: str, allowed_keys: Collection[str], where: str) -> list[Table]:
    entries = [_mapping(entry, where) for entry in _list(body.get(key, []), where)]
    for entry in entries:
        for entry_key in entry:
            if entry_key and entry_key not in allowed_keys:
                raise ConfigError(
                    f'unknown key "{entry_key[:80]}"',
                    where=_origin(entry, where),
                    hint=suggest(entry_key, allowed_keys),
                )
    return entries


def _require_new(name: str, origins: dict[str, str], origin: str) -> str:
    require_valid_name(name, origin)
    if name in origins:
        raise ConfigError(f'"{name}" is defined twice, first at {origins[name]}', where=origin)
    origins[name] = origin
    return name


def _mapping(value: Any, where: str) -> Table:
    if not isinstance(value, dict):
        raise ConfigError(f"{str(value)[:80]!r} is not a mapping", where=where, hint="see topology.yaml(5)")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{str(value)[:80]!r} is not a list", where=where, hint="see topology.yaml(5)")
    return value


def _text(entry: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f'no "{key}"' if value is None else f'"{key}" is not text', where=_origin(entry, where))
    return value


def _origin(entry: Mapping[str, Any], where: str) -> str:
    return f"{where}:{entry['']}" if "" in entry else where


def _scalar(text: str) -> str:
    return text if _PLAIN_SCALAR.fullmatch(text) and text.lower() not in _YAML_KEYWORDS else json.dumps(text)
