"""`pit launch prune`: remove old runs, and the older checkpoints of others."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import format_option, site_option

_COLUMNS = ("run_id", "run_state", "state", "freed_bytes", "steps", "reason")


@click.command()
@click.option("--where", "conditions", metavar="CONDITIONS", required=True, help="Such as age>30d,state=failed.")
@click.option(
    "--keep-last",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The newest checkpoints that stay.",
)
@click.option("--remove", is_flag=True, help="Do it; without this, only show what would be removed.")
@site_option
@format_option
@click.pass_context
def prune(ctx: click.Context, conditions: str, keep_last: int, remove: bool, site_name: str, form: str) -> None:
    """Show which runs would be removed, and which would lose their older checkpoints; --remove does it.

    Only runs that are over. Runs with checkpoints keep the newest, and those that a link beside them names. Runs of
    sweeps, and runs with files of their program, are never removed. Exit 1 if something could not be removed.

    \b
      pit launch prune --where 'age>30d,state!=completed'
      ln -s step_400 RUN/checkpoints/best          name a checkpoint: it stays
    """
    from pitools.commands.launch_monitor import runs_of_site
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.core.units import format_size
    from pitools.launch.monitor.run_filter import filter_runs
    from pitools.launch.prune_runs import prune_runs
    from pitools.launch.recovery.resume import settle_run
    from pitools.site.load import load_site
    from pitools.slurm.states import is_final

    if not conditions.strip():
        raise UsageError("no condition", where="--where", hint="--where 'age>30d'")
    filter_runs([], conditions)
    errors = []

    def report_error(path: object, error: object) -> None:
        errors.append(error)
        click.echo(f"pit: {path}: {error}", err=True)

    site = load_site(site_name)
    wanted = filter_runs(runs_of_site(site, report_error), conditions)
    for run in wanted:
        if is_final(run.state) and not run.is_over:
            settle_run(Path(run.run_dir), site)
    freed = 0
    with Output(form, _COLUMNS) as out:
        for record in prune_runs(wanted, keep_last=keep_last, dry_run=not remove):
            out(record)
            freed += record.freed_bytes
            errors += [record] if record.state == "failed" else []
    verb = "freed" if remove else "would be freed; --remove does it"
    if wanted or not remove:  # cron mails what is printed
        click.echo(f"pit: {len(wanted)} runs match: {format_size(freed)} {verb}", err=True)
    ctx.exit(1 if errors else 0)
