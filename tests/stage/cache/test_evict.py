from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.stage.cache import evict, records
from pitools.stage.cache import lease as lease_module
from pitools.stage.cache.evict import EvictionCandidate, KeptReason
from pitools.stage.cache.inventory import list_sets, matches_sizes
from pitools.stage.cache.layout import create_root, journal_path, partial_path, purge_trash, trash, version_lock
from pitools.stage.cache.lease import last_used, leased_set
from pitools.stage.plain_store.stage_store import stage_store
from pitools.stage.resolve import resolve_source
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version


@pytest.fixture
def final(small: Path, root: Path) -> Path:
    """A staged set that was last used long ago."""
    path = Path(stage_version(load_version(small), root).path)
    os.utime(root / ".leases" / path.name, (1000, 1000))
    return path


def take(root: Path, final: Path, **how: object) -> KeptReason | None:
    return evict.evict_item(root, EvictionCandidate(final.name, final), **how)


def test_an_old_set_goes(final: Path, root: Path, residue):
    """With its record, and without leaving anything; a dry run first says that it would."""
    assert take(root, final, dry_run=True) is None
    assert final.exists()
    assert take(root, final) is None
    assert not final.exists()
    assert residue(root) == []
    assert list((root / ".records").iterdir()) == []
    assert take(root, final, force=True, grace_s=0) == KeptReason.NOT_PRESENT


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_copy_of_a_plain_store(tmp_path: Path, root: Path, dry_run: bool):
    """It stays where the store is gone, since it cannot come back, but not where that was written again."""
    store = tmp_path / "x.zarr"
    zarr.create_group(store).create_array("a", data=np.arange(9))
    final = Path(stage_store(resolve_source(store), root).path)
    store.rename(tmp_path / "y.zarr")
    assert take(root, final, grace_s=0, dry_run=dry_run) == KeptReason.SOURCE_GONE
    assert final.exists()
    zarr.create_group(store).create_array("a", data=np.arange(10))
    assert take(root, final, grace_s=0, dry_run=dry_run) is None
    shutil.rmtree(store)
    if dry_run:
        states = [
            record.state for force in (False, True) for record in evict.evict_version(root, final.name, force=force)
        ]
        assert states == ["kept", "evicted"]


@pytest.mark.parametrize("force", [False, True])
def test_what_keeps_a_set(final: Path, root: Path, force: bool):
    """A lock, a lease and a pin also withstand force; a source that is not known only the default."""
    with version_lock(root, final.name, timeout_s=0):
        assert take(root, final, force=force) == KeptReason.LOCKED
    with leased_set(final):
        assert take(root, final, force=force, grace_s=0) == KeptReason.LEASED
    records.set_pinned(root, final.name)
    assert take(root, final, force=force, grace_s=0) == KeptReason.PINNED
    records.set_pinned(root, final.name, pinned=False)
    records.remove_stage_record(root, final.name)
    assert take(root, final, force=force, grace_s=0) == (None if force else KeptReason.UNKNOWN_SOURCE)
    assert final.exists() is not force


def test_grace_is_counted_from_the_last_use(final: Path, root: Path):
    """Between staging and a job's lease a set stays; whoever names it does not wait for that."""
    now = time.time()
    os.utime(root / ".leases" / final.name, (now, now - 599))
    assert take(root, final) == KeptReason.RECENTLY_USED
    assert take(root, final, grace_s=500, dry_run=True) is None
    os.utime(root / ".leases" / final.name, (now, now - 601))
    assert take(root, final, dry_run=True) is None
    named = evict.evict_version(root, final.name)
    assert [(record.state, record.reason) for record in named] == [("evicted", None)]


def test_a_clock_that_was_ahead_does_not_keep_a_set_for_ever(final: Path, root: Path):
    """A last use in the future is taken for now, from where it ages; a lease still counts for all."""
    os.utime(root / ".leases" / final.name, (0, time.time() + 10**8))
    with leased_set(final, touch=False):
        assert take(root, final, grace_s=0) == KeptReason.LEASED
    start_time = time.time()
    os.utime(root / ".leases" / final.name, (0, start_time + 10**8))
    assert take(root, final) == KeptReason.RECENTLY_USED
    assert start_time - 1 < last_used(root, final.name) < time.time() + 1


