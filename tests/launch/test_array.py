from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.launch import array


class Task:
    """A task whose result is a file, as submitit's are."""

    def __init__(self, folder: Path, number: int) -> None:
        self.job_id = f"7_{number}"
        self.paths = SimpleNamespace(folder=folder, result_pickle=folder / f"{number}_result.pkl")
        self.told: object = None

    def exception(self) -> None:
        return None

    def result(self) -> object:
        return self.told


class Queue:
    """A queue that says these states, the last one for ever."""

    def __init__(self, *states: str) -> None:
        self._states = list(states)

    def state(self) -> str:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def cancel(self) -> None:
        raise AssertionError


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Looks often, and gives up soon."""
    for name, seconds in (
        ("_PROGRESS_EVERY_S", 0.01),
        ("_PROGRESS_LONGEST_S", 0.01),
        ("_STATE_EVERY_S", 0.02),
        ("_UNREACHABLE_S", 0.3),
    ):
        monkeypatch.setattr(array, name, seconds)


@pytest.fixture
def tasks(tmp_path) -> Iterator[list[Task]]:
    """Two tasks, of which the first is done."""
    made = [Task(tmp_path, number) for number in range(2)]
    made[0].paths.result_pickle.touch()
    return made


def test_ended_without_a_word(tasks) -> None:
    """A task that Slurm no longer knows, and that leaves nothing, is an error that names it and how to go on."""
    with pytest.raises(ClusterError, match="7_1 ended without a word: NODE_FAIL") as caught:
        array._wait_for_tasks(tasks, Queue("RUNNING", "NODE_FAIL"), lambda _: None, lambda: 0)
    assert "run the same command again" in caught.value.hint


def test_a_result_that_shows_late(tasks) -> None:
    """On a shared file system a result may show after Slurm calls the task done; it counts, and so does a requeue."""

    class Late(Queue):
        def state(self) -> str:
            said = super().state()
            if len(self._states) == 1:
                tasks[1].paths.result_pickle.touch()
            return said

    shown: list[int] = []
    array._wait_for_tasks(tasks, Late("COMPLETED", "PENDING", "COMPLETED", "COMPLETED"), shown.append, lambda: 5)
    assert sum(shown) == 5


def test_what_a_task_met(tasks) -> None:
    """An error of ours is raised as it was on the node."""
    tasks[0].told = DataError("cut short", where="a.hdf5")
    with pytest.raises(DataError, match="cut short"):
        array._wait_for_tasks(tasks, Queue("RUNNING"), lambda _: None, lambda: 0)


def test_slurm_that_does_not_answer() -> None:
    """Where Slurm does not answer the tasks are taken to be at work."""

    def state_of(_: object) -> None:
        raise TryLater("no answer")

    assert array._SlurmTasks(SimpleNamespace(state_of=state_of), "7").state() == "RUNNING"
