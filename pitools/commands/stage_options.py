"""Options, path types and signal handling that the commands of `pit stage` share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pitools.core import units
from pitools.core.errors import UsageError

if TYPE_CHECKING:
    from pitools.stage.cache.evict import Eviction

F = TypeVar("F", bound=Callable[..., Any])


class _SourcePath(click.Path):
    """A SOURCE: a path on this node, a URL, or `-`. The shell completes paths."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text; refuse an empty one, which an unset variable leaves behind."""
        if not value:
            hint = "is a variable not set? `set -u` makes the shell refuse it"
            raise UsageError("an empty path", where=_option_name(param), hint=hint)
        return value


class _ExpandedPath(_SourcePath):
    """A path in which `{node}`, `{user}` and `{job}` are filled in, so that one srun line serves every node."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the absolute path."""
        text = super().convert(value, param, ctx)
        if text == "-":
            raise UsageError(
                "- is not a path (expected a folder)",
                where=_option_name(param),
                hint="records go to stdout by themselves",
            )
        if isinstance(text, str) and "://" in text:
            hint = "objects are verified while they are staged"
            raise UsageError(f"{text}: not a path of this machine", where=_option_name(param), hint=hint)
        if isinstance(text, str) and "{" in text:
            from pitools.site.template import expand_placeholders

            text = expand_placeholders(text)
        return Path(text).absolute()


class _StagingRoot(_ExpandedPath):
    """A staging folder: not the whole file system, which `--to "$UNSET/"` would mean."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the absolute folder."""
        root = super().convert(value, param, ctx)
        if os.path.realpath(root) == "/":
            hint = "name a folder of the node's own disk, such as /nvme/{user}/pit"
            raise UsageError("/ cannot be a staging folder", where=_option_name(param), hint=hint)
        return root


def _option_name(param: click.Parameter | None) -> str:
    return "" if param is None else param.opts[0] if isinstance(param, click.Option) else param.human_readable_name


SOURCE_TYPE = _SourcePath(file_okay=False)  # for completion only: the path is not checked here
ROOT_TYPE = _ExpandedPath(file_okay=False)
FILE_TYPE = _ExpandedPath()


def to_option(*, required: bool) -> Callable[[F], F]:
    """Add `--to ROOT`."""
    return click.option(
        "--to",
        "root",
        required=required,
        metavar="ROOT",
        type=_StagingRoot(file_okay=False),
        help="The node's staging folder; {node}, {user}, {job} are filled in.",
    )


def readers_option(function: F) -> F:
    """Add `--readers N`."""
    return click.option(
        "--readers",
        type=click.IntRange(1, 64),
        default=None,
        help="Files read in parallel (default: by the kind of source, at most 16).",
    )(function)


def selection_options(function: F) -> F:
    """Add `--arrays`, `--steps`, `--episodes`, which select whole shards of a dataset."""
    for option in (
        click.option("--episodes", default="", metavar="LIST", help="Only shards of these episodes, such as 3,7-9."),
        click.option("--steps", default="", metavar="A:B", help="Only shards of steps A up to B, B not included."),
        click.option(
            "--arrays",
            multiple=True,
            metavar="NAMES",
            help="Only these arrays, groups of them or globs: action,obs/state,'obs/*_image'. May be given again.",
        ),
    ):
        function = option(function)
    return function


def limit_options(function: F) -> F:
    """Add `--quota` and `--min-free`, the limits of a root."""
    for option in (
        click.option(
            "--min-free",
            metavar="SIZE",
            callback=size_callback,
            envvar="PIT_STAGE_MIN_FREE",
            show_envvar=True,
            help="Space to keep free on ROOT's disk; the least recently used sets are evicted first.",
        ),
        click.option(
            "--quota",
            metavar="SIZE",
            callback=size_callback,
            envvar="PIT_STAGE_QUOTA",
            show_envvar=True,
            help="Limit of ROOT's size; the least recently used sets are evicted first.",
        ),
    ):
        function = option(function)
    return function


def size_callback(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Parse a size such as 200MiB, as an option's callback. Raises UsageError."""
    return None if text is None else _parse_option(units.parse_size, text, ctx, param)


def duration_callback(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """Parse a duration such as 30m, as an option's callback. Raises UsageError."""
    return _parse_option(units.parse_duration, text, ctx, param)


def _parse_option(parse: Callable[[str], int], text: str, ctx: click.Context, param: click.Parameter) -> int:
    try:
        return parse(text)
    except UsageError as error:
        source = ctx.get_parameter_source(param.name or "")
        named = param.envvar if source is click.core.ParameterSource.ENVIRONMENT else param.opts[0]
        raise UsageError(error.message, where=str(named), hint=error.hint) from error


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into exceptions, so that the work is cleaned up; ignore further ones."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]

    def stop(number: int, _: FrameType | None) -> None:
        for other_number in numbers:
            signal.signal(other_number, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handlers = [(number, signal.signal(number, stop)) for number in numbers]
    stopped = False
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        stopped = True  # keep ignoring signals: the process ends with the code of the first one
        raise
    finally:
        for number, handler in handlers if not stopped else ():
            signal.signal(number, handler)


def report_eviction(eviction: Eviction) -> None:
    """Print a note of what was evicted for room."""
    print_note(f"{eviction.path}: evicted to make room ({units.format_size(eviction.bytes)} freed)")


def print_note(text: str) -> None:
    """Print a note to stderr."""
    click.echo(f"pit-stage: note: {text}", err=True)
