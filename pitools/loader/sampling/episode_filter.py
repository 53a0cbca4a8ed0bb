"""Select episodes for training by split, instruction, name, length and success; quarantined episodes are left out.

    all ──present──▶ ──quarantine──▶ ──split──▶ ──instruction──▶ ──name──▶ ──length──▶ ──success──▶ episode numbers

`present`: complete in a staged subset. The error for an empty selection lists the count after each filter.
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
from pitools.loader.sampling.shuffle import Indices
from pitools.stage.cache import records
from pitools.store import retirement, version_state
from pitools.store.manifest import EPISODE_JSON
from pitools.store.reader.version_reader import VersionReader

REGEX_PREFIX = "re:"
# Attributes of an episode, and arrays along steps, that mark success. Not `dones`, which may only mark the end of the
# recording.
_ATTRIBUTES = ("success", "is_success")
_ARRAYS = ("success", "is_success", "rewards", "reward")
_SUCCESS_WORDS = ("success", "succeeded", "successful", "true", "yes", "y")
_FAILURE_WORDS = ("failure", "failed", "fail", "unsuccessful", "false", "no", "n", "none", "")
_BLOCK_BYTES = 64 << 20


class RecordedEpisode(msgspec.Struct, frozen=True):
    """An episode's metadata in `episode_json`."""

    name: str = ""
    instruction: str = ""
    attributes: dict[str, Any] = {}


class EpisodeFilters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters of episodes; by default all pass. Patterns are globs, or regular expressions after `re:`.

    splits: names, any. instructions: patterns of the instruction, any. names: patterns of the episode's name, any.
    min_steps, max_steps: inclusive. success: True for successful episodes, False for the others. success_by: the
    episode attribute or the array that marks success; "": the first present of attributes `success`, `is_success` and
    arrays `success`, `is_success`, `rewards`, `reward`. success_at: the least value for success, of an array the least
    maximum; None: any value above 0. quarantined: include quarantined episodes.
    """

    splits: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    min_steps: int = 0
    max_steps: int | None = None
    success: bool | None = None
    success_by: str = ""
    success_at: float | None = None
    quarantined: bool = False


_NO_FILTERS = EpisodeFilters()


def filter_episodes(
    reader: VersionReader, filters: EpisodeFilters = _NO_FILTERS, *, source_dir: Path | None = None
) -> Indices:
    """Return the numbers of the episodes that pass all filters, ascending.

    source_dir: the version's original folder, whose quarantine applies, if `reader` is a copy; the default for a staged
    version is the folder it was staged from; where that is not accessible, its quarantine at the last staging applies.
    Warns if the version is retired. Raises ConfigError if no episode passes, with the counts; UsageError for an unknown
    split or an invalid pattern; DataError.
    """
    quarantine = version_state.read_quarantine(source_dir) if source_dir else records.quarantine_of(reader.path)
    source_dir = source_dir or records.source_dir(reader.path)
    if reason := retirement.retirement_reason(source_dir):
        warnings.warn(f"{source_dir}: {reason}", stacklevel=2)
    episodes = np.arange(len(reader.offsets) - 1)
    recorded: list[RecordedEpisode] = []
    if filters.instructions or filters.names or filters.success is not None:
        recorded = read_episodes(reader)
    counts = [f"{len(episodes)} episodes"]
    for step in _active_filters(reader, filters, recorded, quarantine):
        candidates, episodes = episodes, episodes[step.keep(episodes)]
        counts.append(f"{len(episodes)} {step.text}")
        if not len(episodes):
            hint = _describe_choices(reader, recorded, step.kind, candidates)
            raise ConfigError(f"filters: no episode passes: {', '.join(counts)}", where=str(reader.path), hint=hint)
    return episodes


def read_episodes(reader: VersionReader) -> list[RecordedEpisode]:
    """Return the metadata of each episode. Raises DataError if `episode_json` is missing or invalid."""
    if EPISODE_JSON not in reader.manifest.arrays:
        raise DataError(f"{EPISODE_JSON}: missing from the version", where=str(reader.path))
    try:
        return msgspec.convert(reader.episode_records(), list[RecordedEpisode])
    except msgspec.ValidationError as error:
        raise DataError(f"{EPISODE_JSON}: {error}", where=str(reader.path), hint="ingest the dataset again") from error


FilterKind = Literal["present", "quarantine", "split", "instruction", "name", "length", "success"]
_Keep = Callable[[Indices], NDArray[np.bool_]]


class ActiveFilter(NamedTuple):
    """A filter that is set. text: describes the episodes that pass. keep: maps episode numbers to a mask."""

    kind: FilterKind
    text: str
    keep: _Keep


def _active_filters(
    reader: VersionReader,
    filters: EpisodeFilters,
    recorded: Sequence[RecordedEpisode],
    quarantine: version_state.Quarantine | None,
) -> Iterable[ActiveFilter]:
    if reader.manifest.subset:
        yield ActiveFilter("present", "staged here", lambda episodes: are_complete(reader)[episodes])
    if not filters.quarantined and quarantine:
        all_quarantined, quarantined = quarantine.whole_version, list(quarantine.episodes)
        yield ActiveFilter(
            "quarantine", "not in quarantine", lambda episodes: ~np.isin(episodes, quarantined) & (not all_quarantined)
        )
    if filters.splits:
        members = _of_splits(reader, filters.splits)
        yield ActiveFilter(
            "split", f"of split {', '.join(filters.splits)}", lambda episodes: np.isin(episodes, members)
        )
    if filters.instructions:
        keep = _matching(filters.instructions, [episode.instruction for episode in recorded])
        yield ActiveFilter("instruction", f"of instruction {', '.join(filters.instructions)}", keep)
    if filters.names:
        keep = _matching(filters.names, [episode.name for episode in recorded])
        yield ActiveFilter("name", f"of name {', '.join(filters.names)}", keep)
    if filters.min_steps > 0 or filters.max_steps is not None:
        lengths, most = np.diff(reader.offsets), filters.max_steps
        text = f"of at least {filters.min_steps} steps" if most is None else f"of {filters.min_steps} to {most} steps"
        yield ActiveFilter(
            "length",
            text,
            lambda episodes: (lengths[episodes] >= filters.min_steps) & (most is None or lengths[episodes] <= most),
        )
    if filters.success is not None:
        text = "that succeeded" if filters.success else "that failed"
        yield ActiveFilter(
            "success", text, lambda episodes: _success(reader, filters, recorded, episodes) == filters.success
        )


def are_complete(reader: VersionReader) -> NDArray[np.bool_]:
    """Return an (episodes,) mask: all of the episode's steps are present in the staged subset."""
    subset, offsets = reader.manifest.subset, reader.offsets
    if not subset:
        return np.ones(len(offsets) - 1, np.bool_)
    runs = np.array(subset.steps or ((0, 0),), np.int64)
    index = np.searchsorted(runs[:, 0], offsets[:-1], "right") - 1
    mask: NDArray[np.bool_] = (index >= 0) & (offsets[1:] <= runs[np.maximum(index, 0), 1])
    return mask


