"""Several questions asked at once, with one deadline for all."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pitools.core.errors import ClusterError, PitError, Unreachable
from pitools.core.files import os_error

T = TypeVar("T")

GRACE_S = 0.5  # whoever asks ends by itself at the deadline, and is then given so long to say so


def gather(questions: Mapping[str, Callable[[float], T]], timeout_s: float) -> dict[str, T | PitError]:
    """The answer to each question, or the error that it raised, in the order of the questions.

    Each is called in a thread of its own with the seconds that it has. One that is silent at the deadline is left
    behind, and its answer is Unreachable. What goes wrong with one is its answer, and nobody else's concern.
    """
    answered: queue.SimpleQueue[tuple[str, T | PitError]] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout_s

    def ask(name: str, question: Callable[[float], T]) -> None:
        try:
            answered.put((name, question(max(0.0, deadline - time.monotonic()))))
        except PitError as error:
            answered.put((name, error))
        except OSError as error:
            answered.put((name, os_error(error, Path(str(error.filename or name)))))
        except Exception as error:  # noqa: BLE001 - an answer can be wrong in ways that nobody thought of
            what = f"what it said could not be understood: {type(error).__name__}: {error}"
            answered.put((name, ClusterError(what, where=name, hint="please report this, with what the site printed")))

    # Daemons: a file system that hangs must not keep the process from ending.
    for name, question in questions.items():
        threading.Thread(target=ask, args=(name, question), name=f"ask {name}", daemon=True).start()
    found: dict[str, T | PitError] = {}
    while len(found) < len(questions):
        try:
            name, answer = answered.get(timeout=max(0.001, deadline + GRACE_S - time.monotonic()))
        except queue.Empty:
            break
        found[name] = answer
    late = Unreachable(f"no answer within {timeout_s:g} s", hint="try again later, or with a longer --timeout")
    return {name: found.get(name, late) for name in questions}
