"""topology.conf, in its tree and block forms, read and written.

Slurm has no use for the lengths of links, so they stand in comments: `SwitchName=m1 Nodes=n[1-8]  # length=2.5`.
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
_HINT = "SwitchName=leaf1 Nodes=n[01-08], SwitchName=core Switches=leaf[1-2], BlockName=b1 Nodes=n[01-18]"


def read_conf(text: str, where: str) -> Fabric:
    """The fabric of a topology.conf. Raises ConfigError or DataError naming line and switch."""
    switches: dict[str, Switch] = {}
    blocks: dict[str, Leaf] = {}
    places: dict[str, str] = {}
    lengths: dict[str, float] = {}
    sizes: list[int] = []
    for at, line, comment in _lines(text, where):
        fields = _fields(line, at)
        if "blocksizes" in fields and "blockname" not in fields:
            sizes = block_sizes(fields["blocksizes"].split(","), at)
            continue
        name = checked_name(fields.get("switchname", fields.get("blockname", "")), at)
        if name in places:
            raise ConfigError(f'"{name}" is there twice, first at {places[name]}', where=at)
        places[name] = at
        if length := _LENGTH.search(comment):
            lengths[name] = link_length(length[1], at)
        if "blockname" in fields:
            blocks[name] = Leaf(path=(name,), nodes=tuple(expand_names(fields.get("nodes", ""), at)))
        else:
            switches[name] = make_switch(name, fields.get("nodes", ""), fields.get("switches", ""), at)
    if switches and blocks:
        raise ConfigError("switches and blocks in one file", where=where, hint="keep those of the plugin in use")
    if blocks:
        return block_fabric(blocks.values(), sizes, places)
    return tree_from_switches(list(switches.values()), lengths, places)


def write_conf(fabric: Fabric) -> str:
    """The topology.conf of a fabric. Raises UsageError where there is no such file: for a torus or a flat one."""
    if fabric.kind == "block":
        lines = [f"BlockName={leaf.path[-1]} Nodes={fold_nodes(leaf.nodes)}" for leaf in fabric.leaves]
        sizes = ",".join(map(str, fabric.block_sizes))
        return "\n".join([*lines, *([f"BlockSizes={sizes}"] if sizes else [])]) + "\n"
    if not fabric.leaves:
        raise UsageError(f"no topology.conf says what a {fabric.kind} fabric is", hint="--as yaml")
    lines = [f"SwitchName={name} {key}={what}{_length(fabric, name)}" for name, key, what in switch_lines(fabric)]
    return "\n".join(lines) + "\n"


def _length(fabric: Fabric, name: str) -> str:
    return f"  # length={fabric.lengths[name]!r}" if name in fabric.lengths else ""


def tree_from_switches(switches: Sequence[Switch], lengths: dict[str, float], origins: dict[str, str]) -> Fabric:
    """A tree out of a file, in which every switch that is named must be there."""
    known = {switch.switch for switch in switches}
    for parent in switches:
        for child in expand_ordered(parent.switches):
            if child not in known:
                what = f'switch "{child}" below "{parent.switch}" is nowhere'
                raise ConfigError(what, where=origins[parent.switch], hint=suggest(child, known))
    return tree_fabric(from_switches(switches, origins).leaves, lengths, origins)


def make_switch(name: str, node_list: str, switches: str, origin: str) -> Switch:
    """One switch of a file, its lists checked. Raises ConfigError."""
    if node_list and switches:
        raise ConfigError(f'switch "{name}" has both nodes and switches', where=origin, hint="give it one of them")
    expand_names(node_list, origin)
    expand_names(switches, origin)
    return Switch(switch=name, level=int(bool(switches)), node_list=node_list, switches=switches)


def expand_names(folded_names: str, origin: str) -> list[str]:
    """The names of a folded list in a file. Raises ConfigError."""
    try:
        return [checked_name(name, origin) for name in expand_ordered(folded_names)]
    except UsageError as error:
        raise ConfigError(error.message, where=origin, hint=error.hint) from error


def checked_name(name: str, origin: str) -> str:
    """A name that Slurm takes for a node or a switch. Raises ConfigError."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is no name of a switch or node", where=origin, hint=_HINT)
    return name


def block_sizes(sizes: Sequence[str], origin: str) -> list[int]:
    """Nodes of a base block, then of aggregates, each a power of two times the first. Raises ConfigError."""
    found = [int(size) if size.isdecimal() and len(size) < 9 else 0 for size in sizes]
    ratios = [divmod(size, found[0]) if found[0] else (0, 0) for size in found]
    if any(rest or ratio < 1 or ratio & (ratio - 1) for ratio, rest in ratios):
        raise ConfigError(
            f"block sizes {', '.join(sizes)}", where=origin, hint="each a power of two times the first: 4,8,32"
        )
    return found


def link_length(text: str, origin: str) -> float:
    """A finite positive number. Raises ConfigError."""
    try:
        length = float(text)
    except ValueError:
        length = 0.0
    if not 0 < length < float("inf"):
        raise ConfigError(f"length={text[:40]} is no positive number", where=origin)
    return length


def fold_nodes(nodes: Sequence[str]) -> str:
    """A list that every version of Slurm takes: with at most one bracket a name."""
    short = hostlist.fold(nodes)
    items = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", short)
    is_plain = all(item.count("[") < 2 and not item.startswith("[") for item in items)
    return short if is_plain else ",".join(sorted(nodes, key=natural_sort_key))


def switch_lines(fabric: Fabric) -> Iterator[tuple[str, str, str]]:
    """(switch, "Nodes" or "Switches", what it has), leaves first, in the order of the tree."""
    below: dict[tuple[str, ...], list[str]] = {}
    for leaf in fabric.leaves:
        yield leaf.path[-1], "Nodes", fold_nodes(leaf.nodes)
        for depth in range(len(leaf.path) - 1, 0, -1):
            children = below.setdefault(leaf.path[:depth], [])
            if leaf.path[depth] not in children[-1:]:
                children.append(leaf.path[depth])
    for path in sorted(below, key=len, reverse=True):
        yield path[-1], "Switches", ",".join(below[path])


def _lines(text: str, where: str) -> Iterator[tuple[str, str, str]]:
    """(place, content, comment) of each line that says something; a backslash joins it with the next."""
    whole, first = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line, mark, comment = raw.partition("#")
        first = first or number
        whole += line.rstrip().removesuffix("\\") + " "
        if line.rstrip().endswith("\\") and not mark:
            continue
        if whole.strip():
            yield f"{where}:{first}", whole.strip(), mark + comment
        whole, first = "", 0


def _fields(line: str, at: str) -> dict[str, str]:
    if rest := _PAIR.sub("", line).strip():
        raise ConfigError(f"{rest[:80]!r} is no KEY=VALUE", where=at, hint=_HINT)
    fields: dict[str, str] = {}
    for key, value in _PAIR.findall(line):
        if key.lower() not in CONF_KEYS:
            raise ConfigError(f'unknown key "{key[:80]}"', where=at, hint=suggest(key, CONF_KEYS.values()))
        if fields.setdefault(key.lower(), value) != value:
            raise ConfigError(f"{key} is there twice", where=at)
    return fields
