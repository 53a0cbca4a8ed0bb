"""The changes of a what-if: more GPUs, a pool away or down, tiers, a team that grows, a limit, a rented pool."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from pitools.capacity.workload import TraceNames
from pitools.core import units
from pitools.core.errors import UsageError, suggest
from pitools.place.simulate.model import DAY_S, HOUR_S, Scenario, SimPool

_Converter = Callable[[str, "WhatIf", TraceNames], Any]  # of a word


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One world to simulate. team_factors: as for `synthesize`. rented: pools billed per started hour of a job."""

    text: str
    scenario: Scenario
    team_factors: dict[str, float] = {}
    rented: frozenset[str] = frozenset()


def apply_changes(text: str, scenario: Scenario, names: TraceNames) -> WhatIf:
    """Return the world of a what-if such as "gpus near +64, limit 12h"; "" changes nothing.

    scenario: of today; its load becomes a factor of the jobs, as a shorter trace would leave the period's end empty.
    Raises UsageError naming the change.
    """
    world = WhatIf(text=text, scenario=msgspec.structs.replace(scenario, load=1.0), team_factors={"": scenario.load})
    subjects = set[tuple[str, ...]]()
    for change in filter(None, map(str.strip, re.findall(r'(?:"[^"]*"|[^,])+', text))):
        kind, *words = split_words(change)
        if kind not in _KINDS:
            hint = suggest(kind, _KINDS) or f"write one of: {'; '.join(form for form, *_ in _KINDS.values())}"
            raise UsageError(f'no change "{kind}"', where=f'"{change}"', hint=hint)
        form, converters, apply = _KINDS[kind]
        subject = (kind, *(words if kind == "preempt" else words[:-1]))
        try:
            if subject in subjects:
                raise ValueError("twice (expected one amount)", "write it once")
            if len(words) != len(converters):
                raise ValueError(f"{len(words)} words after it (expected {len(converters)})")
            values = [convert(word, world, names) for convert, word in zip(converters, words, strict=True)]
            world = apply(world, *values)
        except ValueError as error:
            problem, hint = (*error.args, f"write {form}")[:2]
            raise UsageError(f"{kind}: {problem}", where=f'"{change}"', hint=hint) from error
        subjects.add(subject)
    if not any(world.team_factors.get(team, world.team_factors[""]) for team in names.teams):
        problem = "no jobs are left (expected a factor above 0)"
        raise UsageError(problem, where=f'"{text}"', hint="write a factor above 0")
    priority = world.scenario.tiers
    for tier, others in world.scenario.preempts.items():
        for other in others:
            if priority.get(other, 0) >= priority.get(tier, 0):
                problem = f"{tier} preempts {other} of priority {priority.get(other, 0)}"
                expected = f"expected one below {priority.get(tier, 0)}, that of {tier}"
                hint = f'add "tier {tier} {priority.get(other, 0) + 1}"'
                raise UsageError(f"{problem} ({expected})", where=f'"{text}"', hint=hint)
    return world


def split_words(text: str) -> list[str]:
    """Return the words of a change or goal; one in double quotes may hold spaces and commas."""
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', text)]


def _pool(name: str, world: WhatIf, _: TraceNames) -> SimPool:
    pools = {pool.pool: pool for pool in world.scenario.pools}
    if name not in pools:
        raise ValueError(f'no pool "{name}" (expected one of {", ".join(pools)})')
    return pools[name]


def _new_pool(name: str, world: WhatIf, _: TraceNames) -> str:
    if any(pool.pool == name for pool in world.scenario.pools):
        raise ValueError(f'there is a pool "{name}" (expected a new name)')
    return name


def _known(what: Literal["tiers", "teams"]) -> _Converter:
    def convert(word: str, _: WhatIf, names: TraceNames) -> str:
        known = [name for name in getattr(names, what) if name]
        if word not in known:
            raise ValueError(f'no {what[:-1]} "{word}" in the trace ({suggest(word, known) or "it has none"})')
        return word

    return convert


def _number(pattern: str, expected: str) -> _Converter:
    def convert(word: str, _: WhatIf, __: TraceNames) -> float:
        if not re.fullmatch(pattern, word):
            raise ValueError(f'"{word}" (expected {expected})')
        return float(word.lstrip("x"))

    return convert


_tier_of, _team_of = _known("tiers"), _known("teams")
_more = _number(r"[+-]\d{1,9}", "a whole number with its sign, as +64 or -8")
_whole = _number(r"[+-]?\d{1,9}", "a whole number")
_factor = _number(r"x\d+(\.\d+)?", "a factor, as x2 or x0.5")
_price = _number(r"\d+(\.\d+)?", "a price per GPU hour, as 2.5")


def parse_seconds(word: str, *_: object) -> float:
    """Return the seconds of a duration. Raises ValueError, also for a number without a unit (elsewhere minutes)."""
    try:
        seconds = units.parse_duration(word)
    except UsageError as error:
        raise ValueError(error.message, error.hint) from error
    if word.isdigit():
        raise ValueError(f'"{word}" has no unit (expected as {word}h or {word}m)')
    return float(seconds)


