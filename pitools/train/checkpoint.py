"""One file a checkpoint, `step_<n>.npz`: the named arrays of a training state after n steps, and where its loader was.

Rank 0 writes it whole or not at all; every rank holds the same state, so that every rank can read it.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pitools.core.errors import DataError
from pitools.core.files import write_atomic
from pitools.loader.loader import State

Arrays = dict[str, np.ndarray[Any, Any]]

# The loader's state, as the bytes of its JSON: the one entry whose size may differ.
LOADER = "loader"
_NAME = re.compile(r"step_(\d{1,15})\.npz")


def newest(folder: Path | None) -> str:
    """The file name of the checkpoint with the most steps, or "" where there is none."""
    names = [path.name for path in folder.iterdir()] if folder and folder.is_dir() else []
    return max((name for name in names if _NAME.fullmatch(name)), key=steps, default="")


def steps(name: str) -> int:
    """Steps made when a checkpoint of this file name was saved; 0 for "" (no checkpoint)."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def due(done: int, total: int, every: int, stopped: int) -> bool:
    """Whether to save after `done` of `total` steps: at the end, at a stop, and every so many steps unless 0."""
    return bool(stopped) or done == total or (every > 0 and done % every == 0)


def save(folder: Path, step: int, state: Mapping[str, Any], loader: State) -> Path:
    """Keep the states after `step` steps; on return they survive power loss. Raises NoSpace or ClusterError."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in state.items()}
    arrays[LOADER] = np.frombuffer(msgspec.json.encode(loader), np.uint8)
    np.savez(buffer, **arrays)
    path = folder / f"step_{step}.npz"
    write_atomic(path, buffer.getvalue())
    return path


def load(path: Path, like: Mapping[str, Any]) -> tuple[Arrays, State]:
    """The states in a checkpoint, with the names and shapes of `like`. Raises DataError when it has others."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            state = {name: file[name] for name in file.files}
        loader = msgspec.json.decode(state.pop(LOADER).tobytes(), type=State) if LOADER in state else None
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, msgspec.DecodeError) as error:
        hint = "move it away to resume from the checkpoint before it"
        raise DataError(f"not a readable checkpoint: {error}", where=str(path), hint=hint) from error
    for name in sorted(state.keys() | like.keys()):
        found, wanted = (tuple(arrays[name].shape) if name in arrays else None for arrays in (state, like))
        if found != wanted:
            hint = "it is of another model: resume with the loop that wrote it, or give another checkpoint folder"
            raise DataError(f'"{name}" has shape {found} here, {wanted} in the model', where=str(path), hint=hint)
    if loader is None:
        hint = "go on with the version that wrote it, or begin again with another checkpoint folder"
        raise DataError("it does not say which samples were seen, as checkpoints now do", where=str(path), hint=hint)
    return state, loader
