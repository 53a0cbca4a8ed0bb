"""What a framework has to be able to do for a `Checkpointer`, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from pitools.checkpoint.coordination.exchange import SaveExchange
from pitools.checkpoint.store.hashing import FileDigest
from pitools.core.errors import ClusterError, NoSpace, PitError
from pitools.core.fs import from_os_error

# What a rank has digested while it wrote it, and made durable: by path below the payload.
Digests = Mapping[str, FileDigest]


class FrameworkAdapter(Protocol):
    """A framework's. `OrbaxAdapter` and `DcpAdapter` are such."""

    format: str

    def describe(self, state: Any) -> dict[str, str]:
        """Name → type and shape of all that a state holds, the same at every rank."""

    def copy_to_host(self, state: Any, payload: Future[Path]) -> Callable[[SaveExchange], Digests | None]:
        """Copy a state to this host; returns what writes it, to be called once, in any thread.

        payload: where to write. It comes, or its error does, after `stage` has returned: training does not wait for a
        file system. It is there when what is returned is called.
        """

    def load(self, payload: Path, like: Any) -> Any:
        """What was written, as `like` is. Raises DataError."""

    def rank_of_file(self, path: str, world_size: int) -> int:
        """The rank that wrote this file below the payload."""

    def random_state(self) -> dict[str, Any]:
        """The framework's own generators, as JSON."""

    def set_random_state(self, states: dict[str, Any]) -> None:
        """Undo what was drawn since `random_state`."""


def as_pit_error(error: BaseException, path: Path) -> BaseException:
    """What a library's error means to the user."""
    if isinstance(error, OSError):
        ours: PitError = from_os_error(error, path)
    elif isinstance(error, PitError) or not isinstance(error, Exception):
        return error
    else:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        kind = NoSpace if "No space left" in str(error) or "Disk quota" in str(error) else ClusterError
        ours = kind(f"cannot save: {type(error).__name__}: {line}", where=str(path))
    ours.__cause__ = error
    return ours
