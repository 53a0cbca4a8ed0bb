"""Recordings to one Zarr v3 store, published whole under the digest of what it holds.

recordings ──look──▶ episodes, accepted or refused ──plan──▶ shards ──workers──▶ .tmp/<name>.<key>/ ──rename──▶
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
from pitools.core.fs import os_error, require_local
from pitools.core.progress import bar
from pitools.dataset.check.drift import gate
from pitools.dataset.formats import schema_file
from pitools.dataset.formats.model import Damaged
from pitools.dataset.ingest import append_policy, chunking, execute, finalize, plan, scan, unreadable_episodes
from pitools.dataset.ingest.journal import Entry, Reader
from pitools.dataset.ingest.parent import Parent
from pitools.dataset.ingest.plan import Plan, Range, Source, range_key
from pitools.dataset.ingest.scan import Intake
from pitools.dataset.ingest.shard_worker import hash_range
from pitools.dataset.ingest.staging_dir import Place, open_place
from pitools.dataset.versions import Version, check_complete, check_name, describe
from pitools.store import manifest as manifests
from pitools.store.digest import RANGE
from pitools.store.version_list import versions
from pitools.store.version_state import refresh

_TRIES = 4
# Of these may depend what bytes are made: two that differ in them do not share their work.
_LIBRARIES = ("numcodecs", "numpy", "pillow", "av")
# What a folder's absence is called, also by NFS.
_GONE = (errno.ENOENT, errno.ESTALE)

# Has other nodes take part in a folder's plan until all of `total` jobs are done, as `count()` counts them.
Spread = Callable[[Path, str, int, Callable[[], int]], None]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be made, as far as it does not lie in the recordings. options: as provenance holds them."""

    root: Path
    name: str
    codec: str
    options: dict[str, Any]
    parent: Parent | None
    workers: int
    spread: Spread | None
    refuse_drift: bool


def ingest(
    files: Sequence[Path],
    *,
    root: Path,
    name: str,
    layout: str = "auto",
    codec: str = "",
    skip: Sequence[str] = (),
    schema: Path | None = None,
    append: Path | None = None,
    workers: int = 0,
    skip_refused: bool = False,
    refuse_drift: bool = False,
    report: Path | None = None,
    spread: Spread | None = None,
) -> Version:
    """Write the recordings to `<root>/<name>/<version>/`; the same content and options again change nothing.

    files: in natural order of their names, whatever order they are given in; each may be a folder. codec: "" is the
    parent's, or lz4. skip: globs of array names to leave out. schema: file that says how to rename, cast, resize and
    derive. append: version to begin with, of which whole shards are taken as they are. workers: processes, 0 for two a
    core. skip_refused: leave out episodes that cannot be taken. refuse_drift: do not publish what `check.gate` finds
    faults in next to the parent. report: file for a record of each episode. spread: has other nodes work too.

    Raises UsageError, ConfigError, DataError for a bad recording, NoSpace or ClusterError for a bad destination. What
    was done before an interrupt, or on a full disk, is kept for the same call to go on from.
    """
    check_name(name)
    require_local(root, "root")
    parent = Parent(append, name) if append else None
    if parent and codec and codec != parent.codec:
        raise UsageError(f"the parent's codec is {parent.codec}, not {codec}", hint=f"--codec {parent.codec}")
    codec = codec or (parent.codec if parent else "lz4")
    workers = workers or worker_pool.default_workers()
    made = schema_file.load(schema) if schema else None
    options: dict[str, Any] = {"codec": codec, "skip": sorted(skip), "pitools": __version__}
    if made:
        options["schema"] = schema_file.provenance(made)
    asked = Asked(
        root=root,
        name=name,
        codec=codec,
        options=options,
        parent=parent,
        workers=workers,
        spread=spread,
        refuse_drift=refuse_drift,
    )
    with append_policy.held(append):
        found = scan.take(files, layout=layout, skip=skip, made=made, parent=parent, workers=workers)
        if report:
            scan.report(found, report)
        scan.judge(found, skip_refused=skip_refused)
        tries = _TRIES
        while tries:
            try:
                known, hashes = _published(asked, found)
                if known or (known := _make(asked, found, hashes)):
                    return known
            except Damaged:
                if not skip_refused:
                    raise
                found = _without_damaged(asked, found, report)
                continue
            tries -= 1
            refresh(root / name)  # somebody else's version may not show yet, on a network file system
    raise TryLater("other processes keep removing the working folder", where=str(root), hint="run this again")


