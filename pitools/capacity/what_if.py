"""The changes of a what-if: more GPUs, a pool away or down, tiers, a team that grows, a limit, a rented pool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

import msgspec

from pitools.capacity.workload import TraceNames
from pitools.core import units
from pitools.core.errors import UsageError, suggest
from pitools.place.simulate.model import DAY_S, HOUR_S, Scenario, SimPool


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
    for change in filter(None, (part.strip() for part in text.split(","))):
        kind, *words = change.split()
        subject = (kind, *(words if kind == "preempt" else words[:-1]))
        if subject in subjects:
            raise UsageError(
                f"{' '.join(subject)}: twice (expected one amount)", where=f'"{text}"', hint="write it once"
            )
        subjects.add(subject)
        if kind not in _KINDS:
            hint = suggest(kind, _KINDS) or f"write one of: {'; '.join(form for form, _ in _KINDS.values())}"
            raise UsageError(f'no change "{kind}"', where=f'"{change}"', hint=hint)
        form, apply = _KINDS[kind]
        try:
            world = apply(world, words, names)
        except ValueError as error:
            raise UsageError(f"{kind}: {error}", where=f'"{change}"', hint=f"write {form}") from error
    priority = world.scenario.tiers
    for tier, others in world.scenario.preempts.items():
        for other in others:
            if priority.get(other, 0) >= priority.get(tier, 0):
                problem = f"{tier} preempts {other} of priority {priority.get(other, 0)}"
                expected = f"expected one below {priority.get(tier, 0)}, that of {tier}"
                hint = f'add "tier {tier} {priority.get(other, 0) + 1}"'
                raise UsageError(f"{problem} ({expected})", where=f'"{text}"', hint=hint)
    return world


def _gpus(world: WhatIf, words: list[str], _: TraceNames) -> WhatIf:
    name, amount = _expect(words, 2)
    number, pool = _whole(amount), _pool(world, name)
    if pool.gpus + number < 1:
        raise ValueError(f"{amount} of {pool.gpus} GPUs (expected at least one left)")
    if pool.fabric:
        raise ValueError(f"pool {name} has a fabric (expected a pool that only counts GPUs)")
    return _with_pool(world, msgspec.structs.replace(pool, gpus=pool.gpus + number))


def _away(world: WhatIf, words: list[str], _: TraceNames) -> WhatIf:
    """Announced before: jobs that would reach into the window wait for its end."""
    pool, window = _window(world, words)
    windows = tuple(sorted((*pool.maintenance_windows, window)))
    return _with_pool(world, msgspec.structs.replace(pool, maintenance_windows=windows))


def _down(world: WhatIf, words: list[str], _: TraceNames) -> WhatIf:
    """Not announced: running jobs go on from their last checkpoints, elsewhere or later."""
    pool, window = _window(world, words)
    return _with_pool(world, msgspec.structs.replace(pool, outage_windows=(*pool.outage_windows, window)))


def _window(world: WhatIf, words: list[str]) -> tuple[SimPool, tuple[float, float]]:
    name, from_text, for_text = _expect(words, 3)
    from_s, for_s = float(units.parse_duration(from_text)), float(units.parse_duration(for_text))
    if for_s <= 0:
        raise ValueError(f"for {for_s:g} s (expected a time above 0)")
    return _pool(world, name), (from_s, from_s + for_s)


def _tier(world: WhatIf, words: list[str], names: TraceNames) -> WhatIf:
    """Another priority of a tier, for the order of the queues."""
    tier, priority = _expect(words, 2)
    tiers = {**world.scenario.tiers, _known(tier, "tier", names.tiers): _whole(priority)}
    return msgspec.structs.replace(world, scenario=msgspec.structs.replace(world.scenario, tiers=tiers))


def _preempt(world: WhatIf, words: list[str], names: TraceNames) -> WhatIf:
    """Jobs of the second tier are submitted again where one of the first can then start."""
    tier, other = (_known(word, "tier", names.tiers) for word in _expect(words, 2))
    preempts = {**world.scenario.preempts, tier: world.scenario.preempts.get(tier, frozenset()) | {other}}
    return msgspec.structs.replace(world, scenario=msgspec.structs.replace(world.scenario, preempts=preempts))


def _team(world: WhatIf, words: list[str], names: TraceNames) -> WhatIf:
    name, factor = _expect(words, 2)
    _known(name, "team", names.teams)
    before = world.team_factors.get(name, world.team_factors[""])
    factors = {**world.team_factors, name: before * _factor(factor)}
    return msgspec.structs.replace(world, team_factors=factors)


def _load(world: WhatIf, words: list[str], _: TraceNames) -> WhatIf:
    factor = _factor(_expect(words, 1)[0])
    if not factor:
        raise ValueError("no jobs are left (expected a factor above 0)")
    factors = {team: each * factor for team, each in world.team_factors.items()}
    return msgspec.structs.replace(world, team_factors=factors)


def _limit(world: WhatIf, words: list[str], _: TraceNames) -> WhatIf:
    limit_s = float(units.parse_duration(_expect(words, 1)[0]))
    if limit_s < 60:
        raise ValueError(f"{limit_s:g} s (expected a minute or more)")
    scenario = msgspec.structs.replace(world.scenario, max_limit_s=limit_s)
    return msgspec.structs.replace(world, scenario=scenario)


def _rent(world: WhatIf, words: list[str], _: TraceNames) -> WhatIf:
    """The last pool, so that a federation's jobs go there only if they start nowhere else at that moment."""
    name, gpus, price = _expect(words, 3)
    if any(pool.pool == name for pool in world.scenario.pools):
        raise ValueError(f'there is a pool "{name}" (expected a new name)')
    if _whole(gpus) < 1 or not 0 <= float(price) < inf:
        raise ValueError(f"{gpus} GPUs for {price} (expected GPUs above 0, and a price)")
    pools = (*world.scenario.pools, SimPool(pool=name, gpus=int(gpus), price=float(price)))
    scenario = msgspec.structs.replace(world.scenario, pools=pools)
    return msgspec.structs.replace(world, scenario=scenario, rented=world.rented | {name})


