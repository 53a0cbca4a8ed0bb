"""Files for DCP that are digested while they are written, so that no byte is read again for the digest.

The digest of a large block is computed in a thread while the block is being written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem

from pitools.checkpoint.store.hashing import FileDigest
from pitools.checkpoint.store.manifest import is_inside
from pitools.core.daemon_pool import DaemonPool
from pitools.core.errors import DataError
from pitools.store.digest import Hasher

# Tensors are written in large blocks, metadata in pieces of some bytes.
_BUFFER = 256 << 10


class DigestingFileSystem(FileSystem):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """A DCP file system that digests files while it writes them. digests: of the durable files, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, FileDigest] = {}

    def concat_path(self, path: Any, suffix: Any) -> Any:
        """Return the path of a file that DCP's metadata name. Raises DataError if it is not below `path`."""
        if not isinstance(suffix, str) or not is_inside(suffix):
            raise DataError(f"the index names a file outside: {suffix!r}", where=str(path))
        return super().concat_path(path, suffix)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file for reading, or for writing it once from start to end."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DaemonPool(1, "digest") as pool, Path(path).open("wb", buffering=_BUFFER) as file:
            written = _DigestedFile(file, pool)
            yield written
            written.close()
        self.digests[Path(path).name] = written.digest()

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file, and its digest."""
        super().rename(path, new_path)
        if digest := self.digests.pop(Path(path).name, None):
            self.digests[Path(new_path).name] = digest


class _DigestedFile:
    """The file object that DCP writes to. It cannot seek: bytes out of order would have no digest."""

    def __init__(self, file: BinaryIO, pool: DaemonPool) -> None:
        self._file, self._pool, self._hasher, self._count = file, pool, Hasher(), 0

    def write(self, data: Any) -> int:
        """Write all of a block."""
        with memoryview(data) as view, view.cast("B") as block:
            if len(block) < _BUFFER:
                self._hasher.update(block)
                self._file.write(block)
            else:
                # Both release the GIL.
                hashing = self._pool.submit(self._hasher.update, block)
                try:
                    self._file.write(block)
                finally:
                    hashing.result()
            self._count += len(block)
            return len(block)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._count

    def flush(self) -> None:
        """Do nothing: `close` flushes."""

    def close(self) -> None:
        """Sync the file."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def digest(self) -> FileDigest:
        """Return the digest of all written bytes."""
        return FileDigest(self._count, self._hasher.digest())
