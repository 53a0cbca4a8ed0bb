"""A big cluster without slurmds: its node list and its topology.conf, generated, or taken from a real site's file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from devcluster_parts.errors import FileProblem, UsageProblem

LEAF_NODES = 8
POD_LEAVES = 16
MAX_CLOUD_NODES = 65_000


def generate_topology(count: int) -> tuple[str, str]:
    """The folded node list and the topology.conf of `count` nodes: leaves of 8, pods of 16 leaves, one core."""
    if not 1 <= count <= MAX_CLOUD_NODES:
        raise UsageProblem(f"{count} is not between 1 and {MAX_CLOUD_NODES}", where="--cloud")
    width = max(4, len(str(count)))
    leaves = [_folded(start, min(start + LEAF_NODES - 1, count), width) for start in range(1, count + 1, LEAF_NODES)]
    lines = [f"SwitchName=leaf{i:04d} Nodes={nodes}" for i, nodes in enumerate(leaves, 1)]
    pods = range(1, len(leaves) + 1, POD_LEAVES)
    for number, first in enumerate(pods, 1):
        last = min(first + POD_LEAVES - 1, len(leaves))
        lines.append(f"SwitchName=pod{number:03d} Switches=leaf[{first:04d}-{last:04d}]")
    lines.append(f"SwitchName=core Switches=pod[{1:03d}-{len(pods):03d}]")
    return _folded(1, count, width), "\n".join(lines) + "\n"


def _folded(first: int, last: int, width: int) -> str:
    return f"cloud[{first:0{width}d}-{last:0{width}d}]"


def convert_topology(text: str, where: str) -> tuple[str, str]:
    """The folded node list of a topology.conf, and its lines of switches, each node named once.

    Raises FileProblem for a file of another topology plugin, or with nodes that cannot be read.
    """
    kept: list[str] = []
    folded: list[str] = []
    seen: set[str] = set()
    for number, line in _logical_lines(text):
        fields = _fields(line)
        at = f"{where}:{number}"
        if "switchname" not in fields:
            what = f"{line.split('=')[0]!r} is not a line of topology/tree"
            raise FileProblem(what, where=at, hint="give a file of SwitchName lines")
        kept.append(" ".join(line.split()))
        names = list(expand_hosts(fields["nodes"], at)) if "nodes" in fields else []
        fresh = [name for name in dict.fromkeys(names) if name not in seen]
        seen.update(fresh)
        if fresh:
            folded.append(fields["nodes"] if len(fresh) == len(names) else ",".join(fresh))
        if len(seen) > MAX_CLOUD_NODES:
            raise FileProblem(f"names more than {MAX_CLOUD_NODES} nodes", where=at)
    if not seen:
        raise FileProblem("names no nodes", where=where, hint="give a file of SwitchName lines with Nodes=")
    return ",".join(folded), "\n".join(kept) + "\n"


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    whole, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].rstrip()
        first = first if whole else number
        whole += line.removesuffix("\\") + (" " if line.endswith("\\") else "")
        if not line.endswith("\\"):
            if whole.strip():
                yield first, whole.strip()
            whole = ""
    if whole.strip():
        yield first, whole.strip()


def _fields(line: str) -> dict[str, str]:
    return {key.lower(): value for key, value in re.findall(r"([A-Za-z]+)=(\S+)", line)}


def expand_hosts(folded: str, where: str) -> Iterator[str]:
    """The names of a folded host list, such as `a[01-03,7],b2`; any number of brackets in a name."""
    if not re.fullmatch(r"([A-Za-z0-9_.-]|\[[0-9,-]+\]|,)+", folded):
        raise FileProblem(f"{folded[:80]!r} is not a host list", where=where)
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", folded):
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [[part] if i % 2 == 0 else _numbers(part, where) for i, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str, where: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        first, dash, last = piece.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit()) or int(last) - int(first) not in range(MAX_CLOUD_NODES):
            raise FileProblem(f"[{ranges[:80]}] is not a range of numbers", where=where)
        found += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return found
