"""`pit launch`: a training job on a site, as a folder you can follow."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "plan": ("launch_run", "plan", "What `run` would do with a request, as a record that `run -` accepts."),
    "run": ("launch_run", "run", "Run a request; with --wait until it has finished, over as many jobs as that takes."),
    "list": ("launch_monitor", "list_command", "The runs of a site, oldest first."),
    "show": ("launch_monitor", "show", "A run as it is now, or what its steps add up to."),
    "logs": ("launch_monitor", "logs", "One rank's output."),
    "why": ("launch_recovery", "why", "Why each attempt of a run ended, or why runs keep away from a node."),
    "cancel": ("launch_monitor", "cancel", "End a run for good."),
    "resume": ("launch_recovery", "resume", "Continue a run if that is due, or all the same."),
    "watch": ("launch_recovery", "watch", "Follow runs live, and continue them, until all have ended."),
    "tick": ("launch_recovery", "tick", "Continue every run of a site that is due, once; for cron."),
    "allow": ("launch_recovery", "allow", "Remove a node from the exclusion list."),
    "reproduce": ("launch_reproduce", "reproduce", "Run a run again, and show every difference first."),
    "diff": ("launch_reproduce", "diff", "What differs between two runs."),
    "move": ("launch_reproduce", "move", "Continue a run at another site."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Run a training job on a site, as a folder you can follow, until it has finished."""
