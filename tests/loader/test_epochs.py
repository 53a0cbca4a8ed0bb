"""Frameworks that make an iterator an epoch, and states that they keep."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.core.errors import ConfigError
from pitools.loader.loader import Loader
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DataLoader  # noqa: E402

from pitools.loader.torch import BatchStream, StreamLoader, torch_batches  # noqa: E402

# Of torch on a small machine, and of Python 3.12 on: what it warns of is what these tests try.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork")


@pytest.fixture(scope="module")
def path(record: Callable[..., Path]) -> Path:
    """A small version."""
    return record((40, 3, 25, 60, 17))


def make(path: Path, seed: int = 0) -> Loader:
    """A loader of a module, as workers import it."""
    arrays = VersionReader(path)
    windows = Windows(arrays.offsets, np.arange(5), {"action": WindowSpan(0, 8)}, pad=True)
    return Loader(WindowSamples(arrays, windows, seed=seed), global_batch_size=16)


def steps(batches: Iterator[Any] | list[Any]) -> list[int]:
    return [batch.step for batch in batches]


def fit(loader: Any, epochs: int, limit: int) -> list[list[int]]:
    """The steps that each epoch trains on, in the shape of Lightning's fit loop: it makes an iterator for each epoch,
    takes so many batches, and keeps the last iterator until the next is made.
    """
    observed, iterator = [], None
    for _ in range(epochs):
        iterator = iter(loader)
        observed.append(steps([next(iterator) for _ in range(limit)]))
    return observed


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_continue(path: Path, workers: int):
    """Each goes on where the one before ended, though workers were ahead: no batch comes twice and none is left out."""
    loader = StreamLoader(BatchStream(partial(make, path)), num_workers=workers, timeout=60 * (workers > 0))
    assert fit(loader, epochs=3, limit=5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert loader.state().position == 15 * 16


def test_epochs_continue_in_torch_s_own_loader(path: Path):
    """Without workers the dataset itself knows what was taken; so do `torch_batches`."""
    stream = BatchStream(partial(make, path))
    assert fit(DataLoader(stream, batch_size=None), epochs=2, limit=3) == [[0, 1, 2], [3, 4, 5]]
    assert stream.state() == stream.state(6)
    batches = torch_batches(make(path))
    assert fit(batches, epochs=2, limit=3) == [[0, 1, 2], [3, 4, 5]]
    batches.close()


def test_workers_that_nobody_counts_are_refused(path: Path):
    """They would give the same batches in every epoch: torch raises the workers' error in the training process."""
    loader = DataLoader(BatchStream(partial(make, path)), batch_size=None, num_workers=1, timeout=60)
    with pytest.raises(ConfigError, match="StreamLoader"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="persistent_workers"):
        StreamLoader(BatchStream(partial(make, path)), num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_repeats(path: Path, workers: int):
    """The same batches in each pass, by any DataLoader."""
    stream = BatchStream(partial(make, path), repeat=True)
    for kind in (StreamLoader, partial(DataLoader, batch_size=None)):
        loader = kind(stream, num_workers=workers, timeout=60 * (workers > 0))
        assert fit(loader, epochs=2, limit=3) == [[0, 1, 2]] * 2
    resumed = StreamLoader(stream, num_workers=workers, timeout=60 * (workers > 0))
    resumed.load_state_dict(through_json(resumed.state_dict()))
    assert fit(resumed, epochs=1, limit=3) == [[0, 1, 2]]


def test_a_stream_of_no_function(path: Path):
    """A loader in place of what makes it is refused where it is given, not in a worker."""
    with pytest.raises(ConfigError, match=r"make_loader: .* Loader"):
        BatchStream(make(path))  # type: ignore[arg-type]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save({"loader": state}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["loader"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("through", [through_json, through_torch])
def test_a_state_is_plain(path: Path, through: Callable[[dict[str, Any]], dict[str, Any]]):
    """As JSON and through torch.load, which takes no classes, each kind of loader goes on where it was."""
    loader, on_device = make(path), torch_batches(make(path))
    streamed = StreamLoader(BatchStream(partial(make, path)))
    for batches in (loader, on_device, streamed):
        steps(list(islice(batches, 4)))
        state = through(batches.state_dict())
        assert state == loader.state_dict()
        again = make(path)
        again.load_state_dict(state)
        assert next(again).step == 4
        stream_loader = StreamLoader(BatchStream(partial(make, path), state=state))
        assert fit(stream_loader, 1, 2) == [[4, 5]]
        batches.load_state_dict(state)
        assert next(iter(batches)).step == 4
        loader.load_state_dict(state)
        again.close()
    for batches in (loader, on_device, streamed):
        with pytest.raises(ConfigError, match=r"state: .*position"):
            batches.load_state_dict({"position": "four"})
    with pytest.raises(ConfigError, match="seed"):
        StreamLoader(BatchStream(partial(make, path, seed=1))).load_state_dict(state)
    loader.close()
    on_device.close()
