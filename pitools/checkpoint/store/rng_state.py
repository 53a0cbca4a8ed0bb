"""The states of every rank's random generators, saved beside the training state: Python's, NumPy's, the framework's.

With another world size a rank restores the state of its rank number if there is one; the others keep their seeds. So do
the generators of a framework whose version has states of another size: the training state is as good without them.
"""

from __future__ import annotations

import base64
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from pitools.core.errors import DataError, Unreachable
from pitools.core.record import decode_json

RNG_STATE_FILE = "rng_states.json"


class FrameworkGenerators(Protocol):
    """The random generators of a framework."""

    def random_state(self) -> dict[str, Any]:
        """Return their states, as JSON."""

    def set_random_state(self, states: dict[str, Any]) -> None:
        """Restore them."""


class RngState(NamedTuple):
    """The states of a process's random generators, as each generator returns them."""

    python: Any
    numpy: Any
    framework: dict[str, Any]


def capture_rng_state(framework: FrameworkGenerators) -> RngState:
    """Capture the states of this process's generators."""
    numpy = sys.modules.get("numpy")
    return RngState(random.getstate(), numpy and numpy.random.get_state(legacy=True), framework.random_state())


def encode_rng_state(states: RngState) -> bytes:
    """Encode the states for `write_rng_state`."""
    version, words, gauss = states.python
    record: dict[str, Any] = {"python": [version, _encode_words(words), gauss], "framework": states.framework}
    if states.numpy:
        kind, keys, *rest = states.numpy
        record["numpy"] = [kind, _encode_words(keys.tolist()), *rest]
    return msgspec.json.encode(record)


def write_rng_state(unpublished_dir: Path, by_rank: list[bytes]) -> None:
    """Write the states of all ranks into the unpublished folder; the manifest's seal covers them."""
    (unpublished_dir / RNG_STATE_FILE).write_bytes(msgspec.json.encode([msgspec.Raw(states) for states in by_rank]))


def restore_rng_state(step_dir: Path, rank: int, framework: FrameworkGenerators) -> None:
    """Restore the generators of this rank's process. Raises DataError, Unreachable."""
    path = step_dir / RNG_STATE_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError("generators' states: missing", where=str(path)) from error
    except OSError as error:
        hint = "check that the file system answers: ls; then start the run again"
        raise Unreachable(f"read failed: {error.strerror}", where=str(path), hint=hint) from error
    try:
        by_rank = decode_json(data, list[dict[str, Any]])
        if rank >= len(by_rank):
            return
        version, words, gauss = by_rank[rank]["python"]
        random.setstate((version, _decode_words(words), gauss))
        if "numpy" in by_rank[rank]:
            import numpy as np

            kind, keys, *rest = by_rank[rank]["numpy"]
            np.random.set_state((kind, np.array(_decode_words(keys), np.uint32), *rest))
        states = by_rank[rank]["framework"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"generators' states: cannot be restored: {error}", where=str(path)) from error
    try:
        if states:
            framework.set_random_state(states)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        print(f"{path}: the framework's generators keep their seeds: {error}", file=sys.stderr, flush=True)


def _encode_words(words: Any) -> str:
    return base64.b64encode(b"".join(word.to_bytes(4, "little") for word in words)).decode()


def _decode_words(text: str) -> tuple[int, ...]:
    data = base64.b64decode(text)
    return tuple(int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4))
