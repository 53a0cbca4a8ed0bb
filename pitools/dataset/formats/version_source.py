"""Read a dataset version as a recording, to ingest it again with a transform or another codec.

Splits, instructions and attributes are kept. A subset of a version is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pitools.core.errors import DataError
from pitools.dataset.formats import zarr_store
from pitools.dataset.formats.model import Recording, is_skipped
from pitools.store import manifest as manifests
from pitools.store import version_state
from pitools.store.manifest import EPISODE_JSON
from pitools.store.reader.version_reader import VersionReader
from pitools.store.resolve import unusable_reason


def scan_version(path: Path, skip: Sequence[str]) -> Recording:
    """Return the version's episodes. Raises DataError for a damaged version, and for a subset of a version.

    All reads are verified by the manifest's digests: the new version would get new digests, which would hide damage.
    """
    store = VersionReader(path, checksums="always", verify_digests=True)
    manifest = store.manifest
    if manifest.subset:
        raise DataError(
            "the folder is a subset of a version", where=str(path), hint=f"give version {manifest.subset.whole}"
        )
    records: list[dict[str, Any]] = (
        store.episode_records()
        if EPISODE_JSON in manifest.arrays
        else [{"name": f"episode_{number}"} for number in range(manifest.episodes)]
    )
    offsets = store.offsets.tolist()
    columns = {
        name: store.metadata_of(name)
        for name in sorted(manifest.arrays)
        if not is_skipped(name, skip) and manifest.along_steps(name)
    }
    names = _episode_names(records, store.attributes)
    array_attributes = zarr_store.read_array_attributes(path, columns)
    episodes = tuple(
        zarr_store.make_zarr_episode(
            path,
            name,
            columns,
            low,
            high,
            is_own_version=True,
            instruction=str(line.get("instruction") or ""),
            attributes=dict(line.get("attributes") or {}),
            array_attributes=array_attributes,
        )
        for name, line, low, high in zip(names, records, offsets[:-1], offsets[1:], strict=True)
    )
    splits = {split: tuple(names[number] for number in numbers) for split, numbers in store.splits.items()}
    # The manifest has the digest of every other file, and its own digest is the folder's name.
    return Recording(
        path=path,
        layout="zarr",
        episodes=episodes,
        splits=splits,
        files=(path / manifests.MANIFEST_FILE,),
        attributes={"version": store.version, "recordings": store.attributes.get("recordings", [])},
        notes=tuple(_notes(path)),
    )


def _notes(path: Path) -> Iterator[str]:
    """Yield remarks on retirement and quarantine, which are not carried over. Raises DataError for a damaged record."""
    if reason := unusable_reason(path):
        yield f"the version is {reason}"
    elif quarantine := version_state.read_quarantine(path):
        yield f"{len(quarantine.episodes)} episodes in quarantine are ingested; the quarantine is not carried over"


def _episode_names(records: Sequence[dict[str, Any]], attributes: dict[str, Any]) -> list[str]:
    """Return the episodes' names; duplicates are prefixed by their recording: `take_2/demo_0`."""
    names = [str(line.get("name", "")) for line in records]
    counts = Counter(names)
    if max(counts.values(), default=0) > 1:
        stems = [Path(str(record.get("file", ""))).stem for record in attributes.get("recordings") or []]
        indices = [int(line.get("recording", 0)) for line in records]
        names = [f"{stems[i] if i < len(stems) else i}/{name}" for i, name in zip(indices, names, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{number}/{name}" for number, name in enumerate(names)]
    return names
