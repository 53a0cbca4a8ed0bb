"""The interface between a `Checkpointer` and a framework, and the translation of the framework's errors."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from pitools.checkpoint.coordination.exchange import SaveExchange
from pitools.checkpoint.store.hashing import FileDigest
from pitools.core.errors import ClusterError, DataError, NoSpace, PitError, Unreachable
from pitools.core.fs import from_os_error

# Digests that a rank computed while it wrote durable files: by path below the payload.
Digests = Mapping[str, FileDigest]
# Errors of an open that a retry would not change.
_NO_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)


class FrameworkAdapter(Protocol):
    """Save and load the states of one framework: `OrbaxAdapter`, `DcpAdapter`."""

    format: str

    def describe(self, state: Any) -> dict[str, str]:
        """Name → type and shape of all that a state holds, the same at every rank."""

    def begin_save(self, state: Any, payload_dir: Future[Path]) -> Callable[[SaveExchange], Digests | None]:
        """Copy a state to this host; return the function that writes it, or waits for its write; called once.

        payload_dir: the folder to write to; a future, because training does not wait for a file system. It is done,
        with the folder or an error, when the returned function is called, in any thread.
        """

    def load(self, payload: Path, like: Any) -> Any:
        """Return the state in `payload`, in the structure of `like`. Raises DataError, Unreachable, ClusterError."""

    def rank_of_file(self, path: str, world_size: int) -> int:
        """The rank that wrote this file below the payload."""

    def random_state(self) -> dict[str, Any]:
        """The framework's own generators, as JSON."""

    def set_random_state(self, states: dict[str, Any]) -> None:
        """Restore the random generators to `states`, as `random_state` returned them."""


def load_error(error: Exception, path: Path) -> PitError:
    """Translate a failed load of verified files: a failed read to Unreachable, any other failure to DataError."""
    if isinstance(error, OSError) and error.errno not in _NO_FILE:
        hint = "check that the file system answers: ls; then start the run again"
        return Unreachable(f"read failed: {error.strerror}", where=str(path), hint=hint)
    if isinstance(error, MemoryError):
        return ClusterError("out of memory while loading", where=str(path), hint="request more memory")
    return DataError(f"cannot be loaded: {_first_line(error)}", where=str(path))


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def as_pit_error(error: BaseException, path: Path) -> BaseException:
    """Translate a library's error to a PitError; return other errors unchanged."""
    if isinstance(error, OSError):
        ours: PitError = from_os_error(error, path)
    elif isinstance(error, PitError) or not isinstance(error, Exception):
        return error
    else:
        kind = NoSpace if "No space left" in str(error) or "Disk quota" in str(error) else ClusterError
        ours = kind(f"cannot save: {type(error).__name__}: {_first_line(error)}", where=str(path))
    ours.__cause__ = error
    return ours
