"""A pool of worker processes, each with its own interpreter and HDF5 library."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from pitools.core.errors import ClusterError
from pitools.core.signals import defer_sigint

MAX_WORKERS = 8  # each holds a shard, 64 MiB, and its encoded form
_QUEUED_PER_WORKER = 4  # tasks queued for each worker, so that none waits
_PR_SET_PDEATHSIG = 1
# A task is a shard or a range of 64 MiB: if none finishes for this long, a file system does not answer.
_STALL_TIMEOUT_S = 300.0
# How long workers may take to end; then they are killed.
_STOP_TIMEOUT_S = 20.0
_EXIT_GRACE_S = 1.0  # a worker that is blocked in the kernel dies later

Task = TypeVar("Task")
Result = TypeVar("Result")
TaskIn = TypeVar("TaskIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class Worker(Protocol[TaskIn, ResultOut]):
    """The function of a worker process, called with one task after another."""

    def __call__(self, task: TaskIn, /) -> ResultOut:
        """Do a task, and return its result. Result and exception are pickled."""
        ...

    def close(self) -> None:
        """Close files; called only if the worker runs in the caller's process."""
        ...


def default_workers() -> int:
    """Return two per core, at most MAX_WORKERS: a worker waits for the disk half of its time."""
    return min(MAX_WORKERS, 2 * len(os.sched_getaffinity(0)))


def run_tasks(
    tasks: Iterable[Task],
    make_worker: Callable[[], Worker[Task, Result]],
    *,
    workers: int,
    stop_timeout_s: float = _STOP_TIMEOUT_S,
) -> Iterator[Result]:
    """Yield the results of all tasks as they finish, started in about their order; one worker runs in this process.

    make_worker: creates a worker, in its process. The first exception stops all workers, and is raised after they have
    ended, or are killed after stop_timeout_s: 0 where a task writes nothing. Raises ClusterError when one dies.
    """
    if workers <= 1:
        with contextlib.closing(make_worker()) as worker:
            yield from map(worker, tasks)
        return
    # A fork needs no imports; with other threads, which may hold a lock at that moment, it is not safe.
    is_single_threaded = sys.platform == "linux" and threading.active_count() == 1
    context = multiprocessing.get_context("fork" if is_single_threaded else "spawn")
    other_processes = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_init_process, initargs=(make_worker, os.getpid())
    )
    try:
        yield from _collect(pool, tasks, workers * _QUEUED_PER_WORKER)
        pool.shutdown(wait=True)
    except BrokenProcessPool as error:
        hint = "if it ran out of memory, use fewer --workers; finished tasks are kept: run this again to continue"
        raise ClusterError("a worker process was killed", hint=hint) from error
    finally:
        try:
            with defer_sigint():
                pool.shutdown(wait=False, cancel_futures=True)
        finally:
            _stop_processes(set(multiprocessing.active_children()) - other_processes, stop_timeout_s)


def _collect(pool: ProcessPoolExecutor, tasks: Iterable[Task], max_pending: int) -> Iterator[Any]:
    done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    pending = 0
    for task in tasks:
        with defer_sigint():
            pool.submit(_do_task, task).add_done_callback(done.put)
        pending += 1
        if pending >= max_pending:
            yield _next_done(done).result()
            pending -= 1
    for _ in range(pending):
        yield _next_done(done).result()


def _next_done(done: queue.SimpleQueue[Future[Any]]) -> Future[Any]:
    began = time.monotonic()
    while True:
        try:
            return done.get(timeout=_STALL_TIMEOUT_S)
        except queue.Empty:
            print(
                f"pit: no task has finished for {(time.monotonic() - began) / 60:.0f} min; check that the file systems "
                "answer; Ctrl-C keeps finished tasks",
                file=sys.stderr,
            )


def _stop_processes(processes: Collection[BaseProcess], timeout_s: float) -> None:
    """Wait for workers to finish their tasks, then kill the others."""
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # also after a second Ctrl-C
        alive = list(filter(BaseProcess.is_alive, processes))
        for process in alive:
            process.kill()
        for process in alive:
            process.join(_EXIT_GRACE_S)


_make_worker: Callable[[], Worker[Any, Any]]
_worker: Worker[Any, Any] | None = None  # in a worker process


def _init_process(make_worker: Callable[[], Worker[Any, Any]], parent: int) -> None:
    global _make_worker
    # Ctrl-C reaches the whole group; the parent handles it, and ends the workers after their current task.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    _make_worker = make_worker


def _do_task(task: Any) -> Any:
    global _worker
    if _worker is None:  # created with the first task, so that its failure is raised as the task's
        _worker = _make_worker()
    return _worker(task)
