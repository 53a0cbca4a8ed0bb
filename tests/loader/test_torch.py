"""Batches as torch tensors, and by torch's own DataLoader."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.loader.loader import Loader
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

torch = pytest.importorskip("torch", reason="torch is not installed")

from pitools.loader import device_prefetch  # noqa: E402
from pitools.loader import torch as to_torch  # noqa: E402

# Of torch on a small machine, and of Python 3.12 on: what it warns of is what these tests try. A worker that is stopped
# early leaves its queue's thread running while Python ends: before 3.14 that may abort it, as its iterator then says.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create",
    "ignore:.*multi-threaded, use of fork",
    "ignore:Exception ignored in. <function _MultiProcessingDataLoaderIter:pytest.PytestUnraisableExceptionWarning",
)

LENGTHS = (40, 3, 25, 60, 17)
WORKERS = """
from pathlib import Path
import numpy as np
from pitools.loader.loader import Loader
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

def make(path, seed=0):
    arrays = VersionReader(Path(path), resident_bytes=0)
    spans = {"obs/image": WindowSpan(1, 1), "action": WindowSpan(0, 8)}
    windows = Windows(arrays.offsets, np.arange(5), spans, pad=True)
    return Loader(WindowSamples(arrays, windows, seed=seed), global_batch_size=16)

def total(batch):
    return {"step": batch.step, "samples": batch.sample_indices, "total": batch.arrays["obs/image"].sum(dtype=int)}
"""
WORKERS = WORKERS.replace("dtype=int", "dtype=__import__('torch').int64")


@pytest.fixture(scope="module")
def path(record: Callable[..., Path]) -> Path:
    """A small version."""
    return record(LENGTHS)


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that worker processes can import too."""
    (tmp_path / "made_for_workers.py").write_text(WORKERS)
    monkeypatch.syspath_prepend(tmp_path)
    import made_for_workers

    yield made_for_workers
    del sys.modules["made_for_workers"]


def loader(path: Path, **more: Any) -> Loader:
    arrays = VersionReader(path, resident_bytes=0)
    spans = {"obs/image": WindowSpan(1, 1), "action": WindowSpan(0, 8)}
    windows = Windows(arrays.offsets, np.arange(len(LENGTHS)), spans, pad=True)
    return Loader(WindowSamples(arrays, windows), **{"global_batch_size": 16, **more})


def test_tensors_are_views_of_the_batch(path: Path):
    """On the CPU: the same values in the same memory, which is used again; state and times are the loader's."""
    batches, plain = to_torch.torch_batches(loader(path), "cpu"), loader(path)
    places = set()
    for batch, expected in zip(islice(batches, 20), plain, strict=False):
        assert batch.step == expected.step
        for name in ("arrays", "valid_mask"):
            for key, array in getattr(expected, name).items():
                np.testing.assert_array_equal(getattr(batch, name)[key].numpy(), array)
        np.testing.assert_array_equal(batch.sample_indices.numpy(), expected.sample_indices)
        np.testing.assert_array_equal(batch.sample_seeds.numpy().view(np.uint64), expected.sample_seeds)
        assert batch.bytes_read > 0
        places.add(batch.arrays["obs/image"].data_ptr())
        if expected.step == 19:
            break
    assert len(places) <= 4
    assert batches.stats.batches == 20
    assert batches.state() == plain.state()
    batches.load_state(batches.state())
    assert next(batches).sample_indices.tolist() == next(plain).sample_indices.tolist()
    batches.close()


class Copied:
    """A device as far as `DevicePrefetcher` sees one: copies that begin at `put` and are over at `settle`."""

    def __init__(self, batches: Loader) -> None:
        self.events: list[tuple[str, int]] = []
        self.on = device_prefetch.DevicePrefetcher(batches, self.put, self.settle, early=True)

    def put(self, batch: Any) -> Any:
        self.events.append(("put", batch.step))
        return [batch, None]

    def settle(self, given: Any) -> None:
        given[1] = given[0].arrays["action"].copy()
        self.events.append(("settle", given[0].step))


