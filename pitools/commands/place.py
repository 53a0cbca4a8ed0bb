"""`pit place`: choose site and time of a job, and manage the queue over several sites."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "plan": ("place_plan", "plan", "Show where and when a request could run, and why not elsewhere."),
    "run": ("place_dispatch", "run", "Put requests in the queue that several sites serve."),
    "tick": ("place_dispatch", "tick", "Decide and submit once, for cron; a concurrent second tick does nothing."),
    "watch": ("place_dispatch", "watch", "Tick repeatedly, and show the queue live."),
    "list": ("place_dispatch", "list_command", "List the queue: each job, its tickets, its site."),
    "cancel": ("place_dispatch", "cancel", "Withdraw jobs from the queue and from every site."),
    "declare-lost": ("place_dispatch", "declare_lost", "Give up tickets at a site that does not answer."),
    "simulate": ("place_simulate", "simulate", "Replay a trace of jobs on several sites under a policy."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Which site a request runs on: by wait, data, speed, cost and risk; live, or replayed from a trace."""
