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

# A file system that gives nothing to any reader for this long is not slow but gone.
STALL_TIMEOUT_S = 300.0
_POLL_S = 0.1
_STOP_TIMEOUT_S = 10.0
_EXIT_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NUMBER, _LENGTH = struct.Struct("=I"), struct.Struct("=Q")


class Worker(Protocol[TaskIn, ResultOut]):
    """What one thread does with one task after another."""

    def __call__(self, task: TaskIn) -> ResultOut:
        """Do it. The result is pickled, and so is the exception that ends everything."""
        ...

    def close(self) -> None:
        """Let go of descriptors and buffers."""
        ...


def default_readers() -> int:
    """Two per core this process may use, 2 to 16: a reader waits for its file system about as long as it works."""
    return max(2, min(16, 2 * len(os.sched_getaffinity(0))))


def run_tasks(
    tasks: Sequence[Task],
    make_worker: Callable[[WorkerSlot], Worker[Task, Result]],
    on_result: Callable[[Result], None],
    *,
    readers: int,
    advance: Callable[[int], None],
) -> None:
    """Do every task once, in about this order, with `readers` threads over the cores; `on_result` and `advance` are
    called here, in the caller's process, and `advance` also with 0 as time passes.

    `make_worker` makes one thread's worker after the fork. The first exception, also one that a signal raises in the
    caller, stops all workers, is waited for, and raised. Raises Unreachable when nothing moves for minutes.
    """
    if not tasks:
        return
    readers = max(1, min(readers, len(tasks)))
    processes = min(readers, len(os.sched_getaffinity(0)))
    threads = -(-readers // processes)
    board = SharedProgress(processes * threads)
    crew = _Processes(tasks, make_worker, board, threads)
    answered = 0

    def answer(value: Result) -> None:
        nonlocal answered
        answered += 1
        on_result(value)

    try:
        for _ in range(processes):
            crew.fork()
        crew.feed_and_collect(answer, advance)
        if answered < len(tasks):
            left = f"{len(tasks) - answered} of {len(tasks)} pieces of work were not done"
            raise ClusterError(left, hint="run this again")
    except BaseException:
        board.stop()
        raise
    finally:
        crew.stop()


class _Processes(Generic[Task, Result]):
    """The forked processes, and the pipes between them and their parent."""

    def __init__(
        self,
        tasks: Sequence[Task],
        start: Callable[[WorkerSlot], Worker[Task, Result]],
        board: SharedProgress,
        threads: int,
    ) -> None:
        self._tasks, self._start, self._board, self._threads = tasks, start, board, threads
        self._take, self._feed = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._feed, False)
        self._pids: dict[int, int] = {}  # by the descriptor its results come through
        self._received: dict[int, bytearray] = {}

    def fork(self) -> None:
        """Start one process."""
        parent, number = os.getpid(), len(self._pids)
        results, send = os.pipe2(os.O_CLOEXEC)
        # The caller's signal handlers may raise; in the child that would unwind the caller's own clean-up.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                _worker_main(
                    self._tasks,
                    self._start,
                    self._take,
                    send,
                    [WorkerSlot(self._board, number * self._threads + thread) for thread in range(self._threads)],
                    parent=parent,
                    strange=(self._feed, results, *self._pids),
                )
            os.close(send)
            self._pids[results], self._received[results] = pid, bytearray()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def feed_and_collect(self, result: Callable[[Result], None], advance: Callable[[int], None]) -> None:
        """Feed tasks and take results until all processes are done. Raises what one of them raised."""
        os.close(self._take)
        self._take = -1
        numbers = memoryview(b"".join(_NUMBER.pack(number) for number in range(len(self._tasks))))
        told, signs, moving = 0, 0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            for descriptor in self._pids:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._feed, selectors.EVENT_WRITE)
            left = set(self._pids)
            while left:
                for key, _ in selector.select(_POLL_S):
                    if key.fd == self._feed:
                        numbers = self._fill(numbers)
                        if not numbers:
                            selector.unregister(self._feed)
                            self._close_feed()
                    elif not self._receive(key.fd, result):
                        selector.unregister(key.fd)
                        left.discard(key.fd)
                        self._reap(key.fd)
                total, now = self._board.total_bytes, time.monotonic()
                if total != told or self._board.heartbeats != signs:
                    moving, signs = now, self._board.heartbeats
                elif now - moving > STALL_TIMEOUT_S:
                    raise Unreachable(
                        f"no byte has moved for {STALL_TIMEOUT_S:.0f} s", hint="is the source still there?"
                    )
                advance(total - told)
                told = total

    def stop(self) -> None:
        """Wait for the processes; those that hang in a dead file system are killed."""
        self._close_feed()
        if self._take >= 0:
            os.close(self._take)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for descriptor, pid in self._pids.items():
            os.close(descriptor)
            if pid and not _wait_exit(pid, deadline):
                os.kill(pid, signal.SIGKILL)
                _wait_exit(pid, time.monotonic() + _EXIT_GRACE_S)  # longer it stays only in uninterruptible sleep
        self._pids.clear()

    def _close_feed(self) -> None:
        if self._feed >= 0:
            os.close(self._feed)
            self._feed = -1

    def _fill(self, numbers: memoryview) -> memoryview:
        with contextlib.suppress(BlockingIOError):
            # At most PIPE_BUF, so that a number is never cut in two.
            numbers = numbers[os.write(self._feed, numbers[:4096]) :]
        return numbers

    def _receive(self, descriptor: int, result: Callable[[Result], None]) -> bool:
        """Take what has come; False at the end."""
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
            what = (
                f"a worker process was ended by signal {-code}" if code < 0 else f"a worker process ended with {code}"
            )
            raise ClusterError(what, hint="was it out of memory? fewer --readers take less")


