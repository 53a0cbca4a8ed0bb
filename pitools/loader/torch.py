"""A loader's batches as torch tensors: on the CPU views of its buffers, on a GPU copied from pinned ones meanwhile.

For those who need processes of Python, because a transform holds the interpreter's lock: `StreamLoader` is torch's own
DataLoader over a `BatchStream`; workers take turns, so that the order is the loader's for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pitools.core.errors import ConfigError
from pitools.loader.device_prefetch import DevicePrefetcher
from pitools.loader.loader import Batch, Loader, LoaderState, NumpyBatch, Stateful, to_loader_state

TorchBatch: TypeAlias = Batch[Any]  # tensors on the device


def torch_batches(loader: Loader, device: Any = "cpu") -> DevicePrefetcher[TorchBatch]:
    """The loader's batches on a device, with keys in int64.

    CPU: no copy is made; a batch is valid until the next one is asked for. CUDA: give a loader that has not begun, so
    that its buffers are pinned. They are copied on a stream of their own, the next batch while this one is trained on.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return DevicePrefetcher(loader, _tensors, lambda _: None, early=False)
    if device.type != "cuda":
        return DevicePrefetcher(
            loader, lambda batch: _to_device(_tensors(batch), device, wait=True), lambda _: None, early=False
        )
    loader.allocate = allocate_pinned
    stream, done = torch.cuda.Stream(device), torch.cuda.Event()

    def put(batch: NumpyBatch) -> TorchBatch:
        with torch.cuda.stream(stream):
            moved = _to_device(_tensors(batch), device, wait=False)
            done.record(stream)
        return moved

    def settle(batch: TorchBatch) -> None:
        done.synchronize()  # begun a step ago, so there is seldom a wait; then the loader may fill its buffers again
        for tensor in _tensors_of(batch):
            tensor.record_stream(torch.cuda.current_stream(device))  # else its memory could be given away while in use

    return DevicePrefetcher(loader, put, settle, early=True)


def allocate_pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Page-locked memory, from which a GPU reads by itself."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer: NDArray[Any] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer.view(dtype).reshape(shape)


class BatchStream(IterableDataset):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """The batches of a loader as a dataset of torch's, without end: each iterator goes on where the one before ended.

    So a framework that makes an iterator an epoch trains on each batch once. With workers only a `StreamLoader` knows
    how many batches were taken, and any other DataLoader's workers are refused.
    """

    def __init__(
        self,
        make_loader: Callable[[], Loader],
        *,
        transform: Callable[[TorchBatch], Any] | None = None,
        state: LoaderState | Mapping[str, Any] | None = None,
        repeat: bool = False,
    ) -> None:
        """make: makes the Loader: a function of a module, or a `partial` of one, as workers are given it by pickle.
        transform: done by the workers, on tensors of their own. state: where to go on. repeat: each iterator begins
        there again, as validation wants it. Raises ConfigError.
        """
        _require_function(make_loader)
        self._make, self._transform, self._repeat = make_loader, transform, repeat
        self._start = None if state is None else to_loader_state(state)
        # Batches given since `_start`; and whether this is the copy of a worker whose DataLoader counts them.
        self.batches_taken, self.counted = 0, False

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and not (self.counted or self._repeat):
            # In one line: of a worker's error torch passes no more on.
            what = (
                "a DataLoader with workers does not count the batches that are taken, so that each iterator would give"
            )
            what += " the same (expected pitools.loader.torch.StreamLoader, or num_workers=0)"
            raise ConfigError(what, where="BatchStream")
        begin = 0 if self._repeat else self.batches_taken
        loader = self._loader(begin)
        if worker is not None:
            loader.restrict_to_worker(worker.id, worker.num_workers)
        try:
            for number, batch in enumerate(loader, begin + 1):
                if worker is None:
                    self.batches_taken = max(self.batches_taken, number)
                # A copy, since workers send what they yield some time later.
                own = _map_tensors(_tensors(batch), torch.clone)
                yield self._transform(own) if self._transform else own
        finally:
            loader.close()

    def state(self, batches: int | None = None) -> LoaderState:
        """Return the state after so many batches since `state`, after those taken so far where none is said."""
        return self._loader(self.batches_taken if batches is None else batches).state()

    def restart(self, state: LoaderState) -> None:
        """Let the next iterator begin where `state` was taken. Raises ConfigError where it is another loader's."""
        self._make().load_state(state)
        self._start, self.batches_taken = state, 0

    def _loader(self, batches: int) -> Loader:
        """A loader that goes on after so many batches since `state`."""
        loader = self._make()
        if self._start is not None:
            loader.load_state(self._start)
        loader.restrict_to_worker(batches, 1)
        return loader


class StreamLoader(Stateful, DataLoader):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """torch's DataLoader over a `BatchStream`: each iterator, so each epoch, goes on where the one before ended.

    Any number of workers, forked or spawned, gives the same batches in the same order. Each has threads of its own.
    `state` is after the last batch that was given, however far ahead workers are; a framework may take one ahead of
    training, as Lightning does without `limit_train_batches`.
    """

    def __init__(self, stream: BatchStream, **options: Any) -> None:
        """options: of torch's DataLoader. Raises ConfigError for `persistent_workers`."""
        if options.get("persistent_workers"):
            what = "persistent_workers: not possible (expected False): workers learn where to go on when they start"
            raise ConfigError(what, where="StreamLoader", hint="take longer epochs, or one iterator for all of them")
        super().__init__(stream, batch_size=None, **options)

    def __iter__(self) -> Iterator[Any]:
        stream: BatchStream = self.dataset
        begin = stream.batches_taken
        stream.counted = True
        try:
            batches = super().__iter__()  # starts the workers, each with a copy of the stream
        finally:
            stream.counted = False
        for number, batch in enumerate(batches, begin + 1):
            stream.batches_taken = max(stream.batches_taken, number)
            yield batch

    def state(self) -> LoaderState:
        """What `load_state` goes on from: after the last batch that was given."""
        return self.dataset.state()  # type: ignore[no-any-return]

    def load_state(self, state: LoaderState) -> None:
        """Let the next iterator begin where `state` was taken. Raises ConfigError where it is another loader's."""
        self.dataset.restart(state)


def _require_function(make: Any) -> None:
    if not callable(make):
        what = f"make: not a function (expected one that makes a Loader, got {type(make).__name__})"
        hint = "BatchStream(partial(make_loader, path)), with make_loader in a module that workers can import"
        raise ConfigError(what, where="BatchStream", hint=hint)


def _tensors(batch: NumpyBatch) -> TorchBatch:
    """Views of the batch's arrays."""
    return _map_tensors(batch._replace(keys=batch.keys.view(np.int64)), _view)  # torch does little with unsigned ones


def _view(array: NDArray[Any]) -> Any:
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"torch has no tensors of {array.dtype}", where="to_torch") from error


def _to_device(batch: TorchBatch, device: Any, *, wait: bool) -> TorchBatch:
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=not wait))


def _map_tensors(batch: TorchBatch, change: Callable[[Any], Any]) -> TorchBatch:
    parts = (batch.arrays, batch.valid_mask, batch.extras)
    arrays, valid_mask, extras = ({name: change(tensor) for name, tensor in part.items()} for part in parts)
    return batch._replace(
        arrays=arrays, valid_mask=valid_mask, extras=extras, samples=change(batch.samples), keys=change(batch.keys)
    )


def _tensors_of(batch: TorchBatch) -> Iterator[Any]:
    for part in (batch.arrays, batch.valid_mask, batch.extras):
        yield from part.values()
    yield from (batch.samples, batch.keys)
