"""Several questions asked at once, with one deadline for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pitools.core.errors import PitError
from pitools.place.clusters.parallel import GRACE_S, Asking

__all__ = ["GRACE_S", "gather"]

T = TypeVar("T")


def gather(questions: Mapping[str, Callable[[float], T]], timeout_s: float) -> dict[str, T | PitError]:
    """The answer to each question, or the error that it raised, in the order of the questions: one round of `Asking`.

    One that is silent at the deadline is left behind, and its answer is Unreachable.
    """
    asking: Asking[T] = Asking("try again later, or with a longer --timeout")
    asking.patience_s = timeout_s  # nobody is asked again: whoever is slower than others has time all the same
    return {name: answer.said for name, answer in asking.ask(questions, timeout_s).items()}
