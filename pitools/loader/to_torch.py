"""A loader's batches as torch tensors: on the CPU views of its buffers, on a GPU copied from pinned ones meanwhile.

For those who need processes of Python, because a transform holds the interpreter's lock: `BatchStream` is a dataset for
torch's own DataLoader, whose workers take turns, so that the order is the loader's for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from pitools.core.errors import ConfigError
from pitools.loader.device import OnDevice
from pitools.loader.loader import Batch, Loader, State


class TorchBatch(NamedTuple):
    """This rank's part of a global batch, as in `Batch`: tensors on the device, and what it cost. keys: int64."""

    step: int
    size: int
    arrays: dict[str, Any]
    inside: dict[str, Any]
    aside: dict[str, Any]
    samples: Any
    keys: Any
    bytes_read: int
    waited_s: float


def torch_batches(loader: Loader, device: Any = "cpu") -> OnDevice[TorchBatch]:
    """The loader's batches on a device.

    CPU: no copy is made; a batch is valid until the next one is asked for. CUDA: give a loader that has not begun, so
    that its buffers are pinned. They are copied on a stream of their own, the next batch while this one is trained on.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return OnDevice(loader, _tensors, lambda _: None, early=False)
    if device.type != "cuda":
        return OnDevice(loader, lambda batch: _moved(_tensors(batch), device, wait=True), lambda _: None, early=False)
    loader.allocate = pinned
    stream, done = torch.cuda.Stream(device), torch.cuda.Event()

    def put(batch: Batch) -> TorchBatch:
        with torch.cuda.stream(stream):
            moved = _moved(_tensors(batch), device, wait=False)
            done.record(stream)
        return moved

    def settle(batch: TorchBatch) -> None:
        done.synchronize()  # begun a step ago, so there is seldom a wait; then the loader may fill its buffers again
        for tensor in _every(batch):
            tensor.record_stream(torch.cuda.current_stream(device))  # else its memory could be given away while in use

    return OnDevice(loader, put, settle, early=True)


def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Page-locked memory, from which a GPU reads by itself."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer: NDArray[Any] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer.view(dtype).reshape(shape)


class BatchStream(IterableDataset):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """The batches of a loader for `torch.utils.data.DataLoader(…, batch_size=None, num_workers=…)`, without end.

    Any number of workers, forked or spawned, gives the same batches in the same order. Each has threads of its own.
    Each iterator of the DataLoader begins again where `state` was taken, so one is to be used for all epochs.
    """

    def __init__(
        self, make: Callable[[], Loader], *, transform: Callable[[TorchBatch], Any] | None = None,
        state: State | None = None,
    ) -> None:  # fmt: skip
        """make: a function of a module, or a `partial` of one, as workers are given it by pickle. transform: done by
        the workers, on tensors of their own. state: where to go on.
        """
        self._make, self._transform, self._start = make, transform, state

    def __iter__(self) -> Iterator[Any]:
        loader, worker = self._make(), get_worker_info()
        if self._start is not None:
            loader.load_state(self._start)
        if worker is not None:
            loader.only(worker.id, worker.num_workers)
        try:
            for batch in loader:
                # A copy, since workers send what they yield some time later.
                own = _changed(_tensors(batch), torch.clone)
                yield self._transform(own) if self._transform else own
        finally:
            loader.close()

    def state(self, batches: int) -> State:
        """The state after so many batches were taken since `state`: workers are ahead of training, and do not know."""
        loader = self._make()
        if self._start is not None:
            loader.load_state(self._start)
        loader.only(batches, 1)
        return loader.state()


def _tensors(batch: Batch) -> TorchBatch:
    """Views of the batch's arrays."""
    parts = (batch.arrays, batch.inside, batch.aside)
    arrays, inside, aside = ({name: _view(array) for name, array in part.items()} for part in parts)
    keys = _view(batch.keys.view(np.int64))  # torch does little with unsigned ones
    samples = _view(batch.samples)
    return TorchBatch(batch.step, batch.size, arrays, inside, aside, samples, keys, batch.bytes_read, batch.waited_s)


def _view(array: NDArray[Any]) -> Any:
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"torch has no tensors of {array.dtype}", where="to_torch") from error


def _moved(batch: TorchBatch, device: Any, *, wait: bool) -> TorchBatch:
    return _changed(batch, lambda tensor: tensor.to(device, non_blocking=not wait))


def _changed(batch: TorchBatch, change: Callable[[Any], Any]) -> TorchBatch:
    parts = (batch.arrays, batch.inside, batch.aside)
    arrays, inside, aside = ({name: change(tensor) for name, tensor in part.items()} for part in parts)
    return batch._replace(
        arrays=arrays, inside=inside, aside=aside, samples=change(batch.samples), keys=change(batch.keys)
    )


def _every(batch: TorchBatch) -> Iterator[Any]:
    for part in (batch.arrays, batch.inside, batch.aside):
        yield from part.values()
    yield from (batch.samples, batch.keys)
