"""What a training loop relies on, with a framework of a few lines: ranks are threads that share a store."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.checkpoint.checkpointer import Checkpointer, Restored
from pitools.checkpoint.coordination.exchange import SaveExchange
from pitools.checkpoint.store import check_folder, layout, lookup
from pitools.core.errors import ClusterError, ConfigError, DataError, NoSpace, PitError, Unreachable

State = dict[str, bytes]


class Store:
    """A key-value store whose readers wait."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self.timed_out: list[str] = []

    def put(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self._values, f"{key} twice"
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, seconds):
                self.timed_out.append(key)
                raise TimeoutError(key)
            return self._values[key]

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


class Files:
    """A framework: each rank writes its own file, and rank 0 at the end an index."""

    format = "files"

    def __init__(self, rank: int = 0, hinder: Callable[[str], None] = lambda _: None) -> None:
        self._rank, self._hinder = rank, hinder
        self.drawn = 0

    def describe(self, state: State) -> dict[str, str]:
        return {name: f"bytes[{len(value)}]" for name, value in state.items()}

    def begin_save(self, state: State, payload: Future[Path]) -> Callable[[SaveExchange], None]:
        self._hinder("stage")
        copy = dict(state)
        return lambda meet: self._write(copy, payload.result(0), meet)

    def load(self, payload: Path, like: State) -> State:
        names = (payload / "index").read_text().split()
        assert set(names) == like.keys()
        return {name: (payload / f"0.{name}").read_bytes() for name in names}

    def rank_of_file(self, path: str, world_size: int) -> int:
        return int(path.split(".")[0]) % world_size if "." in path else 0

    def random_state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def set_random_state(self, states: dict[str, Any]) -> None:
        self.drawn = states["drawn"]

    def _write(self, state: State, payload: Path, meet: SaveExchange) -> None:
        for name, value in state.items():
            self._hinder(name)
            (payload / f"{self._rank}.{name}").write_bytes(value)

        def finish(said: list[bytes]) -> list[bytes]:
            self._hinder("index")
            assert said == [f"{rank}".encode() for rank in range(len(said))]
            (payload / "index").write_text(" ".join(state))
            return [text + b"!" for text in said]

        assert meet(f"{self._rank}".encode(), finish) == f"{self._rank}!".encode()


def state(step: int) -> State:
    return {"w": bytes([step]) * 3000, "momentum": bytes([step, 255 - step]) * 700}


def on_ranks(world_size: int, work: Callable[[int, dict[str, Any]], Any], store: Store | None = None) -> list[Any]:
    """What each rank's work returns, or raises."""
    store, actual = store or Store(), [None] * world_size  # type: Store, list[Any]

    def one(rank: int) -> None:
        try:
            options = {
                "rank": rank,
                "world_size": world_size,
                "put": store.put,
                "get": store.get,
                "delete": store.delete,
            }
            actual[rank] = work(rank, options)
        except Exception as error:  # noqa: BLE001  # the test looks at it
            actual[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return actual


def saved(folder: Path, *steps: int, world_size: int = 1, **more: Any) -> None:
    """Checkpoints of these steps, saved by so many ranks."""

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options, **more) as guard:
            for step in steps:
                guard.save(step, state(step), {"position": step})

    for result in on_ranks(world_size, work):
        if result:
            raise result


def restored(folder: Path, **more: Any) -> Restored | None:
    with Checkpointer(folder, Files(), **more) as guard:
        return guard.restore(state(0))


def test_a_second_checkpointer_of_the_same_name(folder: Path) -> None:
    """Closed and opened again in one job, as between two phases: the ranks find each other again."""

    def work(rank: int, options: dict[str, Any]) -> int | None:
        for step in (1, 2, 3):
            with Checkpointer(folder, Files(rank), timeout_s=20, **options) as checkpointer:
                checkpointer.save(step, state(step))
        return lookup.latest_step(folder)

    assert on_ranks(3, work) == [3, 3, 3]


