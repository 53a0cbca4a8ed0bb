"""Replay a trace under a policy by its name: pitools' own, decided as live, or a baseline."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pitools.core.errors import UsageError, suggest
from pitools.place.policy import JobTableBuilder, PolicyParams, decide
from pitools.place.policy.runtime_predictor import RuntimePredictor
from pitools.place.simulate import baselines, engine
from pitools.place.simulate.model import Result, Scenario, Trace

Advance = Callable[[int], object]

OWN_POLICY = "ours"


def policy_names() -> list[str]:
    """Return the names of all policies."""
    return [OWN_POLICY, *baselines.BASELINES]


def require_policy(name: str) -> None:
    """Raise UsageError, with the most similar name, for an unknown policy."""
    if name not in policy_names():
        raise UsageError(f'no policy "{name}"', where="--policy", hint=suggest(name, policy_names()))


def replay(
    trace: Trace, scenario: Scenario, name: str, *, tick_s: float = 60.0, advance: Advance = lambda _: None
) -> tuple[Result, float]:
    """Replay a trace under a policy; return the result, and the duration in seconds. Raises UsageError."""
    require_policy(name)
    began = time.perf_counter()
    if name == OWN_POLICY:
        ours = partial(decide, policy=PolicyParams(), builder=JobTableBuilder())
        result = engine.simulate(
            trace, scenario, ours, name=name, tick_s=tick_s, predictor=RuntimePredictor(), advance=advance
        )
    else:
        result = engine.simulate(trace, scenario, name, advance=advance)
    return result, time.perf_counter() - began