def _of_splits(reader: VersionReader, names: Sequence[str]) -> list[int]:
    splits = reader.splits
    for name in names:
        if name not in splits:
            hint = suggest(name, splits) or "the dataset has no splits"
            raise UsageError(f"split {name!r}: not found", where=str(reader.path), hint=hint)
    return [number for name in names for number in splits[name]]


def _matching(patterns: Sequence[str], texts: Sequence[str]) -> _Keep:
    tests = [_make_matcher(pattern) for pattern in patterns]
    # Each distinct text is matched once: many episodes have the same instruction.
    passes = {text: any(test(text) for test in tests) for text in set(texts)}
    return lambda episodes: np.array([passes[texts[number]] for number in episodes.tolist()], np.bool_)


def _make_matcher(pattern: str) -> Callable[[str], bool]:
    if not pattern.startswith(REGEX_PREFIX):
        return lambda text: fnmatchcase(text, pattern)
    try:
        expression = re.compile(pattern.removeprefix(REGEX_PREFIX))
    except re.error as error:
        raise UsageError(f"{pattern!r}: not a regular expression: {error}", where="filters") from error
    return lambda text: expression.search(text) is not None


def _success(
    reader: VersionReader, filters: EpisodeFilters, recorded: Sequence[RecordedEpisode], episodes: Indices
) -> NDArray[np.bool_]:
    """Return a mask of the successful ones among these episodes."""
    by, least = filters.success_by, filters.success_at
    for name in (by,) if by else _ATTRIBUTES:
        if any(name in recorded[number].attributes for number in episodes.tolist()):
            values = [recorded[number].attributes.get(name, False) for number in episodes.tolist()]
            return np.array([_is_success(value, least) for value in values], np.bool_)
    for name in (by,) if by else _ARRAYS:
        if name in reader.manifest.arrays and reader.manifest.along_steps(name):
            best = _max_per_episode(reader, name, episodes)
            return best > 0 if least is None else best >= least
    message = f"{by!r}: neither an episode attribute nor an array along steps" if by else "success: not recorded"
    hint = "name the attribute or the array: success_by"
    raise UsageError(message, where=str(reader.path), hint=hint)


def _is_success(value: object, least: float | None) -> bool:
    if isinstance(value, str):
        value = _number_of_word(value.strip().lower())
    if isinstance(value, (int, float)):
        return value > 0 if least is None else value >= least
    return bool(value)


def _number_of_word(word: str) -> float:
    """Return a text of success as a number; a text of another meaning is neither success nor failure: UsageError."""
    if word in _SUCCESS_WORDS or word in _FAILURE_WORDS:
        return float(word in _SUCCESS_WORDS)
    try:
        return float(word)
    except ValueError as error:
        message = f"{word!r}: not a text of success or failure (expected such as {_SUCCESS_WORDS[0]!r}, 'failed')"
        raise UsageError(message, where="success", hint="name another attribute or an array: success_by") from error


def _max_per_episode(reader: VersionReader, name: str, episodes: Indices) -> NDArray[np.float64]:
    """Return the maximum of an array in each of these episodes; -inf for an empty episode."""
    row_bytes = max(1, int(np.prod(reader.metadata_of(name).shape[1:])) * reader.dtype(name).itemsize)
    maxima = np.full(len(episodes), -np.inf)
    for index, number in enumerate(episodes.tolist()):
        start, stop = reader.offsets[number : number + 2].tolist()
        for low in range(start, stop, max(1, _BLOCK_BYTES // row_bytes)):
            block = reader.read(name, low, min(stop, low + max(1, _BLOCK_BYTES // row_bytes)))
            maxima[index] = max(maxima[index], float(block.max()))
    return maxima


def _describe_choices(
    reader: VersionReader, recorded: Sequence[RecordedEpisode], kind: FilterKind, candidates: Indices
) -> str:
    """Return a hint on the values that a filter could have matched."""
    if kind == "instruction":
        instructions = sorted({recorded[number].instruction for number in candidates.tolist()})
        return f"instructions: {'; '.join(instructions[:5])}" + ("; …" if len(instructions) > 5 else "")
    if kind == "name":
        return f"first name: {recorded[int(candidates[0])].name!r}"
    if kind == "length":
        lengths = np.diff(reader.offsets)[candidates]
        return f"lengths: {int(lengths.min())} to {int(lengths.max())} steps"
    return ""
