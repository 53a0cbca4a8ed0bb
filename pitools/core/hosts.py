"""Host lists: Slurm's folded form, through ClusterShell's NodeSet."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pitools.core.errors import UsageError

# ClusterShell also reads @groups, set operators and wildcards; Slurm knows none of them, so none is read here.
_SLURM_LIST = re.compile(r"[\w\[\],.\-\s]*")


def expand(folded: str) -> list[str]:
    """Names of `n[01-04,07],login1`, each once, in the list's own sorted order. Raises UsageError."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    hint = "write n01 or n[01-04,07]"
    if not _SLURM_LIST.fullmatch(folded):
        raise UsageError(f"{folded!r} is not a host list", hint=hint)
    try:
        return list(NodeSet(folded))
    except NodeSetException as error:
        raise UsageError(f"{folded!r} is not a host list: {error}", hint=hint) from error


def fold(names: Iterable[str]) -> str:
    """The shortest folded form that `sbatch -w` accepts: `n[01-04,07]`."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(names)))
