"""Select a part of a version, some arrays and some steps: whole files, unchanged, under a manifest of their own.

    arrays, steps ──▶ chunks ──▶ files ──▶ a smaller manifest, whose digest is the part's version

A shard with a selected step is included whole. Other files are absent, and must not read as zeros: an array that is not
selected has no metadata either, so that opening it fails; `dataset.read` refuses other steps by the manifest.
Consolidated metadata that lists removed arrays is rewritten and stored in the manifest, since the source has no such
file.
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
from pitools.store.manifest import EPISODE_PREFIX, MANIFEST_FILE, FileEntry, Manifest, Subset
from pitools.store.zarr import chunk_keys, metadata
from pitools.store.zarr.metadata import METADATA_NAMES, V2_CONSOLIDATED, V3_FILE, ArrayMetadata

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

    version: "" for a plain store. read_file: returns the bytes of one of its files. arrays: names, groups or globs,
    none for all; arrays of episode offsets are always included. steps: `a:b`, as in Python, but never clipped.
    episodes: `3,7-9`. Equal selections of a version give equal manifests.

    Raises UsageError for an unknown array, step or episode, DataError for a file that differs from the manifest, and as
    `read_file` does.
    """
    read_verified = _verifying_reader(manifest, read_file)
    arrays_by_path = metadata.read_arrays((entry.path for entry in manifest.files), read_verified)
    if {array.name: array.shape for array in arrays_by_path.values()} != {
        n: s.shape for n, s in manifest.arrays.items()
    }:
        raise DataError("the manifest and the Zarr metadata list different arrays", where=MANIFEST_FILE)
    names = _selected_arrays(manifest, arrays)
    runs = _selected_runs(manifest, arrays_by_path, read_verified, steps, episodes)
    selected = {path: array for path, array in arrays_by_path.items() if array.name in names}
    nodes = {group for path in selected for group in metadata.parent_groups(path)} | selected.keys()
    rewritten = dict(_narrowed_metadata(manifest, nodes, read_verified))
    subset_manifest = structs.replace(
        manifest,
        arrays={name: manifest.arrays[name] for name in names},
        subset=Subset(whole=version, arrays=names, steps=runs, metadata=rewritten or UNSET),
    )
    files = tuple(
        _file_entry(entry, rewritten) for entry in _needed_files(subset_manifest, arrays_by_path, selected, nodes)
    )
    return manifest if len(files) == len(manifest.files) else structs.replace(subset_manifest, files=files)


def _file_entry(entry: FileEntry, rewritten: Mapping[str, str]) -> FileEntry:
    if entry.path not in rewritten:
        return entry
    data = rewritten[entry.path].encode()
    return FileEntry(path=entry.path, bytes=len(data), digest=digest_bytes(data))


