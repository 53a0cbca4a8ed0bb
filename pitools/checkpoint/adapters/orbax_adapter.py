"""Save JAX states by orbax: pytrees of jax.Array, replicated or sharded over processes, NumPy arrays and numbers.

Handler and format are orbax's: `orbax.checkpoint.PyTreeCheckpointer` reads `payload/`. Its checkpointers are not used:
errors of their barriers do not name the missing ranks, and they publish without verification.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # type: ignore[import-untyped]

from pitools.checkpoint.adapters.base import load_error
from pitools.checkpoint.coordination.exchange import SaveExchange
from pitools.core.daemon_pool import DaemonPool

_RANK_IN_NAME = re.compile(r"(?:ocdbt\.|array_metadatas/)process_(\d+)(?:/|$)")


class OrbaxAdapter:
    """The adapter of a `Checkpointer` for JAX.

    A fully addressable array is taken as replicated, and written by process 0 only.
    """

    format = "orbax"

    def __init__(self) -> None:
        self._handler = ocp.PyTreeCheckpointHandler()

    def describe(self, state: Any) -> dict[str, str]:
        """Name → type and shape of all that a state holds, over all processes."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        return {_name(path): _type_and_shape(leaf) for path, leaf in leaves}

    def begin_save(self, state: Any, payload_dir: Future[Path]) -> Callable[[SaveExchange], None]:
        """Copy a state to this host; return the function that waits for its write into `payload_dir`, called once."""
        args = ocp.args.PyTreeSave(jax.tree.map(_for_saving, jax.tree.map(_key_data, state)))
        # Copies now, and writes once the folder exists: earlier, its threads would compete with this one for the GIL.
        futures = _run(self._handler.async_save(_AwaitedPath(payload_dir), args=args))
        return lambda exchange: self._write(futures, payload_dir, exchange)

    def load(self, payload: Path, like: Any) -> Any:
        """Return the state in `payload`. like: arrays, or jax.ShapeDtypeStruct with a sharding.

        Raises DataError, Unreachable, ClusterError.
        """
        plain = jax.tree.map(_key_data, like)
        args = ocp.args.PyTreeRestore(item=plain, restore_args=jax.tree.map(_for_restoring, plain))
        try:
            state = self._handler.restore(epath.Path(payload), args=args)
        except Exception as error:
            raise load_error(error, payload) from error
        return jax.tree.map(_match_type, like, jax.tree.map(_with_sharding, plain, state))

    def random_state(self) -> dict[str, Any]:
        """Nothing: JAX's keys are a part of the state."""
        return {}

    def set_random_state(self, states: dict[str, Any]) -> None:
        """Nothing."""

    def rank_of_file(self, path: str, world_size: int) -> int:
        """The rank that wrote this file below `payload`."""
        match = _RANK_IN_NAME.match(path)
        return int(match[1]) % world_size if match else 0

    def _write(self, futures: Any, payload_dir: Future[Path], exchange: SaveExchange) -> None:
        with contextlib.ExitStack() as waits:  # for all of them, also where one fails
            for future in futures:
                waits.callback(future.result)
        payload = payload_dir.result()

        def finish(_: list[bytes]) -> list[bytes]:
            self._handler.finalize(epath.Path(payload))  # merges the processes' databases into one
            return []

        exchange(at_rank0=finish)


class _AwaitedPath:
    """A path whose folder is created later: orbax's protocol `PathAwaitingCreation`."""

    def __init__(self, folder: Future[Path], *names: str) -> None:
        self._folder, self._names = folder, names

    def __truediv__(self, name: str) -> _AwaitedPath:
        return _AwaitedPath(self._folder, *self._names, name)

    @property
    def path(self) -> epath.Path:
        """Return the path, once its folder exists."""
        return _PresentPath(self._folder.result(), *self._names)

    async def await_creation(self) -> epath.Path:
        """Wait for the folder, and return the path."""
        await asyncio.wrap_future(self._folder)
        return self.path


class _PresentPath(type(epath.Path("/"))):  # type: ignore[misc]
    """An existing folder. If two threads of orbax await its creation, the slower one awaits this object."""

    async def await_creation(self) -> epath.Path:
        """Return self."""
        return self


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_alone(coroutine)
    with DaemonPool(1, "orbax") as threads:  # in a notebook's own event loop
        return threads.submit(_run_alone, coroutine).result()


def _run_alone(coroutine: Coroutine[Any, Any, Any]) -> Any:
    # As asyncio.run without cancelling tasks and closing generators: there are none, and it costs three iterations.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _name(path: Any) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator="/"))


def _type_and_shape(leaf: Any) -> str:
    # A Python number in `like`, such as the step of a new TrainState, is a 0-d array after the first compiled step.
    if not hasattr(leaf, "shape") or (not leaf.shape and not _is_key(leaf)):
        return "value"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    """Return the uint32 data of a random key: orbax cannot restore its own format of keys with another world size."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _match_type(leaf: Any, value: Any) -> Any:
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else value


def _is_addressable(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable


def _for_saving(leaf: Any) -> Any:
    return np.asarray(leaf) if _is_addressable(leaf) else leaf


def _for_restoring(leaf: Any) -> Any:
    if _is_addressable(leaf) or isinstance(leaf, np.ndarray | np.generic):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    return ocp.RestoreArgs(restore_type=type(leaf))


def _with_sharding(leaf: Any, value: Any) -> Any:
    return jax.device_put(value, leaf.sharding) if _is_addressable(leaf) else value