def test_the_next_batch_is_copied_while_this_one_is_trained_on(path: Path):
    """Its copy begins before this one is given, its buffers are not filled before the copy is over, state is exact."""
    expected = [batch.arrays["action"].copy() for batch in islice(loader(path), 8)]
    batches = loader(path)
    copied = Copied(batches)
    for step in range(4):
        while step and not batches.is_ready:
            pass
        arguments = next(copied.on)
        np.testing.assert_array_equal(arguments[1], expected[step])
        assert copied.on.state().position == (step + 1) * 16
        order = [event for event in copied.events if event[1] >= step]
        assert order[:2] == [("put", step), ("settle", step)]
        assert ("settle", step + 1) not in order
    assert ("put", 4) in copied.events or not batches.is_ready
    copied.on.close()
    np.testing.assert_array_equal(next(copied.on)[1], expected[4])  # nothing is lost by closing
    copied.on.load_state(copied.on.state())
    np.testing.assert_array_equal(next(copied.on)[1], expected[5])
    copied.on.close()


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("where", ["put", "settle"])
def test_a_copy_that_fails_loses_no_batch(path: Path, step: int, where: str):
    """As when a device is out of memory: raised for the batch it is of, which the next call gives, with its state."""
    expected = [batch.arrays["action"].copy() for batch in islice(loader(path), 5)]
    batches = loader(path)
    copied, failing = Copied(batches), {step}
    copy = getattr(copied, where)

    def fail(given: Any) -> Any:
        number = (given if where == "put" else given[0]).step
        if number in failing:
            raise MemoryError(number)
        return copy(given)

    on = device_prefetch.DevicePrefetcher(
        batches, *(fail if name == where else getattr(copied, name) for name in ("put", "settle")), early=True
    )
    for number in range(5):
        until = time.monotonic() + 0.1  # after an error nothing is read ahead
        while not batches.is_ready and time.monotonic() < until:
            pass
        if number == step:
            with pytest.raises(MemoryError):
                next(on)
            assert on.state().position == 16 * number
            failing.clear()
        np.testing.assert_array_equal(next(on)[1], expected[number])
        assert on.state().position == 16 * (number + 1)
    on.close()


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_a_dataloader_gives_the_same_batches(path: Path, context: str | None, workers: Any):
    """No workers, or two, forked after this process has read, or spawned: batches of the loader, in its order."""
    plain = loader(path)
    expected = [
        (batch.step, batch.sample_indices.tolist(), batch.arrays["obs/image"].copy()) for batch in islice(plain, 7)
    ]
    stream = to_torch.BatchStream(partial(workers.make, path))
    count = {"num_workers": 2, "multiprocessing_context": context, "timeout": 60} if context else {"num_workers": 0}
    actual = list(islice(to_torch.StreamLoader(stream, **count), 7))
    for batch, (step, samples, images) in zip(actual, expected, strict=True):
        assert (batch.step, batch.sample_indices.tolist()) == (step, samples)
        np.testing.assert_array_equal(batch.arrays["obs/image"].numpy(), images)
    plain.close()


def test_a_dataloader_goes_on_from_a_state_and_transforms(path: Path, workers: Any):
    """After seven batches, with three workers that transform: the eighth and on, once each."""
    plain = loader(path)
    expected = [(batch.step, int(batch.arrays["obs/image"].sum(dtype=np.int64))) for batch in islice(plain, 12)][7:]
    state = to_torch.BatchStream(partial(workers.make, path)).state(7)
    assert state.position == 7 * 16
    stream = to_torch.BatchStream(partial(workers.make, path), transform=workers.total, state=state)
    loaded = to_torch.StreamLoader(stream, num_workers=3, timeout=60)
    assert [(batch["step"], int(batch["total"])) for batch in islice(loaded, 5)] == expected
    assert stream.state(2).position == 9 * 16
    plain.close()


def test_the_state_of_a_stream_is_counted_on(path: Path, monkeypatch: pytest.MonkeyPatch):
    """A state after each batch opens the dataset once, and counts each batch once; an earlier state is right, too."""
    opened, counted = [], []

    def make() -> Loader:
        opened.append(loader(path))
        return opened[-1]

    stream = to_torch.BatchStream(make)
    batches = iter(stream)
    next(batches)
    stream.state()
    real = WindowSamples.batch_at
    monkeypatch.setattr(WindowSamples, "batch_at", lambda *args: counted.append(args) or real(*args))
    opened.clear()
    assert [stream.state(number).position for number in range(1, 40)] == [16 * number for number in range(1, 40)]
    assert opened == []
    assert len(counted) == 38
    assert stream.state(3).position == 3 * 16
    batches.close()


def test_pinned_buffers_are_numpy_arrays(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of any shape and type; where there is no GPU, torch's empty memory stands for the pinned."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **more: empty(*size, **more))
    for shape, dtype in (((7,), "float64"), ((3, 2, 5), "uint8"), ((0,), "int32")):
        buffer = to_torch.allocate_pinned(shape, np.dtype(dtype))
        assert (buffer.shape, buffer.dtype) == (shape, dtype)
        buffer[...] = 3
    batches = loader(path, allocate=to_torch.allocate_pinned)
    expected = loader(path)
    for _ in range(5):
        np.testing.assert_array_equal(next(batches).arrays["action"], next(expected).arrays["action"])


def test_another_kind_of_device_is_given_copies(path: Path):
    """Tensors are on the device that was asked for, each batch in its own place there; here, torch's `meta`."""
    batches = to_torch.torch_batches(loader(path), "meta")
    for step, batch in enumerate(islice(batches, 3)):
        assert batch.step == step
        assert {
            tensor.device.type for tensor in (*batch.arrays.values(), *batch.valid_mask.values(), batch.sample_seeds)
        } == {"meta"}
        assert batch.arrays["action"].shape == (16, 8, 3)
    batches.close()
