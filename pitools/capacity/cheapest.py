"""Find the cheapest combination of what-ifs that keeps waits within goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import msgspec
import numpy as np

from pitools.capacity.ask import Outcome, Period, simulate_all
from pitools.capacity.what_if import WhatIf, apply_changes, owned_cost
from pitools.capacity.workload import ALL, TraceNames, names_of
from pitools.core import units
from pitools.core.errors import UsageError
from pitools.place.simulate.model import Scenario, Trace

MAX_OPTIONS = 6  # 64 combinations
_QUANTILES = {"p50": 1, "p95": 2}  # place in Outcome.waits


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the p50 or p95 wait of a group may be, in seconds."""

    group: str
    quantile: str
    most_s: float

    def is_met(self, outcome: Outcome) -> bool:
        """Return whether a period meets the goal; one in which the group has no jobs does."""
        wait = outcome.waits.get(self.group)
        return not outcome.unfinished and (wait is None or wait[_QUANTILES[self.quantile]] <= self.most_s)


def parse_goal(text: str) -> Goal:
    """Return the goal of a text such as "tier 1 p95 30m", "queue urgent p50 5m" or "all p95 2h". Raises UsageError."""
    *group, quantile, most = text.split() if len(text.split()) > 2 else ("", "", "")
    if quantile not in _QUANTILES or group[0] not in (ALL, "tier", "queue", "team"):
        hint = 'write "all p95 2h", "tier 1 p95 30m", "queue NAME p95 30m" or "team NAME p50 5m"'
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

    Also the outcomes of today and of that combination. Options that exclude each other (two pools of one name) are not
    combined; of equally dear combinations, the one with the fewest options. A combination costs at least its owned
    pools, so the search ends when those cost more than the best so far. Raises UsageError for too many options.
    """
    if len(options) > MAX_OPTIONS:
        raise UsageError(f"{len(options)} what-ifs (expected at most {MAX_OPTIONS} to combine)", where="--if")
    names = names_of(trace)
    _require_known_groups(goals, names, today)
    worlds = sorted(_combine(options, today, names), key=lambda each: (owned_cost(each[1], period.days), len(each[0])))
    of_today = simulate_all(trace, [apply_changes("", today, names)], period, seeds=seeds, advance=advance)
    best: tuple[float, list[str], list[Outcome]] | None = None
    for chosen, world in worlds:
        if best and owned_cost(world, period.days) >= best[0]:
            break
        outcomes = of_today if not chosen else _replay_while_met(trace, world, goals, period, seeds, advance)
        if len(outcomes) < seeds or not all(goal.is_met(outcome) for goal in goals for outcome in outcomes):
            continue
        cost = float(np.median([outcome.cost for outcome in outcomes]))
        if best is None or cost < best[0]:
            best = cost, list(chosen), outcomes
    if best is None:
        return None, of_today
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
    if seeds == 1 or not all(goal.is_met(first[0]) for goal in goals):
        return first
    return first + simulate_all(trace, [world], period, seeds=seeds - 1, first_seed=1, advance=advance)


def _require_known_groups(goals: Sequence[Goal], names: TraceNames, today: Scenario) -> None:
    tiers = {0, *today.tiers.values(), *today.tier_shares}
    known = {"team": names.teams, "queue": names.queues, "tier": sorted(map(str, tiers)), ALL: [""]}
    for goal in goals:
        kind, _, name = goal.group.partition(" ")
        if name not in known[kind]:
            hint = f"known: {', '.join(known[kind])}"
            raise UsageError(f'no jobs of "{goal.group}" in the trace', where="--reach", hint=hint)
