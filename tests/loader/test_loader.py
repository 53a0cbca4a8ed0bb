from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, DataError, Unreachable, UsageError
from pitools.dataset.ingest.ingest import ingest
from pitools.loader.loader import Loader
from pitools.loader.sampling.protocol import DrawnSamples
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

LENGTHS = (40, 3, 25, 60, 17)
SPANS = {"obs/image": WindowSpan(1, 1), "action": WindowSpan(0, 8), "obs/state": WindowSpan(2, 1)}


@pytest.fixture(scope="module", params=["lz4", "raw", "zstd"])
def version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of a few episodes of unequal length, with images, states and actions."""
    return write(tmp_path_factory.mktemp("recording"), request.param)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, uncompressed."""
    return write(tmp_path_factory.mktemp("recording"), "raw")


def write(folder: Path, codec: str) -> Path:
    random = np.random.default_rng(0)
    with h5py.File(folder / "r.hdf5", "w") as file:
        for number, steps in enumerate(LENGTHS):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = steps
            demo["actions"] = random.normal(size=(steps, 7))
            demo["obs/image"] = random.integers(0, 255, (steps, 12, 16, 3), np.uint8)
            demo["obs/state"] = random.normal(size=(steps, 5)).astype(np.float32)
    return Path(ingest([folder / "r.hdf5"], root=folder / "data", name="pick", codec=codec).path)


def windowed(path: Path, *, pad: bool = True, resident: int = 64 << 20, seed: int = 0) -> WindowSamples:
    arrays = VersionReader(path, resident_bytes=resident)
    return WindowSamples(arrays, Windows(arrays.offsets, np.arange(len(LENGTHS)), SPANS, pad=pad), seed=seed)


def loader(path: Path, *, pad: bool = True, resident: int = 64 << 20, seed: int = 0, **more: Any) -> Loader:
    return Loader(windowed(path, pad=pad, resident=resident, seed=seed), **{"global_batch_size": 16, **more})


def naive(path: Path, samples: NDArray[np.int64], *, pad: bool) -> Mapping[str, NDArray[Any]]:
    """The same windows by plain loops over zarr-python."""
    import zarr

    group = zarr.open_group(path, mode="r")
    data = {name: np.asarray(group[name][:]) for name in (*SPANS, "episode_offsets")}
    anchors = []
    for start, stop in pairwise(data["episode_offsets"].astype(int).tolist()):
        anchors += [
            (anchor, start, stop)
            for anchor in range(start, stop)
            if pad or all(start <= anchor - s.before and anchor + s.after <= stop for s in SPANS.values())
        ]
    return {
        name: np.stack(
            [
                np.stack(
                    [
                        data[name][min(max(index, start), stop - 1)]
                        for index in range(anchor - span.before, anchor + span.after)
                    ]
                )
                for anchor, start, stop in (anchors[sample] for sample in samples)
            ]
        )
        for name, span in SPANS.items()
    }


def numbers(batches: Iterator[Any], count: int) -> list[list[int]]:
    return [batch.sample_indices.tolist() for batch in islice(batches, count)]


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("resident", [0, 64 << 20])
def test_batches_are_those_of_a_naive_reader(version: Path, pad: bool, resident: int):
    """From memory and from files, padded and not: each window of each batch, to the bit, over more than an epoch."""
    batches = loader(version, pad=pad, resident=resident)
    for number, batch in enumerate(islice(batches, 12)):
        expected = naive(version, batch.sample_indices, pad=pad)
        assert (batch.step, batch.arrays.keys()) == (number, expected.keys())
        for name, array in expected.items():
            assert np.array_equal(batch.arrays[name], array), name
    batches.close()


def test_padded_steps_are_told(raw: Path):
    """`valid_mask` is False exactly where a window reaches over an end of its episode."""
    batch = next(loader(raw, pad=True, global_batch_size=sum(LENGTHS)))
    assert set(batch.valid_mask) == set(SPANS)
    assert batch.valid_mask["obs/image"].shape == (sum(LENGTHS), 2)
    outside = sum(
        min(length, 7 - k) and sum(1 for a in range(length) if a + 7 - k >= length)
        for length in LENGTHS
        for k in range(7)
    )
    assert (~batch.valid_mask["action"]).sum() == outside
    assert (~batch.valid_mask["obs/state"]).sum() == sum(min(2, length) + min(1, length) for length in LENGTHS)
    inside = next(loader(raw, pad=False)).valid_mask
    assert set(inside) == set(SPANS)
    assert all(mask.all() for mask in inside.values())


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_global_batches_are_the_same_for_any_world_size(raw: Path, world_size: int):
    """Ranks' parts, put together, are the batches of one rank, with the same keys."""
    alone = loader(raw)
    ranks = [loader(raw, rank=rank, world_size=world_size, threads=1) for rank in range(world_size)]
    for _ in range(4):
        full, parts = next(alone), [next(each) for each in ranks]
        for name in SPANS:
            assert np.array_equal(np.concatenate([part.arrays[name] for part in parts]), full.arrays[name])
        assert np.array_equal(np.concatenate([part.sample_seeds for part in parts]), full.sample_seeds)
        assert {part.step for part in parts} == {full.step}
    for each in (alone, *ranks):
        each.close()


