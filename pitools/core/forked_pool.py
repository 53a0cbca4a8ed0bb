"""Forked worker processes, each with a few threads, fed by a pipe: one interpreter lock per process, not per node.

The parent writes task numbers into one pipe that all workers read, and each process sends its results back through
a pipe of its own. Bytes moved are counted in shared memory, so that progress costs no message. Workers die with
their parent, and stop at the next block when one of them fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import selectors
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from pitools.core.errors import ClusterError, Unreachable
from pitools.core.shared_progress import SharedProgress, WorkerSlot, WorkerStopped

Task = TypeVar("Task")
Result = TypeVar("Result")
TaskIn = TypeVar("TaskIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)

# Time-out: no reader has received a byte.
STALL_TIMEOUT_S = 300.0
_POLL_S = 0.1
_STOP_TIMEOUT_S = 10.0
_EXIT_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NUMBER, _LENGTH = struct.Struct("=I"), struct.Struct("=Q")


class Worker(Protocol[TaskIn, ResultOut]):
    """The function of one thread, called with one task after another."""

    def __call__(self, task: TaskIn) -> ResultOut:
        """Do a task, and return its result. Result and exception are pickled; an exception ends the pool."""
        ...

    def close(self) -> None:
        """Close descriptors, and free buffers."""
        ...


def default_readers() -> int:
    """Return two per core of this process's affinity, 2 to 16: a reader waits for its file system half of its time."""
    return max(2, min(16, 2 * len(os.sched_getaffinity(0))))


def run_tasks(
    tasks: Sequence[Task],
    make_worker: Callable[[WorkerSlot], Worker[Task, Result]],
    on_result: Callable[[Result], None],
    *,
    readers: int,
    advance: Callable[[int], None],
) -> None:
    """Do every task once, in about this order, with `readers` threads in forked processes, one process per core.

    make_worker: creates a thread's worker, after the fork. on_result, advance: called in the caller's process, advance
    with bytes moved since its last call, also with 0, at least every 0.1 s. The first exception of a worker, or of a
    signal handler in the caller, stops all workers; it is raised after they have ended. Raises Unreachable when no byte
    moves for STALL_TIMEOUT_S, ClusterError when a process dies.
    """
    if not tasks:
        return
    readers = max(1, min(readers, len(tasks)))
    processes = min(readers, len(os.sched_getaffinity(0)))
    threads = -(-readers // processes)
    progress = SharedProgress(processes * threads)
    pool = _Processes(tasks, make_worker, progress, threads)
    result_count = 0

    def count_result(value: Result) -> None:
        nonlocal result_count
        result_count += 1
        on_result(value)

    try:
        for _ in range(processes):
            pool.fork()
        pool.feed_and_collect(count_result, advance)
        if result_count < len(tasks):
            unfinished = f"{len(tasks) - result_count} of {len(tasks)} pieces of work were not done"
            raise ClusterError(unfinished, hint="run this again")
    except BaseException:
        progress.stop()
        raise
    finally:
        pool.stop()


class _Processes(Generic[Task, Result]):
    """The forked processes, and the pipes between them and their parent."""

    def __init__(
        self,
        tasks: Sequence[Task],
        make_worker: Callable[[WorkerSlot], Worker[Task, Result]],
        progress: SharedProgress,
        threads: int,
    ) -> None:
        self._tasks, self._make_worker, self._progress, self._threads = tasks, make_worker, progress, threads
        self._task_pipe, self._task_pipe_in = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._task_pipe_in, False)
        self._pids: dict[int, int] = {}  # by the descriptor of its result pipe
        self._received: dict[int, bytearray] = {}

    def fork(self) -> None:
        """Start one process."""
        parent, number = os.getpid(), len(self._pids)
        results, send = os.pipe2(os.O_CLOEXEC)
        # The caller's signal handlers may raise; in the child that would unwind the caller's own clean-up.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                _worker_main(
                    self._tasks,
                    self._make_worker,
                    self._task_pipe,
                    send,
                    [WorkerSlot(self._progress, number * self._threads + thread) for thread in range(self._threads)],
                    parent=parent,
                    inherited=(self._task_pipe_in, results, *self._pids),
                )
            os.close(send)
            self._pids[results], self._received[results] = pid, bytearray()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def feed_and_collect(self, result: Callable[[Result], None], advance: Callable[[int], None]) -> None:
        """Feed tasks and collect results until all processes have ended. Raises the first exception of a worker."""
        os.close(self._task_pipe)
        self._task_pipe = -1
        numbers = memoryview(b"".join(_NUMBER.pack(number) for number in range(len(self._tasks))))
        reported_bytes, heartbeats, last_change = 0, 0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            for descriptor in self._pids:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._task_pipe_in, selectors.EVENT_WRITE)
            open_pipes = set(self._pids)
            while open_pipes:
                for key, _ in selector.select(_POLL_S):
                    if key.fd == self._task_pipe_in:
                        numbers = self._fill(numbers)
                        if not numbers:
                            selector.unregister(self._task_pipe_in)
                            self._close_feed()
                    elif not self._receive(key.fd, result):
                        selector.unregister(key.fd)
                        open_pipes.discard(key.fd)
                        self._reap(key.fd)
                total, now = self._progress.total_bytes, time.monotonic()
                if total != reported_bytes or self._progress.heartbeats != heartbeats:
                    last_change, heartbeats = now, self._progress.heartbeats
                elif now - last_change > STALL_TIMEOUT_S:
                    raise Unreachable(
                        f"no byte has moved for {STALL_TIMEOUT_S:.0f} s", hint="check that the source answers: ls"
                    )
                advance(total - reported_bytes)
                reported_bytes = total

    def stop(self) -> None:
        """Wait for the processes; those that hang in a dead file system are killed."""
        self._close_feed()
        if self._task_pipe >= 0:
            os.close(self._task_pipe)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for descriptor, pid in self._pids.items():
            os.close(descriptor)
            if pid and not _wait_exit(pid, deadline):
                os.kill(pid, signal.SIGKILL)
                _wait_exit(pid, time.monotonic() + _EXIT_GRACE_S)  # survives this only in uninterruptible sleep
        self._pids.clear()

    def _close_feed(self) -> None:
        if self._task_pipe_in >= 0:
            os.close(self._task_pipe_in)
            self._task_pipe_in = -1

    def _fill(self, numbers: memoryview) -> memoryview:
        """Write task numbers into the pipe; return those that are left, none when no worker reads it any more."""
        try:
            # At most PIPE_BUF, so that a number is never cut in two.
            return numbers[os.write(self._task_pipe_in, numbers[:4096]) :]
        except BlockingIOError:
            return numbers
        except BrokenPipeError:
            return numbers[:0]  # all workers have ended: their result pipes and exit statuses have the reason

    def _receive(self, descriptor: int, result: Callable[[Result], None]) -> bool:
        """Read available results; return False at the end of the pipe."""
        received = self._received[descriptor]
        block = os.read(descriptor, 1 << 16)
        received += block
        while len(received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < end:
                break
            error, value = pickle.loads(bytes(received[_LENGTH.size : end]))  # noqa: S301 - from our own fork
            del received[:end]
            if error is not None:
                raise error
            result(value)
        return bool(block)

    def _reap(self, descriptor: int) -> None:
        _, status = os.waitpid(self._pids[descriptor], 0)
        self._pids[descriptor] = 0
        if status:
            code = os.waitstatus_to_exitcode(status)
            problem = (
                f"a worker process was ended by signal {-code}" if code < 0 else f"a worker process ended with {code}"
            )
            raise ClusterError(
                problem, hint="check for an out-of-memory kill: dmesg | tail; fewer --readers use less memory"
            )


def _wait_exit(pid: int, deadline: float) -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] != pid:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
    return True


