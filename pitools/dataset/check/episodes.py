"""Judge episodes as such: where they begin, how long they are, what is said of them, and their clocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.check.cameras import Camera
from pitools.dataset.check.finding import Finding
from pitools.dataset.check.thresholds import Bounds
from pitools.dataset.check.vectors import Vectors
from pitools.store.manifest import EPISODE_PREFIX, Manifest
from pitools.store.reader.version_reader import Arrays

OFFSETS, LINES = "episode_offsets", "episode_json"
# log(steps) of recordings that an operator ends by hand differ by so much anyhow.
_LEAST_SIGMA = 0.25
_NAMED_AT_MOST = 8
Offsets = NDArray[np.int64]


def offsets(store: Arrays) -> tuple[Offsets | None, list[Finding]]:
    """Where episodes begin, None where that cannot be believed, and why not."""
    manifest = store.manifest
    if OFFSETS not in manifest.arrays:
        return None, [_wrong(OFFSETS, "there is no such array")]
    shape = manifest.arrays[OFFSETS].shape
    if shape != (manifest.episodes + 1,):
        return None, [_wrong(OFFSETS, "not one more than episodes", str(shape), f"({manifest.episodes + 1},)")]
    try:
        found = store.read(OFFSETS, 0, manifest.episodes + 1).astype(np.int64)
    except DataError as error:
        return None, [_wrong(OFFSETS, error.what)]
    if found[0] != 0 or found[-1] != manifest.steps:
        got = f"{found[0]} and {found[-1]}"
        return None, [_wrong(OFFSETS, "not from the first step to the last", got, f"0 and {manifest.steps}")]
    back = np.flatnonzero(np.diff(found) < 0)
    if len(back):
        episode = int(back[0])
        got, least = f"{found[episode + 1]}", f"{found[episode]} or more"
        return None, [_wrong(OFFSETS, f"episode {episode} ends before it begins", got, least)]
    return found, []


def unequal(manifest: Manifest) -> Iterator[Finding]:
    """Arrays that do not have one row for each step."""
    for name, schema in manifest.arrays.items():
        if not name.rpartition("/")[2].startswith(EPISODE_PREFIX) and schema.shape[:1] != (manifest.steps,):
            yield _wrong(name, "it has not one row for each step", str(schema.shape), f"({manifest.steps}, …)")


def lines(store: Arrays, lengths: NDArray[np.int64]) -> tuple[list[dict[str, Any]] | None, list[Finding]]:
    """What is said of each episode, None where that cannot be read, and what is wrong with it."""
    if LINES not in store.manifest.arrays:
        return None, []
    try:
        text = store.read(LINES, 0, store.array(LINES).shape[0]).tobytes()
        told = [dict(json.loads(line)) for line in text.split(b"\n")[:-1]]
    except (DataError, ValueError, TypeError) as error:
        return None, [_wrong(LINES, f"not JSON Lines: {error}")]
    if len(told) != len(lengths):
        return None, [_wrong(LINES, "not a line for each episode", f"{len(told)} lines", f"{len(lengths)}")]
    found = []
    for episode, (line, steps) in enumerate(zip(told, lengths.tolist(), strict=True)):
        if line.get("steps", steps) != steps:
            found.append(
                Finding(
                    level="damage",
                    check="episodes",
                    array=LINES,
                    episode=episode,
                    got=str(line["steps"]),
                    what="it is said to have another length",
                    expected=f"{steps} steps",
                )
            )
    return told, found


def length(lengths: NDArray[np.int64], bounds: Bounds) -> Iterator[Finding]:
    """Episodes too short to learn from, or unlike the rest."""
    if not len(lengths):
        return
    logs = np.log(np.maximum(lengths, 1))
    middle = float(np.median(logs))
    sigma = max(_LEAST_SIGMA, 1.4826 * float(np.median(np.abs(logs - middle))))
    low, high = (np.exp(middle + sign * bounds.length_sigmas * sigma) for sign in (-1, 1))
    for episode in np.flatnonzero((lengths < bounds.min_steps) | (lengths < low) | (lengths > high)).tolist():
        steps = int(lengths[episode])
        short = steps < bounds.min_steps
        yield Finding(
            level="fault" if short else "warning",
            check="length",
            episode=episode,
            got=f"{steps} steps",
            what="too short" if short else "its length is unlike the rest",
            expected=f"{max(low, bounds.min_steps):.0f} to {high:.0f}",
        )


def length_shift(lengths: NDArray[np.int64], before: NDArray[np.int64], bounds: Bounds) -> Iterator[Finding]:
    """Lengths that are distributed otherwise than before, by Kolmogorov and Smirnov's distance."""
    if not (len(lengths) and len(before)):
        return
    places = np.union1d(lengths, before)
    shares = (np.searchsorted(np.sort(known), places, "right") / len(known) for known in (lengths, before))
    distance = float(np.abs(next(shares) - next(shares)).max())
    # Two samples of one distribution are apart by about 1.63 of this, once in a hundred times.
    limit = bounds.length_shift + 1.63 * float(np.sqrt(1 / len(lengths) + 1 / len(before)))
    if distance > limit:
        yield Finding(
            level="warning",
            check="length-drift",
            what="lengths of episodes are distributed otherwise",
            got=f"median {np.median(lengths):g} steps, a distance of {distance:.2f}",
            expected=f"about {np.median(before):g} steps, a distance up to {limit:.2f}",
        )


