"""The store that torch's ranks share, for the `put`, `get` and `delete` of a `Checkpointer` in your own loop."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from pitools.checkpoint.coordination.barrier import Delete, Get, Put, store_gone_error
from pitools.core.errors import ConfigError


def torch_store(store: Any = None) -> tuple[Put, Get, Delete]:
    """Return `put`, `get` and `delete` of the default process group's store, or of `store`, on a separate connection.

    put, get: of text; `get` raises TimeoutError, all Unreachable. delete: a missing key is no error. Raises ConfigError
    where there is no group.
    """
    if store is None:
        if not dist.is_initialized():
            hint = "call torch.distributed.init_process_group first; one rank alone needs no store"
            raise ConfigError("torch has no process group", where="torch_store()", hint=hint)
        store = dist.distributed_c10d._get_default_store()  # it has no public name yet
    # A separate connection: a blocking wait would block the process group's requests.
    own, where = store.clone(), _where(store)

    def get(key: str, seconds: float) -> str:
        # Polled: torch's own wait prints broken sockets at its time-out.
        deadline, pause = time.monotonic() + seconds, 0.001
        try:
            while not own.check([key]):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{key} was not set in {seconds:g} s")
                time.sleep(pause)
                pause = min(1.5 * pause, 0.05)
            return bytes(own.get(key)).decode()
        except dist.DistError as error:
            raise store_gone_error(error, where) from error

    def put(key: str, value: str) -> None:
        try:
            own.set(key, value)
        except dist.DistError as error:
            raise store_gone_error(error, where) from error

    def delete(key: str) -> None:
        try:
            own.delete_key(key)
        except dist.DistError as error:
            raise store_gone_error(error, where) from error

    return put, get, delete


def _where(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "")
    return f"{host}:{store.port}" if host else type(store).__name__