def _without_damaged(asked: Asked, found: Intake, report: Path | None) -> Intake:
    """What is left without the episodes that cannot be read: all are read once, so that each is met now.

    Raises DataError where none is left, TryLater where all can be read now.
    """
    scan.check_unchanged(found.sources)
    episodes = [episode for recording in found.recordings for episode in recording.episodes]
    refused = unreadable_episodes.damaged(episodes, asked.workers)
    if not refused:
        raise TryLater("an episode that could not be read can be read now", hint="run this again")
    left = scan.without(found, refused)
    if report:
        scan.report(left, report)
    if not left.recordings:
        raise DataError("no episode is left", where=refused[0].where, hint="see --report FILE")
    return left


def _published(asked: Asked, found: Intake) -> tuple[Version | None, dict[str, Entry]]:
    """The version that an earlier ingest made of the same, if there is one, and what had to be hashed to know.

    Raises DataError if it is damaged, UsageError for a recording that the parent has.
    """
    parent = asked.parent
    before = parent.manifest.source if parent else ()
    sizes = [sum(found.sources[number].bytes for number in numbers) for numbers in found.places]
    likely = []
    for path in versions(asked.root, asked.name):
        try:
            version, manifest = describe(path)
        except DataError:
            continue  # another version's damage is no matter here
        known = manifest.source[len(before) :]
        alike = manifest.parent == (parent.version if parent else "") and version.version == path.name
        names = [(str(record.get("file")), record.get("bytes")) for record in known]
        if alike and names == [(each.path.name, size) for each, size in zip(found.recordings, sizes, strict=True)]:
            likely.append((path, version, manifest))
    if not likely and not (parent and parent.may_have(sizes)):
        return None, {}
    hashes = _hash(found.sources, asked.workers)
    source = _provenance(asked, found, hashes)
    if parent:
        parent.check_new(source)
    for path, version, manifest in likely:
        if manifest.source == (*before, *source):
            check_complete(path, manifest)
            return version, hashes
    return None, hashes


def _make(asked: Asked, found: Intake, hashes: dict[str, Entry]) -> Version | None:
    """Make the version and publish it; None when somebody else, who made the same, has done so meanwhile."""
    made = _plan(asked, found)
    try:
        place = open_place(asked.root, asked.name, _key(asked, found, made))
    except OSError as error:
        raise os_error(error, asked.root) from error
    try:
        entries = _fill(asked, made, place, hashes)
        source = _provenance(asked, found, entries)
        scan.check_unchanged(found.sources)
        scan.tell_twins(source)
        data = finalize.manifest(
            asked.name,
            made,
            place,
            entries,
            found.recordings,
            source,
            asked.parent,
            asked.codec,
            found.array_attributes,
        )
        return _publish(asked, place, data)
    except (DataError, UsageError) as error:
        if isinstance(error, append_policy.Drifted):  # which may be accepted, and then nothing is to be made again
            _say_what_stays(place, made)
        else:
            place.remove()  # the same command would end here again
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _GONE and place.is_gone():
            return None
        _say_what_stays(place, made)
        if isinstance(error, OSError):
            raise os_error(error, asked.root) from error
        raise


