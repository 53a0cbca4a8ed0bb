"""Find a plan's datasets at a remote site; upload the missing ones in batches, and publish them there, verified.

<paths.data>/<name>/<version>/            complete, or absent
<paths.data>/.tmp/<name>.<version>/<n>/   the complete batches; a repeated upload sends only the others
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
from pitools.core.fs import from_os_error
from pitools.core.progress import progress_bar
from pitools.launch.plan import Plan, StagedDataset
from pitools.launch.tickets.remote import paths
from pitools.site import remote_files, tar_stream
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import error_for, error_text
from pitools.slurm.transport import Transport, run_command
from pitools.store import manifest
from pitools.store.manifest import MANIFEST_FILE, FileEntry
from pitools.store.publish import BUILD_DIR
from pitools.store.version_list import published_at

BATCH_BYTES, BATCH_MAX_FILES = 256 << 20, 4096
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERIFY_BYTES_PER_S = 20 << 20  # a slow file system, in bytes per second; it bounds the time of a verification
# A version's name is the digest of its manifest: a site with that file has the version, or is receiving it.
_DIGEST_OF = f'sha256sum "$d/{MANIFEST_FILE}" 2>/dev/null | cut -c1-32 | grep .'
_DIGEST_SCRIPT = f"while IFS= read -r d; do {_DIGEST_OF} || echo -; done; echo end"
_DIGEST = re.compile(r"[0-9a-f]{32}|-")
_RECEIVE_SCRIPT = '"$1" -m pitools.launch.tickets.remote.receive "$2" "$3" "$4"'


class DatasetTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes uploaded, and seconds with verification: the bandwidth that `pit place` uses for later estimates."""

    bytes: int = 0
    wall_s: float = 0.0


def dataset_dir(site: Site, staged: StagedDataset, user: str = "") -> str:
    """Return the remote path to which a plan's dataset is copied.

    user: our name at the site, "" to query it. Raises ConfigError without paths.data; DataError for a dataset that has
    changed, or with an invalid name.
    """
    root = paths.remote_datasets_dir(site, user)
    if not root:
        return staged.source
    name = _read_manifest(staged)[0].name
    if not _SAFE_NAME.fullmatch(name):
        raise DataError(f"dataset name: {name!r} cannot be the name of a folder", where=staged.source)
    return f"{root}/{name}/{staged.version}"


def find_datasets(
    site: Site, data: Sequence[StagedDataset], *, user: str = "", transport: Transport | None = None
) -> dict[str, str]:
    """Return name → folder of the datasets that the site has: at their path here, or where they would be copied.

    By one call. user: as for `dataset_dir`. transport: by default the site's. Raises as `dataset_dir`, but for a site
    without paths.data only if it lacks a dataset; Unreachable, ClusterError.
    """
    if not data:
        return {}
    candidates = [(staged, staged.source) for staged in data]
    if site.paths.data:
        candidates += [(staged, dataset_dir(site, staged, user)) for staged in data]
    folders = "".join(f"{folder}\n" for _, folder in candidates)
    done = run_command(transport or client(site).transport, ["sh", "-c", _DIGEST_SCRIPT], env={}, stdin=folders)
    if done.code:
        raise error_for("sh", site.connection.host, done.code, done.stderr)
    *digests, end = done.stdout.split("\n")[:-1] or [""]
    if end != "end" or len(digests) != len(candidates) or not all(map(_DIGEST.fullmatch, digests)):
        problem = f"{len(digests)} lines (expected {len(candidates)} digests of manifests)"
        raise ClusterError(problem, where=site.name, hint="log in, and check that the shell prints nothing else")
    found: dict[str, str] = {}
    for (staged, folder), digest in zip(candidates, digests, strict=True):
        if digest == staged.version:
            found.setdefault(staged.name, folder)
    for staged in data:
        if staged.name not in found:
            dataset_dir(site, staged, user)
    return found


def missing_datasets(plan: Plan, site: Site) -> tuple[StagedDataset, ...]:
    """Return the plan's datasets that the site does not have. Raises as `find_datasets`."""
    found = find_datasets(site, plan.data)
    return tuple(staged for staged in plan.data if staged.name not in found)


