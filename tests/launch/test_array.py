from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.launch import array


class Task:
    """A task with a result file, like a job of submitit."""

    def __init__(self, folder: Path, number: int) -> None:
        self.job_id = f"7_{number}"
        self.paths = SimpleNamespace(folder=folder, result_pickle=folder / f"{number}_result.pkl")
        self.output: object = None

    def exception(self) -> None:
        return None

    def result(self) -> object:
        return self.output


class Queue:
    """A queue that returns these states in order, and then the last one again and again."""

    def __init__(self, *states: str) -> None:
        self._states = list(states)

    def state(self) -> str:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def cancel(self) -> None:
        raise AssertionError


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Poll often, with short time-outs."""
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
    pair = [Task(tmp_path, number) for number in range(2)]
    pair[0].paths.result_pickle.touch()
    return pair


def test_task_that_ended_without_a_result(tasks) -> None:
    """A task that left no result and has ended in Slurm is an error with its id and a command to repeat."""
    with pytest.raises(ClusterError, match=r"7_1 .*NODE_FAIL") as caught:
        array._wait_for_tasks(tasks, Queue("RUNNING", "NODE_FAIL"), lambda _: None, lambda: 0)
    assert "run the same command again" in caught.value.hint


def test_result_that_appears_late(tasks) -> None:
    """A result that a shared file system shows after the task's end counts, and so does a requeued task."""

    class Late(Queue):
        def state(self) -> str:
            state = super().state()
            if len(self._states) == 1:
                tasks[1].paths.result_pickle.touch()
            return state

    shown: list[int] = []
    array._wait_for_tasks(tasks, Late("COMPLETED", "PENDING", "COMPLETED", "COMPLETED"), shown.append, lambda: 5)
    assert sum(shown) == 5


def test_error_of_a_task_is_raised(tasks) -> None:
    """A PitError of a task is raised by the wait."""
    tasks[0].output = DataError("cut short", where="a.hdf5")
    with pytest.raises(DataError, match="cut short"):
        array._wait_for_tasks(tasks, Queue("RUNNING"), lambda _: None, lambda: 0)


def test_slurm_that_does_not_answer() -> None:
    """Without an answer of Slurm the tasks count as running."""

    def state_of(_: object) -> None:
        raise TryLater("no answer")

    assert array._SlurmTasks(SimpleNamespace(state_of=state_of), "7").state() == "RUNNING"
