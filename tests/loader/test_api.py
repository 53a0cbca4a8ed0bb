"""`pitools.load`: batches in five lines, the same for NumPy, torch and JAX, resumed by a plain state."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pitools
from pitools.core.errors import ConfigError, PitError

Record = Callable[..., Path]
OPTIONS: dict[str, Any] = {"windows": {"obs/state": (1, 1), "action": (0, 3)}, "batch_size": 4, "seed": 7}
WAYS: list[dict[str, Any]] = [
    {},
    {"framework": "torch"},
    {"framework": "torch", "workers": 2},
]
# In a process of its own: JAX's threads make every later fork of a process a warning.
JAX = """\
import sys
import numpy as np
import pitools

options = {"windows": {"obs/state": (1, 1), "action": (0, 3)}, "batch_size": 4, "seed": 7, "framework": "jax"}
batches = pitools.load(sys.argv[1], **options)
first = [np.array(next(batches).arrays["obs/state"]) for _ in range(2)]
resumed = pitools.load(sys.argv[1], **options)
resumed.load_state_dict(batches.state_dict())
np.save(sys.argv[2], first + [np.array(next(resumed).arrays["obs/state"])])
"""


@pytest.fixture(scope="module")
def version(record: Record) -> Path:
    return record([9, 4, 7], masks={"train": [0, 2]})


def arrays(batches: Any, count: int) -> list[np.ndarray[Any, Any]]:
    # float32, because JAX has no float64 by default.
    parts = (batch.arrays["obs/state"] for batch in islice(batches, count))
    return [part.numpy().copy() if torch.is_tensor(part) else np.array(part) for part in parts]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_framework_gets_the_same_batches(version: Path, way: dict[str, Any]) -> None:
    """In the same order; and a state that went through JSON and torch.save continues after the batches taken."""
    expected = arrays(pitools.load(version, **OPTIONS), 6)
    batches = pitools.load(version, **OPTIONS, **way)
    np.testing.assert_array_equal(arrays(batches, 2), expected[:2])
    state = json.loads(json.dumps(batches.state_dict()))
    torch.save(state, path := version.parent / "state.pt")
    resumed = pitools.load(version, **OPTIONS, **way)
    resumed.load_state_dict(torch.load(path))
    np.testing.assert_array_equal(arrays(resumed, 2), expected[2:4])


def test_a_position_that_cannot_be_is_refused_as_it_is_loaded(version: Path) -> None:
    """And not at the next batch."""
    batches = pitools.load(version, **OPTIONS)
    with pytest.raises(ConfigError):
        batches.load_state_dict({**batches.state_dict(), "position": -1})


def test_jax_gets_the_same_batches(version: Path, tmp_path: Path) -> None:
    """In the same order, and after a state."""
    subprocess.run([sys.executable, "-c", JAX, version, tmp_path / "it.npy"], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "it.npy"), arrays(pitools.load(version, **OPTIONS), 3))


def test_ranks_share_a_batch(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variables of the launcher, or as they are given."""
    (whole,) = arrays(pitools.load(version, **OPTIONS), 1)
    monkeypatch.setenv("PIT_RANK", "1")
    monkeypatch.setenv("PIT_WORLD_SIZE", "2")
    (second,) = arrays(pitools.load(version, **OPTIONS), 1)
    (first,) = arrays(pitools.load(version, **OPTIONS, rank=0, world_size=2), 1)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)


def test_tasks_of_slurm_without_ranks_are_refused(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would read the whole batch; a program may still say that it is the only rank."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError):
        pitools.load(version, **OPTIONS)
    assert next(pitools.load(version, **OPTIONS, rank=0, world_size=1)).arrays["action"].shape[0] == 4


def test_episodes_are_filtered(version: Path) -> None:
    """By split; windows beyond an episode's end are masked."""
    batches = pitools.load(version, **OPTIONS, splits=["train"])
    episodes = {int(number) for batch in islice(batches, 8) for number in batch.extras["episode"]}
    assert episodes == {0, 2}
    batch = next(pitools.load(version, **OPTIONS, shuffle=False, pad=True))
    assert batch.valid_mask["action"].all()
    assert batch.extras["step"].tolist() == [0, 1, 2, 3]
    batch = next(pitools.load(version, **OPTIONS, shuffle=False, pad=False))
    assert batch.valid_mask["action"].all()
    assert batch.arrays["action"].shape == (4, 3, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 2},
        {"framework": "torch", "transform": print},
        {"framework": "tensorflow"},
        {"device": "cpu"},
        {"framework": "torch", "workers": 2, "device": "cuda"},
        {"windows": {}},
        {"splits": "train"},
        {"instructions": "pick"},
        {"windows": {"action": 8}},
        {"windows": ["action"]},
        {"windows": {"actoin": (0, 1)}},
        {"batch_size": 0},
        {"splits": ["nosuch"]},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(version: Path, wrong: dict[str, Any]) -> None:
    """As errors of pitools, at the call."""
    with pytest.raises(PitError):
        next(pitools.load(version, **{**OPTIONS, **wrong}))


def test_the_example_has_five_lines(repo: Path) -> None:
    """The README's loop of a user takes no more than five lines, imports included."""
    text = (repo / "pitools/loader/README.md").read_text()
    block = text.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in block.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= 5
    assert lines[0] == "import pitools"


class OwnDataset(torch.utils.data.IterableDataset[Any]):
    """Batches of `pitools.load`, which is called here, or in the worker; `shares`: each worker is given its share."""

    def __init__(self, version: Path, *, is_early: bool, shares: bool = False) -> None:
        self.version, self.shares = version, shares
        self.batches = pitools.load(version, **OPTIONS) if is_early else None

    def __iter__(self) -> Iterator[list[int]]:
        worker = torch.utils.data.get_worker_info()
        share = {"rank": worker.id, "world_size": worker.num_workers} if worker and self.shares else {}
        for batch in islice(self.batches or pitools.load(self.version, **OPTIONS, **share), 3):
            yield batch.sample_indices.tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork")
def test_workers_of_a_foreign_dataloader_do_not_repeat_batches(version: Path) -> None:
    """Each of several would return every batch; one worker, and workers with a share each, are no repetition."""
    for is_early in (False, True):
        with pytest.raises(ConfigError, match="workers=2"):
            list(torch.utils.data.DataLoader(OwnDataset(version, is_early=is_early), batch_size=None, num_workers=2))
        one = torch.utils.data.DataLoader(OwnDataset(version, is_early=is_early), batch_size=None, num_workers=1)
        expected = [batch.sample_indices.tolist() for batch in islice(pitools.load(version, **OPTIONS), 3)]
        assert list(one) == expected
    shared = OwnDataset(version, is_early=False, shares=True)
    parts = list(torch.utils.data.DataLoader(shared, batch_size=None, num_workers=2))
    assert sorted(chain(*parts)) == sorted(chain(*expected))
