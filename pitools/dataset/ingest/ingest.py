"""Ingest recordings into one Zarr v3 store, published under the digest of its content.

recordings ──scan──▶ episodes, accepted or rejected ──plan──▶ shards ──workers──▶ .tmp/<name>.<key>/ ──rename──▶
                                                                                         <root>/<name>/<version>/
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from pitools import __version__
from pitools.core import worker_pool
from pitools.core.errors import DataError, TryLater, UsageError
from pitools.core.fs import from_os_error, require_local_path
from pitools.core.progress import progress_bar
from pitools.dataset.check.drift import check_drift
from pitools.dataset.formats import transform_file
from pitools.dataset.formats.model import EpisodeUnreadable
from pitools.dataset.ingest import append_checks, chunking, execute, finalize, plan, scan, unreadable_episodes
from pitools.dataset.ingest.journal import FinishedJob, JournalReader
from pitools.dataset.ingest.parent import ParentVersion
from pitools.dataset.ingest.plan import HashJob, IngestPlan, RecordingFile, range_key
from pitools.dataset.ingest.scan import ScanResult
from pitools.dataset.ingest.shard_worker import hash_file_range
from pitools.dataset.ingest.work_dir import IngestWorkDir, open_work_dir
from pitools.dataset.versions import VersionInfo, check_complete, check_name, describe_version
from pitools.store import manifest as manifests
from pitools.store.digest import RANGE_BYTES
from pitools.store.version_list import version_dirs
from pitools.store.version_state import revalidate_nfs

_PUBLISH_TRIES = 4
# The written bytes may depend on these libraries: ingests with different releases do not share shards.
_LIBRARIES = ("numcodecs", "numpy", "pillow", "av")
# Errors of a removed folder; ESTALE is NFS's.
_REMOVED_ERRNOS = (errno.ENOENT, errno.ESTALE)

# Called with (working folder, `<session>.<plan digest>`, jobs, count of finished ones): runs the plan on other nodes.
SubmitArray = Callable[[Path, str, int, Callable[[], int]], None]


class IngestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of an ingest besides its recordings. options: as provenance records them."""

    root: Path
    name: str
    codec: str
    options: dict[str, Any]
    parent: ParentVersion | None
    workers: int
    submit_array: SubmitArray | None
    accept_drift: bool


def ingest(
    files: Sequence[Path],
    *,
    root: Path,
    name: str,
    layout: str = "auto",
    codec: str = "",
    skip_arrays: Sequence[str] = (),
    transform: Path | None = None,
    append: Path | None = None,
    workers: int = 0,
    skip_rejected: bool = False,
    accept_drift: bool = False,
    report: Path | None = None,
    submit_array: SubmitArray | None = None,
) -> VersionInfo:
    """Write the recordings to `<root>/<name>/<version>/`; repeating it with the same input and options changes nothing.

    files: files or folders, ingested in natural order of their names. codec: "" for the parent's, or lz4. skip_arrays:
    globs of array names to leave out. transform: file of renames, casts, resizes and derived arrays. append: parent
    version, whose full shards are linked. workers: processes, 0 for two per core. skip_rejected: leave out rejected
    episodes. accept_drift: publish also where `check_drift` finds faults against the parent. report: file for one
    record per episode. submit_array: runs the plan on other nodes too.

    Raises UsageError, ConfigError, DataError for a bad recording, NoSpace or ClusterError for a bad destination. After
    an interrupt or a full disk, the same call continues from the finished shards.
    """
    check_name(name)
    require_local_path(root, "root")
    if report:
        scan.require_separate_report(report, files)
    parent = ParentVersion(append, name) if append else None
    if parent and codec and codec != parent.codec:
        raise UsageError(f"codec: expected {parent.codec}, the parent's, got {codec}", hint=f"--codec {parent.codec}")
    codec = codec or (parent.codec if parent else "lz4")
    workers = workers or worker_pool.default_workers()
    rules = transform_file.load_transform(transform) if transform else None
    options: dict[str, Any] = {"codec": codec, "skip_arrays": sorted(skip_arrays), "pitools": __version__}
    if rules:
        options["transform"] = transform_file.transform_provenance(rules)
    request = IngestRequest(
        root=root,
        name=name,
        codec=codec,
        options=options,
        parent=parent,
        workers=workers,
        submit_array=submit_array,
        accept_drift=accept_drift,
    )
    with append_checks.parent_lease(append):
        scanned = scan.scan_recordings(
            files, layout=layout, skip=skip_arrays, transform=rules, parent=parent, workers=workers
        )
        if report:
            scan.write_report(scanned, report)
        scan.require_accepted(scanned, skip_rejected=skip_rejected)
        tries = _PUBLISH_TRIES
        while tries:
            try:
                version, hashes = _find_published(request, scanned)
                if version or (version := _make_version(request, scanned, hashes)):
                    return version
            except EpisodeUnreadable as error:
                if not skip_rejected:
                    if report:
                        scan.write_report(scanned, report, unreadable=(error.rejected,))
                    raise
                scanned = _without_unreadable(request, scanned, report)
                continue
            tries -= 1
            revalidate_nfs(root / name)  # NFS may not show another process's version yet
    raise TryLater("working folder: removed repeatedly by other processes", where=str(root), hint="run this again")


