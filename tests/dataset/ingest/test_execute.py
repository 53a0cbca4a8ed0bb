from __future__ import annotations

import contextlib
import errno
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from pitools.core.errors import ClusterError, DataError, NoSpace
from pitools.dataset.ingest import chunking, execute, finalize
from pitools.dataset.ingest import ingest as ingesting
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.ingest.shard_worker import ShardWorker
from pitools.dataset.ingest.work_dir import IngestWorkDir, open_work_dir
from pitools.dataset.versions import VersionInfo, check_complete
from pitools.store import manifest as manifests
from pitools.store.publish import BUILD_DIR


@pytest.fixture
def small():
    """Shards of a few KiB, as a large recording has many, and workers for even those."""
    with patch.multiple(chunking, CHUNK_BYTES=512, SHARD_BYTES=2048), patch.object(execute, "_SERIAL_BYTES", 0):
        yield


@pytest.mark.parametrize("workers", [2, 8])
def test_any_number_of_workers(robomimic, tmp_path, small, workers) -> None:
    """One worker or eight give the same version, statistics and all."""
    source = robomimic(60, 70, 80)
    version = ingest([source], root=tmp_path / "one", name="x", workers=1)
    many = ingest([source], root=tmp_path / "many", name="x", workers=workers)
    assert many.version == version.version
    assert manifests.load_manifest(Path(many.path))[0] == manifests.load_manifest(Path(version.path))[0]


class Nodes:
    """Nodes of which one does its part, with what it finds in the folder before and after."""

    def __init__(self, before=lambda work, plan: None, after=lambda work: None) -> None:
        self.before, self.after = before, after
        self.counts: list[int] = []
        self.jobs: list[int] = []

    def __call__(self, work: Path, plan: str, total: int, done) -> None:
        self.counts.append(done())
        self.before(work, plan)
        self.jobs += [execute.run_part(str(work), plan, number, 3, 1) for number in range(2)]
        self.counts.append(done())
        self.after(work)


def test_parts(robomimic, tmp_path, small) -> None:
    """Two nodes of three do their parts, and what the third left is done by who asked; the version is the same."""
    source = robomimic(60, 70)
    nodes = Nodes()
    version = ingest([source], root=tmp_path / "root", name="x", submit_array=nodes)
    assert nodes.counts == [0, sum(nodes.jobs)]
    assert min(nodes.jobs) > 3
    assert version.version == ingest([source], root=tmp_path / "whole", name="x").version


def together(monkeypatch, calls: list[Callable[[], VersionInfo]]) -> tuple[list[VersionInfo], list[str]]:
    """What ingests at once return, which take their steps in turn; and the shards that they made, each its own."""
    ready, created = threading.Barrier(len(calls)), []
    opened, make, step = ingesting.open_work_dir, ShardWorker._make_shard, threading.Barrier(len(calls))

    def open_all(*arguments):
        place = opened(*arguments)
        ready.wait(60)  # both are there before either has done anything
        return place

    def in_turn(maker, key, job):
        with contextlib.suppress(threading.BrokenBarrierError):  # the other is done with making
            step.wait(60)
        created.append(key)
        return make(maker, key, job)

    monkeypatch.setattr(ingesting, "open_work_dir", open_all)
    monkeypatch.setattr(ShardWorker, "_make_shard", in_turn)

    def call(one: Callable[[], VersionInfo]) -> VersionInfo:
        try:
            return one()
        finally:
            step.abort()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls)), created


def test_two_at_once_share_the_work(robomimic, tmp_path, small, monkeypatch) -> None:
    """Two ingests of the same at once each do a part, and make next to no shard twice; one of them publishes."""
    source = robomimic(300, 300)
    (one, other), created = together(
        monkeypatch, [lambda: ingest([source], root=tmp_path / "root", name="x", workers=1)] * 2
    )
    assert (one.version, {one.new, other.new}) == (other.version, {True, False})
    assert len(set(created)) > 60
    assert len(created) < 1.4 * len(set(created))
    assert not (tmp_path / "root" / BUILD_DIR).exists()


