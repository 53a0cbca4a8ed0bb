"""Rebuild a version from the recordings that its manifest names, and compare."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pitools.core.errors import DataError, UsageError
from pitools.core.fs import from_os_error, fsync_dir, remove_tree
from pitools.core.record import Record
from pitools.dataset.catalog import compare
from pitools.dataset.catalog.compare import VersionDifference
from pitools.dataset.ingest.append_checks import inherit_quarantine
from pitools.dataset.ingest.work_dir import make_tmp_dir
from pitools.store import digest, version_state
from pitools.store import manifest as manifests
from pitools.store.manifest import Manifest
from pitools.store.publish import BUILD_DIR, publish_dir
from pitools.store.version_list import is_version

_LEASE_S = 2 * 86400


class RebuildResult(Record, frozen=True, kw_only=True, tag="pit.dataset-rebuild/1"):
    """Result of a rebuild. state: `identical` to the manifest; `same-data` where only the release of pitools differs;
    or `differs`. rebuilt: the version made. path: where it was published, or "".

    repaired_files: files of the existing version replaced because missing or damaged.
    """

    name: str
    version: str
    rebuilt: str
    state: str
    path: str = ""
    repaired_files: int = 0


def rebuild_version(
    path: Path, folders: Sequence[Path], *, to_publish: bool = False
) -> tuple[RebuildResult, list[VersionDifference]]:
    """Ingest a version's recordings again, and compare the result. Reads only the version's manifest.

    folders: where the recordings are, at any depth. to_publish: replace missing or damaged files of the version, or
    publish the result beside it if it differs. Raises UsageError for missing recordings, DataError for a damaged
    parent, and the errors of `ingest`.
    """
    resolved = path.resolve()
    root, name = resolved.parent.parent, resolved.parent.name
    manifest, data = manifests.load_manifest(resolved)
    version = manifests.version_of(data)
    if manifest.subset:
        hint = f"rebuild version {manifest.subset.whole}, and stage this part of it again"
        raise UsageError("version: a subset, which no ingest made", where=str(path), hint=hint)
    parent, records = _parent_and_records(root, name, manifest, str(path))
    files = find_recordings(records, folders, root)
    with contextlib.ExitStack() as stack:
        for needed in (resolved, *([parent] if parent else [])):
            stack.enter_context(version_state.leased_version(needed, _LEASE_S, f"rebuild of {name}/{version}"))
        scratch_root = stack.enter_context(_scratch_root(root, name))
        rebuilt = _ingest(_link_in_order(files, scratch_root), records, scratch_root, manifest.name, parent)
        known = manifests.load_manifest(rebuilt)[0]
        differences = [] if rebuilt.name == version else list(compare.compare_manifests(manifest, known))
        state = "identical" if rebuilt.name == version else _state(differences)
        record = RebuildResult(name=name, version=version, rebuilt=rebuilt.name, state=state)
        if not to_publish:
            return record, differences
        final = resolved.parent / rebuilt.name
        inherit_quarantine(resolved, final)  # that of the ingest is below the scratch root
        repaired = 0 if publish_dir(rebuilt, final) else _replace_damaged_files(final, rebuilt, known)
        return RebuildResult(
            name=name, version=version, rebuilt=rebuilt.name, state=state, path=str(final), repaired_files=repaired
        ), differences


def _state(differences: Sequence[VersionDifference]) -> str:
    extra_files = {
        (difference.kind, difference.subject) for difference in differences if difference.change != compare.SHARED
    }
    return "same-data" if extra_files == {("option", "pitools")} else "differs"


def find_recordings(records: Sequence[dict[str, Any]], folders: Sequence[Path], root: Path) -> list[Path]:
    """Find the recordings of provenance records by name and size; among several, by digest. Raises UsageError."""
    wanted = {str(record.get("file")) for record in records}
    places: dict[str, list[Path]] = {name: [] for name in wanted}
    for name in wanted:
        if is_version(name):  # a version that was ingested again
            places[name] += [path.parent for path in root.glob(f"*/{name}/{manifests.MANIFEST_FILE}")]
    for folder in folders:
        if folder.name in wanted:
            places[folder.name].append(folder)
        for matches, inner, names in os.walk(folder):
            for name in wanted.intersection((*inner, *names)):
                places[name].append(Path(matches) / name)
    chosen: list[Path] = []
    for record in records:
        chosen.append(_choose_by_digest(record, places[str(record.get("file"))], chosen))
    return chosen


def _link_in_order(files: Sequence[Path], scratch_root: Path) -> list[Path]:
    """Return links to recordings of repeated names, in their order: an ingest sorts those of one name by folder."""
    if len({file.name for file in files}) == len(files):
        return list(files)
    links = [scratch_root / ".recordings" / str(number) / file.name for number, file in enumerate(files)]
    for link, file in zip(links, files, strict=True):
        link.parent.mkdir(parents=True)
        link.symlink_to(file.resolve())
    return links


def _choose_by_digest(record: dict[str, Any], places: list[Path], chosen: Sequence[Path]) -> Path:
    by_target = {path.resolve(): path for path in places}
    taken = {path.resolve() for path in chosen}
    places = [path for target, path in by_target.items() if target not in taken]
    name, size, text = str(record.get("file")), record.get("bytes"), str(record.get("digest"))
    likely = [path for path in places if path.is_dir() or (path.is_file() and path.stat().st_size == size)]
    if len(likely) > 1:
        likely = [path for path in likely if path.is_dir() or digest.digest_file(path) == (size, text)]
    if len(likely) == 1:
        return likely[0]
    if likely and not likely[0].is_dir():
        return likely[0]  # the same bytes, twice
    if likely:
        hint = "--from FOLDER: one that holds only one of them"
        raise UsageError(f"recording {name}: {len(likely)} folders of this name", where=str(likely[0]), hint=hint)
    problem = f"recording {name}: not found (expected {size} bytes, digest {text})"
    raise UsageError(problem, hint="--from FOLDER: one that holds it, at any depth")


def _parent_and_records(
    root: Path, name: str, manifest: Manifest, where: str
) -> tuple[Path | None, list[dict[str, Any]]]:
    """Return the parent's folder and the records of the appended recordings. Raises UsageError."""
    records = list(manifest.recordings)
    parent = root / name / manifest.parent if manifest.parent else None
    if parent:
        if not (parent / manifests.MANIFEST_FILE).is_file():
            hint = "rebuild or stage that version first"
            raise UsageError(f"parent {manifest.parent}: missing", where=where, hint=hint)
        records = records[len(manifests.load_manifest(parent)[0].recordings) :]
    if not records:
        raise UsageError("manifest: names no recordings", where=where)
    return parent, records


