"""`pit perf trace`: record a trace of some steps of a run, of its ranks' own profilers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.options import data_option, parse_named_paths, rows_format_option, site_option
from pitools.commands.perf import without_steps

if TYPE_CHECKING:
    from pitools.run.run_folder import RunRecord
    from pitools.run.traces import RankTrace, TraceRequest
    from pitools.site.schema import Site

COLUMNS = ("rank", "state", "framework", "first_step", "last_step", "bytes", "file", "blocked_s", "slowdown", "error")
_WITHOUT_LOG = "a program without pitools' step log cannot be traced, see --help"
_NEW_RUN_AFTER = 9  # compiling and filling of caches are over
_MAX_RANKS = 64  # that are traced unless asked
_POLL_S, _SAY_EVERY_S, _SILENT_S = 0.5, 10.0, 10.0


@click.command()
@click.argument("run", metavar="RUN|REQUEST", shell_complete=completion.complete_runs)
@click.option("--steps", type=click.IntRange(1, 100), default=5, show_default=True, help="How many steps.")
@click.option("--ranks", metavar="0-3,7", help="Of which ranks. [default: all, of a large run the first 64]")
@click.option("--after", type=click.IntRange(1), help="Start after this step. [default: soon; of a new run: 9]")
@click.option("--timeout", default="10m", show_default=True, help="Wait no longer.")
@data_option("Fill in a dataset of a REQUEST, as `pit launch run` does.")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="A key or parameter of a REQUEST.")
@site_option
@rows_format_option
@click.pass_context
def trace(
    ctx: click.Context,
    run: str,
    steps: int,
    ranks: str | None,
    after: int | None,
    timeout: str,
    data: tuple[str, ...],
    sets: tuple[str, ...],
    site_name: str,
    form: str,
) -> None:
    """Record a trace of some steps of RUN, which is running, or of a new run of REQUEST, a TOML file.

    The ranks record themselves, by PyTorch's profiler or JAX's, and keep the trace in the run's folder. Their program
    must write pitools' step log, from one process a rank:

    \b
        log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"]) / "steps", rank)  # of pitools.run.steps
        log.write(step=step, loss=loss, wall_s=wall_s, …)  # at each step's end

    A block under `with annotate("input")`, of pitools.run.trace_capture, is a part of its own. A program whose own
    profiler is on is not traced; its own start_trace of JAX raises RuntimeError during the recording. Exit 1 if a
    rank's trace is missing. Ctrl-C withdraws what no rank has begun; the run goes on.

    \b
    pit perf trace bc-20261126-190100-9f3c2a --ranks 0-3
    """
    from pitools.core import units
    from pitools.core.errors import UsageError
    from pitools.core.output import Output

    timeout_s = units.parse_duration(timeout)
    if Path(run).is_file():
        attempt, request, found = _trace_new_run(Path(run), site_name, data, sets, steps, ranks, after, timeout_s)
    elif data or sets:
        raise UsageError(f"{run}: no file (expected a request, to fill in)", where="--data, --set")
    else:
        attempt, request, found = _trace_running(run, site_name, steps, ranks, after, timeout_s)
    with Output(form, COLUMNS) as out:
        for record in found:
            out(record)
    for error in dict.fromkeys(record.error for record in found if record.state == "done" and record.error):
        click.echo(f"pit: the trace has {error}", err=True)
    if any(record.state == "done" for record in found):
        click.echo(f"pit: what limits it: pit perf attribute {attempt / 'traces' / request.window}", err=True)
    if any(record.state != "done" for record in found):
        ctx.exit(1)


def _trace_running(
    run: str, site_name: str, steps: int, ranks: str | None, after: int | None, timeout_s: float
) -> tuple[Path, TraceRequest, list[RankTrace]]:
    """Ask the ranks of a running run, and wait. Raises as `_wait_for_steps` and `trace_run.ask` do."""
    from pitools.launch.plan import load_plan
    from pitools.launch.run_lookup import find_run_dir
    from pitools.perf import trace_run
    from pitools.site.load import load_site

    run_dir = find_run_dir(run, site_name)
    plan = load_plan(run_dir)
    text, asked = _ranks(ranks, plan.ranks)
    watch = _Watch(run_dir, load_site(plan.site), timeout_s)
    attempt = watch.wait_for_steps(asked[0], is_new=False)
    now = trace_run.position(attempt, asked[0])
    request = trace_run.ask(attempt, now, steps=steps, ranks=text, after=after)
    with watch.withdraw_on_interrupt(request):
        return attempt, request, watch.wait_for_traces(attempt, request, asked)


def _trace_new_run(
    path: Path,
    site_name: str,
    data: tuple[str, ...],
    sets: tuple[str, ...],
    steps: int,
    ranks: str | None,
    after: int | None,
    timeout_s: float,
) -> tuple[Path, TraceRequest, list[RankTrace]]:
    """Launch a request whose run's folder says what to trace, and wait for the traces, not for the run's end."""
    from pitools.commands.launch_run import warn_of_unusable
    from pitools.core import timestamps
    from pitools.launch.submission.submit import submit_run
    from pitools.launch.sweep.points import parse_point, plan_point
    from pitools.run import run_folder, traces
    from pitools.site.load import load_site

    site = load_site(site_name)
    plan = plan_point(path, site, parse_point(sets), data=parse_named_paths(data, "--data"))
    (text, asked), first = _ranks(ranks, plan.ranks), (after or _NEW_RUN_AFTER) + 1
    request = traces.TraceRequest(t=timestamps.now_rfc3339(), first_step=first, last_step=first + steps - 1, ranks=text)
    warn_of_unusable(plan)

    def populate(folder: Path) -> None:
        run_folder.write_record(folder / traces.RUN_REQUEST_FILE, request)

    run_dir = submit_run(plan, site, populate=populate)
    click.echo(f"pit: run {run_dir.name} in {run_dir}", err=True)
    watch = _Watch(run_dir, site, timeout_s)
    with watch.withdraw_on_interrupt(request):
        attempt = watch.wait_for_steps(asked[0], is_new=True)
        return attempt, request, watch.wait_for_traces(attempt, request, asked)


def _ranks(text: str | None, count: int) -> tuple[str, list[int]]:
    """Return the asked ranks of so many: as a request has them, and as numbers. Raises UsageError."""
    from pitools.launch.monitor.merged_logs import parse_ranks

    text = text or ("all" if count <= _MAX_RANKS else f"0-{_MAX_RANKS - 1}")
    return "" if text == "all" else text, parse_ranks(text, count)


class _Watch:
    """Waits for a run, and prints what for. timeout_s: for all that it waits for."""

    def __init__(self, run_dir: Path, site: Site, timeout_s: float) -> None:
        from pitools.launch.monitor.wait import RunPoller
        from pitools.launch.monitor.wait_reason import WaitReason

        self._run_dir, self._deadline, self._timeout_s = run_dir, time.monotonic() + timeout_s, timeout_s
        self._poller, self._reason = RunPoller(run_dir, site), WaitReason(run_dir)
        self._said, self._said_at, self._room_at = "", 0.0, time.monotonic()

    @contextmanager
    def withdraw_on_interrupt(self, request: TraceRequest) -> Iterator[None]:
        """On Ctrl-C, withdraw a request of the run, and say what goes on."""
        from pitools.perf import trace_run
        from pitools.run import run_folder

        try:
            yield
        except KeyboardInterrupt:
            trace_run.withdraw(run_folder.last_attempt(self._run_dir) or self._run_dir / "attempts" / "0")
            click.echo(f"pit: steps {request.window} are no longer asked for; who records already goes on", err=True)
            click.echo(f"pit: the run goes on; to end it: pit launch cancel {self._run_dir.name}", err=True)
            raise

    def wait_for_steps(self, rank: int, *, is_new: bool) -> Path:
        """Return the attempt once a rank has logged steps; unless the run is new, so many that its speed is known.

        Raises UsageError for a run that has ended, or writes no step log, NoSpace for a full disk, TryLater for a run
        that does not start in time.
        """
        from pitools.core.errors import TryLater, UsageError
        from pitools.perf import trace_run
        from pitools.run import run_folder

        while True:
            run, attempt = self._poller.poll(), run_folder.last_attempt(self._run_dir)
            now = trace_run.position(attempt, rank) if attempt else trace_run.Position()
            if attempt and (now.count if is_new else now.is_steady and not (attempt / "exit.json").exists()):
                return attempt
            if run.is_over or self._poller.lost:
                raise _ended(run) if now.count else without_steps(run)
            if self._has_no_room():
                raise without_steps(run)
            self._say(self._reason.changed_line(run) or f"waits for rank {rank} to log its first steps: {_WITHOUT_LOG}")
            if time.monotonic() > self._deadline:
                problem = f"no steps of rank {rank} in {self._timeout_s:g} s: the run is {run.state.lower()}"
                if run.state == "RUNNING":
                    problem += ", or it writes no step log"
                    raise UsageError(problem, where=run.run_dir, hint=trace_run.HOW_TO_LOG)
                hint = f"see: pit launch show {run.run_id}"
                hint += f"; once it runs, it records them, for: pit perf attribute {run.run_id}" * is_new
                raise TryLater(problem, where=run.run_dir, hint=hint)
            time.sleep(_POLL_S)

    def wait_for_traces(self, attempt: Path, request: TraceRequest, ranks: list[int]) -> list[RankTrace]:
        """Return what each rank recorded, at the latest when the attempt has ended, or time is up."""
        from pitools.perf import trace_run

        why, seen_at = "", time.monotonic()
        while not why and (left := trace_run.unfinished(attempt, request, ranks)):
            self._say(trace_run.describe(attempt, request, left))
            time.sleep(_POLL_S)
            run = self._poller.poll()
            if set(left) & set(trace_run.logging_ranks(attempt)):
                seen_at = time.monotonic()
            if run.is_over or (attempt / "exit.json").exists() or self._poller.lost:
                why = f"attempt {attempt.name} ended before the trace was written"
                why += ", and the run may go on: ask again" * (not run.is_over)
            elif time.monotonic() > self._deadline:
                why = f"no trace in {self._timeout_s:g} s"
            elif self._has_no_room():
                why = "no trace"
            elif time.monotonic() > seen_at + _SILENT_S:  # such as where rank 0 alone logs
                break
        if why:
            trace_run.withdraw(attempt)
            why += ": the disk of the run is full" * trace_run.is_disk_full(self._run_dir)
        return trace_run.results(attempt, request, ranks, why)

    def _has_no_room(self) -> bool:
        """Return whether the disk of the run has been full for some time: nothing more will be recorded."""
        from pitools.perf.trace_run import is_disk_full

        if not is_disk_full(self._run_dir):
            self._room_at = time.monotonic()
        return time.monotonic() > self._room_at + _SILENT_S

    def _say(self, line: str) -> None:
        """Print a line that differs in more than its numbers, or is due again."""
        kind = line.partition(":")[0]
        if kind != self._said or time.monotonic() > self._said_at + _SAY_EVERY_S:
            click.echo(f"pit: {line}", err=True)
            self._said, self._said_at = kind, time.monotonic()


def _ended(run: RunRecord) -> Exception:
    """Return the error of a run that has logged steps, and has ended."""
    from pitools.core.errors import UsageError

    problem = f"the run has ended: {run.state.lower()} at step {run.steps}"
    return UsageError(problem, where=run.run_dir, hint=f"a new run: pit perf trace {run.run_dir}/request.toml")
