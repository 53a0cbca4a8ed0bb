"""`pit node`: check nodes, drain those that are broken, and return them after a re-test."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "check": ("node_check", "check", "Check this node; with --report for the controller."),
    "show": ("node_check", "show", "Show the facts of this node, or the history of another."),
    "list": ("node_drain", "list_command", "List all nodes: Slurm's state, incident, last report."),
    "drain": ("node_drain", "drain", "Drain and return nodes by their reports, once, for cron."),
    "return": ("node_drain", "return_command", "Return drained nodes of ours at once."),
    "watch": ("node_drain", "watch", "Drain and return repeatedly."),
    "bench": ("node_bench", "bench", "Measure nodes alone and in groups, and find slow and wrong ones."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Health of nodes: facts, checks that are data, and drains that have an end."""
