"""`pit tenancy`: who may have what on the clusters."""

from __future__ import annotations

import click

from pitools.commands.lazy_group import LazyGroup

COMMANDS = {
    "import": ("tenancy_plan", "import_command", "Print the policy that sites have now."),
    "plan": ("tenancy_plan", "plan", "Show what a policy would change, in words and as commands."),
    "show": ("tenancy_show", "show", "Show what a user may run, what binds, and what is left."),
    "run": ("tenancy_run", "run", "Change accounting to a policy, or undo a run."),
    "check": ("tenancy_check", "check", "Find what differs from a policy, or makes it ineffective; for cron."),
    "report": ("tenancy_report", "report", "Report use against shares, budgets and waits, by team; for chargeback."),
    "history": ("tenancy_run", "history", "List the changes that your runs made, with who and when."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Teams, users, tiers and limits of Slurm's accounting, from a policy file, over several sites."""