def _verifying_reader(manifest: Manifest, read: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Return a `read` that accepts only the manifest's files, and compares their content where there is a digest."""
    entries = {entry.path: entry for entry in manifest.files}

    def read_verified(path: str) -> bytes:
        if path not in entries:
            raise DataError("missing", where=path, hint="the dataset is not complete")
        data = read(path)
        hasher = hasher_for(entries[path].digest)
        hasher.update(data)
        if len(data) != entries[path].bytes or entries[path].digest not in ("", hasher.digest()):
            raise DataError("differs from the manifest", where=path, hint="run `check` on the source")
        return data

    return read_verified


def _selected_arrays(manifest: Manifest, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the selected arrays and those of episode offsets, sorted."""
    all_names = sorted(manifest.arrays)
    selected = set() if patterns else set(all_names)
    for name in patterns:
        prefix = f"{name.rstrip('/')}/"
        matches = {
            candidate
            for candidate in all_names
            if candidate == name or candidate.startswith(prefix) or fnmatchcase(candidate, name)
        }
        if not matches:
            hint = "the store is a single array: omit --arrays" if all_names == ["."] else suggest(name, all_names)
            raise UsageError(f"no array {name!r}", where="--arrays", hint=hint)
        selected |= matches
    selected |= {name for name in all_names if name in OFFSET_ARRAYS or name.startswith(EPISODE_PREFIX)}
    return tuple(sorted(selected))


def _selected_runs(
    manifest: Manifest,
    arrays_by_path: Mapping[str, ArrayMetadata],
    read_verified: Callable[[str], bytes],
    steps: str,
    episodes: str,
) -> Runs:
    available: Runs = ((0, manifest.steps),) if manifest.steps else ()
    if manifest.subset:
        available = manifest.subset.steps
    if steps and episodes:
        raise UsageError("both --steps and --episodes", where="--steps", hint="give only one of them")
    if steps:
        runs: Runs = (_parse_steps(steps, manifest.steps),)
    elif episodes:
        runs = _parse_episodes(episodes, episode_offsets.read_offsets(manifest, arrays_by_path, read_verified))
    else:
        return available
    for run in runs:
        if not any(start <= run[0] and run[1] <= stop for start, stop in available):
            available_text = ", ".join(f"{start}:{stop}" for start, stop in available)
            where = "--steps" if steps else "--episodes"
            raise UsageError(
                f"steps {run[0]}:{run[1]} are not in this subset", where=where, hint=f"it has {available_text}"
            )
    return runs


def _parse_steps(text: str, steps: int) -> tuple[int, int]:
    """Parse `a:b` as steps [a, b). Raises UsageError."""
    match = _STEPS.fullmatch(text)
    if not match:
        raise UsageError(f"not a range of steps: {text!r}", where="--steps", hint="such as 1000:2000, :500 or -500:")
    start, stop = int(match[1] or 0), int(match[2] or steps)
    start, stop = start + steps * (start < 0), stop + steps * (stop < 0)
    if not (0 <= start <= steps and 0 <= stop <= steps):
        message = f"steps {text}: out of range (expected within 0:{steps})"
        raise UsageError(message, where="--steps", hint=f"all steps are 0:{steps}")
    if start >= stop:
        hint = "give the first step and the end, which is not included, such as 10:20"
        raise UsageError(f"steps {text}: empty", where="--steps", hint=hint)
    return start, stop


def _parse_episodes(text: str, offsets: list[int]) -> Runs:
    """Parse `3,7-9` as ranges of steps; adjacent ranges are joined. Raises UsageError."""
    count = len(offsets) - 1
    episodes: set[int] = set()
    for part in text.split(","):
        match = _EPISODES.fullmatch(part.strip())
        if not match:
            raise UsageError(f"not a list of episodes: {text!r}", where="--episodes", hint="such as 3,7-9")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UsageError(f"episodes {part.strip()}: reversed", where="--episodes", hint=f"write {last}-{first}")
        if not first <= last < count:
            available = f"episodes 0 to {count - 1}" if count else "no episodes"
            raise UsageError(f"no episodes {part.strip()}", where="--episodes", hint=f"there are {available}")
        episodes.update(range(first, last + 1))
    runs: list[tuple[int, int]] = []
    for number in sorted(episodes):
        start, stop = offsets[number], offsets[number + 1]
        if runs and start == runs[-1][1]:
            start = runs.pop()[0]
        runs += [(start, stop)] if start < stop else []
    if not runs:
        raise UsageError(f"episodes {text}: no steps", where="--episodes")
    return tuple(runs)


def _needed_files(
    subset_manifest: Manifest,
    arrays_by_path: Mapping[str, ArrayMetadata],
    selected: Mapping[str, ArrayMetadata],
    nodes: Set[str],
) -> Iterator[FileEntry]:
    """Yield the files that the selected arrays and steps need. nodes: paths of the arrays and of their parent
    groups.
    """
    row_filters = {path: _make_row_filter(subset_manifest, array) for path, array in selected.items()}
    owners = chunk_keys.arrays_of_paths(arrays_by_path, (entry.path for entry in subset_manifest.files))
    for entry, (path, owner) in zip(subset_manifest.files, owners, strict=True):
        folder, _, name = path.rpartition("/")
        if name in METADATA_NAMES:
            is_needed = folder in nodes
        else:
            is_needed = owner is not None and owner.path in row_filters and row_filters[owner.path](path)
        if is_needed:
            yield entry


def _make_row_filter(subset_manifest: Manifest, array: ArrayMetadata) -> Callable[[str], bool]:
    """Return a function that tells whether a path is a chunk of the array with a selected row."""
    parse_key = chunk_keys.make_key_parser(array)
    rows = chunk_keys.chunk_ranges(array, subset_manifest.present_ranges(array.name)) if array.shape else []
    starts = [row_range.start for row_range in rows]

    def is_wanted(path: str) -> bool:
        coordinate = parse_key(path)
        if not coordinate:
            return coordinate is not None
        index = bisect_right(starts, coordinate[0]) - 1
        return index >= 0 and coordinate[0] in rows[index]

    return is_wanted


def _narrowed_metadata(
    manifest: Manifest, nodes: Set[str], read_verified: Callable[[str], bytes]
) -> Iterator[tuple[str, str]]:
    """Yield path and new text of metadata that would make an absent array readable as zeros."""
    for entry in manifest.files:
        folder, _, name = entry.path.rpartition("/")
        if folder in nodes and name in (V3_FILE, V2_CONSOLIDATED):
            document = metadata.parse_json_object(read_verified(entry.path), entry.path)
            if kept := metadata.keep_consolidated_nodes(entry.path, document, nodes):
                yield entry.path, json.dumps(kept) + "\n"
