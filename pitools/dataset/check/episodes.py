"""Check episodes: offsets, lengths, records, splits and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError, UsageError
from pitools.dataset.check.cameras import CameraFrames
from pitools.dataset.check.finding import Finding
from pitools.dataset.check.thresholds import Thresholds
from pitools.dataset.check.vectors import VectorStats
from pitools.store.manifest import EPISODE_JSON, EPISODE_OFFSETS, EPISODE_PREFIX, Manifest
from pitools.store.reader.version_reader import VersionReader

# log(steps) of recordings that an operator ends by hand differ by so much anyhow.
_LEAST_SIGMA = 0.25
_MAX_NAMED = 8
Offsets = NDArray[np.int64]


def read_offsets(store: VersionReader) -> tuple[Offsets | None, list[Finding]]:
    """Return the offsets of episodes, or None and why they cannot be used."""
    try:
        return store.offsets, []
    except (DataError, UsageError) as error:
        return None, [_episode_finding(EPISODE_OFFSETS, error.message)]


def find_unequal_lengths(manifest: Manifest) -> Iterator[Finding]:
    """Yield arrays that do not have one row for each step."""
    for name, schema in manifest.arrays.items():
        if not name.rpartition("/")[2].startswith(EPISODE_PREFIX) and schema.shape[:1] != (manifest.steps,):
            yield _episode_finding(
                name, "it has not one row for each step", str(schema.shape), f"({manifest.steps}, …)"
            )


def read_episode_json(
    store: VersionReader, lengths: NDArray[np.int64]
) -> tuple[list[dict[str, Any]] | None, list[Finding]]:
    """Return the episodes' records, None where they cannot be read, and findings where they contradict `lengths`."""
    if EPISODE_JSON not in store.manifest.arrays:
        return None, []
    try:
        records = store.episode_records()
    except DataError as error:
        return None, [_episode_finding(EPISODE_JSON, error.message)]
    findings = [
        Finding(
            level="damage",
            check="episodes",
            array=EPISODE_JSON,
            episode=episode,
            got=str(record["steps"]),
            problem="wrong number of steps",
            expected=f"{steps} steps",
        )
        for episode, (record, steps) in enumerate(zip(records, lengths.tolist(), strict=True))
        if record.get("steps", steps) != steps
    ]
    return records, findings


def find_odd_lengths(lengths: NDArray[np.int64], bounds: Thresholds) -> Iterator[Finding]:
    """Yield episodes too short to train on, or of outlying length."""
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
            problem="too short" if short else "its length differs from the rest",
            expected=f"{max(low, bounds.min_steps):.0f} to {high:.0f}",
        )


def compare_lengths(
    lengths: NDArray[np.int64], parent_lengths: NDArray[np.int64], bounds: Thresholds
) -> Iterator[Finding]:
    """Yield a finding where the distribution of lengths differs from the parent's, by Kolmogorov-Smirnov distance."""
    if not (len(lengths) and len(parent_lengths)):
        return
    places = np.union1d(lengths, parent_lengths)
    shares = (np.searchsorted(np.sort(values), places, "right") / len(values) for values in (lengths, parent_lengths))
    distance = float(np.abs(next(shares) - next(shares)).max())
    # Two samples of one distribution are apart by about 1.63 of this, once in a hundred times.
    limit = bounds.length_shift + 1.63 * float(np.sqrt(1 / len(lengths) + 1 / len(parent_lengths)))
    if distance > limit:
        yield Finding(
            level="warning",
            check="length-drift",
            problem="the distribution of lengths differs from the parent's",
            got=f"median {np.median(lengths):g} steps, a distance of {distance:.2f}",
            expected=f"about {np.median(parent_lengths):g} steps, a distance up to {limit:.2f}",
        )


