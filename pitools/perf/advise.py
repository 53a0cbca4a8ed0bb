"""What to try on a run: the advice of its verdict as changes of its request, and what trying one of them showed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pitools.core import hostlist
from pitools.core.record import Record
from pitools.perf.attribute.verdict import Advice, Verdict
from pitools.perf.regression.change_points import MIN_EFFECT
from pitools.perf.regression.repeats import Effect

# Keys that a request's arguments and parameters often have, doubled to try an advice; the first that is there counts.
_DOUBLED = {
    "input": ("workers", "num_workers", "loader_workers", "threads"),
    "checkpoint": ("checkpoint_every", "save_every", "checkpoint_interval", "save_interval"),
}


class Proposal(Record, frozen=True, kw_only=True, tag="pit.perf-proposal/1"):
    """A remedy, what it would give, and how to try it.

    step_ms: a step's mean now. predicted_ms: with `changes`, or where none is known with the remedy. bound_ms: if the
    cause were gone altogether. gain, ceiling: the same two as shares of step_ms. changes: text by key of the run's
    request, that tries it; {} if unknown, and then `note` says what to do. node: of a straggler, "" if unknown.
    """

    cause: str
    remedy: str
    step_ms: float
    predicted_ms: float
    bound_ms: float
    gain: float
    ceiling: float
    changes: dict[str, str] = {}
    node: str = ""
    note: str = ""


class Trial(Record, frozen=True, kw_only=True, tag="pit.perf-trial/1"):
    """What a change of the request gained, by runs without (A) and with it (B) in turn on the same nodes.

    predicted, ceiling: of the proposal, as shares of a step. gain: 1 - B ÷ A, with a 95 % interval. verdict: whether
    the gain is `as-predicted`, to within 2 % of a step, `less` or `more`; `none`: the interval reaches 0 or less and
    excludes the predicted gain; `inconclusive` where it has both. a_step_s, b_step_s: mean step of each run, seconds.
    """

    cause: str
    changes: dict[str, str]
    verdict: Literal["as-predicted", "less", "more", "none", "inconclusive"]
    predicted: float
    ceiling: float
    gain: float
    gain_low: float
    gain_high: float
    steps: int
    a_step_s: list[float]
    b_step_s: list[float]
    a_runs: list[str]
    b_runs: list[str]


def propose(
    verdict: Verdict, request: Mapping[str, Any], nodes: Mapping[int, str], sets: Mapping[str, str] = {}
) -> list[Proposal]:
    """Return the advice of a verdict as proposals, greatest gain first.

    request: its tables. nodes: by rank. sets: the user's own change, whose gain is predicted where its key is known.
    """
    proposals = [_proposal(each, verdict, request, nodes, sets) for each in verdict.advice]
    return sorted(proposals, key=lambda each: -each.gain)


def _proposal(
    advice: Advice, verdict: Verdict, request: Mapping[str, Any], nodes: Mapping[int, str], sets: Mapping[str, str]
) -> Proposal:
    node, wall, gain_ms, changes = "", verdict.wall_ms, advice.gain_ms, {}
    note = "no change for it is tried automatically"
    if advice.cause == "straggler":
        node = "" if verdict.rank is None else nodes.get(verdict.rank, "")
        changes = _excluding(node, request, nodes)
        note = "no rank is surely late" if verdict.rank is None else "the slow rank's node is the only one, or unknown"
    elif names := _DOUBLED.get(advice.cause):
        note = f"the request has no number of a usual name ({', '.join(names)})"
    if known := _known_value(advice.cause, request):
        key, value = known
        changes = {key: str(2 * value or 2)}
        gain_ms = _predict(advice, wall, value, sets.get(key) or sets.get(key.removeprefix("params.")) or changes[key])
    return Proposal(
        cause=advice.cause,
        remedy=advice.remedy,
        step_ms=wall,
        predicted_ms=round(wall - gain_ms, 6),
        bound_ms=round(wall - advice.ceiling_ms, 6),
        gain=round(gain_ms / wall, 4),
        ceiling=round(advice.ceiling_ms / wall, 4),
        changes=changes,
        node=node,
        note="" if changes else f"{note}; one of your own: --verify --cause {advice.cause} --set KEY=VALUE",
    )


def _predict(advice: Advice, wall_ms: float, before: int, text: str) -> float:
    """Return what a change from one number to another takes off a step, ms; the advice's own guess for no increase.

    Saves are rarer by the ratio. Loaders read faster by it, and beside the step: only 0 workers do not yet.
    """
    if not text.isdecimal() or (after := int(text)) <= before:
        return advice.gain_ms
    if advice.cause == "checkpoint":
        return advice.ceiling_ms * (1 - before / after)
    left_ms = wall_ms * before / after if before else advice.ceiling_ms / after
    return min(advice.ceiling_ms, wall_ms - left_ms)


def _excluding(node: str, request: Mapping[str, Any], nodes: Mapping[int, str]) -> dict[str, str]:
    """Return the change that keeps a run off a slow node; {} where that is its only one, or unknown."""
    if not node or set(nodes.values()) == {node}:
        return {}
    excluded = {node, *hostlist.expand(str(request.get("exclude", "")))} if request.get("exclude") else {node}
    return {"exclude": hostlist.fold(sorted(excluded)), "nodelist": ""}


def _known_value(cause: str, request: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the key of a parameter or argument that is doubled against a cause, and its value; None without one."""
    for key in _DOUBLED.get(cause, ()):
        for table in ("params", "args"):
            value = request.get(table, {}).get(key)
            # 0 is no workers, but not an interval of checkpoints.
            if type(value) is int and value >= (0 if cause == "input" else 1):
                return f"{table}.{key}", value
    return None


def least_steps(proposal: Proposal | None, changes: Mapping[str, str]) -> int:
    """Return how many steps show a change: two intervals of checkpoints; 0 for any other."""
    if proposal is None or proposal.cause != "checkpoint":
        return 0
    known = [text for key, text in changes.items() if key.rpartition(".")[2] in _DOUBLED["checkpoint"]]
    return 2 * max((int(text) for text in known if text.isdecimal()), default=0)


def decides(predicted: float) -> Callable[[Effect], bool]:
    """Return the test of whether an effect shows a gain, or that it is none of the predicted size."""
    return lambda effect: effect.high < 0 or -effect.low < max(predicted, MIN_EFFECT)


def conclude(
    proposal: Proposal,
    changes: Mapping[str, str],
    effect: Effect,
    *,
    steps: int,
    times: tuple[Sequence[float], Sequence[float]],
    runs: tuple[Sequence[str], Sequence[str]],
) -> Trial:
    """Return what a trial showed. effect: of the change on a step's time. times, runs: of A and of B."""
    gain, low, high = -effect.effect, -effect.high, -effect.low
    verdict: Literal["as-predicted", "less", "more", "none", "inconclusive"]
    if low > 0:
        least, most = proposal.gain - MIN_EFFECT, proposal.gain + MIN_EFFECT
        verdict = "less" if high < least else "more" if low > most else "as-predicted"
    else:
        verdict = "none" if high < max(proposal.gain, MIN_EFFECT) else "inconclusive"
    return Trial(
        cause=proposal.cause,
        changes=dict(changes),
        verdict=verdict,
        predicted=proposal.gain,
        ceiling=proposal.ceiling,
        gain=round(gain, 4),
        gain_low=round(low, 4),
        gain_high=round(high, 4),
        steps=steps,
        a_step_s=list(times[0]),
        b_step_s=list(times[1]),
        a_runs=list(runs[0]),
        b_runs=list(runs[1]),
    )
