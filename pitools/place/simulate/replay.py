"""A policy by its name: ours, decided as live, or one of what others do."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pitools.core.errors import UsageError, nearest
from pitools.place.policy import Columns, Policy, decide
from pitools.place.policy.runtime_predictor import Predictor
from pitools.place.simulate import baselines, engine
from pitools.place.simulate.model import Result, Scenario, Trace

Advance = Callable[[int], object]

OURS = "ours"


def names() -> list[str]:
    """Every policy there is."""
    return [OURS, *baselines.NAMES]


def check(name: str) -> None:
    """Raises UsageError, with the nearest name, for a policy that is none."""
    if name not in names():
        raise UsageError(f'no policy "{name}"', where="--policy", hint=nearest(name, names()))


def play(
    trace: Trace, scenario: Scenario, name: str, *, tick_s: float = 60.0, advance: Advance = lambda _: None
) -> tuple[Result, float]:
    """Replay a trace under a policy; what came of it, and the seconds that it took. Raises UsageError."""
    check(name)
    began = time.perf_counter()
    if name == OURS:
        ours = partial(decide, policy=Policy(), columns=Columns())
        made = engine.simulate(trace, scenario, ours, name=name, tick_s=tick_s, predictor=Predictor(), advance=advance)
    else:
        made = engine.simulate(trace, scenario, name, advance=advance)
    return made, time.perf_counter() - began
