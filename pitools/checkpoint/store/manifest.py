"""The manifest of a checkpoint: every file with size and digest, and the state to resume from. It is written last.

Its `seal` is the digest of the manifest's own bytes with zeros in place of the seal, so that a flipped bit in the
loader's position is detected as well as one in the tensors. Digests detect damage, not forgery.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import open_regular
from pitools.core.record import Record, decode_json
from pitools.store.digest import ALGORITHM, digest_bytes
from pitools.store.manifest import FileEntry as FileEntry

# A special file at the path, which a retry would not change: a link, a socket, a device, or no file.
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR)
MANIFEST_FILE = "manifest.json"
# The memory limit of a reader; a writer obeys it too, so that no manifest is written that cannot be read.
MAX_BYTES = 64 << 20
MAX_FILES = 250_000
MAX_STEP = 10**15 - 1

_EMPTY_SEAL = f"{ALGORITHM}:{'0' * 32}"
_SEAL = re.compile(rf"{ALGORITHM}:[0-9a-f]{{32}}")
_DIGEST = re.compile(r"xxh3_128(x64m)?:[0-9a-f]{32}")
_HINT = "resume from the checkpoint before it; `pit checkpoint check --quarantine` moves this one aside"


_FLOAT = "$float"
_NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}


class CheckpointManifest(Record, frozen=True, kw_only=True, tag="pit.checkpoint/1"):
    """The files of a checkpoint, and the state of its run.

    seal: digest of these bytes. step: steps made when it was saved. t: time. format: the writer of `payload`
    ("orbax", "dcp", "files"). run: the run's name. state_fingerprint: digest of names, shapes and dtypes. world_size:
    number of ranks that saved. files: sorted by path. loader_state: of the data loader. custom_metadata: the loop's
    own, as JSON; on disk a number that JSON does not have is {"$float": "inf"}.
    """

    # First, so that its place in the bytes is that of the first digest.
    seal: str = _EMPTY_SEAL
    step: int
    t: str
    format: str
    run: str
    state_fingerprint: str
    world_size: int
    files: tuple[FileEntry, ...]
    loader_state: dict[str, Any] = {}
    custom_metadata: dict[str, Any] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(entry.bytes for entry in self.files)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the manifest's bytes, sealed. Raises DataError when they exceed the readers' limits."""
    loader_state, custom_metadata = _encode_floats(manifest.loader_state), _encode_floats(manifest.custom_metadata)
    record = msgspec.structs.replace(
        manifest, seal=_EMPTY_SEAL, loader_state=loader_state, custom_metadata=custom_metadata
    )
    check_entries(record.files, f"step {manifest.step}")
    blank = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    if len(blank) > MAX_BYTES:
        problem = f"manifest: too large (expected at most {MAX_BYTES} bytes, got {len(blank)})"
        raise DataError(
            problem, where=f"step {manifest.step}", hint="keep less in `custom_metadata`, or write fewer files"
        )
    return blank.replace(_EMPTY_SEAL.encode(), digest_bytes(blank).encode(), 1)


def decode_manifest(data: bytes, where: str) -> CheckpointManifest:
    """Return the manifest in these bytes. Raises DataError for invalid JSON, a wrong seal, or invalid entries."""
    try:
        manifest = decode_json(data, CheckpointManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not a checkpoint's manifest: {error}", where=where, hint=_HINT) from error
    sealed = _SEAL.fullmatch(manifest.seal)
    if not sealed or digest_bytes(data.replace(sealed[0].encode(), _EMPTY_SEAL.encode(), 1)) != manifest.seal:
        raise DataError("manifest: changed since it was written: its seal differs", where=where, hint=_HINT)
    if not 0 <= manifest.step <= MAX_STEP:
        raise DataError(
            f"manifest: step out of range (expected 0 to {MAX_STEP}, got {manifest.step})", where=where, hint=_HINT
        )
    check_entries(manifest.files, where)
    loader_state, custom_metadata = _decode_floats(manifest.loader_state), _decode_floats(manifest.custom_metadata)
    return msgspec.structs.replace(manifest, loader_state=loader_state, custom_metadata=custom_metadata)


def load_manifest(step_dir: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint. Raises DataError if it is missing or damaged."""
    path = step_dir / MANIFEST_FILE
    try:
        # A link, a FIFO and an endless file are refused without waiting.
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError("no manifest", where=str(step_dir), hint=_HINT) from error
    except OSError as error:
        raise DataError(f"manifest: cannot be read: {error.strerror}", where=str(path), hint=_HINT) from error
    if len(data) > MAX_BYTES:
        raise DataError(f"manifest: more than {MAX_BYTES} bytes", where=str(path), hint=_HINT)
    return decode_manifest(data, str(path))


def is_read_error(error: DataError) -> bool:
    """Return whether `load_manifest` failed by a read, which may succeed later, and not by what it read."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in NO_FILE


def _encode_floats(value: Any) -> Any:
    """Return a value with a record in place of each infinity and NaN, which msgspec would write as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, Mapping):
        return {name: _encode_floats(part) for name, part in value.items()}
    return [_encode_floats(part) for part in value] if isinstance(value, list | tuple) else value


def _decode_floats(value: Any) -> Any:
    if isinstance(value, dict):
        number = _NOT_FINITE.get(str(value.get(_FLOAT))) if len(value) == 1 else None
        return {name: _decode_floats(part) for name, part in value.items()} if number is None else number
    return [_decode_floats(part) for part in value] if isinstance(value, list) else value


def check_entries(files: Iterable[FileEntry], where: str) -> None:
    """Raise DataError for too many files, and for a path that is outside the folder, repeated or invalid."""
    paths = {MANIFEST_FILE}
    for entry in files:
        # A name in the manifest becomes a path that is read, and written by a copy.
        if not is_inside(entry.path):
            raise DataError(f"manifest: a path outside the checkpoint: {entry.path!r}", where=where, hint=_HINT)
        if entry.path in paths or entry.bytes < 0 or not _DIGEST.fullmatch(entry.digest):
            raise DataError(f"manifest: invalid entry of {entry.path!r}", where=where, hint=_HINT)
        paths.add(entry.path)
    if len(paths) > MAX_FILES + 1:
        raise DataError(f"manifest: more than {MAX_FILES} files", where=where, hint=_HINT)


def is_inside(path: str) -> bool:
    """Whether a relative path stays below its folder, and is text that a manifest can hold."""
    parts = path.split("/")
    return "\0" not in path and path.isprintable() and not any(part in ("", ".", "..") for part in parts)
