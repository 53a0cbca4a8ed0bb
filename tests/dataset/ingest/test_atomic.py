from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from pitools.core.errors import ClusterError, DataError, NoSpace
from pitools.dataset.ingest import chunking, execute, finalize
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.dataset.versions import check_complete
from pitools.store import digest
from pitools.store.publish import BUILD_DIR
from tests.dataset.conftest import write_robomimic

PIT = str(Path(sys.executable).parent / "pit")
Start = Callable[..., subprocess.Popen[str]]

# Ingests in forks of itself, each of which kills itself at the n-th system call that changes a file or a name, and
# says how many are needed.
KILLED = """
import os, signal, sys
from pathlib import Path
from pitools.dataset.ingest.ingest import ingest
import pitools.dataset.ingest.shard_worker
from pitools.dataset.ingest import chunking
chunking.SHARD_BYTES = 4096
source, root, parent = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3] else None

def dying(call, left):
    def instead(*args, **more):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **more)
    return instead

for number in range(0, 1000, int(sys.argv[4])):
    child = os.fork()
    if not child:
        left = [number]
        for name in ("rename", "link", "fsync", "mkdir", "write", "pwrite", "rmdir"):
            setattr(os, name, dying(getattr(os, name), left))
        ingest([source], root=root / str(number), name="x", workers=1, skip_arrays=["done", "reward"], append=parent)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(number, os.waitstatus_to_exitcode(status), flush=True)
    if status == 0:
        break
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an ingest by the command, which is over when the test is."""
    begin: list[subprocess.Popen[str]] = []

    def call(source: Path, root: Path, *more: str) -> subprocess.Popen[str]:
        argv = [PIT, "dataset", "ingest", str(source), "--to", str(root), "--name", "x", "--codec", "zstd", *more]
        begin.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return begin[-1]

    yield call
    for process in begin:
        with process:  # closes its pipes
            process.kill()


def shards(root: Path) -> dict[str, int]:
    """Inode of each shard of images that is done in an unfinished ingest."""
    actual = {}
    for path in root.glob(f"{BUILD_DIR}/x.*/store/obs/eye_image/c/*/0/0/0"):
        actual["/".join(path.parts[-7:])] = path.stat().st_ino
    return actual


def journaled(root: Path) -> int:
    return sum(path.read_text().count("\n") for path in root.glob(f"{BUILD_DIR}/x.*/journal/[!.]*"))


