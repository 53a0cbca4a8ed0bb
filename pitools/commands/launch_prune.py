"""`pit launch prune`: remove old runs, and the older checkpoints of others."""

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.options import format_option, site_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pitools.core.errors import PitError
    from pitools.run.run_folder import RunRecord

_COLUMNS = ("run_id", "run_state", "state", "freed_bytes", "steps", "reason")


@click.command()
@click.option("--where", "conditions", metavar="CONDITIONS", default="", help="Such as age>30d,state=failed.")
@click.option(
    "--sweep",
    metavar="SWEEP",
    shell_complete=completion.complete_sweeps,
    help="The runs of this sweep, of all its sites.",
)
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
def prune(
    ctx: click.Context,
    conditions: str,
    sweep: str | None,
    keep_last: int,
    remove: bool,
    site_name: str,
    form: str,
) -> None:
    """Show which runs would be removed, and which would lose their older checkpoints; --remove does it.

    Only runs that are over. Runs with checkpoints keep the newest, and those that a link beside them names. Runs with
    files of their program are never removed; runs of a sweep only with --sweep, and the sweep with its last run. With
    --remove only changes are shown. Diagnoses first the runs that ended while nobody watched them, also without
    --remove. Exit 1 if something could not be removed.

    \b
      pit launch prune --where 'age>30d,state!=completed'
      ln -s step_400 RUN/checkpoints/best          name a checkpoint: it stays
    """
    from pitools.commands.launch_monitor import runs_of_site
    from pitools.commands.launch_sweep import find_sweep_dir
    from pitools.core.errors import UsageError
    from pitools.core.locks import lock
    from pitools.core.output import Output
    from pitools.core.units import format_size
    from pitools.launch.monitor.run_filter import filter_runs
    from pitools.launch.prune_runs import prune_runs
    from pitools.launch.run_lookup import missing_runs_dir, runs_dir, runs_dirs_of_other_sites
    from pitools.launch.sweep import sweep_folder
    from pitools.site.load import load_site

    if not conditions.strip() and not sweep:
        raise UsageError("no condition", where="--where", hint="--where 'age>30d', or --sweep SWEEP")
    filter_runs([], conditions)
    errors: list[object] = []

    def report_error(path: Path, error: PitError) -> None:
        errors.append(error)
        click.echo(f"pit: {path}: {error}", err=True)

    sweep_dir = find_sweep_dir(sweep, site_name) if sweep else None
    if not sweep and (missing := missing_runs_dir(load_site(site_name))):
        click.echo(f"pit: {missing}; {missing.hint}", err=True)
    freed = 0
    with ExitStack() as stack:
        if sweep_dir and remove:  # nobody launches its points meanwhile
            stack.enter_context(lock(sweep_dir / sweep_folder.LOCK_FILE, f"sweep {sweep_dir.name}"))
        runs = (
            _runs_of_sweep(sweep_dir, report_error) if sweep_dir else runs_of_site(load_site(site_name), report_error)
        )
        settled = settle_ended(filter_runs(runs, conditions), report_error)
        wanted = filter_runs([settled.get(run.run_id, run) for run in runs], conditions)
        out = stack.enter_context(Output(form, _COLUMNS))
        for record in prune_runs(
            wanted,
            keep_last=keep_last,
            dry_run=not remove,
            sweep=sweep_dir.name if sweep_dir else "",
            sweep_roots=[runs_dir(load_site(site_name)), *runs_dirs_of_other_sites(site_name)],
        ):
            if record.state != "kept" or not remove:  # cron mails what is printed
                out(record)
            freed += record.freed_bytes
            errors += [record] if record.state == "failed" else []
        if sweep_dir and remove:
            sweep_folder.forget_removed_runs(sweep_dir)
    verb = "freed" if remove else "would be freed; --remove does it"
    if freed or not remove:
        click.echo(f"pit: {len(wanted)} runs match: {format_size(freed)} {verb}", err=True)
    ctx.exit(1 if errors else 0)


def settle_ended(runs: Sequence[RunRecord], report_error: Callable[[Path, PitError], None]) -> dict[str, RunRecord]:
    """Record the verdicts of ended runs that have none; return run id → record of those that have one now.

    Slurm is asked once for all runs of a site, which are left as they are if it does not respond. A damaged run goes to
    `report_error`.
    """
    from pitools.core.errors import PitError
    from pitools.launch.monitor import status
    from pitools.launch.recovery import resume
    from pitools.site.load import load_site
    from pitools.slurm.states import is_final

    by_site: dict[str, list[Path]] = {}
    for run in runs:
        if is_final(run.state) and not run.is_over:
            by_site.setdefault(run.site, []).append(Path(run.run_dir))
    settled: dict[str, RunRecord] = {}
    for name, run_dirs in by_site.items():
        site = load_site(name)
        with contextlib.suppress(PitError):
            ends = resume.query_ends(run_dirs, site)
            for run_dir in run_dirs:
                resume.settle_run(run_dir, site, ends)
        now = status.run_statuses(run_dirs, site, query_slurm=False, report_error=report_error)
        settled |= {record.run_id: record for record in now if record.is_over}
    return settled


def _runs_of_sweep(sweep_dir: Path, report_error: Callable[[Path, PitError], None]) -> list[RunRecord]:
    """Return the runs of a sweep that are there, site by site. Raises DataError, and the errors of a query."""
    from pitools.launch.monitor import status
    from pitools.launch.sweep import sweep_folder
    from pitools.site.load import load_site

    points = sweep_folder.read_points(sweep_dir)
    runs: list[RunRecord] = []
    for name in dict.fromkeys(point.site for point in points):
        run_dirs = [Path(point.run_dir) for point in points if point.site == name and Path(point.run_dir).exists()]
        runs += status.run_statuses(run_dirs, load_site(name), report_error=report_error)
    return runs
