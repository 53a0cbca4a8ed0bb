"""Read and write topology.conf, in its tree and block forms.

Slurm ignores link lengths, so they are kept in comments: `SwitchName=m1 Nodes=n[1-8]  # length=2.5`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pitools.core import hostlist
from pitools.core.errors import ConfigError, UsageError, suggest
from pitools.slurm.records import Switch
from pitools.topology.fabric_model import (
    Fabric,
    Leaf,
    block_fabric,
    expand_ordered,
    from_switches,
    natural_sort_key,
    tree_fabric,
)

CONF_KEYS = {
    "switchname": "SwitchName",
    "switches": "Switches",
    "nodes": "Nodes",
    "linkspeed": "LinkSpeed",
    "blockname": "BlockName",
    "blocksizes": "BlockSizes",
}
NAME_PATTERN = re.compile(r"[\w.:@+/-]{1,64}")

_PAIR = re.compile(r"([^\s=]+)=(\S*)")
_LENGTH = re.compile(r"#.*?\blength=(\S+)")
_SYNTAX_HINT = "SwitchName=leaf1 Nodes=n[01-08], SwitchName=core Switches=leaf[1-2], BlockName=b1 Nodes=n[01-18]"


def read_conf(text: str, where: str) -> Fabric:
    """Parse a topology.conf. Raises ConfigError or DataError with line and switch."""
    switches: dict[str, Switch] = {}
    blocks: dict[str, Leaf] = {}
    origins: dict[str, str] = {}
    lengths: dict[str, float] = {}
    sizes: list[int] = []
    for origin, line, comment in _logical_lines(text, where):
        fields = _parse_fields(line, origin)
        if "blocksizes" in fields and "blockname" not in fields:
            sizes = parse_block_sizes(fields["blocksizes"].split(","), origin)
            continue
        name = require_valid_name(fields.get("switchname", fields.get("blockname", "")), origin)
        if name in origins:
            raise ConfigError(f'"{name}" is defined twice, first at {origins[name]}', where=origin)
        origins[name] = origin
        if length := _LENGTH.search(comment):
            lengths[name] = parse_link_length(length[1], origin)
        if "blockname" in fields:
            blocks[name] = Leaf(path=(name,), nodes=tuple(expand_names(fields.get("nodes", ""), origin)))
        else:
            switches[name] = make_switch(name, fields.get("nodes", ""), fields.get("switches", ""), origin)
    if switches and blocks:
        raise ConfigError("both switches and blocks in one file", where=where, hint="keep those of the plugin in use")
    if blocks:
        return block_fabric(blocks.values(), sizes, origins)
    return tree_from_switches(list(switches.values()), lengths, origins)


def write_conf(fabric: Fabric) -> str:
    """Return the topology.conf of a fabric. Raises UsageError for a torus or a flat fabric: no form of it fits."""
    if fabric.kind == "block":
        lines = [f"BlockName={leaf.path[-1]} Nodes={fold_nodes(leaf.nodes)}" for leaf in fabric.leaves]
        sizes = ",".join(map(str, fabric.block_sizes))
        return "\n".join([*lines, *([f"BlockSizes={sizes}"] if sizes else [])]) + "\n"
    if not fabric.leaves:
        raise UsageError(f"topology.conf cannot express a {fabric.kind} fabric", hint="--as yaml")
    lines = [
        f"SwitchName={name} {key}={value}{_length_comment(fabric, name)}" for name, key, value in switch_lines(fabric)
    ]
    return "\n".join(lines) + "\n"


def _length_comment(fabric: Fabric, name: str) -> str:
    return f"  # length={fabric.lengths[name]!r}" if name in fabric.lengths else ""


def tree_from_switches(switches: Sequence[Switch], lengths: dict[str, float], origins: dict[str, str]) -> Fabric:
    """Return the tree of a file's switches. Raises ConfigError for an undefined child."""
    defined = {switch.switch for switch in switches}
    for parent in switches:
        for child in expand_ordered(parent.switches):
            if child not in defined:
                problem = f'switch "{child}" below "{parent.switch}" is not defined'
                raise ConfigError(problem, where=origins[parent.switch], hint=suggest(child, defined))
    return tree_fabric(from_switches(switches, origins).leaves, lengths, origins)