def writing(process: subprocess.Popen[str], root: Path, least: int = 1) -> None:
    """Wait until some jobs are done."""
    until = time.monotonic() + 30
    while journaled(root) < least:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A recording of several shards: 230 MB of frames. It is only read."""
    return write_robomimic(tmp_path_factory.mktemp("large") / "reach.hdf5", [200] * 6, (256, 256, 3), 0)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where a sync costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_is_gone_on_from(start, large, tmp_path) -> None:
    """Ctrl-C ends an ingest with 130 and says how to go on; the same command then does the rest, and only that."""
    root = tmp_path / "root"
    process = start(large, root)
    writing(process, root, 3)
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.search(rf"[1-9]\d* of \d+ shards .*{re.escape(str(root / '.tmp'))}", talk)
    assert list(root.iterdir()) == [root / BUILD_DIR]
    before = shards(root)
    version = ingest([large], root=root, name="x", codec="zstd")
    assert list(root.iterdir()) == [root / "x"]
    assert all((Path(version.path) / key).stat().st_ino == inode for key, inode in before.items())
    other = ingest([large], root=tmp_path / "other", name="x", codec="zstd")
    assert other.version == version.version


def test_kill_shows_nothing(start, large, tmp_path, below) -> None:
    """After kill -9 at any moment, workers and all, a dataset is whole or not there, and what was done is not lost."""
    root = tmp_path / "root"
    chance = random.Random(0)
    done = 0
    for _ in range(3):
        process = start(large, root)
        writing(process, root)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        for path in root.glob("x/*"):
            open_dataset(path)
        assert {name.split("/")[0] for name in below(root)} <= {BUILD_DIR, "x"}
        if (root / "x").exists():
            break
        assert len(shards(root)) >= done
        done = len(shards(root))
    version = ingest([large], root=root, name="x", codec="zstd")
    assert open_dataset(Path(version.path)).manifest.steps == 1200
    assert not (root / BUILD_DIR).exists()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("append", [False, True])
def test_kill_at_every_step(robomimic, tmp_path, memory, append, every) -> None:
    """Killed at any call that changes a file or a name, an ingest shows a whole version or none; again, it goes on and
    gives the version that an undisturbed one gives. A version that it begins with stays as it is."""
    options, parent = {"name": "x", "skip_arrays": ["done", "reward"]}, None
    with patch.object(chunking, "SHARD_BYTES", 4096):  # so that the parent has shards to be linked
        if append:
            first = robomimic(70, name="first.hdf5", seed=1, row=(4, 4, 3))
            parent = Path(ingest([first], root=memory / "parent", **options).path)
            options["append"] = parent
        source = robomimic(3, 4, row=(4, 4, 3))
        expected = ingest([source], root=tmp_path / "whole", **options)
        argv = [sys.executable, "-c", KILLED, str(source), str(memory), str(parent or ""), str(every)]
        count, code = 0, ""
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as killer:
            for number, code in map(str.split, killer.stdout):  # each while the next is being killed
                root, count = memory / number, count + 1
                assert code in ("-9", "0")
                for path in root.glob("x/*"):
                    assert open_dataset(path).version.version == expected.version
                version = ingest([source], root=root, **options)
                assert version.version == expected.version
                whole(Path(version.path))
        assert (killer.returncode, code) == (0, "0")
        assert count * every > 40
        if parent:
            assert (parent / "obs/eye_image/c/0/0/0/0").stat().st_nlink == count + 1
            whole(parent)


def whole(path: Path) -> None:
    """Every file of the manifest has its digest, and there is no other."""
    manifest, _ = finalize.manifests.load_manifest(path)
    for entry in manifest.files:
        assert digest.digest_file(path / entry.path) == (entry.bytes, entry.digest)
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files == {"manifest.json", "published.json", *(entry.path for entry in manifest.files)}


def test_kept_work_is_not_trusted(start, large, tmp_path) -> None:
    """A kept shard whose bytes changed, a torn line and a journal's lie cost work, and never make a wrong version."""
    root = tmp_path / "root"
    process = start(large, root)
    writing(process, root, 4)
    process.kill()
    process.communicate()
    (journals,) = root.glob(f"{BUILD_DIR}/x.*/journal")
    lines = [json.loads(line) for path in journals.iterdir() for line in path.read_text().splitlines()]
    for line in lines:
        if not line["key"].startswith("#"):
            with (journals.parent / "store" / line["key"]).open("r+b") as file:
                file.seek(line["bytes"] // 2)
                file.write(b"damage")
    lie = {"key": "action/c/1/0", "bytes": 5, "digest": "xxh3_128:0"}
    (journals / "0.host.1.2.jsonl").write_text(json.dumps(lie) + '\n{"key": "obs/eye_image/c/1/0/0/0", "by')
    version = ingest([large], root=root, name="x", codec="zstd")
    assert version.version == ingest([large], root=tmp_path / "other", name="x", codec="zstd").version
    manifest, _ = finalize.manifests.load_manifest(Path(version.path))
    for entry in manifest.files:
        assert digest.digest_file(Path(version.path) / entry.path) == (entry.bytes, entry.digest)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_full_disk(robomimic, mounted, below, capsys, codec) -> None:
    """A destination that fills up is NoSpace, to be tried later; with more room the same ingest goes on."""
    point = mounted("size=2m")
    source = robomimic(100, 100, row=(96, 96, 3))
    with pytest.raises(NoSpace) as caught:
        ingest([source], root=point / "root", name="x", codec=codec)
    assert str(point) in caught.value.where
    assert not (point / "root" / "x").exists()
    assert re.search(rf"[1-9]\d* of \d+ shards .*{re.escape(str(point / 'root/.tmp'))}", capsys.readouterr().err)
    subprocess.run(["mount", "-o", "remount,size=30m", str(point)], check=True)
    version = ingest([source], root=point / "root", name="x", codec=codec)
    assert below(point / "root") == {"x", *(f"x/{name}" for name in below(point / "root" / "x"))}
    assert open_dataset(Path(version.path)).manifest.steps == 200


def test_read_only(robomimic, mounted, below) -> None:
    """A destination that is mounted read-only is refused with its path."""
    point = mounted("ro")
    with pytest.raises(ClusterError, match="cannot write") as caught:
        ingest([robomimic(3)], root=point / "root", name="x")
    assert str(point) in caught.value.where
    assert below(point) == set()


def test_two_at_once(start, large, tmp_path) -> None:
    """Two ingests of one recording at the same time both succeed, one of them publishes, and one version is there."""
    root = tmp_path / "root"
    pair = [start(large, root) for _ in range(2)]
    answers = [process.communicate(timeout=100) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], answers
    assert sorted('"new":true' in answer for answer, _ in answers) == [False, True]
    assert list(root.iterdir()) == [root / "x"]
    (path,) = (root / "x").iterdir()
    manifest = open_dataset(path).manifest
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {
        "manifest.json",
        "published.json",
        *(entry.path for entry in manifest.files),
    }


def test_published_by_another_meanwhile(robomimic, tmp_path, monkeypatch) -> None:
    """An ingest whose working folder another one has just published finds that version, and says it is not new."""
    source = robomimic(3)
    manifest = finalize.write_metadata

    def late(*args):
        monkeypatch.setattr(finalize, "write_metadata", manifest)
        assert ingest([source], root=tmp_path / "root", name="x").new
        return manifest(*args)

    monkeypatch.setattr(finalize, "write_metadata", late)
    version = ingest([source], root=tmp_path / "root", name="x")
    assert not version.new
    assert list((tmp_path / "root").iterdir()) == [tmp_path / "root" / "x"]
    (path,) = (tmp_path / "root" / "x").iterdir()
    check_complete(path, open_dataset(path).manifest)


def test_a_dead_worker_is_an_error(start, large, tmp_path) -> None:
    """When a worker is killed, as the kernel does when memory runs out, the ingest says so, and the next goes on."""
    root = tmp_path / "root"
    process = start(large, root, "--workers", "2")
    writing(process, root)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, talk = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "a worker process was killed" in talk
    assert "--workers" in talk
    assert ingest([large], root=root, name="x", codec="zstd").new
    assert list(root.iterdir()) == [root / "x"]


def test_workers_end_with_their_parent(start, large, tmp_path) -> None:
    """kill -9 of the command leaves no worker behind."""
    process = start(large, tmp_path / "root", "--workers", "2")
    writing(process, tmp_path / "root")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.kill()
    process.communicate()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_first_failure_stops_all(robomimic, tmp_path, monkeypatch) -> None:
    """Damage met by one worker process is raised whole, and nothing of the ingest stays."""
    import h5py
    import numpy as np

    monkeypatch.setattr(execute, "_SERIAL_BYTES", 0)
    path = robomimic(2, 20)
    with h5py.File(path, "r+") as file:
        del file["data/demo_1/obs/eye_image"]
        frames = np.zeros((20, 8, 8, 3), np.uint8)
        dataset = file["data/demo_1/obs"].create_dataset("eye_image", data=frames, compression="gzip")
        where = dataset.id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[where : where + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        ingest([path], root=tmp_path / "root", name="x", workers=3)
    assert caught.value.where.startswith(f"{path}: /data/demo_1/")
    assert not (tmp_path / "root").exists()
