"""Which episodes to train on: by split, task, name, length and success, and never one that is in quarantine.

    all ──here──▶ ──quarantine──▶ ──split──▶ ──task──▶ ──name──▶ ──length──▶ ──success──▶ numbers of the rest

`here` are those that a staged subset has. Each filter says how many it left, so that the one that left none is named.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, DataError, UsageError, suggest
from pitools.stage.cache import records
from pitools.stage.cache.layout import OBJECTS
from pitools.store import retirement, version_state
from pitools.store.reader.version_reader import VersionReader

Indices = NDArray[np.int64]
REGEX_PREFIX = "re:"
# What says of a whole episode, or of each of its steps, that the task was done. `dones` alone does not: it may mean
# no more than that the recording ended.
_ATTRIBUTES = ("success", "is_success")
_ARRAYS = ("success", "is_success", "rewards", "reward")
_BLOCK_BYTES = 64 << 20


class RecordedEpisode(msgspec.Struct, frozen=True):
    """What a recording says of one episode."""

    name: str = ""
    language: str = ""
    attributes: dict[str, Any] = {}


class EpisodeFilters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to take; whatever is not set takes all. Patterns are globs, or after `re:` regular expressions.

    splits: names, any of them. tasks: patterns of the instruction, any. names: patterns of the episode's name, any.
    min_steps, max_steps: both included. success: True takes those that succeeded, False the others. success_by: the
    attribute of an episode, or the array, that says so: an array where any of its values is at least `success_at`;
    "" takes the first that there is of an attribute or array `success`, and `rewards`, of which any above 0 will do.
    quarantined: take those in quarantine, too.
    """

    splits: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    min_steps: int = 0
    max_steps: int | None = None
    success: bool | None = None
    success_by: str = ""
    success_at: float | None = None
    quarantined: bool = False


_NO_FILTERS = EpisodeFilters()


def filter_episodes(
    arrays: VersionReader, filters: EpisodeFilters = _NO_FILTERS, *, source_dir: Path | None = None
) -> Indices:
    """Numbers of the episodes that pass all filters, ascending. source_dir: the version's folder in its root, whose
    quarantine counts, where `arrays` is a copy of it elsewhere; of a staged set, where it was staged from.

    Warns of a version that is retired. Raises ConfigError where none is left, naming the filter; UsageError for a split
    or pattern that is none; DataError.
    """
    source_dir = source_dir or _source_dir(arrays.path)
    if why := retirement.retirement_reason(source_dir):
        warnings.warn(f"{source_dir} is {why}", stacklevel=2)
    left = np.arange(len(arrays.offsets) - 1)
    told: list[RecordedEpisode] = []
    if filters.tasks or filters.names or filters.success is not None:
        told = read_episodes(arrays)
    trail = [f"{len(left)} episodes"]
    for step in _active_filters(arrays, filters, told, source_dir):
        before, left = left, left[step.keep(left)]
        trail.append(f"{len(left)} {step.text}")
        if not len(left):
            known = _describe_choices(arrays, told, step.kind, before)
            raise ConfigError(f"no episode is left: {', '.join(trail)}", where=str(arrays.path), hint=known)
    return left


def _source_dir(path: Path) -> Path:
    """The folder that a staged set came from, if that is known and seen from here; else its own."""
    if path.parent.name == OBJECTS:
        source = Path(records.read_stage_record(path.parent.parent, path.name).source)
        if source.is_absolute() and source.is_dir():
            return source
    return path


def read_episodes(arrays: VersionReader) -> list[RecordedEpisode]:
    """What the recording says of each episode. Raises DataError."""
    if "episode_json" not in arrays.manifest.arrays:
        raise DataError("it has no `episode_json`, so nothing is known of its episodes", where=str(arrays.path))
    data = arrays.read("episode_json", 0, arrays.manifest.arrays["episode_json"].shape[0]).tobytes()
    try:
        found = msgspec.json.Decoder(RecordedEpisode).decode_lines(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"episode_json is not what it should be: {error}", where=str(arrays.path)) from error
    if len(found) != len(arrays.offsets) - 1:
        what = f"episode_json tells of {len(found)} episodes, episode_offsets of {len(arrays.offsets) - 1}"
        raise DataError(what, where=str(arrays.path), hint="ingest the dataset again")
    return found


FilterKind = Literal["present", "quarantine", "split", "task", "name", "length", "success"]
_Keep = Callable[[Indices], NDArray[np.bool_]]


class ActiveFilter(NamedTuple):
    """A filter that is set. text: what to call what passes it. keep: says which of some episodes do."""

    kind: FilterKind
    text: str
    keep: _Keep


