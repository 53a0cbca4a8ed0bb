"""What a job is billed: its resources times the TRESBillingWeights of its partition."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pitools.slurm.records import Partition

_WEIGHT = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e-?\d{1,2})?)([KMGTP]?)", re.IGNORECASE)
_PER_MIB = {"": 1.0, "K": 1024.0, "M": 1.0, "G": 1024.0**-1, "T": 1024.0**-2, "P": 1024.0**-3}
_OF_NODES = ("cpu", "mem", "node", "gres")


def billing(tres: Mapping[str, int], partition: Partition | None, flags: Collection[str]) -> tuple[int, bool]:
    """Return the billing of these resources, and whether that is all; without weights it is the CPUs.

    tres: memory in MiB. flags: PriorityFlags, in lower case: with `max_tres` the dearest resource of nodes counts, not
    their sum. Unknown resources and invalid weights count 0, so the result is a lower bound.
    """
    if not partition or not partition.billing_weights:
        return tres["cpu"], True
    costs: dict[str, float] = {}
    is_all = "max_tres_gres" not in flags
    for name, text in partition.billing_weights.items():
        match, resource = _WEIGHT.fullmatch(text), name.lower()
        if not match or (match[2] and resource != "mem") or (float(match[1]) and is_unknown(resource, tres)):
            is_all = False
            continue
        costs[resource] = tres.get(resource, 0) * float(match[1]) * _PER_MIB[match[2].upper()]
    of_nodes = [cost for name, cost in costs.items() if name.partition("/")[0] in _OF_NODES]
    is_max = {"max_tres", "max_tres_gres"} & {*flags}
    saved = sum(of_nodes) - max(of_nodes, default=0.0) if is_max else 0.0
    return int(sum(costs.values()) - saved), is_all


def is_unknown(name: str, tres: Mapping[str, int]) -> bool:
    """Return whether the resources of a job do not tell how much it uses of this one."""
    kind, (untyped, _, is_typed) = name.partition("/")[0], name.partition(":")
    is_of_other_type = bool(is_typed) and untyped in tres
    return name not in tres and (kind in ("license", "bb", "fs", "mem") or is_of_other_type)