def language(told: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Episodes without an instruction, where others have one."""
    silent = [episode for episode, line in enumerate(told) if not str(line.get("language") or "").strip()]
    if silent and len(silent) < len(told):
        yield Finding(
            level="warning",
            check="language",
            episode=silent[0] if len(silent) == 1 else None,
            what=f"no instruction: {_numbers(silent)}",
            got=f"{len(silent)} of {len(told)}",
            expected="all or none",
        )


def splits(store: Arrays, episodes: int) -> Iterator[Finding]:
    """Splits that name episodes that are not there, or the same ones for training and for validation."""
    try:
        told = store.attributes.get("splits", {})
    except DataError:
        return  # the metadata are damaged, or those of a store that is not ours: nothing is said of splits
    known: dict[str, set[int]] = {}
    for name, numbers in told.items() if isinstance(told, dict) else ():
        try:
            known[name] = {int(number) for number in numbers}
        except (TypeError, ValueError):
            yield _split(name, "not a list of episode numbers", str(numbers)[:80], "numbers")
            continue
        if absent := sorted(number for number in known[name] if not 0 <= number < episodes):
            yield _split(name, "it names episodes that are not there", _numbers(absent), f"0 to {episodes - 1}")
    held_out = [name for name in known if name.startswith(("val", "test"))]
    for one, other in combinations(known, 2):
        if {one, other} & set(held_out) and {one, other} & {"train"} and (both := sorted(known[one] & known[other])):
            yield _split(one, f"it shares episodes with {other}", _numbers(both), "none", level="fault")


def clock(array: Vectors, where: Offsets, bounds: Bounds) -> Iterator[Finding]:
    """Times that stand still or go back, gaps, and episodes of another rate. array: one number a step, all kept."""
    if array.values is None or array.columns != 1:
        return
    steps = np.diff(array.values[:, 0])
    inside = np.ones(len(steps), np.bool_)
    inside[(where[1:-1] - 1)[(where[1:-1] > 0) & (where[1:-1] <= len(steps))]] = False
    usual = steps[inside & (steps > 0)]
    period = float(np.median(usual)) if len(usual) else 0.0
    for episode in range(len(where) - 1):
        low, high = int(where[episode]), int(where[episode + 1]) - 1
        mine = steps[low:high]
        if high > low and np.isfinite(mine).all():  # else `nan` says so
            yield from _episode_clock(array.name, episode, mine, period, bounds)


def _episode_clock(
    name: str, episode: int, steps: NDArray[np.float64], period: float, bounds: Bounds
) -> Iterator[Finding]:
    if len(back := np.flatnonzero(steps <= 0)):
        first = int(back[0])
        yield Finding(
            level="fault",
            check="time",
            array=name,
            episode=episode,
            step=first + 1,
            expected="more than 0",
            what=f"time does not go on, {len(back)} times",
            got=f"{steps[first]:g}",
        )
        return
    own = float(np.median(steps))
    if not period / bounds.period_factor <= own <= period * bounds.period_factor:
        low, high = period / bounds.period_factor, period * bounds.period_factor
        yield Finding(
            level="fault",
            check="time",
            array=name,
            episode=episode,
            got=f"a period of {own:g}",
            what="it has another rate than the rest",
            expected=f"{low:g} to {high:g}",
        )
    if len(gaps := np.flatnonzero(steps > bounds.time_gap * own)):
        first, more = int(gaps[0]), f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        yield Finding(
            level="fault",
            check="time",
            array=name,
            episode=episode,
            step=first + 1,
            got=f"{steps[first]:g}",
            what=f"a gap in time{more}",
            expected=f"about {own:g}",
        )


def frozen(
    camera: Camera, action: str, deviation: NDArray[np.float64], store: Arrays, where: Offsets, bounds: Bounds
) -> Iterator[Finding]:
    """Frames that last while the action moves. deviation: of the action, by column."""
    for episode, start, stop in camera.frozen(max(2, bounds.frozen_steps)):
        rows = store.read(action, start, stop).reshape(stop - start, -1).astype(np.float64)
        if (np.ptp(rows, axis=0) > bounds.frozen_motion * deviation).any():
            yield Finding(
                level="fault",
                check="frozen",
                array=camera.name,
                episode=episode,
                step=start - int(where[episode]),
                what=f"one frame lasts {stop - start} steps, while the action moves",
                got=f"{stop - start} steps",
                expected=f"fewer than {bounds.frozen_steps}",
            )


def _split(name: str, what: str, got: str, expected: str, level: Any = "fault") -> Finding:
    return Finding(level=level, check="split", what=f"split {name!r}: {what}", got=got, expected=expected)


def _wrong(array: str, what: str, got: str = "", expected: str = "") -> Finding:
    return Finding(level="damage", check="episodes", array=array, what=what, got=got, expected=expected)


def _numbers(found: Sequence[int]) -> str:
    more = f" and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
    return ", ".join(map(str, found[:_NAMED_AT_MOST])) + more
