"""A part of a version: some arrays, some steps. Whole files of it, data never changed, under a manifest of its own.

    arrays, steps ──▶ chunks ──▶ files ──▶ a smaller manifest, whose digest is the part's version

A shard that holds a wanted step comes whole. What is not wanted has no file, and must not be mistaken for zeros: an
array left out has no metadata either, so that opening it is an error; steps left out are refused by `dataset.read`,
by what the manifest says. Consolidated metadata that name an array left out are written anew without it, into the
manifest itself, since the source has no such file.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase

from msgspec import UNSET, structs

from pitools.core.errors import DataError, UsageError, suggest
from pitools.stage import episode_offsets
from pitools.stage.sources.store_listing import OFFSET_ARRAYS
from pitools.store.digest import digest_bytes, hasher_for
from pitools.store.manifest import EPISODE_PREFIX, FILE_NAME, FileEntry, Manifest, Subset
from pitools.store.zarr import chunk_keys, metadata
from pitools.store.zarr.metadata import METADATA_NAMES, V2_CONSOLIDATED, V3, ArrayMetadata

Runs = tuple[tuple[int, int], ...]
_STEPS = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?")
_EPISODES = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def make_subset(
    manifest: Manifest,
    version: str,
    read_file: Callable[[str], bytes],
    *,
    arrays: Sequence[str] = (),
    steps: str = "",
    episodes: str = "",
) -> Manifest:
    """Return the manifest of the part of a version that holds these arrays and steps.

    version: "" for a store that has none. read_file: the bytes of one of its files. arrays: names, groups or globs of
    them, none for all; those that say where episodes lie come along. steps: `a:b`, as in Python, but never clipped.
    episodes: `3,7-9`. The same choice of the same version always gives the same manifest.

    Raises UsageError for what is not there, DataError for a file that is not what the manifest says, as `read_file`
    does.
    """
    get = _verifying_reader(manifest, read_file)
    known = metadata.read_arrays((entry.path for entry in manifest.files), get)
    if {array.name: array.shape for array in known.values()} != {n: s.shape for n, s in manifest.arrays.items()}:
        raise DataError("its manifest and its metadata name different arrays", where=FILE_NAME)
    names = _selected_arrays(manifest, arrays)
    runs = _selected_runs(manifest, known, get, steps, episodes)
    kept = {path: array for path, array in known.items() if array.name in names}
    nodes = {group for path in kept for group in metadata.parent_groups(path)} | kept.keys()
    rewritten = dict(_narrowed(manifest, nodes, get))
    part = structs.replace(
        manifest,
        arrays={name: manifest.arrays[name] for name in names},
        subset=Subset(parent=version, arrays=names, steps=runs, metadata=rewritten or UNSET),
    )
    files = tuple(_entry(entry, rewritten) for entry in _needed(part, known, kept, nodes))
    return manifest if len(files) == len(manifest.files) else structs.replace(part, files=files)


def _entry(entry: FileEntry, rewritten: Mapping[str, str]) -> FileEntry:
    if entry.path not in rewritten:
        return entry
    data = rewritten[entry.path].encode()
    return FileEntry(path=entry.path, bytes=len(data), digest=digest_bytes(data))


def _verifying_reader(manifest: Manifest, read: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """`read`, for the manifest's files alone, their content compared where there is a digest."""
    entries = {entry.path: entry for entry in manifest.files}

    def get(path: str) -> bytes:
        if path not in entries:
            raise DataError("missing", where=path, hint="the dataset is not complete")
        data = read(path)
        hasher = hasher_for(entries[path].digest)
        hasher.update(data)
        if len(data) != entries[path].bytes or entries[path].digest not in ("", hasher.digest()):
            raise DataError("it is not what the manifest says", where=path, hint="run `check` on the source")
        return data

    return get


