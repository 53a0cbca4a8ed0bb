"""The ends of a process that leave it time to tidy up, all met alike."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
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
