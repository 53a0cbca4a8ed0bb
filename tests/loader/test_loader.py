from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, DataError, UsageError
from pitools.dataset.ingest import ingest
from pitools.dataset.read import open_dataset
from pitools.loader.loader import Loader
from pitools.loader.windows import Span, Windows
from pitools.store.arrays import Arrays

LENGTHS = (40, 3, 25, 60, 17)
SPANS = {"obs/image": Span(1, 1), "action": Span(0, 8), "obs/state": Span(2, 1)}


@pytest.fixture(scope="module", params=["lz4", "raw", "zstd"])
def version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of a few episodes of unequal length, with images, states and actions."""
    folder, random = tmp_path_factory.mktemp("recording"), np.random.default_rng(0)
    with h5py.File(folder / "r.hdf5", "w") as file:
        for number, steps in enumerate(LENGTHS):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = steps
            demo["actions"] = random.normal(size=(steps, 7))
            demo["obs/image"] = random.integers(0, 255, (steps, 12, 16, 3), np.uint8)
            demo["obs/state"] = random.normal(size=(steps, 5)).astype(np.float32)
    return Path(ingest([folder / "r.hdf5"], root=folder / "data", name="pick", codec=request.param).path)


def loader(path: Path, *, pad: bool = True, resident: int = 64 << 20, batch_size: int = 16, **more: Any) -> Loader:
    arrays = Arrays(path, resident_bytes=resident)
    windows = Windows(arrays.offsets, np.arange(len(LENGTHS)), SPANS, pad=pad)
    return Loader(arrays, windows, batch_size=batch_size, **more)


def naive(path: Path, samples: NDArray[np.int64], *, pad: bool) -> Mapping[str, NDArray[Any]]:
    """The same windows by plain loops over zarr-python's reader."""
    data = open_dataset(path)
    offsets = data.episode_offsets
    anchors = []
    for start, stop in pairwise(offsets):
        anchors += [
            (anchor, start, stop)
            for anchor in range(start, stop)
            if pad or all(start <= anchor - s.before and anchor + s.after <= stop for s in SPANS.values())
        ]
    return {
        name: np.stack([
            np.stack([data.read(name, at, at + 1)[0] for at in
                      np.clip(np.arange(anchor - span.before, anchor + span.after), start, stop - 1)])
            for anchor, start, stop in (anchors[sample] for sample in samples)
        ])
        for name, span in SPANS.items()
    }  # fmt: skip


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("resident", [0, 64 << 20])
def test_batches_are_those_of_a_naive_reader(version: Path, pad: bool, resident: int):
    """From memory and from files, padded and not: each window of each batch, to the bit, over more than an epoch."""
    batches = loader(version, pad=pad, resident=resident)
    for batch in islice(batches, 12):
        expected = naive(version, batch.samples, pad=pad)
        assert batch.arrays.keys() == expected.keys()
        for name, array in expected.items():
            assert np.array_equal(batch.arrays[name], array), name
    batches.close()


def test_padded_steps_are_told(version: Path):
    """`inside` is False exactly where a window reaches over an end of its episode."""
    batch = next(loader(version, pad=True, batch_size=sum(LENGTHS)))
    assert set(batch.inside) == set(SPANS)
    assert batch.inside["obs/image"].shape == (sum(LENGTHS), 2)
    outside = sum(min(length, 7 - k) and sum(1 for a in range(length) if a + 7 - k >= length)
                  for length in LENGTHS for k in range(7))  # fmt: skip
    assert (~batch.inside["action"]).sum() == outside
    assert (~batch.inside["obs/state"]).sum() == sum(min(2, length) + min(1, length) for length in LENGTHS)
    assert next(loader(version, pad=False)).inside == {}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_global_batches_are_the_same_for_any_world_size(version: Path, world_size: int):
    """Ranks' parts, put together, are the batches of one rank, with the same keys."""
    alone = loader(version)
    ranks = [loader(version, rank=rank, world_size=world_size, threads=1) for rank in range(world_size)]
    for _ in range(4):
        whole, parts = next(alone), [next(each) for each in ranks]
        for name in SPANS:
            assert np.array_equal(np.concatenate([part.arrays[name] for part in parts]), whole.arrays[name])
        assert np.array_equal(np.concatenate([part.keys for part in parts]), whole.keys)
        assert {part.step for part in parts} == {whole.step}
    for each in (alone, *ranks):
        each.close()


