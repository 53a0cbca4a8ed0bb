"""Repeated runs of `pit perf advise --verify` and `pit perf watch --confirm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pitools.perf.regression.repeats import Effect
    from pitools.perf.regression.store import Point, Series
    from pitools.perf.regression.watch import SeriesVerdict

MIN_STEPS = 10  # of a repeated run, behind its first
_CONFIRM_STEPS, _CONFIRM_TIMEOUT_S = 50, 3600.0
_MAX_CONFIRMED = 3  # regressions of one call, each by at most eight runs


def repeat(
    run_dir: Path, values: Mapping[str, str], suffix: str, *, nodes_of: Path, steps: int, timeout_s: float
) -> tuple[Path, list[float]]:
    """Repeat a run for some steps; return its folder, and the seconds of each step but the first of each attempt.

    Raises the errors of `repeat_steps`, and DataError for fewer than MIN_STEPS.
    """
    from pitools.core.errors import DataError
    from pitools.launch.timed_rerun import repeat_steps
    from pitools.perf.regression.sources import read_run

    new_dir = repeat_steps(
        run_dir,
        steps=steps,
        values=values,
        suffix=f"-again{suffix}",
        nodes_of=nodes_of,
        timeout_s=timeout_s,
        report=lambda line: click.echo(f"pit: {line}", err=True),
    )
    walls = [step.wall_s for step in read_run(new_dir).steps][:steps]
    if len(walls) < MIN_STEPS:
        raise DataError(f"{len(walls)} steps (expected {MIN_STEPS} or more)", where=str(new_dir))
    return new_dir, walls


def confirm_regressions(
    store: Path, series: Sequence[Series], verdicts: Sequence[SeriesVerdict], min_effect: float, site_name: str
) -> list[SeriesVerdict]:
    """Return the verdicts, of which regressions that repeated runs do not show are unconfirmed.

    Results are stored, and a step is tried once. What cannot be repeated is still a regression, and printed.
    """
    from pitools.core.errors import PitError
    from pitools.perf.regression.store import add_rerun, read_rerun
    from pitools.perf.regression.watch import points_around, with_rerun

    by_key = {one.key: one for one in series}
    result, tried = [], 0
    for verdict in verdicts:
        if verdict.verdict == "regression":
            effect = read_rerun(store, verdict.key, verdict.source)
            try:
                if effect is None and tried < _MAX_CONFIRMED:
                    tried += 1
                    around = points_around(by_key[verdict.key], verdict)
                    effect = _repeat_both(*around, min_effect, site_name)
                    add_rerun(store, verdict.key, verdict.source, effect)
            except PitError as error:
                click.echo(f"pit: {verdict.measure}: not confirmed by runs: {error}", err=True)
            if effect is not None:
                verdict = with_rerun(verdict, effect, min_effect)
                shown = f"{effect.effect:+.1%} ({effect.low:+.1%} to {effect.high:+.1%})"
                word = "confirmed" if verdict.verdict == "regression" else "unconfirmed"
                click.echo(f"pit: {verdict.measure}: {word}: repeated runs show {shown}", err=True)
        result.append(verdict)
    return result


def _repeat_both(before: Sequence[Point], after: Point, min_effect: float, site_name: str) -> Effect:
    """Repeat the run of `after`, in turn with the last one before if its code alone differs, else compared with the
    points before.

    Both get the nodes of the run of `after`. Raises PitError where a run is not there, measured something else, or
    cannot be repeated.
    """
    from statistics import median

    from pitools.core.errors import DataError
    from pitools.launch.run_lookup import find_run_dir
    from pitools.perf.regression.repeats import alternate
    from pitools.perf.regression.sources import point_of_run
    from pitools.perf.regression.watch import confirms, is_other_code

    if not (after.source and before[-1].source):
        raise DataError("the points on both sides name no run (column source)", hint="add runs: watch --add RUN")
    after_dir = find_run_dir(after.source, site_name)
    if (measured := point_of_run(after_dir).measure) != after.measure:
        raise DataError(f"{measured} is what this run measures (expected {after.measure})", where=str(after_dir))
    before_dir = find_run_dir(before[-1].source, site_name) if is_other_code(before[-1], after) else None

    def measure(is_after: bool) -> float:
        _, walls = repeat(
            after_dir if is_after or before_dir is None else before_dir,
            {},
            "-after" if is_after else "-before",
            nodes_of=after_dir,
            steps=_CONFIRM_STEPS,
            timeout_s=_CONFIRM_TIMEOUT_S,
        )
        return median(walls)  # as the points of the series

    return alternate(measure, confirms(min_effect), [] if before_dir else [point.value for point in before])[2]
