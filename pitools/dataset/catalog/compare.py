"""Compare two versions: arrays, episodes, files, statistics and provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.record import Record
from pitools.dataset.reader import open_dataset
from pitools.store import manifest as manifests
from pitools.store.manifest import EPISODE_JSON, FileEntry, Manifest, Statistics

SHARED = "shared"
# Keys of a provenance record that describe the file itself; the others describe how it was read.
_FILE_FIELDS = ("file", "bytes", "digest")
_MAX_SHIFT = 1e9  # JSON has no infinity
_DIGITS = 12  # of a recording's digest, with each of its episodes
# Keys of a manifest that are compared besides its parts.
_FIELDS = ("name", "episodes", "steps", "subset")


class VersionDifference(Record, frozen=True, kw_only=True, tag="pit.dataset-diff/1"):
    """One thing that differs. kind: `array`, `episode`, `instruction`, `statistics`, `recording`, `option`, `parent`,
    `manifest` (another field of it), `files`.

    change: `added`, `removed`, `changed`; of files also `shared`, which is no difference. count, bytes: of files.
    shift: how far the mean moved, in standard deviations of the first version's, in the column where it moved most; at
    most 1e9, as where that column had one value. None where the columns differ.
    """

    kind: str
    subject: str
    change: str
    before: str = ""
    after: str = ""
    count: int = 0
    bytes: int = 0
    shift: float | None = None


def compare_versions(left: Path, right: Path) -> Iterator[VersionDifference]:
    """Yield the differences between the versions in two folders; equal versions yield only the files they share.

    Raises DataError for a folder that is no dataset, or is damaged.
    """
    left_manifest, right_manifest = manifests.load_manifest(left)[0], manifests.load_manifest(right)[0]
    if left_manifest.files != right_manifest.files:
        yield from _compare_by_name("episode", _episodes(left, left_manifest), _episodes(right, right_manifest))
    yield from compare_manifests(left_manifest, right_manifest)


def compare_manifests(left: Manifest, right: Manifest) -> Iterator[VersionDifference]:
    """Yield the differences that two manifests show, without reading any array."""
    yield from _compare_by_name(
        "parent",
        *({"": manifest.parent} if manifest.parent else {} for manifest in (left, right)),
    )
    yield from _compare_by_name(
        "manifest",
        *(
            {
                field: _text(getattr(manifest, field))
                for field in _FIELDS
                if getattr(manifest, field) is not msgspec.UNSET
            }
            for manifest in (left, right)
        ),
    )
    yield from _compare_by_name(
        "array",
        *(
            {name: f"{schema.dtype} {list(schema.shape)}" for name, schema in manifest.arrays.items()}
            for manifest in (left, right)
        ),
    )
    yield from _compare_by_name(
        "instruction",
        *(
            {text: f"{count} episodes" for text, count in (manifest.instructions or {}).items()}
            for manifest in (left, right)
        ),
    )
    yield from _statistics(left.statistics or {}, right.statistics or {})
    yield from _recordings(left, right)
    yield from _files(left.files, right.files)


def _recordings(left: Manifest, right: Manifest) -> Iterator[VersionDifference]:
    """Yield the differences between two versions' recordings and ingest options."""
    contents, options = [], []
    for manifest in (left, right):
        records = _numbered([(str(record.get("file")), record) for record in manifest.recordings])
        contents.append({name: f"{entry.get('digest')}, {entry.get('bytes')} bytes" for name, entry in records.items()})
        option_values: dict[str, set[str]] = {}
        for record in manifest.recordings:
            for key in record.keys() - set(_FILE_FIELDS):
                option_values.setdefault(key, set()).add(_text(record[key]))
        options.append({key: ", ".join(sorted(values)) for key, values in option_values.items()})
    yield from _compare_by_name("recording", *contents)
    yield from _compare_by_name("option", *options)


def _compare_by_name(kind: str, left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[VersionDifference]:
    for name in [*left, *(name for name in right if name not in left)]:
        before, after = left.get(name), right.get(name)
        if before != after:
            change = "added" if before is None else "removed" if after is None else "changed"
            yield VersionDifference(kind=kind, subject=name, change=change, before=before or "", after=after or "")


def _episodes(path: Path, manifest: Manifest) -> dict[str, str]:
    """Return steps, recording's digest and instruction of each episode, by its recording and its name there."""
    if EPISODE_JSON not in manifest.arrays:
        return {}
    pairs = []
    for episode in open_dataset(path).episodes:
        number = episode.get("recording", -1)
        recording: Mapping[str, Any] = manifest.recordings[number] if 0 <= number < len(manifest.recordings) else {}
        text = f"{episode.get('steps')} steps of {str(recording.get('digest', 'unknown')).rpartition(':')[2][:_DIGITS]}"
        instruction = episode.get("instruction") or ""
        name = f"{recording.get('file', '?')}: {episode.get('name')}"
        pairs.append((name, f"{text}, {instruction}" if instruction else text))
    return _numbered(pairs)


def _numbered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values by name; a number is appended to a repeated name."""
    counts: Counter[str] = Counter()
    numbered = {}
    for name, value in pairs:
        counts[name] += 1
        numbered[name if counts[name] == 1 else f"{name} ({counts[name]})"] = value
    return numbered


def _statistics(left: Mapping[str, Statistics], right: Mapping[str, Statistics]) -> Iterator[VersionDifference]:
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        if a and b and a != b:
            comparable = len(a.mean) == len(b.mean) == len(a.deviation)
            shift = max(map(_shift, a.mean, b.mean, a.deviation), default=0.0) if comparable else None
            yield VersionDifference(
                kind="statistics",
                subject=name,
                change="changed",
                before=_format_statistics(a),
                after=_format_statistics(b),
                shift=None if shift is None else round(shift, 4),
            )
        elif not (a and b):
            yield from _compare_by_name(
                "statistics", *({name: _format_statistics(statistics)} if statistics else {} for statistics in (a, b))
            )


def _shift(before: float, after: float, deviation: float) -> float:
    moved = abs(after - before)
    return min(moved / deviation, _MAX_SHIFT) if deviation > 0 else _MAX_SHIFT if moved else 0.0


def _format_statistics(statistics: Statistics) -> str:
    low, high = min(statistics.minimum, default=0.0), max(statistics.maximum, default=0.0)
    return f"{low:.4g} to {high:.4g}" + (f", {statistics.non_finite} not finite" if statistics.non_finite else "")


def _files(left: tuple[FileEntry, ...], right: tuple[FileEntry, ...]) -> Iterator[VersionDifference]:
    old, new = ({entry.path: entry for entry in files} for files in (left, right))
    both = old.keys() & new.keys()
    groups = {
        SHARED: [new[path] for path in both if old[path] == new[path]],
        "changed": [new[path] for path in both if old[path] != new[path]],
        "added": [new[path] for path in new.keys() - both],
        "removed": [old[path] for path in old.keys() - both],
    }
    for change, files in groups.items():
        if files:
            yield VersionDifference(
                kind="files", subject="", change=change, count=len(files), bytes=sum(entry.bytes for entry in files)
            )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