def test_the_evictor_touches_what_is_leased(final: Path, root: Path):
    """A job that runs for a week has used its set to the end, also when it dies without a word."""
    with leased_set(final, touch=False):
        assert last_used(root, final.name) == 1000
        start_time = time.time()
        assert take(root, final) == KeptReason.LEASED
        assert last_used(root, final.name) > start_time - 1


def test_the_order_is_that_of_the_last_use(root: Path, make_dataset):
    """Unfinished copies first, then sets, the one used longest ago at their head, never used ones before all."""
    finals = [Path(stage_version(load_version(make_dataset({"a": bytes([n])}, f"d{n}")), root).path) for n in range(4)]
    for final, when in zip(finals, (300, 100, 400, 200), strict=True):
        os.utime(root / ".leases" / final.name, (0, when))
    partial_path(root, "f" * 32).mkdir()
    order = [item.version for item in evict.eviction_order(root)]
    assert order == ["f" * 32, *(finals[n].name for n in (1, 3, 0, 2))]
    with leased_set(finals[1]):
        pass
    assert evict.eviction_order(root)[-1].path == finals[1]


def test_an_unfinished_copy_goes_unless_somebody_goes_on_with_it(root: Path, residue):
    """Its journal first: what is said to be done must be there."""
    create_root(root)
    partial, journal = partial_path(root, "v"), journal_path(root, "v")
    partial.mkdir()
    (partial / "a").write_bytes(b"x")
    journal.write_text("done")
    item = EvictionCandidate("v", partial)
    with version_lock(root, "v", timeout_s=0):
        assert evict.evict_item(root, item, force=True, grace_s=0) == KeptReason.LOCKED
    assert partial.exists()
    assert evict.evict_item(root, item) is None
    assert residue(root) == []
    assert evict.evict_item(root, item) == KeptReason.NOT_PRESENT


def test_a_copy_of_another_node_is_left_to_a_person(root: Path):
    """Whether that node still writes it cannot be told here: naming the version is not enough."""
    create_root(root)
    partial = root / ".tmp" / f"{'a' * 32}.n2.partial"
    partial.mkdir()
    (kept,) = evict.evict_version(root, "a" * 32)
    assert (kept.state, kept.reason, partial.exists()) == ("kept", KeptReason.OTHER_NODE, True)
    (evicted,) = evict.evict_version(root, "a" * 32, force=True)
    assert (evicted.state, partial.exists()) == ("evicted", False)


def test_a_quarantined_set_is_not_described_as_the_live_one(final: Path, root: Path, small: Path):
    """What a set of the same version is leased, pinned and staged for is that set's own."""
    quarantined = evict.quarantine_set(root, final.name)
    stage_version(load_version(small), root)
    records.set_pinned(root, final.name)
    with leased_set(final):
        live, damaged = list_sets(root)
    assert (live.leased, live.pinned, live.source != "") == (True, True, True)
    assert damaged.path == str(quarantined)
    assert (damaged.leased, damaged.pinned, damaged.locked, damaged.source, damaged.last_used) == (
        False,
        False,
        False,
        "",
        "",
    )


def test_a_quarantined_set_is_out_of_the_way(final: Path, root: Path):
    """A job that reads it keeps it; else it is moved to where no stager, reader or evictor finds it."""
    with leased_set(final), pytest.raises(TryLater):
        evict.quarantine_set(root, final.name)
    to = evict.quarantine_set(root, final.name)
    assert to.parent == root / ".quarantine"
    assert (to / "zarr.json").exists()
    assert not final.exists()
    assert evict.eviction_order(root) == []
    with pytest.raises(ClusterError):
        evict.quarantine_set(root, final.name)


def test_a_set_that_shares_files_leaves_the_other_whole(root: Path, make_dataset):
    """Versions share files by hard links: taking one away takes nothing from the other."""
    first = load_version(make_dataset({"a": b"same" * 100, "b": b"old"}))
    second = load_version(make_dataset({"a": b"same" * 100, "b": b"new"}))
    finals = [Path(stage_version(dataset, root).path) for dataset in (first, second)]
    assert (finals[0] / "a").stat().st_ino == (finals[1] / "a").stat().st_ino
    assert take(root, finals[0], grace_s=0) is None
    assert matches_sizes(finals[1], second)
    assert (finals[1] / "a").read_bytes() == b"same" * 100


