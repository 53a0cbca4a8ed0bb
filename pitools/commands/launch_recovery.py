"""`pit launch resume|why|watch|tick|include`: continue runs, and show why their attempts ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.launch_monitor import RUN_COLUMNS, find_run_and_site
from pitools.commands.options import format_option, run_argument, site_option
from pitools.launch.run_lookup import missing_runs_dir, runs_dir

if TYPE_CHECKING:
    from pitools.core.errors import PitError
    from pitools.site.schema import Site

RESUME_COLUMNS = ("run_id", "action", "cause", "job_id", "attempt", "exclude", "reason")
CAUSE_COLUMNS = ("attempt", "kind", "confidence", "steps", "saved_steps", "nodes", "reason")
_MAX_REASON_CHARS = 2000  # a record of another user's
EXCLUSION_COLUMNS = ("node", "kind", "until", "reason", "run", "confidence", "t")


@click.command()
@run_argument()
@site_option
@click.option("--force", is_flag=True, help="Also continue a run that has finished or was stopped.")
@format_option
def resume(run: str, site_name: str, force: bool, form: str) -> None:
    """Continue RUN from its last checkpoint if its job has ended; a pending or running job is left alone."""
    from pitools.core.output import Output
    from pitools.launch.recovery.resume import TICKET_HINT, resume_run
    from pitools.run.move_record import completed_move
    from pitools.run.run_folder import is_ticket

    run_dir, site = find_run_and_site(run, site_name)
    move = completed_move(run_dir) if force else None
    result = resume_run(run_dir, site, force=force)
    with Output(form, RESUME_COLUMNS) as out:
        out(result)
    if move:
        hint = f"to cancel it there: pit launch cancel {move.new_run_id} --site {move.target_site}"
        moved = f"moved to {move.target_site} as {move.new_run_id}, and continues there as well"
        click.echo(f"pit: note: {moved}; {hint}", err=True)
    if result.action == "already_ended":
        hint = f"to continue it nevertheless: pit launch resume {run_dir.name} --force"
        click.echo(f"pit: {TICKET_HINT if is_ticket(run_dir) else hint}", err=True)


@click.command()
@run_argument("name", metavar="RUN|NODE")
@site_option
@format_option
def why(name: str, site_name: str, form: str) -> None:
    """Show why each attempt of RUN ended, with the evidence; or why NODE is excluded, and until when."""
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.launch.submission import exclusions
    from pitools.run.run_folder import RunNotFound
    from pitools.site.load import load_site

    site = load_site(site_name)
    try:
        run_dir, site = find_run_and_site(name, site_name)
    except RunNotFound as error:
        entries = [entry for entry in exclusions.read_exclusions(runs_dir(site), site.name) if entry.node == name]
        if not entries:
            problem = f'no run "{name}", and no excluded node of this name'
            raise UsageError(problem, where=error.where, hint=error.hint) from error
        with Output(form, EXCLUSION_COLUMNS) as out:
            for entry in entries:
                out(entry)
        click.echo(f"pit: {_node_status(name, site, entries[-1])}", err=True)
        return
    _explain_run(run_dir, site, form)


def _node_status(node: str, site: Site, last: object) -> str:
    from pitools.launch.submission import exclusions

    assert isinstance(last, exclusions.Exclusion)
    if exclusions.is_active(last):
        return f"{node} is excluded until {last.until}; to include it: pit launch include {node} --site {site.name}"
    return f"{node} is no longer excluded"


def _explain_run(run_dir: Path, site: Site, form: str) -> None:
    """Print the causes as records, or on a terminal as text, the last one with its evidence."""
    import shutil
    import sys
    import textwrap

    from pitools.core.output import Output
    from pitools.launch import hooks
    from pitools.launch.diagnosis import explain, slow_ranks
    from pitools.launch.diagnosis.bounded_read import one_line
    from pitools.launch.recovery import apply_decision
    from pitools.launch.recovery.resume import settle_run
    from pitools.run.move_record import interrupted_move
    from pitools.run.run_folder import attempt_dirs

    settle_run(run_dir, site)
    is_terminal = sys.stdout.isatty()
    if form == "table" or (form == "auto" and is_terminal):
        width = shutil.get_terminal_size().columns if is_terminal else 1 << 20
        for line in explain.explain_run(run_dir):
            indent = " " * (len(line) - len(line.lstrip()) + 4)
            click.echo("\n".join(textwrap.wrap(line, max(40, width), subsequent_indent=indent, break_on_hyphens=False)))
    else:
        with Output(form, CAUSE_COLUMNS) as out:
            for cause in apply_decision.cause_history(run_dir):
                out(cause)
    verdict = apply_decision.read_verdict(run_dir)
    if verdict is None:
        text = _why_not_running(run_dir, site)
    else:
        kind = "" if verdict.kind == verdict.state else f"{verdict.kind}: "
        outcome = "has finished" if verdict.state == "succeeded" else "was stopped"
        text = f"the run {outcome}: {kind}{one_line(verdict.reason, _MAX_REASON_CHARS)}"
        if move_error := interrupted_move(run_dir):
            text = f"{move_error.message}; to complete it: {move_error.hint}"
    click.echo(f"pit: {text}", err=True)
    for line in slow_ranks.describe_slow_ranks(run_dir, site):
        click.echo(f"pit: {line}", err=True)
    if len(attempt_dirs(run_dir)) > 1:
        click.echo(f"pit: what an earlier attempt printed: pit launch logs {run_dir.name} --attempt N", err=True)
    if hook_error := hooks.last_error(run_dir):
        click.echo(f"pit: a hook failed: {one_line(hook_error, _MAX_REASON_CHARS)}", err=True)


def _why_not_running(run_dir: Path, site: Site) -> str:
    """Return why a run without a verdict is not running, as far as known."""
    from pitools.core.errors import PitError
    from pitools.launch.monitor import status, wait
    from pitools.run.run_folder import is_ticket
    from pitools.slurm.states import is_final, is_held, may_never_start

    try:
        run = status.run_status(run_dir, site)
    except PitError as error:
        return f"the run is unfinished; the state of its job is unknown: {error}"
    if run.cancel_requested:
        return run.reason
    if is_final(run.state):
        resume_command = f"pit launch resume {run.run_id}"
        if is_ticket(run_dir):
            return (
                f"its job has ended ({run.state}), and its queue decides on the next; for its verdict: {resume_command}"
            )
        return f"its job has ended ({run.state}), and nobody has continued the run yet: {resume_command}"
    if run.state != "PENDING":
        return "the run is unfinished"
    if is_held(run.pending_reason):
        return f"the run is unfinished: {wait.held_error(run).message}; {wait.held_error(run).hint}"
    reason, start = run.pending_reason or "unknown reason", run.expected_start or "unknown"
    if may_never_start(run.pending_reason):
        return f"job {run.job_id} is pending: {reason}: no node can take it as it is requested"
    return f"the run is unfinished: job {run.job_id} is pending: {reason}; expected start: {start}"


@click.command()
@run_argument("runs", nargs=-1)
@site_option
@format_option
@click.pass_context
def watch(ctx: click.Context, runs: tuple[str, ...], site_name: str, form: str) -> None:
    """Follow and continue RUNS, or all unfinished runs of the site, until all have ended.

    Prints a record for every change; on a terminal, a live table. In a pipe, --format table prints it at the end. Exit
    code 1 if a run did not finish.
    """
    import sys

    from pitools.core.errors import UsageError
    from pitools.launch.recovery import tick
    from pitools.site.load import load_site

    site = load_site(site_name)
    chosen = [find_run_and_site(run, site_name) for run in runs]
    if len({run_site.name for _, run_site in chosen}) > 1:
        raise UsageError("runs of several sites (expected one)", hint="run one watch per site")
    if chosen:
        site = chosen[0][1]
    paths = [path for path, _ in chosen] or tick.unfinished_runs(runs_dir(site), site, _print_error)
    if not paths:
        missing = missing_runs_dir(site)
        click.echo(f"pit: {missing}; {missing.hint}" if missing else "pit: no unfinished run", err=True)
        return
    try:
        if form in ("auto", "table") and sys.stdout.isatty():
            has_failure = _watch_live(paths, site)
        else:
            has_failure = _watch_as_records(paths, site, form)
    except KeyboardInterrupt:
        click.echo(
            f"pit: the runs continue without `watch`; for the others: pit launch tick --site {site.name}", err=True
        )
        raise
    if has_failure:
        ctx.exit(1)


def _watch_as_records(paths: list[Path], site: Site, form: str) -> bool:
    """Print each change until all runs have ended; return whether a run did not finish."""
    from pitools.core.output import Output
    from pitools.launch.monitor import follow_runs

    last: dict[str, str] = {}
    with Output(form, RUN_COLUMNS, ends_with_reader=True) as out:
        for run in follow_runs.changed_runs(
            follow_runs.poll_runs(paths, site, lambda text: click.echo(f"pit: {text}", err=True))
        ):
            out(run)
            last[run.run_id] = run.state
    return len(last) < len(paths) or any(state != "COMPLETED" for state in last.values())


def _watch_live(paths: list[Path], site: Site) -> bool:
    """Show the runs until all have ended; return whether a run did not finish."""
    from rich.live import Live

    from pitools.launch.monitor import follow_runs

    messages: list[str] = []
    records = []
    with Live(auto_refresh=False) as live:
        for records in follow_runs.poll_runs(paths, site, messages.append):
            del messages[:-8]
            live.update(follow_runs.live_table(records, messages), refresh=True)
    return len(records) < len(paths) or any(run.state != "COMPLETED" for run in records)


@click.command()
@site_option
@format_option
@click.pass_context
def tick(ctx: click.Context, site_name: str, form: str) -> None:
    """Continue every run of the site that is due, once. For cron: does nothing while another tick of yours runs.

    Diagnoses ended attempts, completes unfinished submissions, submits next jobs; prints a record for each change.
    Errors are printed when they first occur, on a terminal always; the exit code reports them each time.
    """
    import sys

    from pitools.core.errors import PitError
    from pitools.core.output import Output
    from pitools.launch.recovery import tick
    from pitools.site.load import load_site

    site = load_site(site_name)
    if missing := missing_runs_dir(site):
        raise missing
    runs = runs_dir(site)
    reported = () if sys.stderr.isatty() else tick.last_tick_errors(runs, site)
    errors: list[PitError] = []
    lines: list[str] = []
    final_error: PitError | None = None

    def report_error(path: Path, error: PitError) -> None:
        errors.append(error)
        lines.append(f"{path.name}: {error}{f'; {error.hint}' if error.hint else ''}")
        if lines[-1] not in reported:
            click.echo(f"pit: {lines[-1]}", err=True)

    try:
        with Output(form, RESUME_COLUMNS) as out:
            for result in tick.tick_runs(runs, site, report_error):
                out(result)
    except tick.TickRunning as error:
        click.echo(f"pit: {error}", err=True)
        return
    except PitError as error:
        final_error = error
        errors.append(error)
        lines.append(str(error))
    tick.record_tick_errors(runs, site, tuple(lines))
    if not errors:
        return
    worst_error = max(errors, key=lambda error: not error.retry)
    if final_error is None or lines[-1] in reported:
        ctx.exit(worst_error.exit_code)
    final_error.exit_code = worst_error.exit_code
    raise final_error  # not printed yet


def _print_error(path: Path, error: PitError) -> None:
    click.echo(f"pit: {path.name}: {error}", err=True)


@click.command()
@click.argument("node")
@site_option
@format_option
def include(node: str, site_name: str, form: str) -> None:
    """Remove NODE from the exclusion list, so that runs may use it again."""
    from pitools.core.output import Output
    from pitools.launch.submission import exclusions
    from pitools.site.load import load_site

    site = load_site(site_name)
    with Output(form, EXCLUSION_COLUMNS) as out:
        out(exclusions.include_node(runs_dir(site), site, node))