def _gpus(world: WhatIf, pool: SimPool, more: float) -> WhatIf:
    if pool.gpus + more < 1:
        problem = f"{more:+.0f} of {pool.gpus} GPUs (expected at least one left)"
        raise ValueError(problem, f"to close it, write away {pool.pool} 0d 91d")
    if pool.fabric:
        raise ValueError(f"pool {pool.pool} has a fabric (expected a pool that only counts GPUs)")
    return _with_pool(world, pool, gpus=pool.gpus + int(more))


def _away(world: WhatIf, pool: SimPool, from_s: float, for_s: float) -> WhatIf:
    """Announced before: jobs that would reach into the window wait for its end."""
    windows = (*pool.maintenance_windows, _window(from_s, for_s))
    return _with_pool(world, pool, maintenance_windows=tuple(sorted(windows)))


def _down(world: WhatIf, pool: SimPool, from_s: float, for_s: float) -> WhatIf:
    """Not announced: running jobs go on from their last checkpoints, elsewhere or later."""
    return _with_pool(world, pool, outage_windows=(*pool.outage_windows, _window(from_s, for_s)))


def _window(from_s: float, for_s: float) -> tuple[float, float]:
    if for_s <= 0:
        raise ValueError(f"for {for_s:g} s (expected a time above 0)")
    return from_s, from_s + for_s


def _tier(world: WhatIf, tier: str, priority: float) -> WhatIf:
    """Another priority of a tier, for the order of the queues."""
    return _with(world, tiers={**world.scenario.tiers, tier: int(priority)})


def _preempt(world: WhatIf, tier: str, other: str) -> WhatIf:
    """Jobs of the second tier are submitted again where one of the first can then start."""
    preempts = world.scenario.preempts
    return _with(world, preempts={**preempts, tier: preempts.get(tier, frozenset()) | {other}})


def _team(world: WhatIf, team: str, factor: float) -> WhatIf:
    before = world.team_factors.get(team, world.team_factors[""])
    return msgspec.structs.replace(world, team_factors={**world.team_factors, team: before * factor})


def _load(world: WhatIf, factor: float) -> WhatIf:
    factors = {team: each * factor for team, each in world.team_factors.items()}
    return msgspec.structs.replace(world, team_factors=factors)


def _limit(world: WhatIf, limit_s: float) -> WhatIf:
    if limit_s < 60:
        raise ValueError(f"{limit_s:g} s (expected a minute or more)")
    return _with(world, max_limit_s=limit_s)


def _rent(world: WhatIf, name: str, gpus: float, price: float) -> WhatIf:
    """The last pool, so that a federation's jobs go there only if they start nowhere else at that moment."""
    if gpus < 1:
        raise ValueError(f"{gpus:g} GPUs (expected above 0)")
    pools = (*world.scenario.pools, SimPool(pool=name, gpus=int(gpus), price=price))
    return msgspec.structs.replace(_with(world, pools=pools), rented=world.rented | {name})


_KINDS: dict[str, tuple[str, Sequence[_Converter], Callable[..., WhatIf]]] = {
    "gpus": ("gpus POOL +64", (_pool, _more), _gpus),
    "away": ("away POOL 10d 2d", (_pool, parse_seconds, parse_seconds), _away),
    "down": ("down POOL 10d 2d", (_pool, parse_seconds, parse_seconds), _down),
    "tier": ("tier TIER 1", (_tier_of, _whole), _tier),
    "preempt": ("preempt TIER TIER", (_tier_of, _tier_of), _preempt),
    "team": ("team NAME x2", (_team_of, _factor), _team),
    "load": ("load x1.2", (_factor,), _load),
    "limit": ("limit 12h", (parse_seconds,), _limit),
    "rent": ("rent POOL 128 2.5", (_new_pool, _whole, _price), _rent),
}


def shift_windows(scenario: Scenario, by_s: float) -> Scenario:
    """Return the scenario with all windows of its pools later."""
    keys = ("maintenance_windows", "unreachable_windows", "outage_windows")
    pools = []
    for pool in scenario.pools:
        windows = {key: tuple((from_s + by_s, to_s + by_s) for from_s, to_s in getattr(pool, key)) for key in keys}
        pools.append(msgspec.structs.replace(pool, **windows))
    return msgspec.structs.replace(scenario, pools=tuple(pools))


def owned_cost(world: WhatIf, days: float) -> float:
    """Return the cost of all pools that are not rented, used or not."""
    owned = (pool for pool in world.scenario.pools if pool.pool not in world.rented)
    return sum(pool.gpus * pool.price for pool in owned) * days * DAY_S / HOUR_S


def _with(world: WhatIf, **changes: object) -> WhatIf:
    return msgspec.structs.replace(world, scenario=msgspec.structs.replace(world.scenario, **changes))


def _with_pool(world: WhatIf, pool: SimPool, **changes: object) -> WhatIf:
    changed = msgspec.structs.replace(pool, **changes)
    return _with(world, pools=tuple(changed if each is pool else each for each in world.scenario.pools))
