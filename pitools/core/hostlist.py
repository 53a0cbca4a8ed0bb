"""Host lists: Slurm's folded form, through ClusterShell's NodeSet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from pitools.core.errors import UsageError

# ClusterShell also reads @groups, set operators and wildcards; Slurm knows none of them, so none is read here.
_SLURM_LIST = re.compile(r"[\w\[\],.\-\s]*")
_ITEM = re.compile(r"(?:\[[^\]]*\]|[^,\[\s])+")
_INSIDE = re.compile(r"\[([^\]]*)\]")
MAX_HOSTS = 1 << 18  # names of one list: more than any cluster has, and few enough to hold


def expand(folded: str) -> list[str]:
    """Names of `n[01-04,07],login1`, each once, in the list's own sorted order; blanks divide names as commas do.

    Raises UsageError for what is no list, or stands for more than MOST names.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    hint = "write n01 or n[01-04,07]"
    if not _SLURM_LIST.fullmatch(folded) or _ITEM.sub("", folded).replace(",", "").strip():
        raise UsageError(f"{folded!r} is not a host list", hint=hint)
    if count_hosts(folded) > MAX_HOSTS:
        raise UsageError(f"{folded[:80]!r} stands for more than {MAX_HOSTS} names", hint="write a shorter list")
    try:
        return list(NodeSet(",".join("".join(item.split()) for item in _ITEM.findall(folded))))
    except NodeSetException as error:
        raise UsageError(f"{folded!r} is not a host list: {error}", hint=hint) from error


def count_hosts(folded: str) -> int:
    """How many names a host list has at most, without making them: a list of ten letters can name a billion."""
    items = _ITEM.findall(folded)
    return sum(math.prod(sum(map(_span_size, part.split(","))) for part in _INSIDE.findall(item)) for item in items)


def _span_size(text: str) -> int:
    first, dash, last = text.strip().partition("-")
    return max(1, int(last) - int(first) + 1) if dash and first.isdecimal() and last.isdecimal() else 1


def fold(names: Iterable[str]) -> str:
    """The shortest folded form that `sbatch -w` accepts: `n[01-04,07]`."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names)))
