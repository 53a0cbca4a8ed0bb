"""`pit perf`: where the time of a training step goes."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "attribute": ("perf_attribute", "attribute", "Split each step into its parts, and say what limits the run."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Where the time of training steps goes: profiles and step logs of PyTorch and JAX."""