_KINDS = {
    "gpus": ("gpus POOL +64", _gpus),
    "away": ("away POOL 10d 2d", _away),
    "down": ("down POOL 10d 2d", _down),
    "tier": ("tier TIER 1", _tier),
    "preempt": ("preempt TIER TIER", _preempt),
    "team": ("team NAME x2", _team),
    "load": ("load x1.2", _load),
    "limit": ("limit 12h", _limit),
    "rent": ("rent POOL 128 2.5", _rent),
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


def _expect(words: list[str], number: int) -> list[str]:
    if len(words) != number:
        raise ValueError(f"{len(words)} words after it (expected {number})")
    return words


def _known(name: str, what: str, names: Sequence[str]) -> str:
    if name not in names:
        raise ValueError(f'no {what} "{name}" in the trace ({suggest(name, names) or "none is similar"})')
    return name


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,9}", text):
        raise ValueError(f'"{text}" (expected a whole number)')
    return int(text)


def _factor(text: str) -> float:
    if not re.fullmatch(r"x\d+(\.\d+)?", text):
        raise ValueError(f'factor "{text}" (expected as x2 or x0.5)')
    return float(text[1:])


def _pool(world: WhatIf, name: str) -> SimPool:
    names = [pool.pool for pool in world.scenario.pools]
    if name not in names:
        raise ValueError(f'no pool "{name}" (expected one of {", ".join(names)})')
    return world.scenario.pools[names.index(name)]


def _with_pool(world: WhatIf, changed: SimPool) -> WhatIf:
    pools = tuple(changed if pool.pool == changed.pool else pool for pool in world.scenario.pools)
    return msgspec.structs.replace(world, scenario=msgspec.structs.replace(world.scenario, pools=pools))
