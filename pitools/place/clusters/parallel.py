"""Query many sites in parallel, once (`query_all`) or repeatedly; an unreachable site does not delay the others."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.core.fs import from_os_error

T = TypeVar("T")

GRACE_S = 0.5  # a query times out at its deadline; its error may arrive this much later


class SiteAnswer(NamedTuple, Generic[T]):
    """A site's answer, or its error. queried_s: start of the query, Unix time."""

    queried_s: float
    value: T | PitError


def site_error(site: str, error: Exception) -> PitError:
    """Return an exception as a PitError of a site; an unexpected one names its file and line."""
    if isinstance(error, PitError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error, Path(str(error.filename or site)))
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    return ClusterError(f"unexpected error: {message}", where=site, hint="please report it with the site's output")


class SitePoller(Generic[T]):
    """Queries sites in parallel, with a thread for each. hint: for the error of a site that does not answer.

    A query left running is not started again: the next call of `query` returns its late answer, which is lost if none
    follows.
    """

    straggler_s = 2.0

    def __init__(self, hint: str = "the query is repeated") -> None:
        self._hint = hint
        self._changed = threading.Condition()
        self._answers: dict[str, SiteAnswer[T]] = {}
        self._running: dict[str, tuple[float, float]] = {}  # site → Unix time of its start, deadline on time.monotonic

    def query(
        self, queries: Mapping[str, Callable[[float], T]], timeout_s: float, impatient: Collection[str] = ()
    ) -> dict[str, SiteAnswer[T]]:
        """Return the answer of each query by site, in their order; Unreachable for a site silent until its deadline.

        Each query gets the remaining seconds as its argument. An error is the answer of its own site only. The sites in
        `impatient` get only `straggler_s` more than the others: one that is left out of the result is queried still.
        """
        deadline = time.monotonic() + timeout_s
        new = [name for name in queries if name not in self._running and name not in self._answers]
        for name in new:
            self._running[name] = (time.time(), deadline)
            # Daemon threads: a file system that hangs must not block the exit of the process.
            threading.Thread(
                target=self._run, args=(name, queries[name], deadline), name=f"query {name}", daemon=True
            ).start()
        with self._changed:
            # After each answer the next has straggler_s; queries of earlier rounds that still run have none.
            while unanswered := {name for name in new if name not in self._answers}:
                wait_s = deadline + GRACE_S - time.monotonic()
                if len(unanswered) < len(new) and unanswered <= set(impatient):
                    wait_s = min(wait_s, self.straggler_s)
                if wait_s <= 0 or not self._changed.wait(wait_s):
                    break
            answers = {name: self._take_answer(name) for name in queries}
        return {name: answer for name, answer in answers.items() if answer}

    def _run(self, name: str, query: Callable[[float], T], deadline: float) -> None:
        answer: T | PitError
        try:
            answer = query(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - an answer can be malformed in any way
            answer = site_error(name, error)
        with self._changed:
            self._answers[name] = SiteAnswer(self._running.pop(name)[0], answer)
            self._changed.notify_all()

    def _take_answer(self, name: str) -> SiteAnswer[T] | None:
        """Return a site's answer, or its time-out; None while its query runs."""
        if name in self._answers:
            return self._answers.pop(name)
        started_s, deadline = self._running[name]
        if time.monotonic() < deadline:
            return None
        message = f"no answer within {time.time() - started_s:.1f} s"
        return SiteAnswer(started_s, Unreachable(message, where=name, hint=self._hint))


def query_all(queries: Mapping[str, Callable[[float], T]], timeout_s: float) -> dict[str, T | PitError]:
    """Run one round of `SitePoller`: return the answer of each query, or its error, in the order of the queries.

    A site without an answer at the deadline is Unreachable.
    """
    poller: SitePoller[T] = SitePoller("try again later, or with a longer --timeout")
    return {name: answer.value for name, answer in poller.query(queries, timeout_s).items()}
