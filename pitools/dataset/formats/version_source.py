"""A version of ours as a recording, for a backfill: its episodes become another version's, with a schema or a codec.

Read are episode_offsets and episode_json; splits, instructions and attributes are kept. It has no holes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pitools.core.errors import DataError
from pitools.dataset.formats import zarr_store
from pitools.dataset.formats.model import Recording, skipped
from pitools.store import manifest as manifests
from pitools.store import version_state
from pitools.store.reader.version_reader import Arrays
from pitools.store.resolve import discarded

_EPISODES = "episode_json"
_HINT = "check the version, or stage it again"


def scan(path: Path, skip: Sequence[str]) -> Recording:
    """What the version holds. Raises DataError for one that is damaged, or a part of another.

    What is read of it is compared with its manifest's digests, here and later: a new version would have digests of its
    own, by which no damage that came in could ever be found.
    """
    store = Arrays(path, check="always", verify=True)
    manifest = store.manifest
    if manifest.subset:
        raise DataError(
            "a part of a version, not all of it", where=str(path), hint=f"give version {manifest.subset.parent}"
        )
    lines = _lines(store)
    offsets = store.offsets.tolist()
    if len(lines) != manifest.episodes or len(offsets) != manifest.episodes + 1:
        what = f"it has {manifest.episodes} episodes, {_EPISODES} {len(lines)}"
        raise DataError(what, where=str(path), hint=_HINT)
    columns = {
        name: store.array(name)
        for name in sorted(manifest.arrays)
        if manifest.along_steps(name) and not skipped(name, skip)
    }
    names = _names(lines, store.attributes)
    about = zarr_store.array_attributes(path, columns)
    episodes = tuple(
        zarr_store.episode(
            path,
            name,
            columns,
            low,
            high,
            published=True,
            language=str(line.get("language") or ""),
            attributes=dict(line.get("attributes") or {}),
            array_attributes=about,
        )
        for name, line, low, high in zip(names, lines, offsets[:-1], offsets[1:], strict=True)
    )
    splits = {
        split: tuple(names[number] for number in numbers)
        for split, numbers in (store.attributes.get("splits") or {}).items()
    }
    # Its manifest has the digest of every other file, and is checked against its name.
    return Recording(
        path=path,
        layout="zarr",
        episodes=episodes,
        splits=splits,
        files=(path / manifests.FILE_NAME,),
        attributes={"version": store.version, "sources": store.attributes.get("sources", [])},
        notes=tuple(_notes(path)),
    )


def _notes(path: Path) -> Iterator[str]:
    """What is said against the version: that is not carried over. Raises DataError for a record that is damaged."""
    if why := discarded(path):
        yield f"it is {why}"
    elif known := version_state.quarantine(path):
        yield f"{len(known.episodes)} of its episodes are in quarantine: they come in, and it is not carried over"


def _lines(store: Arrays) -> list[dict[str, Any]]:
    if _EPISODES not in store.manifest.arrays:
        return [{"name": f"episode_{number}"} for number in range(store.manifest.episodes)]
    data = store.read(_EPISODES, 0, store.array(_EPISODES).shape[0]).tobytes()
    try:
        return [dict(json.loads(line)) for line in data.splitlines()]
    except (ValueError, TypeError) as error:
        raise DataError(f"{_EPISODES} is not readable: {error}", where=str(store.path), hint=_HINT) from error


def _names(lines: Sequence[dict[str, Any]], attributes: dict[str, Any]) -> list[str]:
    """The episodes' names; where two recordings had one of the same name, after the file it was in: `take_2/demo_0`."""
    names = [str(line.get("name", "")) for line in lines]
    counts = Counter(names)
    if max(counts.values(), default=0) > 1:
        stems = [Path(str(source.get("file", ""))).stem for source in attributes.get("sources") or []]
        sources = [int(line.get("source", 0)) for line in lines]
        names = [f"{stems[i] if i < len(stems) else i}/{name}" for i, name in zip(sources, names, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{number}/{name}" for number, name in enumerate(names)]
    return names