def _ingest(
    files: Sequence[Path], records: Sequence[dict[str, Any]], scratch_root: Path, name: str, parent: Path | None
) -> Path:
    """Repeat the ingest in a separate root. All records of one ingest have the same options."""
    from pitools.dataset.ingest.ingest import ingest

    options = records[0]
    layouts = {str(record.get("layout", "auto")) for record in records}
    transform_file = None
    if transform := options.get("transform"):
        transform_file = scratch_root / "transform.toml"
        transform_file.write_text(str(transform["text"]))
    version = ingest(
        files,
        root=scratch_root,
        name=name,
        layout=layouts.pop() if len(layouts) == 1 else "auto",
        codec=str(options.get("codec", "")),
        skip_arrays=[str(glob) for glob in options.get("skip_arrays", ())],
        transform=transform_file,
        append=parent,
        accept_drift=True,
        skip_rejected=any(record.get("rejected") for record in records),
    )
    return Path(version.path)


@contextmanager
def _scratch_root(root: Path, name: str) -> Iterator[Path]:
    """Create a temporary root beside the datasets, on the same file system, so that files can be linked and renamed."""
    folder = root / BUILD_DIR / f"rebuild.{name}.{os.urandom(4).hex()}"
    try:
        make_tmp_dir(root)
        folder.mkdir()
    except OSError as error:
        raise from_os_error(error, root) from error
    try:
        yield folder
    finally:
        remove_tree(folder)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _replace_damaged_files(final: Path, rebuilt: Path, manifest: Manifest) -> int:
    """Replace files of the published version that contradict its manifest. Returns their number."""
    if manifests.load_manifest(final)[0] != manifest:
        raise DataError("version: another one is at its path", where=str(final))
    count = 0
    for entry in manifest.files:
        try:
            is_intact = digest.digest_file(final / entry.path) == (entry.bytes, entry.digest)
        except OSError:
            is_intact = False
        if is_intact:
            continue
        try:
            (final / entry.path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(rebuilt / entry.path, final / entry.path)
            fsync_dir((final / entry.path).parent)
        except OSError as error:
            raise from_os_error(error, final / entry.path) from error
        count += 1
    return count
