"""`pit topology`: which nodes, and which rank on which of them."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "show": ("topology_show", "show", "The fabric and who is on it, as text or a picture."),
    "score": ("topology_show", "score", "How well running jobs sit on their switches."),
    "choose": ("topology_choose", "choose", "The best k of the free nodes, and what they cost."),
    "order": ("topology_order", "order", "Nodes in rank order, for srun, torchrun, MPI and JAX."),
    "run": ("topology_run", "run", "Submit a script to the best free nodes, and choose again when they are lost."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Which nodes of a site, and which rank on which of them."""
