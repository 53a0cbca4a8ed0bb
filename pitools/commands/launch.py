"""`pit launch`: run a training job on a site; its state is a folder."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "plan": ("launch_run", "plan", "Show the plan that `run` would make from a request; `run -` accepts it."),
    "run": ("launch_run", "run", "Run a request; --wait returns when the run has ended, after as many jobs as needed."),
    "sweep": ("launch_sweep", "group", "Compare the runs of a sweep, plot them, and stop the worst."),
    "list": ("launch_monitor", "list_command", "List the runs of sites, newest last; --where filters them."),
    "show": ("launch_monitor", "show", "Show a run's state, or the totals of its steps."),
    "logs": ("launch_monitor", "logs", "Print the output of ranks, of staging, and of the job's script."),
    "attach": ("launch_attach", "attach", "Open a shell on a rank's node, with the rank's variables."),
    "env": ("launch_attach", "env", "Print a rank's variables for eval, for an allocation, a debugger, a notebook."),
    "why": ("launch_recovery", "why", "Explain why each attempt of a run ended, or why jobs exclude a node."),
    "cancel": ("launch_monitor", "cancel", "Cancel a run and its jobs."),
    "resume": ("launch_recovery", "resume", "Continue an interrupted run; --force: also a stopped one."),
    "prune": ("launch_prune", "prune", "Remove old runs by rule, or their older checkpoints; --remove does it."),
    "watch": ("launch_recovery", "watch", "Show runs live, and continue interrupted ones, until all have ended."),
    "tick": ("launch_recovery", "tick", "Continue each interrupted run of a site once; for cron."),
    "include": ("launch_recovery", "include", "Remove a node from the exclusion list."),
    "reproduce": ("launch_reproduce", "reproduce", "Repeat a run, after showing every difference."),
    "diff": ("launch_reproduce", "diff", "Show the differences between two runs."),
    "move": ("launch_reproduce", "move", "Continue a run at another site."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Run a training job on a site, and continue it after faults until it has finished."""