def _without_unreadable(request: IngestRequest, scanned: ScanResult, report: Path | None) -> ScanResult:
    """Return the scan without unreadable episodes, after reading every episode once.

    Raises DataError if no episode remains, TryLater if all can be read now.
    """
    scan.check_unchanged(scanned.files)
    episodes = [episode for recording in scanned.recordings for episode in recording.episodes]
    refused = unreadable_episodes.find_unreadable(episodes, request.workers)
    if not refused:
        raise TryLater("episodes: a read failed before, all can be read now", hint="run this again")
    readable = scan.without_episodes(scanned, refused)
    if report:
        scan.write_report(readable, report)
    if not readable.recordings:
        raise DataError("no episode is left", where=refused[0].where, hint="see --report FILE")
    return readable


def _find_published(request: IngestRequest, scanned: ScanResult) -> tuple[VersionInfo | None, dict[str, FinishedJob]]:
    """Return the version that an earlier ingest made of the same input, or None; and the hashes computed to know.

    Raises DataError for a damaged one, UsageError for a recording that the parent has.
    """
    parent = request.parent
    parent_recordings = parent.manifest.recordings if parent else ()
    sizes = [sum(scanned.files[number].bytes for number in numbers) for numbers in scanned.file_indices]
    candidates = []
    for path in version_dirs(request.root, request.name):
        try:
            version, manifest = describe_version(path)
        except DataError:
            continue  # damage of another version does not concern this ingest
        own_recordings = manifest.recordings[len(parent_recordings) :]
        same_parent = manifest.parent == (parent.version if parent else "") and version.version == path.name
        names = [(str(record.get("file")), record.get("bytes")) for record in own_recordings]
        if same_parent and names == [
            (recording.path.name, size) for recording, size in zip(scanned.recordings, sizes, strict=True)
        ]:
            candidates.append((path, version, manifest))
    if not candidates and not (parent and parent.may_contain(sizes)):
        return None, {}
    hashes = _hash_files(scanned.files, request.workers)
    provenance = _provenance(request, scanned, hashes)
    if parent:
        parent.require_new(provenance)
    for path, version, manifest in candidates:
        if manifest.recordings == (*parent_recordings, *provenance):
            check_complete(path, manifest)
            return version, hashes
    return None, hashes


def _make_version(request: IngestRequest, scanned: ScanResult, hashes: dict[str, FinishedJob]) -> VersionInfo | None:
    """Make and publish the version; None where another process published or removed it meanwhile."""
    ingest_plan = _make_plan(request, scanned)
    try:
        work_dir = open_work_dir(request.root, request.name, _ingest_key(request, scanned, ingest_plan))
    except OSError as error:
        raise from_os_error(error, Path(error.filename or request.root)) from error
    try:
        entries = _write_shards(request, ingest_plan, work_dir, hashes)
        provenance = _provenance(request, scanned, entries)
        scan.check_unchanged(scanned.files)
        scan.warn_duplicates(provenance)
        data = finalize.write_metadata(
            request.name,
            ingest_plan,
            work_dir,
            entries,
            scanned.recordings,
            provenance,
            request.parent,
            request.codec,
            scanned.array_attributes,
        )
        return _publish(request, work_dir, data)
    except (DataError, UsageError) as error:
        if isinstance(error, append_checks.DriftError):  # --accept-drift then reuses the finished shards
            _report_leftovers(work_dir, ingest_plan)
        else:
            work_dir.remove()  # the same command would fail again
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _REMOVED_ERRNOS and work_dir.is_gone():
            return None
        _report_leftovers(work_dir, ingest_plan)
        if isinstance(error, OSError):
            raise from_os_error(error, request.root) from error
        raise


def _publish(request: IngestRequest, work_dir: IngestWorkDir, data: bytes) -> VersionInfo | None:
    """Publish the version; None where its files are incomplete because another process removed the folder."""
    manifest = manifests.decode_manifest(data, str(work_dir.store))
    final = request.root / request.name / manifests.version_of(data)
    if parent := request.parent:
        append_checks.require_no_drift(
            check_drift(manifest, parent.manifest), parent.path, accept_drift=request.accept_drift
        )
        append_checks.inherit_quarantine(parent.path, final)
    if not work_dir.has_files(manifest.files):
        return None
    new = work_dir.publish(final)
    if not new:
        finalize.restore_manifest(final, manifest, data)
    return describe_version(final, new=new)[0]


