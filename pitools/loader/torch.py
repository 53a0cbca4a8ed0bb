"""Convert a loader's batches to torch tensors: views of its buffers on the CPU, asynchronous copies on a GPU.

For transforms in Python, which hold the interpreter's lock: `StreamLoader` is torch's DataLoader over a `BatchStream`.
Its worker processes take batches in rotation, so any number of workers gives the loader's order.
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
    """Iterate over the loader's batches as tensors on a device, with int64 keys.

    CPU: without a copy; a batch is valid until the next call. CUDA: the loader must not have started, since its
    buffers become pinned memory; a separate stream copies the next batch during the training of this one.
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
            on_device = _to_device(_tensors(batch), device, wait=False)
            done.record(stream)
        return on_device

    def wait_for_copy(batch: TorchBatch) -> None:
        done.synchronize()  # the copy started a step ago: seldom a wait. Then the loader may reuse its buffers
        for tensor in _tensors_of(batch):
            tensor.record_stream(torch.cuda.current_stream(device))  # else torch may reuse its memory while in use

    return DevicePrefetcher(loader, put, wait_for_copy, early=True)


def allocate_pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in page-locked memory, which a GPU reads by DMA."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer: NDArray[Any] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer.view(dtype).reshape(shape)


class BatchStream(IterableDataset):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """An endless torch IterableDataset of a loader's batches: each iterator continues after the previous one.

    So a framework with an iterator per epoch trains on each batch once. With workers only `StreamLoader` counts the
    batches; in the workers of any other DataLoader iteration raises ConfigError.
    """

    def __init__(
        self,
        make_loader: Callable[[], Loader],
        *,
        transform: Callable[[TorchBatch], Any] | None = None,
        state: LoaderState | Mapping[str, Any] | None = None,
        repeat: bool = False,
    ) -> None:
        """make_loader: returns a Loader; a module-level function or a `partial` of one, since it is pickled for the
        workers. transform: runs in the workers, on copies. state: the first batch; None: the loader's start.
        repeat: each iterator starts at `state`, for validation. Raises ConfigError for other types.
        """
        _require_function(make_loader)
        self._make, self._transform, self._repeat = make_loader, transform, repeat
        self._start = None if state is None else to_loader_state(state)
        # batches_taken: since `_start`. counted: this is the copy in a worker of a StreamLoader, which counts.
        self.batches_taken, self.counted = 0, False
        self._counter: tuple[int, Loader] | None = None  # a loader that is this number of batches after `_start`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counter": None}  # a worker opens its own

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and not (self.counted or self._repeat):
            # In one line: torch forwards no more of a worker's error.
            message = (
                "DataLoader: with workers it does not count batches, and each iterator would repeat the same ones "
            )
            message += "(expected pitools.loader.torch.StreamLoader, or num_workers=0)"
            raise ConfigError(message, where="BatchStream")
        begin = 0 if self._repeat else self.batches_taken
        loader = self._loader(begin)
        if worker is not None:
            loader.restrict_to_worker(worker.id, worker.num_workers)
        try:
            for number, batch in enumerate(loader, begin + 1):
                if worker is None:
                    self.batches_taken = max(self.batches_taken, number)
                # A copy: a worker sends its batch later, when the loader may have reused the buffers.
                copy = _map_tensors(_tensors(batch), torch.clone)
                yield self._transform(copy) if self._transform else copy
        finally:
            loader.close()

    def state(self, batches: int | None = None) -> LoaderState:
        """Return the state `batches` batches after the start; None: of the next iterator's first batch."""
        taken = 0 if self._repeat else self.batches_taken
        wanted = taken if batches is None else batches
        # Counted on from the last call: opening the dataset and counting from the start would take longer each time.
        if self._counter and self._counter[0] <= wanted:
            counted, loader = self._counter
            loader.skip(wanted - counted)
        else:
            loader = self._loader(wanted)
        self._counter = (wanted, loader)
        return loader.state()

    def restart(self, state: LoaderState) -> None:
        """Start the next iterator at the position of `state`. Raises ConfigError for the state of another loader."""
        self._make().load_state(state)
        self._start, self.batches_taken, self._counter = state, 0, None

    def _loader(self, batches: int) -> Loader:
        """Return a loader positioned `batches` batches after the start."""
        loader = self._make()
        if self._start is not None:
            loader.load_state(self._start)
        loader.skip(batches)
        return loader


class StreamLoader(Stateful, DataLoader):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """torch's DataLoader over a `BatchStream`: each iterator (epoch) continues after the previous one.

    Any number of workers, forked or spawned, gives the same batches in the same order. Each worker has its own
    threads. `state` is after the last batch returned, whatever the workers have prefetched. A framework may fetch a
    batch before it trains on the previous one, as Lightning does without `limit_train_batches`.
    """

    def __init__(self, stream: BatchStream, **options: Any) -> None:
        """options: arguments of torch's DataLoader. Raises ConfigError for `persistent_workers`."""
        if options.get("persistent_workers"):
            message = "persistent_workers: not supported (expected False): a worker gets its position only at its start"
            raise ConfigError(message, where="StreamLoader", hint="use longer epochs, or one iterator for all epochs")
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
        """Return the state after the last batch that was returned."""
        return self.dataset.state()  # type: ignore[no-any-return]

    def load_state(self, state: LoaderState) -> None:
        """Start the next iterator at the position of `state`. Raises ConfigError for the state of another loader."""
        self.dataset.restart(state)


def _require_function(make_loader: Any) -> None:
    if not callable(make_loader):
        message = (
            f"make_loader: not a function (expected a function that returns a Loader, got {type(make_loader).__name__})"
        )
        hint = "BatchStream(partial(make_loader, path)), with make_loader in a module that workers can import"
        raise ConfigError(message, where="BatchStream", hint=hint)


def _tensors(batch: NumpyBatch) -> TorchBatch:
    """Return the batch as tensors that share its memory."""
    # torch supports few operations on unsigned integers.
    return _map_tensors(batch._replace(sample_seeds=batch.sample_seeds.view(np.int64)), _view)


def _view(array: NDArray[Any]) -> Any:
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"dtype {array.dtype}: not supported by torch", where="torch_batches") from error


def _to_device(batch: TorchBatch, device: Any, *, wait: bool) -> TorchBatch:
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=not wait))


def _map_tensors(batch: TorchBatch, change: Callable[[Any], Any]) -> TorchBatch:
    parts = (batch.arrays, batch.valid_mask, batch.extras)
    arrays, valid_mask, extras = ({name: change(tensor) for name, tensor in part.items()} for part in parts)
    return batch._replace(
        arrays=arrays,
        valid_mask=valid_mask,
        extras=extras,
        sample_indices=change(batch.sample_indices),
        sample_seeds=change(batch.sample_seeds),
    )


def _tensors_of(batch: TorchBatch) -> Iterator[Any]:
    for part in (batch.arrays, batch.valid_mask, batch.extras):
        yield from part.values()
    yield from (batch.sample_indices, batch.sample_seeds)
