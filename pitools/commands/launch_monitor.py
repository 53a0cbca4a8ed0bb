"""`pit launch list|show|logs|cancel`: list runs, show their state and logs, cancel them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import format_option, run_argument, site_option, sites_option
from pitools.launch.run_lookup import find_run_dir, missing_runs_dir, runs_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pitools.core.errors import PitError
    from pitools.launch.monitor.merged_logs import LogFilter, LogKind
    from pitools.run.run_folder import RunRecord
    from pitools.site.schema import Site

RUN_COLUMNS = (
    "run_id",
    "state",
    "cause",
    "steps",
    "attempt",
    "job_id",
    "nodes",
    "exit_code",
    "site",
    "created",
    "pending_reason",
    "expected_start",
)
_PENDING_COLUMNS = ("pending_reason", "expected_start")


def run_columns(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return RUN_COLUMNS for a terminal: the reason to wait follows the state, and only if a job waits."""
    rest = [name for name in RUN_COLUMNS[2:] if name not in _PENDING_COLUMNS]
    waits = _PENDING_COLUMNS if any(run.pending_reason or run.expected_start for run in runs) else ()
    return (*RUN_COLUMNS[:2], *waits, *rest)


def show_runs(form: str, runs: Sequence[RunRecord], *, with_params: bool = False) -> None:
    """Print the records of runs. with_params: tables have a column for each of their parameters."""
    import sys

    from pitools.core.output import Output

    is_table = form == "table" or (form == "auto" and sys.stdout.isatty())
    names = dict.fromkeys(name for run in runs for name in run.params) if with_params else ()
    columns = (*(run_columns(runs) if is_table else RUN_COLUMNS), *(f"params.{name}" for name in names))
    with Output(form, columns) as out:
        for run in runs:
            out(run)


@click.command("list")
@sites_option("The site, as `pit site list` names it; repeatable.")
@click.option("--all-sites", is_flag=True, help="The runs of every site of this machine that answers.")
@click.option("--where", "conditions", metavar="CONDITIONS", default="", help="Such as state=running,name~bc,age<2d.")
@click.option("--params", "with_params", is_flag=True, help="Also a column for each parameter.")
@format_option
@click.pass_context
def list_command(
    ctx: click.Context, sites: tuple[str, ...], all_sites: bool, conditions: str, with_params: bool, form: str
) -> None:
    """List the runs of sites, newest last. Queries each Slurm once, for the runs that have not ended."""
    from pitools.core.errors import PitError
    from pitools.launch.monitor.run_filter import filter_runs
    from pitools.run import run_folder as folder
    from pitools.site.load import load_site, site_names

    errors: list[PitError] = []

    def report_error(path: Path, error: PitError) -> None:
        errors.append(error)
        click.echo(f"pit: {path.name}: {error}", err=True)

    filter_runs([], conditions)  # a wrong condition is reported before any query
    all_runs: list[RunRecord] = []
    if all_sites:
        sites = tuple(name for name in site_names() if _has_runs(name))
    for name in dict.fromkeys(sites):
        try:
            site = load_site(name)
            runs = runs_of_site(site, report_error)
        except PitError as error:  # list the other sites too
            if len(sites) == 1:
                raise
            report_error(Path(name), error)
            continue
        if not runs and (missing := missing_runs_dir(site)):
            click.echo(f"pit: {missing}; {missing.hint}", err=True)
        elif not runs:
            click.echo(f"pit: no runs of {site.name} in {runs_dir(site)} that you may read", err=True)
        all_runs += runs
    wanted = filter_runs(all_runs, conditions)
    show_runs(form, sorted(wanted, key=lambda run: folder.run_id_sort_key(run.run_id)), with_params=with_params)
    if errors:  # printed already
        ctx.exit(errors[-1].exit_code)


def _has_runs(site_name: str) -> bool:
    """Whether a site has a folder of runs here; examples of site files have none."""
    from pitools.core.errors import PitError
    from pitools.site.load import load_site

    try:
        return runs_dir(load_site(site_name)).is_dir()
    except (PitError, OSError):
        return False