def find_missing_instructions(episodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for episodes without an instruction, where others have one."""
    silent = [episode for episode, line in enumerate(episodes) if not str(line.get("instruction") or "").strip()]
    if silent and len(silent) < len(episodes):
        yield Finding(
            level="warning",
            check="instruction",
            episode=silent[0] if len(silent) == 1 else None,
            problem=f"no instruction: {_numbers(silent)}",
            got=f"{len(silent)} of {len(episodes)}",
            expected="all or none",
        )


def check_splits(store: VersionReader, episodes: int) -> Iterator[Finding]:
    """Yield splits that name missing episodes, and held-out splits that share episodes with training."""
    try:
        splits = store.attributes.get("splits", {})
    except DataError:
        return  # damaged metadata, or a store of another writer: it has no splits to check
    members: dict[str, set[int]] = {}
    for name, numbers in splits.items() if isinstance(splits, dict) else ():
        try:
            members[name] = {int(number) for number in numbers}
        except (TypeError, ValueError):
            yield _split_finding(name, "not a list of episode numbers", str(numbers)[:80], "numbers")
            continue
        if absent := sorted(number for number in members[name] if not 0 <= number < episodes):
            yield _split_finding(name, "it names missing episodes", _numbers(absent), f"0 to {episodes - 1}")
    held_out = [name for name in members if name.startswith(("val", "test"))]
    for first, second in combinations(members, 2):
        if (
            {first, second} & set(held_out)
            and {first, second} & {"train"}
            and (shared := sorted(members[first] & members[second]))
        ):
            yield _split_finding(first, f"it shares episodes with {second}", _numbers(shared), "none", level="fault")


def check_clock(array: VectorStats, offsets: Offsets, bounds: Thresholds) -> Iterator[Finding]:
    """Yield timestamps that do not increase, gaps, and episodes of another rate. array: one number a step, all in
    memory."""
    if array.values is None or array.columns != 1:
        return
    steps = np.diff(array.values[:, 0])
    inside = np.ones(len(steps), np.bool_)
    inside[(offsets[1:-1] - 1)[(offsets[1:-1] > 0) & (offsets[1:-1] <= len(steps))]] = False
    usual = steps[inside & (steps > 0)]
    period = float(np.median(usual)) if len(usual) else 0.0
    for episode in range(len(offsets) - 1):
        low, high = int(offsets[episode]), int(offsets[episode + 1]) - 1
        own_steps = steps[low:high]
        if high > low and np.isfinite(own_steps).all():  # else the check `nan` reports it
            yield from _episode_clock(array.name, episode, own_steps, period, bounds)


def _episode_clock(
    name: str, episode: int, steps: NDArray[np.float64], period: float, bounds: Thresholds
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
            problem=f"times do not increase at {len(back)} steps",
            got=f"{steps[first]:g}",
        )
        return
    own_period = float(np.median(steps))
    if not period / bounds.period_factor <= own_period <= period * bounds.period_factor:
        low, high = period / bounds.period_factor, period * bounds.period_factor
        yield Finding(
            level="fault",
            check="time",
            array=name,
            episode=episode,
            got=f"a period of {own_period:g}",
            problem="its rate differs from the rest",
            expected=f"{low:g} to {high:g}",
        )
    if len(gaps := np.flatnonzero(steps > bounds.time_gap * own_period)):
        first, more = int(gaps[0]), f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        yield Finding(
            level="fault",
            check="time",
            array=name,
            episode=episode,
            step=first + 1,
            got=f"{steps[first]:g}",
            problem=f"a gap in time{more}",
            expected=f"about {own_period:g}",
        )


def find_frozen_frames(
    camera: CameraFrames,
    action: str,
    deviation: NDArray[np.float64],
    store: VersionReader,
    offsets: Offsets,
    bounds: Thresholds,
) -> Iterator[Finding]:
    """Yield frames that repeat while the action moves. deviation: of the action, by column."""
    for episode, start, stop in camera.frozen_runs(max(2, bounds.frozen_steps)):
        rows = store.read(action, start, stop).reshape(stop - start, -1).astype(np.float64)
        if (np.ptp(rows, axis=0) > bounds.frozen_motion * deviation).any():
            yield Finding(
                level="fault",
                check="frozen",
                array=camera.name,
                episode=episode,
                step=start - int(offsets[episode]),
                problem=f"one frame lasts {stop - start} steps, while the action moves",
                got=f"{stop - start} steps",
                expected=f"fewer than {bounds.frozen_steps}",
            )


def _split_finding(name: str, problem: str, got: str, expected: str, level: Any = "fault") -> Finding:
    return Finding(level=level, check="split", problem=f"split {name!r}: {problem}", got=got, expected=expected)


def _episode_finding(array: str, problem: str, got: str = "", expected: str = "") -> Finding:
    return Finding(level="damage", check="episodes", array=array, problem=problem, got=got, expected=expected)


def _numbers(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return ", ".join(map(str, numbers[:_MAX_NAMED])) + more
