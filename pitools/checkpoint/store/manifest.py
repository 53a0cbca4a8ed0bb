"""The manifest of a checkpoint: every file, its size and digest, and what is needed to go on from it. Written last.

Its own `seal` is the digest of its bytes with zeros where the seal stands, so that a flipped bit in the loader's
position is found as one in the tensors is. Digests show damage; they are no defence against a forger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.record import Record, decode_json
from pitools.store.digest import ALGORITHM, digest_bytes
from pitools.store.manifest import FileEntry as FileEntry

FILE_NAME = "manifest.json"
# What a reader is willing to hold in memory: a writer keeps to it too, so that nothing is sealed that none can open.
MAX_BYTES = 64 << 20
MAX_FILES = 250_000
MAX_STEP = 10**15 - 1

_EMPTY_SEAL = f"{ALGORITHM}:{'0' * 32}"
_SEAL = re.compile(rf"{ALGORITHM}:[0-9a-f]{{32}}")
_DIGEST = re.compile(r"xxh3_128(x64m)?:[0-9a-f]{32}")
_HINT = "go on from the checkpoint before it; `pit checkpoint check --quarantine` moves this one aside"


class CheckpointManifest(Record, frozen=True, kw_only=True, tag="pit.checkpoint/1"):
    """What a checkpoint is made of, and where the run stands in it.

    seal: of these bytes. step: steps made when it was saved. t: when. format: who wrote the files below `payload`
    ("orbax", "dcp", "files"). run: whose it is. model: fingerprint of names, shapes and dtypes. world_size: ranks that
    wrote it. files: sorted by path. loader: the data loader's state. extra: whatever else the loop keeps, as JSON.
    """

    # First, so that its place in the bytes is the first place where a digest stands.
    seal: str = _EMPTY_SEAL
    step: int
    t: str
    format: str
    run: str
    model: str
    world_size: int
    files: tuple[FileEntry, ...]
    loader: dict[str, Any] = {}
    extra: dict[str, Any] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(entry.bytes for entry in self.files)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The manifest's bytes, sealed. Raises DataError when no reader would take them."""
    record = msgspec.structs.replace(manifest, seal=_EMPTY_SEAL)
    check_entries(record.files, f"step {manifest.step}")
    blank = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    if len(blank) > MAX_BYTES:
        what = f"the manifest would have {len(blank)} bytes, of {MAX_BYTES} at most"
        raise DataError(what, where=f"step {manifest.step}", hint="keep less in `extra`, or write fewer files")
    return blank.replace(_EMPTY_SEAL.encode(), digest_bytes(blank).encode(), 1)


def decode_manifest(data: bytes, where: str) -> CheckpointManifest:
    """The manifest in these bytes. Raises DataError when they are none, were changed, or name what cannot be."""
    try:
        manifest = decode_json(data, CheckpointManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not a checkpoint's manifest: {error}", where=where, hint=_HINT) from error
    sealed = _SEAL.fullmatch(manifest.seal)
    if not sealed or digest_bytes(data.replace(sealed[0].encode(), _EMPTY_SEAL.encode(), 1)) != manifest.seal:
        raise DataError("the manifest was changed since it was written", where=where, hint=_HINT)
    if not 0 <= manifest.step <= MAX_STEP:
        raise DataError(f"the manifest's step is not possible: {manifest.step}", where=where, hint=_HINT)
    check_entries(manifest.files, where)
    return manifest


def load_manifest(step_dir: Path) -> CheckpointManifest:
    """The manifest of a checkpoint's folder. Raises DataError where it has none that can be believed."""
    path = step_dir / FILE_NAME
    try:
        # A link, a FIFO and a file without end are no manifests, and none of them may keep us waiting.
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError("it has no manifest", where=str(step_dir), hint=_HINT) from error
    except OSError as error:
        raise DataError(f"its manifest cannot be read: {error.strerror}", where=str(path), hint=_HINT) from error
    if len(data) > MAX_BYTES:
        raise DataError(f"its manifest has more than {MAX_BYTES} bytes", where=str(path), hint=_HINT)
    return decode_manifest(data, str(path))


def check_entries(files: Iterable[FileEntry], where: str) -> None:
    """Raises DataError when there are too many files, one is outside the folder, named twice, or cannot be."""
    seen = {FILE_NAME}
    for entry in files:
        # What a manifest names becomes a path that we read, and that a copy of it writes.
        if not is_inside(entry.path):
            raise DataError(f"the manifest names a path outside: {entry.path!r}", where=where, hint=_HINT)
        if entry.path in seen or entry.bytes < 0 or not _DIGEST.fullmatch(entry.digest):
            raise DataError(f"the manifest's entry for {entry.path!r} is not possible", where=where, hint=_HINT)
        seen.add(entry.path)
    if len(seen) > MAX_FILES + 1:
        raise DataError(f"the manifest names more than {MAX_FILES} files", where=where, hint=_HINT)


def is_inside(path: str) -> bool:
    """Whether a relative path stays below its folder, and is text that a manifest can hold."""
    parts = path.split("/")
    return "\0" not in path and path.isprintable() and not any(part in ("", ".", "..") for part in parts)
