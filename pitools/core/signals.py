"""Signals that end a process: defer Ctrl-C, and handle SIGTERM and SIGHUP as Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def defer_sigint() -> Iterator[None]:
    """Defer Ctrl-C to the end of a block, which has to be short.

    For `submit`, `add_done_callback` and `shutdown` of `concurrent.futures`: a KeyboardInterrupt in one of them can
    leave a lock held; the pool's own thread then waits for that lock for ever, and Python waits for that thread at its
    exit. `wait` and `as_completed` have the same fault, but are long; `SimpleQueue.get` does not have it.
    """
    # Another handler, or none, stays as it is; and Python interrupts only the main thread.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if received:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGHUP and SIGTERM in a block, as for Ctrl-C.

    A signal that has a handler or is ignored (nohup) stays as it is; so do all signals outside of the main thread.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # Python accepts handlers only there
    replaced = [n for n in (signal.SIGHUP, signal.SIGTERM) if is_main and signal.getsignal(n) == signal.SIG_DFL]
    try:
        for number in replaced:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