def test_it_resumes_where_it_was_at_another_world_size(raw: Path):
    """The state of four ranks after some batches goes on as two ranks, in the middle of an epoch."""
    before = [loader(raw, rank=rank, world_size=4) for rank in range(4)]
    states = []
    for _ in range(5):
        states = [each.state() for each in before if next(each)]
    assert states == states[:1] * 4
    expected = numbers(loader(raw), 9)[5:]
    after = [loader(raw, rank=rank, world_size=2) for rank in range(2)]
    for each in after:
        next(each)  # wherever it is
        each.load_state(states[0])
    for samples in expected:
        assert np.concatenate([next(each).sample_indices for each in after]).tolist() == samples


def test_workers_take_turns(raw: Path):
    """Three loaders that each give every third batch give all of them, also from a place in the middle."""
    expected = numbers(loader(raw), 11)
    begin = loader(raw)
    next(begin)
    workers = [loader(raw) for _ in range(3)]
    for number, worker in enumerate(workers):
        worker.load_state(begin.state())
        worker.restrict_to_worker(number, 3)
    actual = [next(workers[number % 3]) for number in range(10)]
    assert [batch.sample_indices.tolist() for batch in actual] == expected[1:]
    assert [batch.step for batch in actual] == list(range(1, 11))


def test_a_state_of_something_else_is_refused(raw: Path):
    """Another seed, or other windows: resuming would silently repeat and skip samples."""
    state = loader(raw).state()
    with pytest.raises(ConfigError, match="seed"):
        loader(raw, seed=1).load_state(state)
    with pytest.raises(ConfigError, match=r"samples|windows"):
        loader(raw, pad=False).load_state(state)


def test_damage_ends_the_iteration_by_its_name(version: Path, tmp_path: Path):
    """A missing shard is an error in the batch that needs it, also on the next call; nothing hangs."""
    copy = tmp_path / version.name
    shutil.copytree(version, copy)
    (copy / "obs/image/c/0/0/0/0").unlink()
    batches = loader(copy, resident=0)
    for _ in range(2):
        with pytest.raises(DataError, match="obs/image/c/0/0/0/0"):
            next(batches)
    batches.close()


class Failing(WindowSamples):
    """Windows of which one sample cannot be read for a while."""

    fails: int | None = None

    def read(self, drawn: Any, low: int, high: int, *buffers: Any) -> None:
        """As the windows', or the error of a failing disk."""
        if self.fails in drawn.sample_indices[low:high].tolist():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().read(drawn, low, high, *buffers)


def test_an_error_is_that_of_its_batch_and_does_not_end_the_loader(raw: Path):
    """Batches before come first; the next call reads the failed one again; others can be gone to meanwhile."""
    expected = numbers(loader(raw), 8)
    arrays = VersionReader(raw)
    samples = Failing(arrays, Windows(arrays.offsets, np.arange(len(LENGTHS)), SPANS, pad=True))
    samples.fails = expected[3][5]
    batches = Loader(samples, global_batch_size=16, prefetch=3)
    assert numbers(batches, 3) == expected[:3]
    for _ in range(2):
        with pytest.raises(Unreachable, match="Input/output error"):
            next(batches)
        assert not batches.is_ready
    here = batches.state()
    assert here.position == 3 * 16
    samples.fails = None
    assert next(batches).sample_indices.tolist() == expected[3]
    batches.load_state(here)
    assert numbers(batches, 5) == expected[3:]
    batches.close()


@contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, skip: int = 0) -> Iterator[Callable[[], None]]:
    """After so many, reads do not come back, as from a file server that is gone; until the yielded is called."""
    gate, release = os.pipe()
    preadv, left = os.preadv, [skip]

    def blocked(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            os.read(gate, 1)  # for as long as the pipe's other end is open
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", blocked)
    ends = [release]

    def end() -> None:
        while ends:
            os.close(ends.pop())

    try:
        yield end
    finally:
        end()
        monkeypatch.undo()


def test_a_read_that_does_not_come_back_is_named(raw: Path, monkeypatch: pytest.MonkeyPatch):
    """Unreachable after the time-out and again on the next call, naming the file; when it does come, so do batches."""
    expected = numbers(loader(raw), 4)
    batches = loader(raw, resident=0)
    first = next(batches).sample_indices.tolist()
    assert first == expected[0]
    monkeypatch.setattr(batches, "_read_timeout_s", 0.2)
    with stuck(monkeypatch, skip=1) as release:
        for _ in range(2):
            with pytest.raises(Unreachable, match=r"/c/0.* 0\.2 s") as error:
                list(islice(batches, 4))  # some were read before
            assert error.value.where == str(raw)
        place = batches.state().position // 16
        monkeypatch.undo()  # what comes now may take its time
        release()
        assert numbers(batches, 4 - place) == expected[place:]
    batches.close()


def test_a_stuck_read_holds_up_nothing_else(raw: Path, monkeypatch: pytest.MonkeyPatch):
    """With all threads stuck, `close` returns, and the loader reads elsewhere with others."""
    expected = numbers(loader(raw), 3)
    batches = loader(raw, resident=0)
    monkeypatch.setattr(batches, "_read_timeout_s", 0.1)
    with stuck(monkeypatch) as release:
        with pytest.raises(Unreachable):
            next(batches)
        closing = threading.Thread(target=batches.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        monkeypatch.undo()  # another server answers
        assert numbers(batches, 3) == expected
        release()
    batches.close()


def test_a_late_read_fills_no_buffer_that_is_used_again(raw: Path, monkeypatch: pytest.MonkeyPatch):
    """Gone elsewhere while a thread still reads ahead: what it reads in the end is in no batch that is given since."""
    samples, read = windowed(raw), WindowSamples.read
    second = samples.draw(np.arange(16, 32)).sample_indices.tolist()
    event, go, over = threading.Event(), threading.Event(), threading.Event()

    def slow(self: WindowSamples, drawn: DrawnSamples, *more: Any) -> None:
        late = drawn.sample_indices.tolist() == second and not event.is_set()
        if late:
            event.set()
            go.wait(20)
        read(self, drawn, *more)
        if late:
            over.set()

    expected = [batch.arrays["action"].copy() for batch in islice(loader(raw), 3)]
    monkeypatch.setattr(WindowSamples, "read", slow)
    batches = Loader(samples, global_batch_size=16)
    state = batches.state()
    next(batches)
    assert event.wait(20)
    batches.load_state(state)
    for number in range(3):
        arguments = next(batches)
        np.testing.assert_array_equal(arguments.arrays["action"], expected[number])
    go.set()
    assert over.wait(20)
    np.testing.assert_array_equal(arguments.arrays["action"], expected[2])
    batches.close()


STUCK = """
import os, sys
from itertools import islice
from pathlib import Path
sys.path.insert(0, {here!r})
from test_loader import loader
batches = loader(Path({path!r}), resident=0)
next(batches)
batches._read_timeout_s = 0.2
gate, _ = os.pipe()
os.preadv = lambda *args: os.read(gate, 1)
try:
    list(islice(batches, 5))
except Exception as error:
    print(type(error).__name__)
"""


def test_a_program_ends_with_a_read_that_does_not_come_back(raw: Path):
    """The interpreter does not wait for the stuck threads when it ends."""
    code = STUCK.format(here=str(Path(__file__).parent), path=str(raw))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Unreachable\n", "")


def test_an_interrupt_ends_a_wait(raw: Path, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while training waits for a batch is not held up by the reads."""
    batches = loader(raw, resident=0)
    with stuck(monkeypatch):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_buffers_are_used_again(raw: Path):
    """A hundred batches live in a handful of buffers."""
    batches = loader(raw)
    places = {batch.arrays["obs/image"].__array_interface__["data"][0] for batch in islice(batches, 100)}
    assert len(places) <= 4
    assert batches.stats.batches == 100


def test_bytes_are_those_that_were_read(version: Path):
    """What the kernel says of this process; nothing once a small array is in memory; each batch says its own."""
    batches = loader(version, resident=0)
    before, read = rchar(), 0
    for batch in islice(batches, 40):
        read += batch.bytes_read
        assert batch.bytes_read > 0
        assert batch.waited_s > 0
    assert batches.stats.bytes_read == read
    batches.close()
    # What was read ahead of the last batch, indexes of shards, and this question itself.
    assert 0.9 * (rchar() - before) - 20_000 < read <= rchar() - before
    held = loader(version)
    assert sum(batch.bytes_read for batch in islice(held, 3)) > 0
    assert [batch.bytes_read for batch in islice(held, 20)][-10:] == [0] * 10


def rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_what_cannot_be_loaded_is_said(raw: Path):
    """An array that is not there, windows that fit nowhere, more ranks than samples in a batch."""
    arrays = VersionReader(raw)
    with pytest.raises(UsageError, match="'obs/imag'") as error:
        WindowSamples(arrays, Windows(arrays.offsets, np.arange(5), {"obs/imag": WindowSpan(0, 1)}))
    assert "obs/image" in error.value.hint
    with pytest.raises(ConfigError, match="windows: none"):
        WindowSamples(arrays, Windows(arrays.offsets, np.arange(5), {"action": WindowSpan(0, 99)}))
    with pytest.raises(ConfigError, match=r"batch of 2: .* rank 0 of 3"):
        loader(raw, global_batch_size=2, rank=0, world_size=3)
    with pytest.raises(ConfigError, match="batch of 0"):
        Loader(windowed(raw))
