"""`pit stage sync`: keep the dataset versions of a policy on this node, or in a site's shared cache; for cron."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import format_option
from pitools.commands.stage_options import stop_on_signals
from pitools.core import units
from pitools.core.errors import INTERNAL, PitError, UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.stage.sync.metrics import SyncTotals
    from pitools.stage.sync.sync import SyncRun

_COLUMNS = ("rule", "action", "dataset", "version", "bytes", "copied_bytes", "path")
_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--policy", "path", required=True, type=_FILE, metavar="FILE", help="The rules, in TOML.")
@click.option("--metrics", type=_FILE, metavar="FILE", help="Write metrics for node_exporter to FILE, NAME.prom.")
@click.option("--dry-run", is_flag=True, help="Only show the versions that would be staged and evicted.")
@click.option(
    "--timeout",
    default="10m",
    show_default=True,
    metavar="TIME",
    help="Wait for another process that stages the same version this long.",
)
@format_option
def sync(path: Path, metrics: Path | None, dry_run: bool, timeout: str, form: str) -> int:
    """Keep at each rule's root the newest versions that it names, and evict older ones that earlier syncs staged.

    Prints a record per change, and a line per error. Without a terminal and --format, as in cron: nothing if nothing
    changed, else one line. While a sync of the same policy runs, a second one does nothing, with exit code 0;
    --metrics shows the time of the last success.

    For an example of a policy and of a crontab, see scripts/cron (in an installed package
    pitools/shipped/scripts/cron).
    """
    from pitools.stage.sync import policy as policies
    from pitools.stage.sync.metrics import SyncTotals
    from pitools.stage.sync.sync import SyncRun, SyncRunning, sync_lock

    timeout_s = units.parse_duration(timeout)
    if metrics and metrics.suffix != ".prom":
        raise UsageError(f'"{metrics}" does not end in .prom', hint="node_exporter reads only files NAME.prom")
    quiet = form == "auto" and not dry_run and not any(s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr))
    report = MetricsReport(None if dry_run else metrics, str(path.absolute()))
    try:
        policy = policies.load_policy(path)
    except PitError as error:
        print_error("", error)
        return report.end(SyncTotals(errors={error.exit_code: 1}), error.exit_code)
    try:
        with nullcontext() if dry_run else sync_lock(policy), Output(form, _COLUMNS) as out:
            run = SyncRun(
                policy,
                on_change=(lambda _: None) if quiet else out,
                on_error=print_error,
                dry_run=dry_run,
                timeout_s=timeout_s,
                show_progress=sys.stderr.isatty(),
            )
            code = _run_sync(run, report)
    except SyncRunning as running:
        if not quiet:
            click.echo(f"pit-stage sync: {running}: nothing is done", err=True)
        return 0
    if not dry_run and (run.counts if quiet else sys.stdout.isatty()):
        click.echo(
            f"pit-stage sync: {path.stem} on {policy.node}: {format_summary(run, report.wall_s())}", err=not quiet
        )
    return code


def _run_sync(run: SyncRun, report: MetricsReport) -> int:
    """Run, and write the metrics of how it ended, also after a signal."""

    code = INTERNAL  # the exit code of an unexpected error
    try:
        report.begin()
        with stop_on_signals():
            run()
        code = run.exit_code()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        code = report.end(run.totals(), code)
    return code


class MetricsReport:
    """The metrics file, if there is one to write."""

    def __init__(self, path: Path | None, policy: str) -> None:
        self._path, self._policy, self._began = path, policy, time.time()
        self._started, self._failed = time.monotonic(), 0

    def wall_s(self) -> float:
        """Return the seconds since the command began."""
        return time.monotonic() - self._started

    def begin(self) -> None:
        """Write that a run has begun."""
        from pitools.stage.sync import metrics

        self._try(lambda path: metrics.write_started(path, self._policy, self._began))

    def end(self, totals: SyncTotals, code: int) -> int:
        """Write the metrics of a run's end; return `code`, or if that is 0 the exit code of a failed write."""
        from pitools.stage.sync import metrics

        self._try(
            lambda path: metrics.write_ended(
                path, self._policy, totals, code, started_s=self._began, now=time.time(), wall_s=self.wall_s()
            )
        )
        return code or self._failed

    def _try(self, write: Callable[[Path], None]) -> None:
        if self._path and not self._failed:
            try:
                write(self._path)
            except PitError as error:
                print_error("", error)
                self._failed = error.exit_code


def print_error(rule: str, error: PitError) -> None:
    """Print an error, its place and its hint as one line on stderr."""
    text = f"{error}; {error.hint}" if error.hint else str(error)
    prefix = f'rule "{rule}": ' if rule else ""
    click.echo(f"pit-stage sync: error: {prefix}{' '.join(text.split())}", err=True)


def format_summary(run: SyncRun, wall_s: float) -> str:
    """Format the counts of a run as one line."""
    count, size = run.counts, units.format_size
    parts = [f"{count['staged']} staged ({size(count['staged_bytes'])})"] if count["staged"] else []
    parts += [f"{count['repaired']} repaired ({size(count['repaired_bytes'])})"] if count["repaired"] else []
    parts += [f"{count['evicted']} evicted ({size(count['evicted_bytes'])})"] if count["evicted"] else []
    sets, n_bytes = (sum(column) for column in zip((0, 0), *run.kept_by_rule.values(), strict=True))
    parts += [f"{len(run.errors)} failed"] if run.errors else []
    return f"{', '.join(parts) or 'no change'}; {sets} kept ({size(n_bytes)}) in {units.format_duration(wall_s)}"