@pytest.mark.parametrize("name", ["NOTE.txt", "payload/.nfs0000001"])
def test_a_stray_file_is_ignored(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A file that the manifest does not name changes no byte of the state: it is restored, and the file is reported."""
    saved(folder, 1, 2)
    (layout.step_path(folder, 2) / name).write_text("the good one")
    result = restored(folder)
    assert result is not None
    assert (result.step, result.state) == (2, state(2))
    assert name in capsys.readouterr().err
    assert not (folder / layout.QUARANTINE).exists()


def test_what_was_saved_comes_back(folder: Path) -> None:
    """State, loader and custom metadata of the newest; the state may change as soon as `save` has returned."""
    assert restored(folder) is None
    with Checkpointer(folder, Files(), keep_last=2) as guard:
        for step in (1, 2, 3):
            now = state(step)
            guard.save(step, now, {"position": step}, {"lr": 0.5, "best": [float("inf"), {"worst": float("-inf")}]})
            now.clear()
    metadata = {"lr": 0.5, "best": [float("inf"), {"worst": float("-inf")}]}
    assert restored(folder) == Restored(3, state(3), {"position": 3}, metadata)
    assert lookup.complete_steps(folder) == [3, 2]
    assert (folder / "latest").readlink() == Path("step_3")


def test_generators_go_on_where_they_were(folder: Path) -> None:
    """Python's, NumPy's and the framework's draw after a restore what they drew after the save."""
    random.seed(5)
    np.random.seed(5)
    framework = Files()
    framework.drawn = 7
    with Checkpointer(folder, framework) as guard:
        guard.save(1, state(1))
        drawn = random.random(), random.gauss(), np.random.random(), np.random.standard_normal()
    framework.drawn = 0
    with Checkpointer(folder, framework) as guard:
        guard.restore(state(0))
    assert (random.random(), random.gauss(), np.random.random(), np.random.standard_normal()) == drawn
    assert framework.drawn == 7


def test_generators_of_another_version_keep_their_seeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A framework that refuses the saved states of its generators restores the training state, and says so."""

    class Newer(Files):
        def set_random_state(self, states: dict[str, Any]) -> None:
            raise RuntimeError("RNG state is wrong size")

    saved(folder, 1)
    with Checkpointer(folder, Newer()) as checkpointer:
        actual = checkpointer.restore(state(0))
    assert actual is not None
    assert actual.state == state(1)
    assert "RNG state is wrong size" in capsys.readouterr().err


def test_the_loop_does_not_wait_for_the_write(folder: Path) -> None:
    """While a file is being written the loop goes on; the next save waits for it; nothing shows before it is whole."""
    event = threading.Event()
    with Checkpointer(folder, Files(hinder=lambda name: name == "momentum" and event.wait(10))) as guard:  # type: ignore[arg-type,return-value]
        guard.save(1, state(1))
        assert lookup.complete_steps(folder) == []
        event.set()
        guard.save(2, state(2))
        assert lookup.complete_steps(folder) == [1]
    assert lookup.complete_steps(folder) == [2, 1]


def test_the_loop_does_not_wait_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one on a slow file system is left to the background, and so is what was wrong with it."""
    event, real = threading.Event(), layout.create_payload_dir

    def made(place: Path) -> Path:
        assert event.wait(10)
        if place.name.startswith(".step_2."):
            raise NoSpace("no inodes left", where=str(place))
        return real(place)

    monkeypatch.setattr(layout, "create_payload_dir", made)
    with Checkpointer(folder, Files()) as guard:
        guard.save(1, state(1))
        assert not layout.leftovers(folder)
        event.set()
        guard.save(2, state(2))
        with pytest.raises(NoSpace, match="no inodes left"):
            guard.wait()
        guard.save(3, state(3))
    assert lookup.complete_steps(folder) == [3, 1]


def test_a_failed_write_is_told_by_the_next_call(folder: Path) -> None:
    """It says what failed, where, and that it was in the background; saving can go on, and the old one stands."""

    def full(name: str) -> None:
        if broken and name == "momentum":
            raise OSError(28, "No space left on device")

    broken = False
    with Checkpointer(folder, Files(hinder=full)) as guard:
        guard.save(1, state(1))
        guard.wait()
        broken = True
        guard.save(2, state(2))
        with pytest.raises(NoSpace) as caught:
            guard.save(3, state(3))
        assert ".step_2." in caught.value.where
        assert "in the background, while step 2 was saved" in caught.value.__notes__
        assert lookup.complete_steps(folder) == [1]
        broken = False
        guard.save(4, state(4))
    assert lookup.complete_steps(folder) == [4, 1]
    assert restored(folder).step == 4  # type: ignore[union-attr]
    assert not layout.leftovers(folder)


@pytest.mark.parametrize(("who", "what"), [(2, "stage"), (1, "w"), (2, "momentum"), (0, "w"), (0, "index")])
def test_one_rank_s_trouble_is_every_rank_s(folder: Path, who: int, what: str) -> None:
    """All raise at once, each with the reason and the rank it is of, and no part of the checkpoint shows."""

    def work(rank: int, options: dict[str, Any]) -> None:
        def hinder(name: str) -> None:
            if rank == who and name == what:
                raise ValueError("the disk said no")

        with Checkpointer(folder, Files(rank, hinder), **options, timeout_s=20) as guard:
            guard.save(7, state(7))
            guard.wait()

    store = Store()
    actual = on_ranks(3, work, store)
    assert store.timed_out == []
    for rank, error in enumerate(actual):
        assert "the disk said no" in str(error)
        if rank != who:
            assert isinstance(error, ClusterError)
            assert f"rank {who}" in str(error)
    assert lookup.complete_steps(folder) == []


def test_a_rank_that_hangs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for ever, and their error names it and its node; the checkpoint before stands."""
    saved(folder, 1, world_size=3)
    monkeypatch.setenv("PIT_NODE", "n04")
    event = threading.Event()

    class Impatient(Store):
        """The time for rank 2's word on the save is over at once; for nobody else's."""

        def get(self, key: str, seconds: float) -> str:
            if "save of step 2" in key and key.endswith("/2"):
                assert seconds <= 20
                raise TimeoutError(key)
            return super().get(key, seconds)

    def work(rank: int, options: dict[str, Any]) -> None:
        hinder = lambda name: rank == 2 and name == "w" and event.wait(60)  # noqa: E731
        with Checkpointer(folder, Files(rank, hinder), **options, timeout_s=20) as guard:  # type: ignore[arg-type]
            guard.restore(state(0))
            guard.save(2, state(2))
            try:
                guard.wait()
            finally:
                event.set()

    for rank, error in enumerate(on_ranks(3, work, Impatient())):
        assert isinstance(error, Unreachable), (rank, error)
        assert error.message.endswith("missing: rank 2 on n04")
    assert lookup.complete_steps(folder) == [1]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "remove": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name",
    ["payload/0.w", "payload/1.momentum", "payload/index", "rng_states.json", "state_schema.json", "manifest.json"],
)
def test_damage_is_found_and_the_one_before_is_taken(folder: Path, name: str, damage: str) -> None:
    """Whatever is done to whichever file, no rank goes on from it; all agree, and a person finds it with the reason."""
    saved(folder, 1, 2, world_size=2)
    DAMAGES[damage](folder / "step_2" / name)

    def work(rank: int, options: dict[str, Any]) -> int:
        with Checkpointer(folder, Files(rank), **options) as guard:
            restored_state = guard.restore(state(0))
            assert restored_state == Restored(1, state(1), {"position": 1}, {})
            guard.save(2, state(2))
            return restored_state.step

    assert on_ranks(2, work) == [1, 1]
    (aside,) = (folder / "quarantine").iterdir()
    assert (aside / "step_2").is_dir()
    assert (aside / "reason.json").is_file()
    assert lookup.complete_steps(folder) == [2, 1]


def test_where_all_are_damaged_training_does_not_begin_anew(folder: Path) -> None:
    """Every start is refused, with their names, until a person has moved them away; nothing is deleted."""
    saved(folder, 1, 2, 3)
    for step in (1, 2, 3):
        DAMAGES["flip"](folder / f"step_{step}" / "payload" / "0.w")
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            restored(folder)
        assert all(f"step_{step}." in caught.value.message for step in (1, 2, 3))
    assert len(list((folder / "quarantine").iterdir())) == 3
    (folder / "quarantine").rename(folder.with_name("damaged"))
    assert restored(folder) is None


@pytest.mark.parametrize("name", ["stage", "w", "momentum", "index"])
def test_a_kill_between_any_two_files_leaves_the_one_before(folder: Path, name: str) -> None:
    """kill -9 at any file of a save: the next process restores what was whole, and sweeps the rest."""
    saved(folder, 1)
    if not (child := os.fork()):
        die = lambda at: at == name and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        with Checkpointer(folder, Files(hinder=die)) as guard:  # type: ignore[arg-type]
            guard.save(2, state(2))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert bool(layout.leftovers(folder)) == (name != "stage")  # until then nothing is made
    actual = restored(folder)
    assert actual
    assert actual.step == 1
    assert not layout.leftovers(folder)


def test_another_model_is_refused_and_the_difference_named(folder: Path) -> None:
    """Each leaf that differs, what it is there and what here; at every rank; nothing is moved."""
    saved(folder, 1, world_size=2)

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options) as guard:
            guard.restore({"w": bytes(3000), "momentum": bytes(7)})

    for error in on_ranks(2, work):
        assert isinstance(error, PitError)
        assert all(text in str(error) for text in ('"momentum"', "bytes[1400]", "bytes[7]"))
    with pytest.raises(ConfigError, match='"bias"'), Checkpointer(folder, Files()) as guard:
        guard.save(2, {**state(2), "bias": b""})
    assert lookup.complete_steps(folder) == [1]


def test_a_state_with_other_leaves_than_at_the_restore_is_not_saved(folder: Path) -> None:
    """A resume would lose them: each rank raises, by name; the program may restore all leaves, and then saves them."""

    def save_more(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options, timeout_s=20) as checkpointer:
            assert checkpointer.restore({"w": bytes(3000)}) is None
            checkpointer.save(1, state(1))

    store = Store()
    for error in on_ranks(2, save_more, store):
        assert isinstance(error, ConfigError)
        assert '"momentum"' in str(error)
    assert store.timed_out == []
    assert layout.listed_steps(folder) == []

    def restore_all(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options) as checkpointer:
            checkpointer.restore(state(0))
            checkpointer.save(1, state(1))

    assert on_ranks(2, restore_all) == [None, None]


def test_a_step_that_an_earlier_program_saved_is_not_saved_again(folder: Path) -> None:
    """A program that does not restore fails at every rank at such a step; the checkpoint and the others stay."""
    saved(folder, 1, 2)

    def train_anew(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options) as checkpointer:
            checkpointer.save(2, state(9), {"position": 9})
            checkpointer.wait()

    errors = on_ranks(2, train_anew)
    assert [isinstance(error, (ConfigError, ClusterError)) for error in errors] == [True, True]
    assert isinstance(errors[0], ConfigError)
    assert lookup.complete_steps(folder) == [2, 1]
    assert not layout.leftovers(folder)
    latest = restored(folder)
    assert latest
    assert (latest.step, latest.loader_state) == (2, {"position": 2})


def test_a_later_restore_compares_every_leaf(folder: Path) -> None:
    """A `like` with fewer leaves than the checkpoint is refused also by a Checkpointer that has restored before."""
    saved(folder, 1)
    with Checkpointer(folder, Files()) as checkpointer:
        checkpointer.restore(state(0))
        with pytest.raises(ConfigError, match='"momentum"'):
            checkpointer.restore({"w": bytes(3000)})


def test_another_run_s_folder_and_a_link_are_refused(folder: Path, tmp_path: Path) -> None:
    """The error names whose it is."""
    saved(folder, 1, run="mine")
    with pytest.raises(ConfigError, match='expected "theirs", got "mine"'):
        restored(folder, run="theirs")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="symbolic link"):
        restored(tmp_path / "link", run="mine")


def test_another_run_s_checkpoint_is_refused_where_it_is(folder: Path) -> None:
    """It is not damaged: the restore is refused at every rank, and neither a restore nor a check moves it."""
    saved(folder.with_name("other"), 5, run="theirs")
    saved(folder, 1, run="mine", world_size=2)
    (folder.with_name("other") / "step_5").rename(folder / "step_5")

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), run="mine", **options) as checkpointer:
            checkpointer.restore(state(0))

    errors = on_ranks(2, work)
    assert isinstance(errors[0], ConfigError)
    assert all("theirs" in str(error) for error in errors)
    *_, totals = check_folder.check_folder(folder, [5, 1], move_aside=True)
    assert isinstance(totals, check_folder.FolderCheck)
    assert (totals.findings, totals.quarantined, totals.newest_good_step) == (1, 0, 1)
    assert layout.listed_steps(folder) == [5, 1]


def test_a_loop_that_fails_does_not_wait_for_its_peers(folder: Path) -> None:
    """Its own error is what is raised, soon, with a word on the save that failed before it."""

    def full(name: str) -> None:
        if name == "w":
            raise OSError(28, "No space left on device")

    def loop() -> None:
        with Checkpointer(folder, Files(hinder=full)) as guard:
            guard.save(1, state(1))
            raise RuntimeError("the loss diverged")

    with pytest.raises(RuntimeError, match="diverged") as caught:
        loop()
    (note,) = caught.value.__notes__
    assert "NoSpace" in note


def test_a_second_restore_finds_what_was_saved_since(folder: Path) -> None:
    """At every rank, also while the last save goes on, and after one that was refused."""

    def work(rank: int, options: dict[str, Any]) -> list[int]:
        slow = lambda name: name == "w" and time.sleep(0.1)  # noqa: E731
        with Checkpointer(folder, Files(rank, slow), **options) as guard:  # type: ignore[arg-type]
            with pytest.raises((ConfigError, ClusterError), match='"momentum"'):
                guard.restore({"w": b""})
            actual = [guard.restore(state(0))]
            for step in (1, 2):
                guard.save(step, state(step), {"position": step})
                actual.append(guard.restore(state(0)))
            return [item.step for item in actual if item]

    saved(folder, 0)
    assert on_ranks(3, work) == [[0, 1, 2]] * 3


def test_a_restore_tells_of_a_save_that_failed(folder: Path) -> None:
    """All ranks hear of it, and the next restore takes what stands."""
    broken = [False]

    def full(name: str) -> None:
        if name == "w" and broken[0]:
            raise OSError(28, "No space left on device")

    def work(rank: int, options: dict[str, Any]) -> int:
        with Checkpointer(folder, Files(rank, full if rank else lambda _: None), **options) as guard:
            guard.save(1, state(1), {"position": 1})
            guard.wait()
            guard._barrier.wait("test: all have saved")
            broken[0] = True
            guard.save(2, state(2))
            with pytest.raises((NoSpace, ClusterError), match="no space left"):
                guard.restore(state(0))
            return guard.restore(state(0)).step  # type: ignore[union-attr]

    assert on_ranks(2, work) == [1, 1]
