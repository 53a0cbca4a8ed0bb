"""Datasets that are not on the far side yet travel there in batches, and appear when all of them are verified.

<paths.data>/<name>/<version>/            whole, or not there
<paths.data>/.tmp/<name>.<version>/<n>/   the batches that have come: each whole; a later try sends only the others
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, DataError, NoSpace, PitError, ToolMissing, Unreachable
from pitools.core.progress import bar
from pitools.launch.plan import Plan, Staged
from pitools.launch.tickets.remote import paths
from pitools.site import remote_files, tar_stream
from pitools.site.schema import Site
from pitools.slurm.errors import sentence
from pitools.store import manifest
from pitools.store.manifest import FILE_NAME, FileEntry
from pitools.store.publish import TEMPORARY

BATCH, MOST_FILES = 256 << 20, 4096
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERIFIED = 20 << 20  # bytes a second that even a slow file system reads back
_ARRIVE = '"$1" -m pitools.launch.tickets.remote.receive "$2" "$3"'


class Travel(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent, and how long that took, verification included: the bandwidth that a later plan can count on."""

    bytes: int = 0
    wall_s: float = 0.0


def place(site: Site, staged: Staged) -> str:
    """Where a dataset of a plan is on the far side. Raises ConfigError, DataError for a name that is no folder's."""
    root = paths.data(site)
    if not root:
        return staged.source
    name = _manifest(staged)[0].name
    if not _PART.fullmatch(name):
        raise DataError(f"{name!r} cannot be the name of a folder", where=staged.source)
    return f"{root}/{name}/{staged.version}"


def missing(plan: Plan, site: Site) -> tuple[Staged, ...]:
    """The plan's datasets that are not there yet; one call. Raises as `place`, and Unreachable."""
    if not plan.data or not paths.data(site):
        return ()
    marks = {f"{place(site, data)}/{FILE_NAME}": data for data in plan.data}
    found = remote_files.exists(site, marks)
    return tuple(data for mark, data in marks.items() if mark not in found)


def send(staged: Staged, site: Site) -> Travel:
    """Bring one dataset there, or what is left of it to bring. Safe to repeat, and to do twice at once.

    Raises DataError where it is not what its manifest says, here or there, NoSpace, Unreachable, ToolMissing where the
    far side has no pitools.
    """
    final, began = place(site, staged), time.monotonic()
    held, raw = _manifest(staged)
    home = f"{paths.data(site)}/{TEMPORARY}/{held.name}.{staged.version}"
    sent = 0
    try:
        sent = _send(staged, site, home, held)
        _publish(site, home, final, held, raw)
    except (ClusterError, DataError):
        # Another may have been faster, and has cleared away what this one was about.
        if not remote_files.exists(site, [f"{final}/{FILE_NAME}"]):
            raise
    return Travel(bytes=sent, wall_s=time.monotonic() - began)


def _send(staged: Staged, site: Site, home: str, held: manifest.Manifest) -> int:
    batches = {f"{home}/{name}": batch for name, batch in _batches(held.files)}
    come, sent = remote_files.exists(site, batches), 0
    with bar(f"to {site.name}", held.total_bytes, unit="bytes") as advance:
        for to, batch in batches.items():
            if to not in come:
                sent += remote_files.put(site, _entries(staged, batch), to, limit=1 << 60).bytes
            advance(sum(entry.bytes for entry in batch))
    return sent


def _publish(site: Site, home: str, final: str, held: manifest.Manifest, raw: bytes) -> None:
    with tar_stream.Pipe(lambda out: out.write(raw), is_source=True) as source:
        timeout_s = 120 + held.total_bytes / _VERIFIED
        done = remote_files.shell(site, _ARRIVE, paths.python(site), home, final, stdin=source, timeout_s=timeout_s)
    if done.code:
        raise _refusal(site, done, final)


def _manifest(staged: Staged) -> tuple[manifest.Manifest, bytes]:
    held, raw = manifest.load(Path(staged.source))
    if manifest.version(raw) != staged.version:
        raise DataError(f'dataset "{staged.name}" is no longer version {staged.version}', where=staged.source)
    return held, raw


def _batches(entries: Sequence[FileEntry]) -> Iterator[tuple[str, list[FileEntry]]]:
    """(name, files) of each batch: the same for everybody who sends this version."""
    batch: list[FileEntry] = []
    held = 0
    for entry in entries:
        if batch and (held + entry.bytes > BATCH or len(batch) >= MOST_FILES):
            yield _named(batch), batch
            batch, held = [], 0
        batch.append(entry)
        held += entry.bytes
    if batch:
        yield _named(batch), batch


def _named(batch: Sequence[FileEntry]) -> str:
    return hashlib.sha256("\n".join(f"{entry.path}\t{entry.digest}" for entry in batch).encode()).hexdigest()[:16]


def _entries(staged: Staged, batch: Sequence[FileEntry]) -> list[tar_stream.Entry]:
    root = Path(staged.source)
    for entry in batch:
        try:
            size = (root / entry.path).lstat().st_size
        except OSError as error:
            raise DataError(f"{entry.path} cannot be read: {error.strerror}", where=staged.source) from error
        if size != entry.bytes:
            raise DataError(f"{entry.path} has {size} bytes, not {entry.bytes}", where=staged.source)
    return [tar_stream.Entry(name=entry.path, path=root / entry.path) for entry in batch]


def _refusal(site: Site, done: subprocesses.Completed, final: str) -> PitError:
    said, where = sentence(done.stderr), f"{site.name}:{final}"
    if done.code in (126, 127) or "No module named" in said:
        hint = "paths.python must be an interpreter that has pitools"
        return ToolMissing(f"it cannot be verified there: {said}", where=where, hint=hint)
    if done.code == DataError.exit_code:
        return DataError(said, where=where, hint="check it here: pit dataset check; then run this again")
    if done.code == Unreachable.exit_code:
        return NoSpace(said, where=where, hint="free space there, or choose another site")
    return ClusterError(said or f"exit code {done.code} and no reason given", where=where)