def runs_of_site(site: Site, report_error: Callable[[Path, PitError], None]) -> list[RunRecord]:
    """Return the runs of a site, oldest first. A damaged folder goes to `report_error`."""
    from pitools.core.errors import PitError
    from pitools.core.fs import from_os_error
    from pitools.launch.monitor import status
    from pitools.launch.plan import load_plan
    from pitools.run import run_folder as folder

    run_dirs: list[Path] = []
    for path in folder.run_dirs(runs_dir(site)):
        try:
            if load_plan(path).site == site.name:
                run_dirs.append(path)
        except (PitError, OSError) as error:
            report_error(path, error if isinstance(error, PitError) else from_os_error(error, path))
    try:
        return status.run_statuses(run_dirs, site, report_error=report_error)
    except PitError as error:
        click.echo(f"pit: note: states from the folders alone: {error}", err=True)
        return status.run_statuses(run_dirs, site, query_slurm=False, report_error=report_error)


@click.command()
@run_argument()
@site_option
@click.option("--steps", is_flag=True, help="Show the totals of its step logs instead.")
@format_option
@click.pass_context
def show(ctx: click.Context, run: str, site_name: str, steps: bool, form: str) -> None:
    """Show the state of RUN (id or folder). Diagnoses first a run that ended while nobody watched it."""
    from pitools.core.output import Output
    from pitools.launch.monitor import status
    from pitools.launch.recovery.resume import settle_run
    from pitools.slurm.states import is_final

    run_dir, site = find_run_and_site(run, site_name)
    if steps:
        summary = status.step_summary(run_dir)
        if summary is None:
            click.echo("pit: the run has no step log (pitools.run.steps.StepLog writes one)", err=True)
            ctx.exit(1)
        with Output(form) as out:
            out(summary)
        return
    record = status.run_status(run_dir, site)
    if is_final(record.state) and not record.is_over:
        settle_run(run_dir, site)
        record = status.run_status(run_dir, site)
    show_runs(form, [record])
    echo_goodput(run_dir, site)


def echo_goodput(run_dir: Path, site: Site) -> None:
    """Print a run's goodput and its greatest loss to stderr; nothing for a run without step log."""
    if not any(run_dir.glob("attempts/*/steps/*.jsonl")):
        return
    from pitools.ledger import run_ledger as ledgers  # imports numpy

    # Errors are left out: the state of the run is what was asked for.
    for ledger in ledgers.ledgers_of(site, [run_dir], timeout_s=ledgers.SHORT_TIMEOUT_S).values():
        if line := ledgers.describe(ledger):
            note = "" if ledger.is_accounted or site.scheduler != "slurm" else ", without accounting"
            click.echo(f"pit: {line}{note}; see: pit monitor goodput {run_dir.name}", err=True)


