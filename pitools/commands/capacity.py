"""`pit capacity`: the workload of a cluster, and what another cluster or workload would do to the waits."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "workload": ("capacity_commands", "workload", "Show the jobs of a trace by class: arrivals, sizes, times, growth."),
    "model": ("capacity_commands", "model", "Write synthetic jobs of the same shape, as the output of sacct."),
    "ask": ("capacity_commands", "ask", "Simulate what-ifs: waits by tier and team, use, cost, with bands."),
    "backtest": ("capacity_commands", "backtest", "Compare forecasts of waits with the real waits of the next period."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """What to buy, rent or change: waits, use and cost of another cluster or workload, from accounting."""
