from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, NoSpace
from pitools.dataset.ingest import ingest
from pitools.dataset.read import open_dataset
from pitools.store.publish import TEMPORARY

PIT = str(Path(sys.executable).parent / "pit")


def start(source: Path, root: Path) -> subprocess.Popen[str]:
    argv = [PIT, "dataset", "ingest", str(source), "--to", str(root), "--name", "x", "--codec", "zstd"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def writing(process: subprocess.Popen[str], root: Path) -> None:
    """Wait until it has begun to write."""
    until = time.monotonic() + 30
    while not list(root.glob(f"{TEMPORARY}/*.{process.pid}.*/zarr.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.001)


def test_interrupt_leaves_nothing(robomimic, tmp_path) -> None:
    """Ctrl-C in the middle of an ingest ends it with 130, and not even the root it made is left."""
    process = start(robomimic(*[200] * 6, row=(128, 128, 3)), tmp_path / "root")
    writing(process, tmp_path / "root")
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=30)
    assert (process.returncode, talk.strip()) == (130, "pit: interrupted")
    assert not (tmp_path / "root").exists()


def test_kill_shows_nothing(robomimic, tmp_path, below) -> None:
    """After kill -9 at any moment a dataset is whole or not there, and the next ingest works and cleans up."""
    source, root = robomimic(*[200] * 3, row=(128, 128, 3)), tmp_path / "root"
    chance = random.Random(0)
    for _ in range(4):
        process = start(source, root)
        writing(process, root)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        for path in root.glob("x/*"):
            open_dataset(path)
        assert {name.split("/")[0] for name in below(root)} <= {TEMPORARY, "x"}
        if (root / "x").exists():
            break
    version = ingest([source], root=root, name="x", codec="zstd")
    assert open_dataset(Path(version.path)).manifest.steps == 600
    assert not (root / TEMPORARY).exists()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_full_disk(robomimic, mounted, below, codec) -> None:
    """A destination that fills up is NoSpace, to be tried later, and gets its space back."""
    point = mounted("size=2m")
    with pytest.raises(NoSpace) as caught:
        ingest([robomimic(100, 100, row=(96, 96, 3))], root=point / "root", name="x", codec=codec)
    assert str(point) in caught.value.where
    assert below(point) == set()


def test_read_only(robomimic, mounted, below) -> None:
    """A destination that is mounted read-only is refused with its path."""
    point = mounted("ro")
    with pytest.raises(ClusterError, match="cannot write") as caught:
        ingest([robomimic(3)], root=point / "root", name="x")
    assert str(point) in caught.value.where
    assert below(point) == set()


def test_two_at_once(robomimic, tmp_path, below) -> None:
    """Two ingests of one recording at the same time both succeed, one of them publishes, and one version is there."""
    source, root = robomimic(200, 200, row=(64, 64, 3)), tmp_path / "root"
    pair = [start(source, root) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert sorted('"new":true' in answer for answer in answers) == [False, True]
    assert len(list(root.iterdir())) == 1
    assert len(list((root / "x").iterdir())) == 1
