"""`pit perf advise`: what would make a run faster, by how much, and a trial of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pitools.commands import completion
from pitools.commands.options import rows_format_option, site_option
from pitools.commands.perf import find_profiles, find_source
from pitools.commands.perf_repeat import MIN_STEPS, repeat

if TYPE_CHECKING:
    from pitools.perf.advise import Proposal, Trial

COLUMNS = ("cause", "step_ms", "predicted_ms", "bound_ms", "gain", "ceiling", "node", "changes", "remedy")
TRIAL_COLUMNS = ("cause", "changes", "verdict", "predicted", "ceiling", "gain", "gain_low", "gain_high")


@click.command()
@click.argument("source", metavar="RUN|TRACE", shell_complete=completion.complete_runs)
@click.option("--verify", is_flag=True, help="Try it: repeat the run without and with a change, in turn.")
@click.option("--cause", help="Try the advice of this cause. [default: the greatest gain with a known change]")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="The change to try, of the run's request.")
@click.option("--steps", type=click.IntRange(MIN_STEPS), default=50, show_default=True, help="Of each repeated run.")
@click.option("--timeout", default="1h", show_default=True, help="For each repeated run, and its queue.")
@site_option
@rows_format_option
@click.pass_context
def advise(
    ctx: click.Context,
    source: str,
    verify: bool,
    cause: str | None,
    sets: tuple[str, ...],
    steps: int,
    timeout: str,
    site_name: str,
    form: str,
) -> None:
    """Say what would make a run faster, from its step logs or a trace: what a change would gain, and at most.

    A proposal has the change of the request that tries it, where one is known: twice the loader's workers or the steps
    between checkpoints, under their usual names, or without a slow rank's node. --verify repeats the run on its nodes,
    from its copy of the code, without and with the change: A B A B, and up to two pairs more until the interval
    decides. Each is cancelled after --steps, and on Ctrl-C, SIGTERM and SIGHUP. Exit 1: no gain is shown.

    \b
    pit perf advise RUN --verify --set args.workers=8
    """
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.core.units import parse_duration
    from pitools.launch.sweep.points import parse_point
    from pitools.perf.advise import least_steps

    timeout_s = parse_duration(timeout)
    path = find_source(source, site_name)
    run_dir = find_run_of(path)
    proposals = _propose(path, run_dir, parse_point(sets))
    if not verify:
        if sets or cause:
            raise UsageError("nothing is tried without --verify", where="--set, --cause", hint="add --verify")
        with Output(form, COLUMNS) as out:
            for proposal in proposals:
                out(proposal)
        for proposal in proposals:
            if proposal.note:
                click.echo(f"pit: {proposal.cause}: {proposal.note}", err=True)
        if not proposals:
            click.echo("pit: nothing that costs 5 % of a step or more can be avoided", err=True)
        return
    if run_dir is None:
        raise UsageError("a trace outside a run's folder (expected a run, to repeat)", where=str(path))
    chosen, changes = _choose(proposals, cause, sets)
    if steps < (least := least_steps(chosen, changes)):
        problem = f"--steps {steps}: too few to see the checkpoints that the change is about"
        raise UsageError(problem, hint=f"--steps {least}")
    trial = _try(run_dir, chosen, changes, steps, timeout_s)
    with Output(form, TRIAL_COLUMNS) as out:
        out(trial)
    interval = f"{trial.gain:.1%} ({trial.gain_low:.1%} to {trial.gain_high:.1%})"
    click.echo(f"pit: {trial.verdict}: gained {interval} of a step; predicted {trial.predicted:.1%}", err=True)
    ctx.exit(trial.verdict in ("none", "inconclusive"))


def find_run_of(path: Path) -> Path | None:
    """Return the run's folder that a path is, or whose attempts it is in; None for a path outside of one."""
    above = (each.parent for each in path.absolute().parents if each.name == "attempts")
    return next((each for each in (path, *above) if (each / "plan.json").is_file()), None)


def _propose(path: Path, run_dir: Path | None, sets: Mapping[str, str]) -> list[Proposal]:
    """Return the proposals for a profile, or for a run by its step logs. Raises as reading them does."""
    import msgspec

    from pitools.launch.plan import load_plan
    from pitools.perf.advise import propose
    from pitools.perf.attribute.buckets import split_steps
    from pitools.perf.attribute.verdict import judge
    from pitools.perf.read.read import read_table
    from pitools.perf.stragglers import read_nodes

    table = read_table(find_profiles([path]))
    verdict = judge(split_steps(table), table.notes)
    click.echo(f"pit: verdict: {verdict.verdict}: {(verdict.evidence or [''])[0]}", err=True)
    for note in verdict.notes:
        click.echo(f"pit: note: {note}", err=True)
    if run_dir is None:
        return propose(verdict, {}, {})
    request: dict[str, Any] = msgspec.to_builtins(load_plan(run_dir).request)
    return propose(verdict, request, read_nodes(run_dir), sets)


def _choose(
    proposals: list[Proposal], cause: str | None, sets: tuple[str, ...]
) -> tuple[Proposal | None, dict[str, str]]:
    """Return the proposal to try, None for a change of the user's where there is none, and the change.

    Raises UsageError for a cause without a proposal, and where no change is known.
    """
    from pitools.core.errors import UsageError, suggest
    from pitools.launch.sweep.points import parse_point

    if cause and not (named := [each for each in proposals if each.cause == cause]):
        causes = [each.cause for each in proposals]
        raise UsageError(f'no advice of cause "{cause}"', where="--cause", hint=suggest(cause, causes))
    candidates = named if cause else proposals
    if sets:
        return (candidates[0] if candidates else None), parse_point(sets)
    if known := [each for each in candidates if each.changes]:
        return known[0], known[0].changes
    raise UsageError("no change to try is known", where="--verify", hint="give one: --set KEY=VALUE")


def _try(run_dir: Path, proposal: Proposal | None, changes: Mapping[str, str], steps: int, timeout_s: float) -> Trial:
    """Repeat a run without and with a change, in turn, and return what that showed.

    Raises the errors of planning, for a change that is none, before it runs anything.
    """
    from statistics import mean

    from pitools.core.errors import UsageError
    from pitools.launch.timed_rerun import plan_repeat, require_accepted
    from pitools.perf.advise import Proposal, conclude, decides
    from pitools.perf.regression.repeats import alternate

    planned, unchanged = (
        plan_repeat(run_dir, values=values, suffix="-again-b", nodes_of=run_dir) for values in (changes, {})
    )
    if planned[0].request == unchanged[0].request:
        words = " ".join(f"{key}={value}" for key, value in changes.items())
        raise UsageError(f"{words} changes nothing (expected another value than the run's)", where="--set")
    require_accepted(*planned)  # before run A
    proposal = proposal or Proposal(
        cause="", remedy="", step_ms=0.0, predicted_ms=0.0, bound_ms=0.0, gain=0.0, ceiling=0.0
    )
    runs: tuple[list[str], list[str]] = ([], [])

    def measure(is_changed: bool) -> float:
        values, suffix = (changes, "-b") if is_changed else ({}, "-a")
        new_dir, walls = repeat(run_dir, values, suffix, nodes_of=run_dir, steps=steps, timeout_s=timeout_s)
        runs[is_changed].append(new_dir.name)
        return mean(walls)  # and not the median: a checkpoint now and then counts

    a, b, effect = alternate(measure, decides(proposal.gain))
    return conclude(proposal, changes, effect, steps=steps, times=(a, b), runs=runs)
