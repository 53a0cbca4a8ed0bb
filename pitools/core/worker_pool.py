"""Worker processes that do one job after another: as many interpreters and HDF5 libraries as there are workers."""

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
_QUEUED_PER_WORKER = 4  # jobs given out for each worker: enough that none waits
_PR_SET_PDEATHSIG = 1
# A job is a shard or a range, 64 MiB: where nobody finishes one for so long, something does not answer.
_STALL_TIMEOUT_S = 300.0
# So long a worker may take to finish when all is over; what it leaves is as good as after kill -9.
_STOP_TIMEOUT_S = 20.0
_EXIT_GRACE_S = 1.0  # one that waits for a file system is not even killed before that answers

Job = TypeVar("Job")
Result = TypeVar("Result")
JobIn = TypeVar("JobIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class Worker(Protocol[JobIn, ResultOut]):
    """What a process does with its jobs."""

    def __call__(self, job: JobIn) -> ResultOut:
        """Do one. The result is pickled, and so is what it raises."""
        ...

    def close(self) -> None:
        """Let go of files; called where the worker is not a process of its own."""
        ...


def default_workers() -> int:
    """Two a core: each waits for the disk about as long as it works."""
    return min(MAX_WORKERS, 2 * len(os.sched_getaffinity(0)))


def run_jobs(make_worker: Callable[[], Worker[Job, Result]], jobs: Iterable[Job], *, workers: int) -> Iterator[Result]:
    """Results of all jobs, as they are done; begun in about their order. With one worker, done in this process.

    make_worker: makes a worker, in its process. The first exception stops all, is waited for, and raised. Raises
    ClusterError when a worker process dies.
    """
    if workers <= 1:
        with contextlib.closing(make_worker()) as worker:
            yield from map(worker, jobs)
        return
    # A fork costs no imports. Beside other threads, which may hold any lock at that moment, it is not safe.
    alone = sys.platform == "linux" and threading.active_count() == 1
    context = multiprocessing.get_context("fork" if alone else "spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_init_process, initargs=(make_worker, os.getpid())
    )
    try:
        yield from _collect(pool, jobs, workers * _QUEUED_PER_WORKER)
        pool.shutdown(wait=True)
    except BrokenProcessPool as error:
        hint = "was it out of memory? fewer --workers take less; what is done is kept, so run this again to go on"
        raise ClusterError("a worker process was killed, or ended without a word", hint=hint) from error
    finally:
        try:
            with defer_sigint():
                pool.shutdown(wait=False, cancel_futures=True)
        finally:
            _stop_processes(set(multiprocessing.active_children()) - others)


def _collect(pool: ProcessPoolExecutor, jobs: Iterable[Job], ahead: int) -> Iterator[Any]:
    done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    pending = 0
    for job in jobs:
        with defer_sigint():
            pool.submit(_do_job, job).add_done_callback(done.put)
        pending += 1
        if pending >= ahead:
            yield _next(done).result()
            pending -= 1
    for _ in range(pending):
        yield _next(done).result()


def _next(done: queue.SimpleQueue[Future[Any]]) -> Future[Any]:
    began = time.monotonic()
    while True:
        try:
            return done.get(timeout=_STALL_TIMEOUT_S)
        except queue.Empty:
            print(
                f"pit: no worker has finished anything for {(time.monotonic() - began) / 60:.0f} min: does a file "
                "system not answer? Ctrl-C keeps what is done",
                file=sys.stderr,
            )


def _stop_processes(processes: Collection[BaseProcess]) -> None:
    """Wait for workers to finish their jobs, but not for ever."""
    until = time.monotonic() + _STOP_TIMEOUT_S
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
    finally:  # also where Ctrl-C comes once more
        for process in filter(BaseProcess.is_alive, processes):
            process.kill()
            process.join(_EXIT_GRACE_S)


_make_worker: Callable[[], Worker[Any, Any]]
_worker: Worker[Any, Any] | None = None  # of this process, where it is a worker


def _init_process(start: Callable[[], Worker[Any, Any]], parent: int) -> None:
    global _make_worker
    # Ctrl-C reaches the whole group; the parent hears it, and stops us after the job at hand.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    _make_worker = start


def _do_job(job: Any) -> Any:
    global _worker
    if _worker is None:  # made with the first job, so that what goes wrong is told as a job's failure is
        _worker = _make_worker()
    return _worker(job)
