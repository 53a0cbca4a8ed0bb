"""Convert a loader's batches to JAX arrays, on one device or sharded over a mesh of all processes' devices."""

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
    """Iterate over the loader's batches as JAX arrays; the next batch is copied during the training of this one.

    sharding: a device, for this rank's part alone; or a sharding whose first axis is the sample axis. Over a mesh the
    arrays are global, and each process's devices must need just the samples that its loader reads: else the first
    batch raises ConfigError. sample_seeds: (b, 2) uint32, for `jax.random.wrap_key_data`. sample_indices (a NumPy
    array), bytes_read and waited_s are of this process's part.
    """
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    is_global = not sharding.is_fully_addressable
    # On a CPU, JAX may use the loader's buffer itself, which the loader fills again.
    must_copy = any(device.platform == "cpu" for device in sharding.addressable_devices)

    def to_device(array: NDArray[Any], size: int) -> Any:
        shape = (size, *array.shape[1:]) if is_global else array.shape
        return jax.make_array_from_process_local_data(sharding, array.copy() if must_copy else array, shape)

    def put(batch: NumpyBatch) -> JaxBatch:
        if is_global:
            _check(sharding, loader, (batch.global_size, *next(iter(batch.arrays.values())).shape[1:]))
        parts = (batch.arrays, batch.valid_mask, batch.extras)
        arrays, valid_mask, extras = (
            {name: to_device(array, batch.global_size) for name, array in part.items()} for part in parts
        )
        sample_seeds = to_device(batch.sample_seeds.view(np.uint32).reshape(-1, 2), batch.global_size)
        return batch._replace(
            arrays=arrays,
            valid_mask=valid_mask,
            extras=extras,
            sample_indices=batch.sample_indices.copy(),
            sample_seeds=sample_seeds,
        )

    def wait_for_copy(batch: JaxBatch) -> None:
        jax.block_until_ready((batch.arrays, batch.valid_mask, batch.extras, batch.sample_seeds))

    return DevicePrefetcher(loader, put, wait_for_copy, early=True)


def _check(sharding: Any, loader: Loader, shape: tuple[int, ...]) -> None:
    """Raise ConfigError if the sharding puts other samples on this process's devices than its loader reads."""
    size = shape[0]
    try:
        indices = sharding.addressable_devices_indices_map(shape).values()
    except ValueError as error:
        raise ConfigError(str(error), where="sharding", hint="choose another global_batch_size") from error
    slices = {index[0].indices(size)[:2] for index in indices}
    low, high = min(start for start, _ in slices), max(stop for _, stop in slices)
    if (low, high) != rank_slice(size, loader.rank, loader.world_size) or sum(b - a for a, b in slices) != high - low:
        message = f"sharding: this process's devices need other samples of the batch of {size} than its loader reads "
        message += f"(expected {rank_slice(size, loader.rank, loader.world_size)}, got {sorted(slices)})"
        hint = f"rank={low // (high - low)}, world_size={size // (high - low)}, with a mesh in the processes' order"
        raise ConfigError(message, where="sharding", hint=hint)
