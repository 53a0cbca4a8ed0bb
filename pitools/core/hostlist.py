"""Host lists: Slurm's folded form, through ClusterShell's NodeSet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from pitools.core.errors import UsageError

# ClusterShell also accepts @groups, set operators and wildcards, which Slurm has not: they are refused.
_SLURM_LIST = re.compile(r"[\w\[\],.\-\s]*")
_ITEM = re.compile(r"(?:\[[^\]]*\]|[^,\[\s])+")
_INSIDE = re.compile(r"\[([^\]]*)\]")
MAX_HOSTS = 1 << 18  # names of one list: more than any cluster has


def expand(folded: str) -> list[str]:
    """Expand a host list such as `n[01-04,07],login1` to its distinct names, sorted; blanks separate names, too.

    Raises UsageError if it is not a host list, or has more than MAX_HOSTS names.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    hint = "write n01 or n[01-04,07]"
    if not _SLURM_LIST.fullmatch(folded) or _ITEM.sub("", folded).replace(",", "").strip():
        raise UsageError(f"{folded!r} is not a host list", hint=hint)
    if count_hosts(folded) > MAX_HOSTS:
        raise UsageError(f"{folded[:80]!r}: more than {MAX_HOSTS} names", hint="write a shorter list")
    try:
        return list(NodeSet(",".join("".join(item.split()) for item in _ITEM.findall(folded))))
    except NodeSetException as error:
        raise UsageError(f"{folded!r} is not a host list: {error}", hint=hint) from error


def count_hosts(folded: str) -> int:
    """Return an upper bound of a host list's names, without expanding it: ten characters can be a billion names."""
    items = _ITEM.findall(folded)
    return sum(math.prod(sum(map(_span_size, part.split(","))) for part in _INSIDE.findall(item)) for item in items)


def _span_size(text: str) -> int:
    first, dash, last = text.strip().partition("-")
    return max(1, int(last) - int(first) + 1) if dash and first.isdecimal() and last.isdecimal() else 1


def fold(names: Iterable[str]) -> str:
    """Fold names to the form that `sbatch -w` accepts: `n[01-04,07]`."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names)))
