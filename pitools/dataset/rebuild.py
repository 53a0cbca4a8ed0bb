"""A version made once more from where its manifest says it came from, to show that it would be the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pitools.core.errors import DataError, UsageError
from pitools.core.fs import os_error, remove_tree, sync_dir
from pitools.core.record import Record
from pitools.dataset.catalog import compare
from pitools.dataset.catalog.compare import Difference
from pitools.store import digest, version_state
from pitools.store import manifest as manifests
from pitools.store.manifest import Manifest
from pitools.store.publish import TEMPORARY, publish
from pitools.store.version_list import is_version

_LEASE_S = 2 * 86400


class Rebuilt(Record, frozen=True, kw_only=True, tag="pit.dataset-rebuilt/1"):
    """What became of it. state: `identical`, to what the manifest says; `same-files`, where only our own release
    is another; `differs`. rebuilt: the version that was made. path: where it was published, or "".

    repaired_files: of the version that was there, replaced since they were missing or damaged.
    """

    name: str
    version: str
    rebuilt: str
    state: str
    path: str = ""
    repaired_files: int = 0


def rebuild(path: Path, folders: Sequence[Path], *, to_publish: bool = False) -> tuple[Rebuilt, list[Difference]]:
    """Ingest again what the version in folder `path` was made of, as it was, and compare. Only its manifest is read.

    folders: where the recordings are now, at whatever depth. to_publish: put the result in the root: into the version
    itself what of its files is missing or damaged, or beside it as another one. Raises UsageError for recordings that
    are not found, DataError where the version that it was appended to has damage itself, and as an ingest.
    """
    whole = path.resolve()
    root, name = whole.parent.parent, whole.parent.name
    manifest, data = manifests.load(whole)
    version = manifests.version(data)
    if manifest.subset:
        hint = f"rebuild version {manifest.subset.parent}, and stage this part of it again"
        raise UsageError("it is a part of a version, which no ingest made", where=str(path), hint=hint)
    parent, records = _own(root, name, manifest, str(path))
    files = find(records, folders, root)
    with contextlib.ExitStack() as stack:
        for needed in (whole, *([parent] if parent else [])):
            stack.enter_context(version_state.lease(needed, _LEASE_S, f"rebuild of {name}/{version}"))
        made = _ingest(files, records, stack.enter_context(_aside(root, name)), manifest.name, parent)
        known = manifests.load(made)[0]
        found = [] if made.name == version else list(compare.compare_manifests(manifest, known))
        state = "identical" if made.name == version else _state(found)
        record = Rebuilt(name=name, version=version, rebuilt=made.name, state=state)
        if not to_publish:
            return record, found
        final = whole.parent / made.name
        repaired = 0 if publish(made, final) else _repair(final, made, known)
        return Rebuilt(
            name=name, version=version, rebuilt=made.name, state=state, path=str(final), repaired_files=repaired
        ), found


def _state(found: Sequence[Difference]) -> str:
    other = {(each.kind, each.what) for each in found if each.change != compare.SAME}
    return "same-files" if other == {("option", "pitools")} else "differs"


def find(records: Sequence[dict[str, Any]], folders: Sequence[Path], root: Path) -> list[Path]:
    """The recordings that provenance names, by name and size; of several such, by digest. Raises UsageError."""
    wanted = {str(record.get("file")) for record in records}
    places: dict[str, list[Path]] = {name: [] for name in wanted}
    for name in wanted:
        if is_version(name):  # a backfill of one of ours
            places[name] += [found.parent for found in root.glob(f"*/{name}/{manifests.FILE_NAME}")]
    for folder in folders:
        if folder.name in wanted:
            places[folder.name].append(folder)
        for here, inner, names in os.walk(folder):
            for name in wanted.intersection((*inner, *names)):
                places[name].append(Path(here) / name)
    return [_choose(record, places[str(record.get("file"))]) for record in records]


def _choose(record: dict[str, Any], places: list[Path]) -> Path:
    places = list({path.resolve(): path for path in places}.values())
    name, size, text = str(record.get("file")), record.get("bytes"), str(record.get("digest"))
    likely = [path for path in places if path.is_dir() or (path.is_file() and path.stat().st_size == size)]
    if len(likely) > 1:
        likely = [path for path in likely if path.is_dir() or digest.of_file(path) == (size, text)]
    if len(likely) == 1:
        return likely[0]
    if likely and not likely[0].is_dir():
        return likely[0]  # the same bytes, twice
    if likely:
        hint = "give --from nearer to the right one"
        raise UsageError(f"{len(likely)} folders are called {name}", where=str(likely[0]), hint=hint)
    what = f"{name} is not there with {size} bytes and digest {text}"
    raise UsageError(what, hint="give the folder that it is in: --from FOLDER")


def _own(root: Path, name: str, manifest: Manifest, where: str) -> tuple[Path | None, list[dict[str, Any]]]:
    """The version that this one begins with, and the records of what came to it. Raises UsageError."""
    records = list(manifest.source)
    parent = root / name / manifest.parent if manifest.parent else None
    if parent:
        if not (parent / manifests.FILE_NAME).is_file():
            hint = "rebuild or stage that one first"
            raise UsageError(f"it was appended to {manifest.parent}, which is not there", where=where, hint=hint)
        records = records[len(manifests.load(parent)[0].source) :]
    if not records:
        raise UsageError("its manifest does not say what it was made of", where=where)
    return parent, records


def _ingest(
    files: Sequence[Path], records: Sequence[dict[str, Any]], aside: Path, name: str, parent: Path | None
) -> Path:
    """The same ingest once more, in a root of its own. All records of one ingest hold the same options."""
    from pitools.dataset.ingest.ingest import ingest

    asked = records[0]
    layouts = {str(record.get("layout", "auto")) for record in records}
    schema = None
    if held := asked.get("schema"):
        schema = aside / "schema.toml"
        schema.write_text(str(held["text"]))
    made = ingest(
        files,
        root=aside,
        name=name,
        layout=layouts.pop() if len(layouts) == 1 else "auto",
        codec=str(asked.get("codec", "")),
        skip=[str(glob) for glob in asked.get("skip", ())],
        schema=schema,
        append=parent,
        skip_refused=any(record.get("refused") for record in records),
    )
    return Path(made.path)


@contextmanager
def _aside(root: Path, name: str) -> Iterator[Path]:
    """A root beside the datasets, on the same file system, so that files can be linked and renamed; gone at the end."""
    folder = root / TEMPORARY / f"rebuild.{name}.{os.urandom(4).hex()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise os_error(error, root) from error
    try:
        yield folder
    finally:
        remove_tree(folder)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _repair(final: Path, made: Path, manifest: Manifest) -> int:
    """Replace, one by one, files of the published version that are not what its manifest says. Their number."""
    if manifests.load(final)[0] != manifest:
        raise DataError("another version is in its place", where=str(final))
    count = 0
    for entry in manifest.files:
        try:
            stands = digest.of_file(final / entry.path) == (entry.bytes, entry.digest)
        except OSError:
            stands = False
        if stands:
            continue
        try:
            (final / entry.path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(made / entry.path, final / entry.path)
            sync_dir((final / entry.path).parent)
        except OSError as error:
            raise os_error(error, final / entry.path) from error
        count += 1
    return count