def test_it_resumes_where_it_was_at_another_world_size(version: Path):
    """The state of four ranks after some batches goes on as two ranks, in the middle of an epoch."""
    before = [loader(version, rank=rank, world_size=4) for rank in range(4)]
    for _ in range(5):
        states = {each.state() for each in before if next(each)}
    assert len(states) == 1
    expected = list(islice(loader(version), 9))[5:] and [batch.samples for batch in islice(loader(version), 9)][5:]
    after = [loader(version, rank=rank, world_size=2) for rank in range(2)]
    for each in after:
        next(each)  # wherever it is
        each.load_state(states.copy().pop())
    for samples in expected:
        assert np.array_equal(np.concatenate([next(each).samples for each in after]), samples)


def test_a_state_of_something_else_is_refused(version: Path):
    """Another seed, or other windows: resuming would silently repeat and skip samples."""
    state = loader(version).state()
    with pytest.raises(ConfigError, match="seed"):
        loader(version, seed=1).load_state(state)
    with pytest.raises(ConfigError, match="samples"):
        loader(version, pad=False).load_state(state)


def test_damage_ends_the_iteration_by_its_name(version: Path, tmp_path: Path):
    """A missing shard is an error in the batch that needs it, also on the next call; nothing hangs."""
    import shutil

    copy = tmp_path / version.name
    shutil.copytree(version, copy)
    (copy / "obs/image/c/0/0/0/0").unlink()
    batches = loader(copy, resident=0)
    for _ in range(2):
        with pytest.raises(DataError, match="obs/image/c/0/0/0/0"):
            next(batches)
    batches.close()


def _first_of(batches: Loader, queue: Any) -> None:
    queue.put(next(batches).samples.tolist())


def test_a_forked_child_reads_on(version: Path):
    """After the parent has read: a child's batch comes, from threads of its own, and the parent goes on."""
    batches = loader(version)
    expected = [batch.samples.tolist() for batch in islice(loader(version), 3)]
    assert next(batches).samples.tolist() == expected[0]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_first_of, args=(batches, queue)) for _ in range(3)]
    for child in children:
        child.start()
    assert [queue.get(timeout=30) for _ in children] == [expected[1]] * 3
    for child in children:
        child.join(30)
    assert next(batches).samples.tolist() == expected[1]


def test_buffers_are_used_again(version: Path):
    """A hundred batches live in a handful of buffers."""
    batches = loader(version)
    places = {batch.arrays["obs/image"].__array_interface__["data"][0] for batch in islice(batches, 100)}
    assert len(places) <= 4
    assert batches.times.batches == 100
    assert batches.times.bytes == 100 * sum(array.nbytes for array in next(batches).arrays.values())


def test_what_cannot_be_loaded_is_said(version: Path):
    """An array that is not there, windows that fit nowhere, more ranks than samples in a batch."""
    arrays = Arrays(version)
    with pytest.raises(UsageError, match="no array 'obs/imag'") as error:
        next(Loader(arrays, Windows(arrays.offsets, np.arange(5), {"obs/imag": Span(0, 1)}), batch_size=4))
    assert "obs/image" in error.value.hint
    with pytest.raises(ConfigError, match="long enough"):
        Loader(arrays, Windows(arrays.offsets, np.arange(5), {"action": Span(0, 99)}), batch_size=4)
    with pytest.raises(ConfigError, match="no part"):
        loader(version, batch_size=2, rank=0, world_size=3)