def _selected_arrays(manifest: Manifest, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the selected arrays, sorted, and those that hold the episode offsets."""
    known = sorted(manifest.arrays)
    kept = set() if wanted else set(known)
    for name in wanted:
        inside = f"{name.rstrip('/')}/"
        found = {other for other in known if other == name or other.startswith(inside) or fnmatchcase(other, name)}
        if not found:
            hint = "it is a single array: leave --arrays out" if known == ["."] else suggest(name, known)
            raise UsageError(f"no array {name!r}", where="--arrays", hint=hint)
        kept |= found
    kept |= {name for name in known if name in OFFSET_ARRAYS or name.startswith(EPISODE_PREFIX)}
    return tuple(sorted(kept))


def _selected_runs(
    manifest: Manifest, known: Mapping[str, ArrayMetadata], get: Callable[[str], bytes], steps: str, episodes: str
) -> Runs:
    here: Runs = ((0, manifest.steps),) if manifest.steps else ()
    if manifest.subset:
        here = manifest.subset.steps
    if steps and episodes:
        raise UsageError("both --steps and --episodes", where="--steps", hint="give one of them")
    if steps:
        wanted: Runs = (_parse_steps(steps, manifest.steps),)
    elif episodes:
        wanted = _parse_episodes(episodes, episode_offsets.read_offsets(manifest, known, get))
    else:
        return here
    for run in wanted:
        if not any(start <= run[0] and run[1] <= stop for start, stop in here):
            has = ", ".join(f"{start}:{stop}" for start, stop in here)
            where = "--steps" if steps else "--episodes"
            raise UsageError(f"steps {run[0]}:{run[1]} are not in this subset", where=where, hint=f"it has {has}")
    return wanted


def _parse_steps(text: str, steps: int) -> tuple[int, int]:
    """Parse `a:b` as steps [a, b). Raises UsageError."""
    match = _STEPS.fullmatch(text)
    if not match:
        raise UsageError(f"not a range of steps: {text!r}", where="--steps", hint="such as 1000:2000, :500 or -500:")
    start, stop = int(match[1] or 0), int(match[2] or steps)
    start, stop = start + steps * (start < 0), stop + steps * (stop < 0)
    if not (0 <= start <= steps and 0 <= stop <= steps):
        message = f"{text} is not within the {steps} steps there are"
        raise UsageError(message, where="--steps", hint=f"all of them are 0:{steps}")
    if start >= stop:
        hint = "from the first step to the one after the last, such as 10:20"
        raise UsageError(f"{text} holds no step", where="--steps", hint=hint)
    return start, stop


def _parse_episodes(text: str, bounds: list[int]) -> Runs:
    """Parse `3,7-9` as runs of steps, neighbours joined. Raises UsageError."""
    count = len(bounds) - 1
    wanted: set[int] = set()
    for part in text.split(","):
        match = _EPISODES.fullmatch(part.strip())
        if not match:
            raise UsageError(f"not a list of episodes: {text!r}", where="--episodes", hint="such as 3,7-9")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UsageError(f"{part.strip()} goes backwards", where="--episodes", hint=f"write {last}-{first}")
        if not first <= last < count:
            there = f"episodes 0 to {count - 1}" if count else "no episodes"
            raise UsageError(f"no episodes {part.strip()}", where="--episodes", hint=f"there are {there}")
        wanted.update(range(first, last + 1))
    runs: list[tuple[int, int]] = []
    for number in sorted(wanted):
        start, stop = bounds[number], bounds[number + 1]
        if runs and start == runs[-1][1]:
            start = runs.pop()[0]
        runs += [(start, stop)] if start < stop else []
    if not runs:
        raise UsageError(f"episodes {text} hold no step", where="--episodes")
    return tuple(runs)


def _needed(
    part: Manifest, known: Mapping[str, ArrayMetadata], kept: Mapping[str, ArrayMetadata], nodes: Set[str]
) -> Iterator[FileEntry]:
    """The files that the arrays and steps of `part`, which still names all files, are made of. kept: its arrays.
    nodes: paths of these and of the groups above them."""
    wanted = {path: _holds_wanted_rows(part, array) for path, array in kept.items()}
    owners = chunk_keys.arrays_of_paths(known, (entry.path for entry in part.files))
    for entry, (path, owner) in zip(part.files, owners, strict=True):
        folder, _, name = path.rpartition("/")
        if name in METADATA_NAMES:
            needed = folder in nodes
        else:
            needed = owner is not None and owner.path in wanted and wanted[owner.path](path)
        if needed:
            yield entry


def _holds_wanted_rows(part: Manifest, array: ArrayMetadata) -> Callable[[str], bool]:
    """Whether a path is a chunk of the array that holds a wanted row."""
    find = chunk_keys.make_key_parser(array)
    rows = chunk_keys.chunk_ranges(array, part.runs(array.name)) if array.shape else []
    starts = [some.start for some in rows]

    def wanted(path: str) -> bool:
        coordinate = find(path)
        if not coordinate:
            return coordinate is not None
        at = bisect_right(starts, coordinate[0]) - 1
        return at >= 0 and coordinate[0] in rows[at]

    return wanted


def _narrowed(manifest: Manifest, nodes: Set[str], get: Callable[[str], bytes]) -> Iterator[tuple[str, str]]:
    """Path and new text of metadata by which a reader would find an array that is not there, and read it as zeros."""
    for entry in manifest.files:
        folder, _, name = entry.path.rpartition("/")
        if folder in nodes and name in (V3, V2_CONSOLIDATED):
            document = metadata.parse_json_object(get(entry.path), entry.path)
            if narrower := metadata.narrowed(entry.path, document, nodes):
                yield entry.path, json.dumps(narrower) + "\n"
