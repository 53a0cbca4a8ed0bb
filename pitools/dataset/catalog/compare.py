"""What differs between two versions: their arrays, episodes, files, values and where they came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.record import Record
from pitools.dataset.reader import open_dataset
from pitools.store import manifest as manifests
from pitools.store.manifest import FileEntry, Manifest, Statistics

SAME = "shared"
# What a provenance record says of a file itself; the rest is how it was read.
_CONTENT = ("file", "bytes", "digest")
_DIGITS = 12  # of a recording's digest, with each of its episodes
# Of a manifest, besides what is compared part by part.
_FIELDS = ("name", "episodes", "steps", "subset")


class Difference(Record, frozen=True, kw_only=True, tag="pit.dataset-diff/1"):
    """One thing that differs. kind: `array`, `episode`, `task`, `statistics`, `source`, `option`, `parent`, `manifest`
    (another field of it), `files`.

    change: `added`, `removed`, `changed`; of files also `shared`, which is no difference. count, bytes: of files.
    shift: how far the mean moved, in standard deviations of the first version's, in the column where it moved most.
    """

    kind: str
    what: str
    change: str
    before: str = ""
    after: str = ""
    count: int = 0
    bytes: int = 0
    shift: float | None = None


def compare(first: Path, second: Path) -> Iterator[Difference]:
    """What differs between the versions in these folders; nothing but files they share where they are the same.

    Raises DataError for one that is no dataset, or damaged.
    """
    one, two = manifests.load(first)[0], manifests.load(second)[0]
    if one.files != two.files:
        yield from _by_name("episode", _episodes(first, one), _episodes(second, two))
    yield from compare_manifests(one, two)


def compare_manifests(one: Manifest, two: Manifest) -> Iterator[Difference]:
    """What differs, as far as it shows without reading any array."""
    yield from _by_name("parent", {"": one.parent} if one.parent else {}, {"": two.parent} if two.parent else {})
    yield from _by_name(
        "manifest",
        *(
            {field: _text(getattr(known, field)) for field in _FIELDS if getattr(known, field) is not msgspec.UNSET}
            for known in (one, two)
        ),
    )
    yield from _by_name(
        "array",
        *({name: f"{each.dtype} {list(each.shape)}" for name, each in known.arrays.items()} for known in (one, two)),
    )
    yield from _by_name(
        "task", *({task: f"{count} episodes" for task, count in (known.tasks or {}).items()} for known in (one, two))
    )
    yield from _statistics(one.statistics or {}, two.statistics or {})
    yield from _sources(one, two)
    yield from _files(one.files, two.files)


def _sources(one: Manifest, two: Manifest) -> Iterator[Difference]:
    """How the recordings that two versions were made of differ, and what was asked to be made of them."""
    contents, options = [], []
    for known in (one, two):
        records = _numbered([(str(record.get("file")), record) for record in known.source])
        contents.append({name: f"{each.get('digest')}, {each.get('bytes')} bytes" for name, each in records.items()})
        asked: dict[str, set[str]] = {}
        for record in known.source:
            for key in record.keys() - set(_CONTENT):
                asked.setdefault(key, set()).add(_text(record[key]))
        options.append({key: ", ".join(sorted(values)) for key, values in asked.items()})
    yield from _by_name("source", *contents)
    yield from _by_name("option", *options)


def _by_name(kind: str, one: Mapping[str, str], two: Mapping[str, str]) -> Iterator[Difference]:
    for name in [*one, *(name for name in two if name not in one)]:
        before, after = one.get(name), two.get(name)
        if before != after:
            change = "added" if before is None else "removed" if after is None else "changed"
            yield Difference(kind=kind, what=name, change=change, before=before or "", after=after or "")


def _episodes(path: Path, manifest: Manifest) -> dict[str, str]:
    """What each episode is, by the file it came from and its name there."""
    if "episode_json" not in manifest.arrays:
        return {}
    found = []
    for episode in open_dataset(path).episodes:
        number = episode.get("source", -1)
        known: Mapping[str, Any] = manifest.source[number] if 0 <= number < len(manifest.source) else {}
        text = f"{episode.get('steps')} steps of {str(known.get('digest', 'unknown')).rpartition(':')[2][:_DIGITS]}"
        language = episode.get("language") or ""
        place = f"{known.get('file', '?')}: {episode.get('name')}"
        found.append((place, f"{text}, {language}" if language else text))
    return _numbered(found)


def _numbered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """By name; the second and later of one name are told apart by a number."""
    seen: Counter[str] = Counter()
    found = {}
    for name, value in pairs:
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = value
    return found


def _statistics(one: Mapping[str, Statistics], two: Mapping[str, Statistics]) -> Iterator[Difference]:
    for name in sorted(one.keys() | two.keys()):
        a, b = one.get(name), two.get(name)
        if a and b and a != b:
            comparable = len(a.mean) == len(b.mean) == len(a.deviation)
            shift = max(map(_shift, a.mean, b.mean, a.deviation), default=0.0) if comparable else None
            yield Difference(
                kind="statistics",
                what=name,
                change="changed",
                before=_brief(a),
                after=_brief(b),
                shift=None if shift is None else round(shift, 4),
            )
        elif not (a and b):
            yield from _by_name("statistics", *({name: _brief(known)} if known else {} for known in (a, b)))


def _shift(before: float, after: float, deviation: float) -> float:
    moved = abs(after - before)
    return moved / deviation if deviation > 0 else 0.0 if moved == 0 else float("inf")


def _brief(known: Statistics) -> str:
    low, high = min(known.minimum, default=0.0), max(known.maximum, default=0.0)
    return f"{low:.4g} to {high:.4g}" + (f", {known.bad} bad" if known.bad else "")


def _files(one: tuple[FileEntry, ...], two: tuple[FileEntry, ...]) -> Iterator[Difference]:
    old, new = ({entry.path: entry for entry in files} for files in (one, two))
    both = old.keys() & new.keys()
    groups = {
        SAME: [new[path] for path in both if old[path] == new[path]],
        "changed": [new[path] for path in both if old[path] != new[path]],
        "added": [new[path] for path in new.keys() - both],
        "removed": [old[path] for path in old.keys() - both],
    }
    for change, files in groups.items():
        if files:
            yield Difference(
                kind="files", what="", change=change, count=len(files), bytes=sum(entry.bytes for entry in files)
            )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
