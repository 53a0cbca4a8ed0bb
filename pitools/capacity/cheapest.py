"""Find the cheapest combination of what-ifs that keeps waits within goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, combinations
from math import inf

import msgspec
import numpy as np

from pitools.capacity.ask import Outcome, Period, replay_queue, simulate_all
from pitools.capacity.what_if import WhatIf, apply_changes, owned_cost, parse_seconds, split_words
from pitools.capacity.workload import ALL, TraceNames, names_of
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
        return max(wait_s, 1.0) / max(self.most_s, 1.0)  # waits below 1 s count as 1 s


def parse_goal(text: str) -> Goal:
    """Return the goal of a text such as "tier urgent p95 30m" or "all p50 2h". Raises UsageError."""
    kind, *name, quantile, most = words if len(words := split_words(text)) > 2 else ("", "", "")
    try:
        if quantile not in ("p50", "p95") or (kind, len(name)) not in ((ALL, 0), ("tier", 1), ("team", 1)):
            raise ValueError(f'"{text}" is no goal', 'write "all p95 2h", "tier NAME p95 30m" or "team NAME p50 5m"')
        return Goal(group=" ".join((kind, *name)), quantile=quantile, most_s=parse_seconds(most))
    except ValueError as error:
        problem, hint = (*error.args, 'write "all p95 2h"')[:2]
        raise UsageError(problem, where=f'--reach "{text}"', hint=hint) from error


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

    Also the outcomes of today and of that combination, or of the nearest by the first seed, if it is nearer than today
    with all seeds. Options that exclude each other (two amounts for a pool) are not combined; of equally dear
    combinations, the one with the fewest options. A combination costs at least its owned pools: one of which those cost
    more than the best so far is not tried. Raises UsageError for too many options, for one that is not a purchase, and
    for a goal of no jobs.
    """
    options = list(dict.fromkeys(options))
    if len(options) > MAX_OPTIONS:
        raise UsageError(f"{len(options)} what-ifs (expected at most {MAX_OPTIONS} to combine)", where="--if")
    names = names_of(trace)
    _require_known_groups(goals, names)
    worlds = _combine(options, today, names)
    _require_purchases([world for _, world in worlds.values()], today)
    of_today = simulate_all(trace, [worlds[""][1]], period, seeds=seeds, advance=advance)
    for goal in goals:
        if not all(goal.group in outcome.waits for outcome in of_today):
            problem = f'no jobs of "{goal.group}" in one of the {seeds} periods'
            raise UsageError(problem, where="--reach", hint="give more --days")

    def excess(outcomes: Sequence[Outcome]) -> float:
        return max((goal.excess(outcome) for goal in goals for outcome in outcomes), default=0.0)

    least = {text: (owned_cost(world, period.days), len(chosen)) for text, (chosen, world) in worlds.items()}
    replayed: dict[str, list[Outcome]] = {**{text: [] for text in worlds}, "": of_today}
    best: tuple[float, int, str] | None = (*least[""], "") if excess(of_today) <= 1 else None

    def is_needed(task: tuple[WhatIf, int]) -> bool:
        text = task[0].text
        return (best is None or least[text] < best[:2]) and excess(replayed[text]) <= 1

    queue = sorted(((world, 0) for text, (_, world) in worlds.items() if text), key=lambda task: least[task[0].text])
    for outcome in replay_queue(trace, period, queue, is_needed, advance):
        text, outcomes = outcome.what_if, replayed[outcome.what_if]
        outcomes.append(outcome)
        if excess(outcomes) > 1:
            continue
        if len(outcomes) == 1:  # of the first seed
            queue += [(worlds[text][1], seed) for seed in range(1, seeds)]
            queue.sort(key=lambda task: least[task[0].text])
        if len(outcomes) == seeds:
            cost = float(np.median([each.cost for each in outcomes]))
            best = min(best or (inf, 0, ""), (cost, least[text][1], text))
    if best:
        outcomes = sorted(replayed[best[2]], key=lambda outcome: outcome.seed) if best[2] else []
        return list(worlds[best[2]][0]), of_today + outcomes
    nearest = min(worlds, key=lambda text: excess(replayed[text][:1]))
    outcomes = simulate_all(trace, [worlds[nearest][1]], period, seeds=seeds, advance=advance) if nearest else []
    return None, of_today + (outcomes if excess(outcomes) < excess(of_today) else [])


def _combine(options: Sequence[str], today: Scenario, names: TraceNames) -> dict[str, tuple[tuple[str, ...], WhatIf]]:
    """Return the combinations by their text, today first: the options, and their world."""
    for option in options:
        apply_changes(option, today, names)  # each alone is to be valid
    worlds: dict[str, tuple[tuple[str, ...], WhatIf]] = {}
    for chosen in chain.from_iterable(combinations(options, number) for number in range(len(options) + 1)):
        with suppress(UsageError):  # these exclude each other
            text = ", ".join(chosen)
            worlds.setdefault(text, (chosen, apply_changes(text, today, names)))
    return worlds


def _require_known_groups(goals: Sequence[Goal], names: TraceNames) -> None:
    known = {"team": names.teams, "tier": names.tiers, ALL: [""]}
    for goal in goals:
        kind, _, name = goal.group.partition(" ")
        if name not in known[kind]:
            hint = f"known: {', '.join(filter(None, known[kind])) or 'none'}"
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