def make_switch(name: str, node_list: str, switches: str, origin: str) -> Switch:
    """Return a switch of a file. Raises ConfigError for an invalid list of nodes or switches."""
    if node_list and switches:
        raise ConfigError(f'switch "{name}" has both nodes and switches', where=origin, hint="give it one of them")
    expand_names(node_list, origin)
    expand_names(switches, origin)
    return Switch(switch=name, level=int(bool(switches)), node_list=node_list, switches=switches)


def expand_names(folded_names: str, origin: str) -> list[str]:
    """Return the names in a host list. Raises ConfigError."""
    try:
        return [require_valid_name(name, origin) for name in expand_ordered(folded_names)]
    except UsageError as error:
        raise ConfigError(error.message, where=origin, hint=error.hint) from error


def require_valid_name(name: str, origin: str) -> str:
    """Return the name if Slurm accepts it for a node or a switch, else raise ConfigError."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is not a valid name of a switch or node", where=origin, hint=_SYNTAX_HINT)
    return name


def parse_block_sizes(sizes: Sequence[str], origin: str) -> list[int]:
    """Parse block sizes: the base block, then aggregates, each a power of two times it. Raises ConfigError."""
    parsed = [int(size) if size.isdecimal() and len(size) < 9 else 0 for size in sizes]
    ratios = [divmod(size, parsed[0]) if parsed[0] else (0, 0) for size in parsed]
    if any(rest or ratio < 1 or ratio & (ratio - 1) for ratio, rest in ratios):
        problem = f"block sizes {', '.join(sizes)} (expected each a power of two times the first)"
        raise ConfigError(problem, where=origin, hint="write for example 4,8,32")
    return parsed


def parse_link_length(text: str, origin: str) -> float:
    """Parse a finite positive number. Raises ConfigError."""
    try:
        length = float(text)
    except ValueError:
        length = 0.0
    if not 0 < length < float("inf"):
        raise ConfigError(f"length={text[:40]} is not a positive number", where=origin)
    return length


def fold_nodes(nodes: Sequence[str]) -> str:
    """Return a host list that every Slurm version accepts: at most one bracket per name."""
    folded = hostlist.fold(nodes)
    items = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", folded)
    is_plain = all(item.count("[") < 2 and not item.startswith("[") for item in items)
    return folded if is_plain else ",".join(sorted(nodes, key=natural_sort_key))


def switch_lines(fabric: Fabric) -> Iterator[tuple[str, str, str]]:
    """Yield (switch, "Nodes" or "Switches", their list), leaves first, in the order of the tree."""
    below: dict[tuple[str, ...], list[str]] = {}
    for leaf in fabric.leaves:
        yield leaf.path[-1], "Nodes", fold_nodes(leaf.nodes)
        for depth in range(len(leaf.path) - 1, 0, -1):
            children = below.setdefault(leaf.path[:depth], [])
            if leaf.path[depth] not in children[-1:]:
                children.append(leaf.path[depth])
    for path in sorted(below, key=len, reverse=True):
        yield path[-1], "Switches", ",".join(below[path])


def _logical_lines(text: str, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (file:line, content, comment) of each non-empty line; a backslash continues a line."""
    joined, first_number = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line, mark, comment = raw.partition("#")
        first_number = first_number or number
        joined += line.rstrip().removesuffix("\\") + " "
        if line.rstrip().endswith("\\") and not mark:
            continue
        if joined.strip():
            yield f"{where}:{first_number}", joined.strip(), mark + comment
        joined, first_number = "", 0


def _parse_fields(line: str, origin: str) -> dict[str, str]:
    if rest := _PAIR.sub("", line).strip():
        raise ConfigError(f"{rest[:80]!r} is not KEY=VALUE", where=origin, hint=_SYNTAX_HINT)
    fields: dict[str, str] = {}
    for key, value in _PAIR.findall(line):
        if key.lower() not in CONF_KEYS:
            raise ConfigError(f'unknown key "{key[:80]}"', where=origin, hint=suggest(key, CONF_KEYS.values()))
        if fields.setdefault(key.lower(), value) != value:
            raise ConfigError(f"{key} is given twice", where=origin)
    return fields
