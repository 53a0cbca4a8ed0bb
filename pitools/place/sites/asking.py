"""Questions to many sites again and again, where one that is silent makes nobody wait twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pitools.core.errors import PitError, Unreachable
from pitools.core.files import os_error

T = TypeVar("T")


class Answer(NamedTuple, Generic[T]):
    """What a site said when it was asked at `asked_s`, Unix time; or the error that it gave."""

    asked_s: float
    said: T | PitError


class Asking(Generic[T]):
    """Asks sites at once. One that is slower than others by `patience_s` is left to its thread, and asked again once
    that has ended; its late answer counts in the round after."""

    patience_s = 2.0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: dict[str, Answer[T]] = {}
        self._asked: dict[str, float] = {}

    def ask(self, questions: Mapping[str, Callable[[], T]], timeout_s: float) -> dict[str, Answer[T]]:
        """The answer to each question, by site; Unreachable for one that is still silent."""
        new = [name for name in questions if name not in self._asked and name not in self._answers]
        for name in new:
            self._asked[name] = time.time()
            # Daemons: a file system that hangs must not keep the process from ending.
            threading.Thread(target=self._run, args=(name, questions[name]), name=f"ask {name}", daemon=True).start()
        with self._changed:
            # A site that was silent before gets no more time than the others take.
            deadline = time.monotonic() + timeout_s
            while waiting := [name for name in new if name not in self._answers]:
                some = min(timeout_s, self.patience_s) if len(waiting) < len(new) else deadline - time.monotonic()
                if some <= 0 or not self._changed.wait(some):
                    break
            return {name: self._answers.pop(name) if name in self._answers else self._late(name) for name in questions}

    def _run(self, name: str, question: Callable[[], T]) -> None:
        said: T | PitError
        try:
            said = question()
        except PitError as error:
            said = error
        except OSError as error:
            said = os_error(error, Path(str(error.filename or name)))
        with self._changed:
            self._answers[name] = Answer(self._asked.pop(name), said)
            self._changed.notify_all()

    def _late(self, name: str) -> Answer[T]:
        silent_s = time.time() - self._asked[name]
        error = Unreachable(f"no answer for {silent_s:.0f} s", where=name, hint="it is asked again and again")
        return Answer(self._asked[name], error)
