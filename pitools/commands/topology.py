"""`pit topology`: choose nodes and order ranks by the network fabric."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "show": ("topology_show", "show", "Show a fabric with its occupancy, as text or a picture."),
    "score": ("topology_show", "score", "Score the placement of running jobs."),
    "choose": ("topology_choose", "choose", "Choose the best k of the free nodes."),
    "order": ("topology_order", "order", "Put nodes in rank order, for srun, torchrun, MPI and JAX."),
    "run": ("topology_run", "run", "Submit a script to the best free nodes."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Choose nodes and order ranks by the network fabric of a site."""
