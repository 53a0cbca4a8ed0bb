"""The fabric of a live Slurm, whichever topology plugin it runs."""

from __future__ import annotations

from pitools.slurm.client import Client
from pitools.slurm.records import Block, Switch
from pitools.topology.model import Fabric, from_blocks, from_switches


def fabric(slurm: Client) -> Fabric:
    """What `scontrol show topology` tells; empty for a flat topology. Raises what the client raises."""
    parts = slurm.topology()
    blocks = [part for part in parts if isinstance(part, Block)]
    if blocks:
        return from_blocks(blocks)
    return from_switches([part for part in parts if isinstance(part, Switch)])
