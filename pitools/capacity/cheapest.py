"""Find the cheapest combination of what-ifs that keeps waits within goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf

import msgspec
import numpy as np

from pitools.capacity.ask import Outcome, Period, simulate_all
from pitools.capacity.what_if import WhatIf, apply_changes, owned_cost
from pitools.capacity.workload import ALL, TraceNames, names_of
from pitools.core import units
from pitools.core.errors import UsageError
from pitools.place.simulate.model import Scenario, Trace

MAX_OPTIONS = 6  # 64 combinations


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the p50 or p95 wait of a group may be, in seconds."""

    group: str
    quantile: str
    most_s: float

    def excess(self, outcome: Outcome) -> float:
        """Return the wait of the group, which has jobs in the period, over the most it may be: above 1 misses."""
        wait_s: float = getattr(outcome.waits[self.group], self.quantile)
        return max(wait_s, 1.0) / max(self.most_s, 1.0)  # a second is none


def parse_goal(text: str) -> Goal:
    """Return the goal of a text such as "tier urgent p95 30m" or "all p50 2h". Raises UsageError."""
    *group, quantile, most = text.split() if len(text.split()) > 2 else ("", "", "")
    if quantile not in ("p50", "p95") or group[0] not in (ALL, "tier", "team"):
        hint = 'write "all p95 2h", "tier NAME p95 30m" or "team NAME p50 5m"'
        raise UsageError(f'"{text}" is no goal', where="--reach", hint=hint)
    return Goal(group=" ".join(group), quantile=quantile, most_s=float(units.parse_duration(most)))


def find_cheapest(
    trace: Trace,
    today: Scenario,
    options: Sequence[str],
    goals: Sequence[Goal],
    period: Period,
    *,
    seeds: int,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[list[str] | None, list[Outcome]]:
    """Return the options of the cheapest combination that meets every goal with every seed, None if none does.

    Also the outcomes of today and of that combination, or of the nearest, by the seeds that were tried. Options that
    exclude each other (two amounts for a pool) are not combined; of equally dear combinations, the one with the fewest
    options. A combination costs at least its owned pools, so the search ends when those cost more than the best so
    far. Raises UsageError for too many options, for one that is not a purchase, and for a goal of no jobs.
    """
    options = list(dict.fromkeys(options))
    if len(options) > MAX_OPTIONS:
        raise UsageError(f"{len(options)} what-ifs (expected at most {MAX_OPTIONS} to combine)", where="--if")
    names = names_of(trace)
    _require_known_groups(goals, names)
    worlds = sorted(_combine(options, today, names), key=lambda each: (owned_cost(each[1], period.days), len(each[0])))
    _require_purchases([world for _, world in worlds], today)
    of_today = simulate_all(trace, [apply_changes("", today, names)], period, seeds=seeds, advance=advance)
    for goal in goals:
        if not all(goal.group in outcome.waits for outcome in of_today):
            problem = f'no jobs of "{goal.group}" in one of the {seeds} periods'
            raise UsageError(problem, where="--reach", hint="give more --days")
    best: tuple[float, list[str], list[Outcome]] | None = None
    nearest: tuple[float, list[Outcome]] = inf, []
    for chosen, world in worlds:
        if best and (owned_cost(world, period.days), len(chosen)) >= (best[0], len(best[1])):
            break
        outcomes = of_today if not chosen else _replay_while_met(trace, world, goals, period, seeds, advance)
        excess = max(goal.excess(outcome) for goal in goals for outcome in outcomes)
        if excess > 1:
            nearest = min(nearest, (excess, outcomes if chosen else []), key=lambda each: each[0])
            continue
        cost = float(np.median([outcome.cost for outcome in outcomes]))
        if best is None or (cost, len(chosen)) < (best[0], len(best[1])):
            best = cost, list(chosen), outcomes
    if best is None:
        return None, of_today + nearest[1]
    return best[1], of_today + (best[2] if best[1] else [])


def _combine(options: Sequence[str], today: Scenario, names: TraceNames) -> list[tuple[tuple[str, ...], WhatIf]]:
    for option in options:
        apply_changes(option, today, names)  # each alone is to be valid
    worlds = []
    for number in range(len(options) + 1):
        for chosen in combinations(options, number):
            try:
                worlds.append((chosen, apply_changes(", ".join(chosen), today, names)))
            except UsageError:  # these exclude each other
                continue
    return worlds


def _replay_while_met(
    trace: Trace, world: WhatIf, goals: Sequence[Goal], period: Period, seeds: int, advance: Callable[[int], object]
) -> list[Outcome]:
    """Return the outcomes, only that of the first seed if it misses a goal."""
    first = simulate_all(trace, [world], period, seeds=1, advance=advance)
    if seeds == 1 or max(goal.excess(first[0]) for goal in goals) > 1:
        return first
    return first + simulate_all(trace, [world], period, seeds=seeds - 1, first_seed=1, advance=advance)


def _require_known_groups(goals: Sequence[Goal], names: TraceNames) -> None:
    known = {"team": names.teams, "tier": names.tiers, ALL: [""]}
    for goal in goals:
        kind, _, name = goal.group.partition(" ")
        if name not in known[kind]:
            hint = f"known: {', '.join(known[kind])}"
            raise UsageError(f'no jobs of "{goal.group}" in the trace', where="--reach", hint=hint)


def _require_purchases(worlds: Sequence[WhatIf], today: Scenario) -> None:
    """Raise UsageError for a world of other jobs, or with other GPUs without a price: that would cost nothing."""
    gpus = {pool.pool: pool.gpus for pool in today.pools}
    for world in worlds:
        if world.team_factors != {"": today.load}:
            raise UsageError("other jobs are nothing to buy", where=f'"{world.text}"', hint="leave load and team out")
        for pool in world.scenario.pools:
            if pool.gpus != gpus.get(pool.pool) and not pool.price:
                problem = f"GPUs of {pool.pool} cost nothing (expected a price, to find the cheapest)"
                hint = "set price_per_gpu_hour in the scenario, or price_per_node_hour in the site file"
                raise UsageError(problem, where=f'"{world.text}"', hint=hint)
