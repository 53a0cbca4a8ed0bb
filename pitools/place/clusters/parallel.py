"""Query many sites in parallel, once (`query_all`) or repeatedly; an unreachable site does not delay the others."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.core.fs import from_os_error

T = TypeVar("T")

GRACE_S = 0.5  # whoever asks ends by itself at the deadline, and is then given so long to say so


class SiteAnswer(NamedTuple, Generic[T]):
    """A site's answer, or its error. queried_s: when it was queried, Unix time."""

    queried_s: float
    value: T | PitError


def site_error(site: str, error: Exception) -> PitError:
    """Return an exception as a PitError of a site; an unexpected one names its file and line."""
    if isinstance(error, PitError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error, Path(str(error.filename or site)))
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    return ClusterError(f"unexpected error: {what}", where=site, hint="please report it with the site's output")


class SitePoller(Generic[T]):
    """Asks sites at once, each in a thread of its own. One that is slower than others by `patience_s` is left to its
    thread, and asked again once that has ended; its late answer counts in the round after. hint: for silent ones."""

    straggler_s = 2.0

    def __init__(self, hint: str = "it is asked again and again") -> None:
        self._hint = hint
        self._changed = threading.Condition()
        self._answers: dict[str, SiteAnswer[T]] = {}
        self._asked: dict[str, float] = {}

    def query(self, questions: Mapping[str, Callable[[float], T]], timeout_s: float) -> dict[str, SiteAnswer[T]]:
        """The answer to each question, by site and in their order; Unreachable for one that is still silent.

        Each is called with the seconds that it has. What goes wrong with one is its answer, and nobody else's concern.
        """
        deadline = time.monotonic() + timeout_s
        new = [name for name in questions if name not in self._asked and name not in self._answers]
        for name in new:
            self._asked[name] = time.time()
            # Daemons: a file system that hangs must not keep the process from ending.
            threading.Thread(
                target=self._run, args=(name, questions[name], deadline), name=f"ask {name}", daemon=True
            ).start()
        with self._changed:
            # A site that was silent before gets no more time than the others take.
            while waiting := [name for name in new if name not in self._answers]:
                some = deadline + GRACE_S - time.monotonic()
                some = min(some, self.straggler_s) if len(waiting) < len(new) else some
                if some <= 0 or not self._changed.wait(some):
                    break
            return {
                name: self._answers.pop(name) if name in self._answers else self._timeout_answer(name)
                for name in questions
            }

    def _run(self, name: str, question: Callable[[float], T], deadline: float) -> None:
        said: T | PitError
        try:
            said = question(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - an answer can be wrong in ways that nobody thought of
            said = site_error(name, error)
        with self._changed:
            self._answers[name] = SiteAnswer(self._asked.pop(name), said)
            self._changed.notify_all()

    def _timeout_answer(self, name: str) -> SiteAnswer[T]:
        silent_s = time.time() - self._asked[name]
        error = Unreachable(f"no answer within {silent_s:.1f} s", where=name, hint=self._hint)
        return SiteAnswer(self._asked[name], error)


def query_all(questions: Mapping[str, Callable[[float], T]], timeout_s: float) -> dict[str, T | PitError]:
    """The answer to each question, or the error that it raised, in the order of the questions: one round of
    `SitePoller`.

    One that is silent at the deadline is left behind, and its answer is Unreachable.
    """
    asking: SitePoller[T] = SitePoller("try again later, or with a longer --timeout")
    asking.straggler_s = timeout_s  # nobody is asked again: whoever is slower than others has time all the same
    return {name: answer.value for name, answer in asking.query(questions, timeout_s).items()}