def _active_filters(
    arrays: VersionReader, filters: EpisodeFilters, told: Sequence[RecordedEpisode], home: Path
) -> Iterable[ActiveFilter]:
    if arrays.manifest.subset:
        yield ActiveFilter("present", "staged here", lambda left: are_complete(arrays)[left])
    if not filters.quarantined and (held := version_state.read_quarantine(home)):
        whole, bad = held.whole_version, list(held.episodes)
        yield ActiveFilter("quarantine", "not in quarantine", lambda left: ~np.isin(left, bad) & (not whole))
    if filters.splits:
        wanted = _of_splits(arrays, filters.splits)
        yield ActiveFilter("split", f"of split {', '.join(filters.splits)}", lambda left: np.isin(left, wanted))
    if filters.tasks:
        keep = _matching(filters.tasks, [episode.language for episode in told])
        yield ActiveFilter("task", f"of task {', '.join(filters.tasks)}", keep)
    if filters.names:
        keep = _matching(filters.names, [episode.name for episode in told])
        yield ActiveFilter("name", f"of name {', '.join(filters.names)}", keep)
    if filters.min_steps > 0 or filters.max_steps is not None:
        lengths, most = np.diff(arrays.offsets), filters.max_steps
        text = f"of at least {filters.min_steps} steps" if most is None else f"of {filters.min_steps} to {most} steps"
        yield ActiveFilter(
            "length", text, lambda left: (lengths[left] >= filters.min_steps) & (most is None or lengths[left] <= most)
        )
    if filters.success is not None:
        text = "that succeeded" if filters.success else "that failed"
        yield ActiveFilter("success", text, lambda left: _success(arrays, filters, told, left) == filters.success)


def are_complete(arrays: VersionReader) -> NDArray[np.bool_]:
    """(episodes,) whether all of an episode's steps are here, which in a staged subset those of some are not."""
    subset, offsets = arrays.manifest.subset, arrays.offsets
    if not subset:
        return np.ones(len(offsets) - 1, np.bool_)
    runs = np.array(subset.steps or ((0, 0),), np.int64)
    at = np.searchsorted(runs[:, 0], offsets[:-1], "right") - 1
    found: NDArray[np.bool_] = (at >= 0) & (offsets[1:] <= runs[np.maximum(at, 0), 1])
    return found


def _of_splits(arrays: VersionReader, names: Sequence[str]) -> list[int]:
    splits: dict[str, list[int]] = arrays.attributes.get("splits", {})
    for name in names:
        if name not in splits:
            hint = suggest(name, splits) or "the dataset has no splits"
            raise UsageError(f"no split {name!r}", where=str(arrays.path), hint=hint)
    return [number for name in names for number in splits[name]]


def _matching(patterns: Sequence[str], texts: Sequence[str]) -> _Keep:
    tests = [_make_matcher(pattern) for pattern in patterns]
    # Many episodes have one instruction.
    passes = {text: any(test(text) for test in tests) for text in set(texts)}
    return lambda left: np.array([passes[texts[number]] for number in left.tolist()], np.bool_)


def _make_matcher(pattern: str) -> Callable[[str], bool]:
    if not pattern.startswith(REGEX_PREFIX):
        return lambda text: fnmatchcase(text, pattern)
    try:
        found = re.compile(pattern.removeprefix(REGEX_PREFIX))
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}", where="filters") from error
    return lambda text: found.search(text) is not None


def _success(
    arrays: VersionReader, filters: EpisodeFilters, told: Sequence[RecordedEpisode], left: Indices
) -> NDArray[np.bool_]:
    """Of each of these episodes, whether it succeeded."""
    by, least = filters.success_by, filters.success_at
    for name in (by,) if by else _ATTRIBUTES:
        if any(name in told[number].attributes for number in left.tolist()):
            values = [told[number].attributes.get(name, False) for number in left.tolist()]
            return np.array([_is_success(value, least) for value in values], np.bool_)
    for name in (by,) if by else _ARRAYS:
        if name in arrays.manifest.arrays and arrays.manifest.along_steps(name):
            best = _max_per_episode(arrays, name, left)
            return best > 0 if least is None else best >= least
    what = f"neither an attribute of an episode nor an array {by!r}" if by else "nothing says which episodes succeeded"
    hint = "name the attribute or the array: success_by"
    raise UsageError(what, where=str(arrays.path), hint=hint)


def _is_success(value: object, least: float | None) -> bool:
    if isinstance(value, (int, float)):
        return value > 0 if least is None else value >= least
    return bool(value) and str(value).lower() not in ("false", "no", "0")


def _max_per_episode(arrays: VersionReader, name: str, left: Indices) -> NDArray[np.float64]:
    """The greatest value of an array in each of these episodes; an episode of no steps has -inf."""
    row_bytes = max(1, int(np.prod(arrays.metadata_of(name).shape[1:])) * arrays.dtype(name).itemsize)
    found = np.full(len(left), -np.inf)
    for place, number in enumerate(left.tolist()):
        start, stop = arrays.offsets[number : number + 2].tolist()
        for low in range(start, stop, max(1, _BLOCK_BYTES // row_bytes)):
            block = arrays.read(name, low, min(stop, low + max(1, _BLOCK_BYTES // row_bytes)))
            found[place] = max(found[place], float(block.max()))
    return found


def _describe_choices(arrays: VersionReader, told: Sequence[RecordedEpisode], kind: FilterKind, before: Indices) -> str:
    """What there would have been to choose from."""
    if kind == "task":
        tasks = sorted({told[number].language for number in before.tolist()})
        return f"tasks are: {'; '.join(tasks[:5])}" + ("; …" if len(tasks) > 5 else "")
    if kind == "name":
        return f"the first of them is called {told[int(before[0])].name!r}"
    if kind == "length":
        lengths = np.diff(arrays.offsets)[before]
        return f"they have {int(lengths.min())} to {int(lengths.max())} steps"
    return ""
