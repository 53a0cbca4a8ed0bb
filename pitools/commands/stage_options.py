"""What the commands of `pit stage` share: places, options, and how they end when they are told to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def place(text: str) -> Path:
    """A path in which `{node}`, `{user}` and `{job}` are filled in, so that one srun line serves every node."""
    if "{" in text:
        from pitools.site.template import fill

        text = fill(text)
    return Path(text).absolute()


def to_option(*, required: bool) -> Callable[[F], F]:
    """`--to ROOT`."""
    return click.option(
        "--to", "root", required=required, metavar="ROOT", type=place,
        help="The node's staging folder; {node}, {user}, {job} are filled in.",
    )  # fmt: skip


def readers_option(function: F) -> F:
    """`--readers N`."""
    return click.option(
        "--readers", type=click.IntRange(1, 64), default=None,
        help="Files read at once (default: by the kind of source, at most 16).",
    )(function)  # fmt: skip


def choice_options(function: F) -> F:
    """`--arrays`, `--steps`, `--episodes`: a part of a dataset, whole shards of it."""
    for option in (
        click.option("--episodes", default="", metavar="LIST", help="Only shards of these episodes, such as 3,7-9."),
        click.option("--steps", default="", metavar="A:B", help="Only shards of steps A up to B, B not included."),
        click.option("--arrays", default="", metavar="NAMES", help="Only these arrays, or groups of them: a,b/c."),
    ):
        function = option(function)
    return function


def bytes_of(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """A size as people write it, for an option's callback. Raises UsageError."""
    from pitools.core import units

    return None if text is None else units.size(text)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM end the work with everything cleaned up; more of them do not disturb the cleaning."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]

    def stop(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = [(number, signal.signal(number, stop)) for number in numbers]
    stopped = False
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        stopped = True  # and still deaf: the process is about to end, with the code of the first signal
        raise
    finally:
        for number, handler in before if not stopped else ():
            signal.signal(number, handler)
