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
from pitools.core.progress import progress_bar
from pitools.launch.plan import Plan, StagedDataset
from pitools.launch.tickets.remote import paths
from pitools.site import remote_files, tar_stream
from pitools.site.schema import Site
from pitools.slurm.errors import error_text
from pitools.store import manifest
from pitools.store.manifest import FILE_NAME, FileEntry
from pitools.store.publish import STAGING_DIR

BATCH_BYTES, BATCH_MAX_FILES = 256 << 20, 4096
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERIFY_BYTES_PER_S = 20 << 20  # bytes a second that even a slow file system reads back
_RECEIVE_SCRIPT = '"$1" -m pitools.launch.tickets.remote.receive "$2" "$3"'


class DatasetTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent, and how long that took, verification included: the bandwidth that a later plan can count on."""

    bytes: int = 0
    wall_s: float = 0.0


def dataset_dir(site: Site, staged: StagedDataset) -> str:
    """Where a dataset of a plan is on the far side. Raises ConfigError, DataError for a name that is no folder's."""
    root = paths.remote_datasets_dir(site)
    if not root:
        return staged.source
    name = _read_manifest(staged)[0].name
    if not _SAFE_NAME.fullmatch(name):
        raise DataError(f"{name!r} cannot be the name of a folder", where=staged.source)
    return f"{root}/{name}/{staged.version}"


def missing_datasets(plan: Plan, site: Site) -> tuple[StagedDataset, ...]:
    """The plan's datasets that are not there yet; one call. Raises as `place`, and Unreachable."""
    if not plan.data or not paths.remote_datasets_dir(site):
        return ()
    marks = {f"{dataset_dir(site, data)}/{FILE_NAME}": data for data in plan.data}
    found = remote_files.existing(site, marks)
    return tuple(data for mark, data in marks.items() if mark not in found)


def send_dataset(staged: StagedDataset, site: Site) -> DatasetTransfer:
    """Bring one dataset there, or what is left of it to bring. Safe to repeat, and to do twice at once.

    Raises DataError where it is not what its manifest says, here or there, NoSpace, Unreachable, ToolMissing where the
    far side has no pitools.
    """
    final, began = dataset_dir(site, staged), time.monotonic()
    held, raw = _read_manifest(staged)
    home = f"{paths.remote_datasets_dir(site)}/{STAGING_DIR}/{held.name}.{staged.version}"
    sent = 0
    try:
        sent = _send_batches(staged, site, home, held)
        _run_receive(site, home, final, held, raw)
    except (ClusterError, DataError):
        # Another may have been faster, and has cleared away what this one was about.
        if not remote_files.existing(site, [f"{final}/{FILE_NAME}"]):
            raise
    return DatasetTransfer(bytes=sent, wall_s=time.monotonic() - began)


def _send_batches(staged: StagedDataset, site: Site, home: str, held: manifest.Manifest) -> int:
    batches = {f"{home}/{name}": batch for name, batch in _split_batches(held.files)}
    come, sent = remote_files.existing(site, batches), 0
    with progress_bar(f"to {site.name}", held.total_bytes, unit="bytes") as advance:
        for to, batch in batches.items():
            if to not in come:
                sent += remote_files.put_tree(site, _batch_entries(staged, batch), to, limit=1 << 60).bytes
            advance(sum(entry.bytes for entry in batch))
    return sent


def _run_receive(site: Site, home: str, final: str, held: manifest.Manifest, raw: bytes) -> None:
    with tar_stream.TarPipe(lambda out: out.write(raw), is_source=True) as source:
        timeout_s = 120 + held.total_bytes / _VERIFY_BYTES_PER_S
        done = remote_files.run_shell(
            site, _RECEIVE_SCRIPT, paths.remote_python(site), home, final, stdin=source, timeout_s=timeout_s
        )
    if done.code:
        raise _receive_error(site, done, final)


def _read_manifest(staged: StagedDataset) -> tuple[manifest.Manifest, bytes]:
    held, raw = manifest.load_manifest(Path(staged.source))
    if manifest.version_of(raw) != staged.version:
        raise DataError(f'dataset "{staged.name}" is no longer version {staged.version}', where=staged.source)
    return held, raw


def _split_batches(entries: Sequence[FileEntry]) -> Iterator[tuple[str, list[FileEntry]]]:
    """(name, files) of each batch: the same for everybody who sends this version."""
    batch: list[FileEntry] = []
    held = 0
    for entry in entries:
        if batch and (held + entry.bytes > BATCH_BYTES or len(batch) >= BATCH_MAX_FILES):
            yield _batch_name(batch), batch
            batch, held = [], 0
        batch.append(entry)
        held += entry.bytes
    if batch:
        yield _batch_name(batch), batch


def _batch_name(batch: Sequence[FileEntry]) -> str:
    return hashlib.sha256("\n".join(f"{entry.path}\t{entry.digest}" for entry in batch).encode()).hexdigest()[:16]


def _batch_entries(staged: StagedDataset, batch: Sequence[FileEntry]) -> list[tar_stream.TarEntry]:
    root = Path(staged.source)
    for entry in batch:
        try:
            size = (root / entry.path).lstat().st_size
        except OSError as error:
            raise DataError(f"{entry.path} cannot be read: {error.strerror}", where=staged.source) from error
        if size != entry.bytes:
            raise DataError(f"{entry.path} has {size} bytes, not {entry.bytes}", where=staged.source)
    return [tar_stream.TarEntry(name=entry.path, path=root / entry.path) for entry in batch]


def _receive_error(site: Site, done: subprocesses.Completed, final: str) -> PitError:
    said, where = error_text(done.stderr), f"{site.name}:{final}"
    if done.code in (126, 127) or "No module named" in said:
        hint = "paths.python must be an interpreter that has pitools"
        return ToolMissing(f"it cannot be verified there: {said}", where=where, hint=hint)
    if done.code == DataError.exit_code:
        return DataError(said, where=where, hint="check it here: pit dataset check; then run this again")
    if done.code == Unreachable.exit_code:
        return NoSpace(said, where=where, hint="free space there, or choose another site")
    return ClusterError(said or f"exit code {done.code} and no reason given", where=where)