@click.command()
@run_argument()
@site_option
@click.option("--rank", type=click.IntRange(0), help="Default: the rank that failed first, else 0.")
@click.option("--ranks", metavar="LIST", help="Several ranks, each line with its rank: all, or 0-3,7.")
@click.option(
    "--of",
    "kind",
    type=click.Choice(["ranks", "stage", "job", "all"]),
    help="The output of ranks, of staging, of the job's script, or all of it.",
)
@click.option("--since", metavar="TIME", help="Only lines from then on, by their own times: 10m, or RFC 3339.")
@click.option("--grep", metavar="REGEX", help="Only lines that match.")
@click.option("--attempt", metavar="N", help="Of this attempt, 0 for the first. [default: the last]")
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the run ends; Ctrl-C stops.")
def logs(
    run: str,
    site_name: str,
    rank: int | None,
    ranks: str | None,
    kind: LogKind | None,
    since: str | None,
    grep: str | None,
    attempt: str | None,
    follow: bool,
) -> None:
    """Print output of an attempt: of one rank as it is, or of several with the source of each line.

    Before the ranks start, one rank's output is the job's, or a failed staging's.
    """
    from pitools.core.errors import UsageError
    from pitools.launch.monitor import merged_logs, rank_log
    from pitools.run import run_folder as folder
    from pitools.run.attempt_records import first_failure

    run_dir, site = find_run_and_site(run, site_name)
    if ranks is not None and rank is not None:
        raise UsageError("--rank and --ranks are both given", hint="leave one of them out")
    ranks = str(rank) if rank is not None and kind else ranks
    names = [path.name for path in folder.attempt_dirs(run_dir)]
    if attempt is not None and attempt not in names:
        raise UsageError(
            f"no attempt {attempt}", where=run_dir.name, hint=f"there are: {', '.join(names[-20:]) or 'none'}"
        )
    if rank is None:
        attempt_dir = run_dir / "attempts" / attempt if attempt else folder.last_attempt(run_dir)
        failed = first_failure(attempt_dir) if attempt_dir else None
        rank = failed.rank if failed else 0
    if ranks or kind or since or grep or attempt:
        wanted = merged_logs.LogFilter(
            merged_logs.parse_since(since) if since else "", merged_logs.compile_pattern(grep) if grep else None
        )
        chosen = ranks or ("all" if kind else str(rank))
        _print_merged(run_dir, site, chosen, kind or "ranks", wanted, follow, attempt or "")
        return
    is_empty = True
    for text in rank_log.read_log(run_dir, site, rank, follow=follow):
        click.echo(text, nl=False)
        is_empty = is_empty and not text
    if is_empty:
        click.echo(f"pit: rank {rank} has printed nothing; see: pit launch show {run_dir.name}", err=True)


_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")


def _print_merged(
    run_dir: Path, site: Site, ranks: str, kind: LogKind, wanted: LogFilter, follow: bool, attempt: str
) -> None:
    """Print lines of several logs, each with its source; of a single one, as they are."""
    from pitools.launch.monitor import merged_logs
    from pitools.launch.plan import load_plan

    count = load_plan(run_dir).ranks
    chosen = merged_logs.parse_ranks(ranks, count)
    is_single = kind == "job" or (kind == "ranks" and len(chosen) == 1)
    width, is_empty = len(str(count - 1)), True
    colours: dict[str, str] = {}

    def note(text: str) -> None:
        click.echo(f"pit: {text}", err=True)

    lines = merged_logs.read_lines(run_dir, site, chosen, kind, wanted, follow=follow, report=note, attempt=attempt)
    for line in lines:
        is_empty = False
        colour = colours.setdefault(line.source, _COLOURS[len(colours) % len(_COLOURS)])
        prefix = "" if is_single else click.style(f"{line.source:>{width}}: ", fg=colour)
        click.echo(f"{prefix}{line.text}")
    if is_empty:
        note(f"no lines; see: pit launch show {run_dir.name}")


@click.command()
@run_argument()
@site_option
@format_option
def cancel(run: str, site_name: str, form: str) -> None:
    """Cancel RUN (id or folder) and its jobs. Safe to repeat; a run that has ended stays as it is."""
    from pitools.launch.monitor import status
    from pitools.launch.recovery import cancel_run

    run_dir, site = find_run_and_site(run, site_name)
    earlier_verdict = cancel_run.cancel_run(run_dir, site)
    if earlier_verdict:
        outcome = "has finished" if earlier_verdict.state == "succeeded" else "was stopped"
        click.echo(f"pit: it {outcome} before, {earlier_verdict.t}: {earlier_verdict.reason}", err=True)
    show_runs(form, [status.run_status(run_dir, site)])


def find_run_and_site(run: str, site_name: str) -> tuple[Path, Site]:
    """Return a run's folder and its site, by its plan, not by `site_name`."""
    from pitools.launch.plan import load_plan
    from pitools.site.load import load_site

    run_dir = find_run_dir(run, site_name)
    return run_dir, load_site(load_plan(run_dir).site)