def send_dataset(staged: StagedDataset, site: Site) -> DatasetTransfer:
    """Upload one dataset, or its missing batches. Safe to repeat, and to run twice concurrently.

    Raises DataError for files that differ from the manifest, here or there; NoSpace; Unreachable; ToolMissing for a
    site without pitools.
    """
    final, began = dataset_dir(site, staged), time.monotonic()
    contents, raw = _read_manifest(staged)
    batch_root = f"{paths.remote_datasets_dir(site)}/{BUILD_DIR}/{contents.name}.{staged.version}"
    sent_bytes = 0
    try:
        sent_bytes = _send_batches(staged, site, batch_root, contents)
        _run_receive(staged, site, batch_root, final, contents, raw)
    except (ClusterError, DataError):
        # A concurrent upload may have published the dataset and removed the batches.
        if not remote_files.existing(site, [f"{final}/{MANIFEST_FILE}"]):
            raise
    return DatasetTransfer(bytes=sent_bytes, wall_s=time.monotonic() - began)


def _send_batches(staged: StagedDataset, site: Site, batch_root: str, contents: manifest.Manifest) -> int:
    batches = {f"{batch_root}/{name}": batch for name, batch in _split_batches(contents.files)}
    existing, sent_bytes = remote_files.existing(site, batches), 0
    with progress_bar(f"to {site.name}", contents.total_bytes, unit="bytes") as advance:
        for to, batch in batches.items():
            if to not in existing:
                sent_bytes += remote_files.put_tree(site, _batch_entries(staged, batch), to, limit=1 << 60).bytes
            advance(sum(entry.bytes for entry in batch))
    return sent_bytes


def _run_receive(
    staged: StagedDataset, site: Site, batch_root: str, final: str, contents: manifest.Manifest, raw: bytes
) -> None:
    try:
        published = published_at(Path(staged.source))
    except OSError as error:
        raise from_os_error(error, Path(staged.source)) from error
    arguments = (paths.remote_python(site), batch_root, final, published)
    with tar_stream.TarPipe(lambda out: out.write(raw), is_source=True) as source:
        timeout_s = 120 + contents.total_bytes / _VERIFY_BYTES_PER_S
        done = remote_files.run_shell(site, _RECEIVE_SCRIPT, *arguments, stdin=source, timeout_s=timeout_s)
    if done.code:
        raise _receive_error(site, done, final)


def _read_manifest(staged: StagedDataset) -> tuple[manifest.Manifest, bytes]:
    contents, raw = manifest.load_manifest(Path(staged.source))
    if manifest.version_of(raw) != staged.version:
        raise DataError(f'dataset "{staged.name}" has changed (expected version {staged.version})', where=staged.source)
    return contents, raw


def _split_batches(entries: Sequence[FileEntry]) -> Iterator[tuple[str, list[FileEntry]]]:
    """Yield (name, files) of each batch, which depend on the version alone, so that any upload can be resumed."""
    batch: list[FileEntry] = []
    batch_bytes = 0
    for entry in entries:
        if batch and (batch_bytes + entry.bytes > BATCH_BYTES or len(batch) >= BATCH_MAX_FILES):
            yield _batch_name(batch), batch
            batch, batch_bytes = [], 0
        batch.append(entry)
        batch_bytes += entry.bytes
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
            raise DataError(f"{entry.path}: cannot read: {error.strerror}", where=staged.source) from error
        if size != entry.bytes:
            raise DataError(f"{entry.path}: {size} bytes (expected {entry.bytes})", where=staged.source)
    return [tar_stream.TarEntry(name=entry.path, path=root / entry.path) for entry in batch]


def _receive_error(site: Site, done: subprocesses.Completed, final: str) -> PitError:
    reason, where = error_text(done.stderr), f"{site.name}:{final}"
    if done.code in (126, 127) or "No module named" in reason:
        hint = "paths.python in the site file must be an interpreter with pitools"
        return ToolMissing(f"cannot verify the dataset at the site: {reason}", where=where, hint=hint)
    if done.code == DataError.exit_code:
        return DataError(
            reason, where=where, hint="check the local version: pit dataset check; then repeat the command"
        )
    if done.code == Unreachable.exit_code:
        return NoSpace(reason, where=where, hint="free space there, or choose another site")
    return ClusterError(reason or f"exit code {done.code} and no reason given", where=where)