@pytest.fixture
def memory() -> Iterator[Path]:
    """A root in memory, where a sync costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "pit"


def put_back(root: Path, final: Path) -> None:
    """Let the set stand again, from the copy beside it."""
    with version_lock(root, final.name, timeout_s=1):
        shutil.copytree(root / "spare", final)
        records.write_stage_record(root, final.name, source="/shared", n_bytes=400)


def duration(root: Path, final: Path) -> float:
    """How long an eviction takes here and now, in seconds: what the kills are spread over."""
    began = time.monotonic()
    assert take(root, final, grace_s=0, force=True) is None
    took = time.monotonic() - began
    put_back(root, final)
    return took


def test_kill_at_any_moment_of_an_eviction(memory: Path, make_dataset, residue):
    """kill -9: the set is whole or gone, and the next evictor removes what is left."""
    root = memory
    dataset = load_version(make_dataset({f"c/{i % 20}/{i}": b"x" for i in range(400)}))
    final = Path(stage_version(dataset, root).path)
    shutil.copytree(final, root / "spare")
    cut, one = 0, duration(root, final)
    for trial in range(100):
        begin, begins = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(begins, b"!")
                take(root, final, grace_s=0)
            finally:
                os._exit(0)
        os.read(begin, 1)
        time.sleep(one * (trial % 20) / 15)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(begin)
        os.close(begins)
        cut += bool(residue(root))
        if final.exists():
            assert matches_sizes(final, dataset)
            assert take(root, final, grace_s=0, force=True) is None
        purge_trash(root)
        assert residue(root) == []
        put_back(root, final)
        if trial >= 19 and cut > 2:
            break
    assert cut > 2, "no trial cut an eviction short"


def test_the_steps_of_an_eviction_are_in_the_safe_order(
    final: Path, root: Path, residue, monkeypatch: pytest.MonkeyPatch
):
    """Killed between any two, it leaves a set with its record, or a removal that is on the disk and can be finished."""
    steps: list[str] = []

    def move(path: Path, home: Path) -> Path:
        assert records.read_stage_record(root, final.name).source, "a set without its record would stay for ever"
        steps.append("moved")
        return trash(path, home)

    def sync(folder: Path) -> None:
        assert not final.exists()
        assert residue(root), "removed before the rename was on the disk"
        steps.append(f"synced {folder.name}")

    monkeypatch.setattr(evict, "trash", move)
    monkeypatch.setattr(evict, "fsync_dir", sync)
    assert take(root, final) is None
    assert steps == ["moved", "synced objects"]


def test_a_journal_goes_before_what_it_tells_of(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed in between, an eviction must not leave a journal that calls done what is gone."""
    create_root(root)
    partial_path(root, "v").mkdir()
    journal_path(root, "v").write_text("done")

    def move(path: Path, home: Path) -> Path:
        assert not journal_path(root, "v").exists()
        return trash(path, home)

    monkeypatch.setattr(evict, "trash", move)
    assert evict.evict_item(root, EvictionCandidate("v", partial_path(root, "v"))) is None


def test_a_pin_cannot_come_too_late(final: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    """An evictor that has found no pin is waited for: a pin is of a set that stays, or it is an error."""
    monkeypatch.setattr(lease_module, "_LOCK_TIMEOUT_S", 0.05)

    def move(path: Path, home: Path) -> Path:
        with pytest.raises(TryLater, match="locked by another process"):
            records.set_pinned(root, final.name)
        return trash(path, home)

    monkeypatch.setattr(evict, "trash", move)
    assert take(root, final) is None
    with pytest.raises(DataError):
        records.set_pinned(root, final.name)
    assert list((root / ".records").iterdir()) == []


def test_a_source_that_does_not_answer_keeps_its_set_and_holds_up_nobody(
    final: Path, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file system that hangs is given up, as the root's lock is held meanwhile."""
    answer = threading.Event()
    monkeypatch.setattr(evict, "_SOURCE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(evict, "is_zarr_store", lambda _: answer.wait(60))
    records.write_stage_record(root, final.name, source="/hung/x.zarr", n_bytes=1, store_key="k")
    assert take(root, final, grace_s=0) == KeptReason.SOURCE_GONE
    assert not answer.is_set()
    answer.set()
    assert take(root, final, grace_s=0) is None