def _publish(asked: Asked, place: Place, data: bytes) -> Version | None:
    """Let the version appear; None when its files are not all there, since another process removed the folder."""
    known = manifests.decode(data, str(place.store))
    final = asked.root / asked.name / manifests.version(data)
    if parent := asked.parent:
        append_policy.judge(gate(known, parent.manifest), parent.path, refuse=asked.refuse_drift)
        append_policy.carry_quarantine(parent.path, final)
    if not place.holds(known.files):
        return None
    return describe(final, new=place.publish(final))[0]


def _plan(asked: Asked, found: Intake) -> Plan:
    episodes = tuple(episode for recording in found.recordings for episode in recording.episodes)
    parent = asked.parent
    first = parent.steps if parent else 0
    offsets = tuple(accumulate((episode.steps for episode in episodes), initial=first))
    grids = {
        name: chunking.choose((offsets[-1], *column.row), column.dtype, asked.codec)
        for name, column in sorted(episodes[0].columns.items())
    }
    linked = parent.linked(grids) if parent else {}
    return Plan(
        grids=grids,
        episodes=episodes,
        offsets=offsets,
        sources=found.sources,
        linked=linked,
        jobs=plan.in_order(grids, found.recordings, found.places, found.sources, first),
        parent=parent.path.absolute() if parent else None,
        base=parent.base(linked) if parent else {},
    )


def _key(asked: Asked, found: Intake, made: Plan) -> str:
    """What tells this ingest from any other: content by stamps, for digests would take reading it."""
    parts = {
        **asked.options,
        "parent": asked.parent.version if asked.parent else "",
        "grids": made.grids,
        "sources": [(source.path.name, source.stamp) for source in found.sources],
        "episodes": [[episode.name for episode in recording.episodes] for recording in found.recordings],
        "layouts": [recording.layout for recording in found.recordings],
        "libraries": list(map(_release, _LIBRARIES)),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:32]


def _release(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def _fill(asked: Asked, made: Plan, place: Place, hashes: dict[str, Entry]) -> dict[str, Entry]:
    this = secrets.token_hex(4)
    if asked.spread:
        journals = Reader(place.journal)

        def done() -> int:
            place.touch()  # it may be long until a first task runs
            return journals.look()

        asked.spread(place.path, f"{this}.{execute.keep(made, place, this)}", len(made.jobs), done)
    return execute.complete(made, place, run=this, workers=asked.workers, done=hashes)


def _provenance(asked: Asked, found: Intake, ranges: Mapping[str, Entry]) -> tuple[dict[str, Any], ...]:
    return finalize.provenance(found.recordings, found.places, found.sources, ranges, asked.options, found.refused)


def _hash(sources: Sequence[Source], workers: int) -> dict[str, Entry]:
    """Entries for all ranges of the sources. Raises DataError."""
    jobs = [Range(file, number) for file, source in enumerate(sources) for number in range(source.ranges)]
    total = sum(source.bytes for source in sources)
    workers = 1 if total <= RANGE else min(workers, len(jobs))
    entries = {}
    with bar("digest", total) as advance:
        for entry in worker_pool.run(partial(_Hasher, sources), jobs, workers=workers):
            entries[entry.key] = entry
            advance(entry.bytes)
    return entries


class _Hasher:
    """Hashes ranges of files."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def close(self) -> None:
        """Nothing is open."""

    def __call__(self, job: Range) -> Entry:
        source = self._sources[job.file]
        size = min(RANGE, source.bytes - job.number * RANGE)
        return hash_range(range_key(*job), source.path, job.number, size)


def _say_what_stays(place: Place, made: Plan) -> None:
    """On stderr: how to go on, or to be rid of it. Where nothing was done, nothing stays."""
    journals = Reader(place.journal)
    with contextlib.suppress(OSError):  # what went wrong is being told
        journals.look()
    shards = sum(not key.startswith("#") for key in journals.entries)
    if not shards:
        place.remove()
        return
    total = sum(known.shards for known in made.grids.values())
    print(
        f"pit: {shards} of {total} shards are kept in {place.path}: run the same command to go on, or remove that "
        "folder; `pit dataset gc` does when nobody has gone on for a week",
        file=sys.stderr,
    )