def _make_plan(request: IngestRequest, scanned: ScanResult) -> IngestPlan:
    episodes = tuple(episode for recording in scanned.recordings for episode in recording.episodes)
    parent = request.parent
    first_step = parent.steps if parent else 0
    offsets = tuple(accumulate((episode.steps for episode in episodes), initial=first_step))
    specs = {
        name: chunking.choose_array_spec((offsets[-1], *column.row), column.dtype, request.codec)
        for name, column in sorted(episodes[0].columns.items())
    }
    reusable = parent.reusable_shards(specs) if parent else {}
    return IngestPlan(
        specs=specs,
        episodes=episodes,
        offsets=offsets,
        files=scanned.files,
        reusable_shards=reusable,
        jobs=plan.jobs_in_order(specs, scanned.recordings, scanned.file_indices, scanned.files, first_step),
        parent=parent.path.absolute() if parent else None,
        base_statistics=parent.base_statistics(reusable) if parent else {},
    )


def _ingest_key(request: IngestRequest, scanned: ScanResult, ingest_plan: IngestPlan) -> str:
    """Return a digest of the request and the files' fingerprints, which names the working folder."""
    parts = {
        **request.options,
        "parent": request.parent.version if request.parent else "",
        "specs": ingest_plan.specs,
        "files": [(file.path.name, file.fingerprint) for file in scanned.files],
        "episodes": [[episode.name for episode in recording.episodes] for recording in scanned.recordings],
        "layouts": [recording.layout for recording in scanned.recordings],
        "libraries": list(map(_library_version, _LIBRARIES)),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:32]


def _library_version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def _write_shards(
    request: IngestRequest, plan: IngestPlan, work_dir: IngestWorkDir, hashes: dict[str, FinishedJob]
) -> dict[str, FinishedJob]:
    session_id = secrets.token_hex(4)
    if request.submit_array:
        journals = JournalReader(work_dir.journal)

        def done() -> int:
            work_dir.touch()  # the first task may start much later
            return journals.poll()

        request.submit_array(
            work_dir.path, f"{session_id}.{execute.save_plan(plan, work_dir, session_id)}", len(plan.jobs), done
        )
    return execute.run_plan(plan, work_dir, session=session_id, workers=request.workers, finished=hashes)


def _provenance(
    request: IngestRequest, scanned: ScanResult, ranges: Mapping[str, FinishedJob]
) -> tuple[dict[str, Any], ...]:
    return finalize.provenance_records(
        scanned.recordings, scanned.file_indices, scanned.files, ranges, request.options, scanned.rejected
    )


def _hash_files(files: Sequence[RecordingFile], workers: int) -> dict[str, FinishedJob]:
    """Hash all ranges of the files. Raises DataError."""
    jobs = [HashJob(number, i) for number, file in enumerate(files) for i in range(file.ranges)]
    total = sum(file.bytes for file in files)
    workers = 1 if total <= RANGE_BYTES else min(workers, len(jobs))
    entries = {}
    with progress_bar("digest", total) as advance:
        for entry in worker_pool.run_tasks(jobs, partial(_Hasher, files), workers=workers):
            entries[entry.key] = entry
            advance(entry.bytes)
    return entries


class _Hasher:
    """Hash ranges of files."""

    def __init__(self, files: Sequence[RecordingFile]) -> None:
        self._files = files

    def close(self) -> None:
        """Nothing is open."""

    def __call__(self, job: HashJob) -> FinishedJob:
        file = self._files[job.file]
        size = min(RANGE_BYTES, file.bytes - job.range_index * RANGE_BYTES)
        return hash_file_range(range_key(*job), file.path, job.range_index, size)


def _report_leftovers(work_dir: IngestWorkDir, ingest_plan: IngestPlan) -> None:
    """Print how to resume or remove an interrupted ingest; remove it where no shard is done."""
    journals = JournalReader(work_dir.journal)
    with contextlib.suppress(OSError):  # an earlier error is already being raised
        journals.poll()
    shards = sum(not key.startswith("#") for key in journals.entries)
    if not shards:
        work_dir.remove()
        return
    total = sum(spec.shards for spec in ingest_plan.specs.values())
    print(
        f"pit: {shards} of {total} shards are kept in {work_dir.path}: run the same command to continue, or remove "
        "that folder; `pit dataset gc` removes it after a week without progress",
        file=sys.stderr,
    )
