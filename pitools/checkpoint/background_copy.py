"""The thread that drains: the newest checkpoint first, again and again until the shared folder takes it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from pitools.checkpoint import tier_copy
from pitools.checkpoint.store import layout, lookup, retention
from pitools.core.errors import DataError, PitError, Unreachable

_NONE = -1
_END_S = 30.0
_AGAIN_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class Drainer:
    """Copies checkpoints of a node's own disk to the shared folder, in the background.

    local, folder: two folders of checkpoints, both claimed by this run. keep_local, keep_last, keep_every: what stays
    in each. Where saves come faster than copies, a newer one takes the place of one that still waits. Nothing local is
    removed before it, or a newer one, stands in the shared folder.
    """

    def __init__(
        self,
        local: Path,
        folder: Path,
        *,
        keep_local: int = 2,
        keep_last: int = retention.KEEP_LAST,
        keep_every: int = 0,
    ) -> None:
        self._local, self._folder = local, folder
        self._keep_local, self._keep = keep_local, (keep_last, keep_every)
        self.error: PitError | None = None
        self._change = threading.Condition()
        self._ended = False
        # What an earlier process saved and did not live to copy.
        here, there = lookup.whole(local)[:1], lookup.whole(folder)[:1]
        self._waiting, self._running = here[0] if here > there else _NONE, _NONE
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self._thread.start()

    def submit(self, step: int) -> None:
        """Copy this checkpoint next."""
        with self._change:
            self._waiting = max(step, self._waiting)
            self._change.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when all that was submitted stands in the shared folder. Raises Unreachable, or what hindered it."""
        with self._change:
            if not self._change.wait_for(lambda: self._waiting == self._running == _NONE, timeout_s):
                raise self.error or Unreachable(f"not copied in {timeout_s:g} s", where=str(self._folder))
            if self.error:
                raise self.error

    def close(self) -> None:
        """End the thread; an unfinished copy is gone on with by the next process.

        One that a file system holds is not waited for long: as a daemon it ends with this process.
        """
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._thread.join(_END_S)

    def _run(self) -> None:
        failed = 0
        while True:
            with self._change:
                self._running = _NONE
                self._change.notify_all()
                self._change.wait_for(lambda: self._waiting != _NONE or self._ended)
                if self._ended:
                    return
                self._running, self._waiting = self._waiting, _NONE
                step = self._running
            try:
                self._copy(step)
                self.error, failed = None, 0
            except tier_copy.Interrupted:
                continue
            except DataError as error:
                self.error = error  # the local copy is damaged: another try reads the same
            except PitError as error:
                self.error = error
                self._later(step, _AGAIN_S[min(failed, len(_AGAIN_S) - 1)])
                failed += 1

    def _copy(self, step: int) -> None:
        tier_copy.drain(layout.step_path(self._local, step), self._folder, threads=2, stopped=lambda: self._ended)
        retention.tidy(self._folder, *self._keep)
        with self._change:
            waiting = self._waiting
        retention.tidy(self._local, self._keep_local, keep={waiting, step} | self._newer(step))

    def _newer(self, step: int) -> set[int]:
        return {other for other in lookup.whole(self._local) if other > step}

    def _later(self, step: int, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        with self._change:
            self._waiting = max(step, self._waiting)
            self._change.wait_for(lambda: self._ended, until - time.monotonic())