def _worker_main(
    tasks: Sequence[Task],
    make_worker: Callable[[WorkerSlot], Worker[Task, Result]],
    task_pipe: int,
    result_pipe: int,
    slots: list[WorkerSlot],
    *,
    parent: int,
    inherited: tuple[int, ...],
) -> NoReturn:
    """Run a forked process to its end, by os._exit: the parent's clean-up and buffers must not run here."""
    try:
        # Ctrl-C reaches the whole group; the parent handles it, and stops the workers by the shared memory.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        for descriptor in inherited:
            os.close(descriptor)
        os.umask(0o022)  # the staging root sets the modes of a copy
        gc.disable()  # collecting would copy the parent's memory, page by page
        lock = threading.Lock()
        threads = [
            threading.Thread(target=_thread_main, args=(tasks, make_worker, task_pipe, result_pipe, slot, lock))
            for slot in slots[1:]
        ]
        for thread in threads:
            thread.start()
        _thread_main(tasks, make_worker, task_pipe, result_pipe, slots[0], lock)
        for thread in threads:
            thread.join()
        os._exit(0)
    finally:
        os._exit(70)


def _thread_main(
    tasks: Sequence[Task],
    make_worker: Callable[[WorkerSlot], Worker[Task, Result]],
    task_pipe: int,
    result_pipe: int,
    slot: WorkerSlot,
    lock: threading.Lock,
) -> None:
    try:
        worker = make_worker(slot)
        try:
            while number := os.read(task_pipe, _NUMBER.size):
                _send(result_pipe, lock, (None, worker(tasks[_NUMBER.unpack(number)[0]])))
        finally:
            worker.close()
    except WorkerStopped:
        return
    except BaseException as error:  # noqa: BLE001 - raised by the parent
        _send(result_pipe, lock, (_picklable_error(error), None))


def _picklable_error(error: BaseException) -> BaseException:
    """Return the error, or a ClusterError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an error's own code runs here
        return ClusterError(f"{type(error).__name__}: {error}")
    return error


def _send(result_pipe: int, lock: threading.Lock, message: Any) -> None:
    payload = pickle.dumps(message)
    frame = memoryview(_LENGTH.pack(len(payload)) + payload)
    with lock:
        try:
            while frame:
                frame = frame[os.write(result_pipe, frame) :]
        except BrokenPipeError:
            os._exit(0)  # the parent has closed the pipe: it is stopping
