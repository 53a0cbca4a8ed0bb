"""What a framework has to be able to do for a `Guard`, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from pitools.checkpoint.coordination.exchange import Meeting
from pitools.checkpoint.store.hashing import Hashed
from pitools.core.errors import ClusterError, NoSpace, PitError
from pitools.core.fs import os_error

# What a rank has digested while it wrote it, and made durable: by path below the payload.
Digests = Mapping[str, Hashed]


class Adapter(Protocol):
    """A framework's. `Orbax` and `Dcp` are such."""

    format: str

    def describe(self, state: Any) -> dict[str, str]:
        """Name → type and shape of all that a state holds, the same at every rank."""

    def stage(self, state: Any, payload: Future[Path]) -> Callable[[Meeting], Digests | None]:
        """Copy a state to this host; returns what writes it, to be called once, in any thread.

        payload: where to write. It comes, or its error does, after `stage` has returned: training does not wait for a
        file system. It is there when what is returned is called.
        """

    def load(self, payload: Path, like: Any) -> Any:
        """What was written, as `like` is. Raises DataError."""

    def writer(self, path: str, world_size: int) -> int:
        """The rank that wrote this file below the payload."""

    def random_state(self) -> dict[str, Any]:
        """The framework's own generators, as JSON."""

    def set_random_state(self, states: dict[str, Any]) -> None:
        """Undo what was drawn since `random_state`."""


def as_ours(error: BaseException, place: Path) -> BaseException:
    """What a library's error means to the user."""
    if isinstance(error, OSError):
        ours: PitError = os_error(error, place)
    elif isinstance(error, PitError) or not isinstance(error, Exception):
        return error
    else:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        kind = NoSpace if "No space left" in str(error) or "Disk quota" in str(error) else ClusterError
        ours = kind(f"cannot save: {type(error).__name__}: {line}", where=str(place))
    ours.__cause__ = error
    return ours