def test_a_plan_of_somebody_else(robomimic, tmp_path) -> None:
    """A node loads the plan that was left for it, byte for byte, and nothing else: to load a pickle is to run it."""

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "evil",))

    def swap(work: Path, plan: str) -> None:
        (work / f"plan.{plan.partition('.')[0]}").write_bytes(pickle.dumps(Evil()))

    with pytest.raises(ClusterError, match=r"plan\.[0-9a-f]{8}: "):
        ingest([robomimic(5)], root=tmp_path / "root", name="x", submit_array=Nodes(before=swap))
    assert not (tmp_path / "evil").exists()


def test_another_ingest_was_first(robomimic, tmp_path) -> None:
    """Where another ingest of the same publishes meanwhile, nodes have nothing to do, and its version is the answer."""
    source = robomimic(5)

    def first(work: Path, plan: str) -> None:
        assert ingest([source], root=tmp_path / "root", name="x").new

    nodes = Nodes(before=first)
    version = ingest([source], root=tmp_path / "root", name="x", submit_array=nodes)
    assert (version.new, nodes.jobs) == (False, [0, 0])


def test_a_full_disk_on_a_node(robomimic, tmp_path, monkeypatch) -> None:
    """What a node meets is told as an error of ours, for it crosses to who asked."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    def part(work: Path, plan: str) -> None:
        with monkeypatch.context() as changed:
            changed.setattr(execute, "run_plan", full)
            with pytest.raises(NoSpace):
                execute.run_part(str(work), plan, 0, 1, 1)

    assert ingest([robomimic(5)], root=tmp_path / "root", name="x", submit_array=Nodes(before=part)).new


@pytest.mark.parametrize("again", [True, False])
def test_a_folder_that_was_made_anew(robomimic, tmp_path, monkeypatch, again) -> None:
    """Where others remove the working folder, and make it anew, under an ingest that knows all its shards to be done,
    it never publishes a version that lacks them, but begins again."""
    manifest, done = finalize.write_metadata, []

    def removed(name, plan, place, *rest) -> bytes:
        if not done:
            done.append(True)
            place.remove()
            if again:
                open_work_dir(tmp_path / "root", "x", place.path.name.removeprefix("x."))
        return manifest(name, plan, place, *rest)

    monkeypatch.setattr(finalize, "write_metadata", removed)
    version = ingest([robomimic(5)], root=tmp_path / "root", name="x")
    assert (version.new, version.episodes) == (True, 1)
    check_complete(Path(version.path), manifests.load_manifest(Path(version.path))[0])
    assert not (tmp_path / "root" / BUILD_DIR).exists()


def test_other_libraries_do_not_share(robomimic, tmp_path, monkeypatch) -> None:
    """Of two ingests at once whose codecs are of other releases neither takes the other's shards for its own."""
    keys = []
    opened = ingesting.open_work_dir
    monkeypatch.setattr(ingesting, "open_work_dir", lambda root, name, key: keys.append(key) or opened(root, name, key))
    source = robomimic(5)
    for number in range(3):
        if number == 2:
            monkeypatch.setattr(ingesting.metadata, "version", lambda name: "0.0")
        ingest([source], root=tmp_path / str(number), name="x")
    assert keys[0] == keys[1] != keys[2]


def test_damaged_copy_of_the_parent(robomimic, tmp_path, monkeypatch) -> None:
    """Where files cannot be linked, a shard that was copied with damage never has its path in the new version."""
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(chunking, "SHARD_BYTES", 4096)
    parent = Path(ingest([robomimic(40)], root=tmp_path / "root", name="x", codec="raw").path)
    shard = "obs/eye_image/c/0/0/0/0"
    content = bytearray((parent / shard).read_bytes())
    content[0] ^= 1
    (parent / shard).write_bytes(content)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "cross-device link")))
    monkeypatch.setattr(IngestWorkDir, "remove", lambda _: None)
    with pytest.raises(DataError):
        ingest([robomimic(5, name="b.hdf5")], root=tmp_path / "root", name="x", append=parent, workers=1)
    (work_dir,) = (tmp_path / "root/.tmp").iterdir()
    assert not (work_dir / "store" / shard).exists()