def _wait_exit(pid: int, deadline: float) -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] != pid:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
    return True


def _worker_main(
    tasks: Sequence[Task],
    start: Callable[[WorkerSlot], Worker[Task, Result]],
    take: int,
    send: int,
    seats: list[WorkerSlot],
    *,
    parent: int,
    strange: tuple[int, ...],
) -> NoReturn:
    """A forked process's whole life. Nothing of the parent's is unwound, flushed or closed here."""
    try:
        # Ctrl-C reaches the whole group; the parent hears it and tells us by the board.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        for descriptor in strange:
            os.close(descriptor)
        os.umask(0o022)  # what a copy's modes are is for its root to say
        gc.disable()  # short-lived, and collecting would copy the parent's memory page by page
        lock = threading.Lock()
        others = [
            threading.Thread(target=_thread_main, args=(tasks, start, take, send, seat, lock)) for seat in seats[1:]
        ]
        for thread in others:
            thread.start()
        _thread_main(tasks, start, take, send, seats[0], lock)
        for thread in others:
            thread.join()
        os._exit(0)
    finally:
        os._exit(70)


def _thread_main(
    tasks: Sequence[Task],
    start: Callable[[WorkerSlot], Worker[Task, Result]],
    take: int,
    send: int,
    seat: WorkerSlot,
    lock: threading.Lock,
) -> None:
    try:
        worker = start(seat)
        try:
            while number := os.read(take, _NUMBER.size):
                _send(send, lock, (None, worker(tasks[_NUMBER.unpack(number)[0]])))
        finally:
            worker.close()
    except WorkerStopped:
        return
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
        _send(send, lock, (_picklable_error(error), None))


def _picklable_error(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an error's own code runs here
        return ClusterError(f"{type(error).__name__}: {error}")
    return error


def _send(send: int, lock: threading.Lock, message: Any) -> None:
    payload = pickle.dumps(message)
    frame = memoryview(_LENGTH.pack(len(payload)) + payload)
    with lock:
        try:
            while frame:
                frame = frame[os.write(send, frame) :]
        except BrokenPipeError:
            os._exit(0)  # the parent has stopped listening: it knows why
