"""A loader's batches as JAX arrays: on this process's device, or sharded over a mesh of all processes' devices."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError
from pitools.loader.device_prefetch import DevicePrefetcher
from pitools.loader.loader import Batch, Loader, NumpyBatch
from pitools.loader.sampling.shuffle import rank_slice

JaxBatch: TypeAlias = Batch[Any]  # arrays over the mesh


def jax_batches(loader: Loader, sharding: Any) -> DevicePrefetcher[JaxBatch]:
    """The loader's batches, their samples divided as `sharding` says; the next is copied while this one is trained on.

    Over a mesh their arrays are of the global batch. keys: (b, 2) uint32, `jax.random.wrap_key_data` makes keys of
    them. samples, bytes_read and waited_s are of this process's part, and samples is NumPy's.

    sharding: a device, for this rank's part alone; or a sharding whose first axis is that of samples, where each
    process needs the part of the batch that its loader, by its rank, reads. Raises ConfigError, with the first batch,
    where it needs another.
    """
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    whole = not sharding.is_fully_addressable
    # What is put on a CPU may stay where it is: in a buffer that is about to be filled again.
    copied = any(device.platform == "cpu" for device in sharding.addressable_devices)

    def place(array: NDArray[Any], size: int) -> Any:
        shape = (size, *array.shape[1:]) if whole else array.shape
        return jax.make_array_from_process_local_data(sharding, array.copy() if copied else array, shape)

    def put(batch: NumpyBatch) -> JaxBatch:
        if whole:
            _check(sharding, loader, (batch.size, *next(iter(batch.arrays.values())).shape[1:]))
        parts = (batch.arrays, batch.valid_mask, batch.extras)
        arrays, valid_mask, extras = (
            {name: place(array, batch.size) for name, array in part.items()} for part in parts
        )
        keys = place(batch.keys.view(np.uint32).reshape(-1, 2), batch.size)
        return batch._replace(
            arrays=arrays, valid_mask=valid_mask, extras=extras, samples=batch.samples.copy(), keys=keys
        )

    def settle(batch: JaxBatch) -> None:
        jax.block_until_ready((batch.arrays, batch.valid_mask, batch.extras, batch.keys))

    return DevicePrefetcher(loader, put, settle, early=True)


def _check(sharding: Any, loader: Loader, shape: tuple[int, ...]) -> None:
    """Refuse a sharding by which this process needs other samples than it reads: they would be taken for those."""
    size = shape[0]
    try:
        found = sharding.addressable_devices_indices_map(shape).values()
    except ValueError as error:
        raise ConfigError(str(error), where="sharding", hint="take another batch_size") from error
    held = {index[0].indices(size)[:2] for index in found}
    low, high = min(start for start, _ in held), max(stop for _, stop in held)
    if (low, high) != rank_slice(size, loader.rank, loader.world_size) or sum(b - a for a, b in held) != high - low:
        what = f"this process's devices hold {sorted(held)} of a batch of {size}, "
        what += f"and its loader reads {rank_slice(size, loader.rank, loader.world_size)}"
        hint = f"rank={low // (high - low)}, world_size={size // (high - low)}, with a mesh in the processes' order"
        raise ConfigError(what, where="sharding", hint=hint)
