"""Signals that end a process: Ctrl-C kept from where it would do harm, and the others handled as Ctrl-C is."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def defer_sigint() -> Iterator[None]:
    """In this block Ctrl-C is not heard before the block's end; for what is short.

    To be put around `submit`, `add_done_callback` and `shutdown` of `concurrent.futures`: KeyboardInterrupt in one of
    them can leave a lock taken. The pool's own thread then waits for that lock for ever, and Python, at its exit, for
    that thread. `wait` and `as_completed` are as bad, and long; `SimpleQueue.get` is not.
    """
    # What is ignored, or another's to handle, stays so; and only the main thread is ever interrupted.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if heard:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """A lost terminal (SIGHUP) and a request to end (SIGTERM) raise KeyboardInterrupt in here, as Ctrl-C does.

    Those that somebody else handles or ignores (nohup) stay as they are; so do all outside of the main thread.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # elsewhere Python takes no handlers
    found = [n for n in (signal.SIGHUP, signal.SIGTERM) if is_main and signal.getsignal(n) == signal.SIG_DFL]
    try:
        for number in found:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in found:
            signal.signal(number, signal.SIG_DFL)
