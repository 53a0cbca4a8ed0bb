"""Options that several nouns share, so that they read and behave the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pitools.commands import completion
from pitools.core.output import FORMATS, default_format

F = TypeVar("F", bound=Callable[..., Any])


def format_option(function: F) -> F:
    """`--format auto|table|jsonl|tsv|hosts`, else `PIT_FORMAT`."""
    return click.option(
        "--format", "form", type=click.Choice(FORMATS), default=default_format, show_default="auto",
        help="Table on a terminal, JSON Lines in a pipe; or say which.",
    )(function)  # fmt: skip


def site_option(function: F) -> F:
    """`--site NAME`, else `PIT_SITE`, else `local`."""
    return click.option(
        "--site", "site_name", envvar="PIT_SITE", default="local", show_default=True, metavar="NAME",
        shell_complete=completion.sites, help="The site, as `pit site list` names it.",
    )(function)  # fmt: skip


def run_argument(name: str = "run", **options: Any) -> Callable[[F], F]:
    """RUN, an id or a folder, that a shell can complete."""
    return click.argument(name, shell_complete=completion.runs, **options)


def request_argument(function: F) -> F:
    """REQUEST, a file that a shell can complete."""
    return click.argument("request", shell_complete=completion.files)(function)


def pairs(values: tuple[str, ...], flag: str) -> dict[str, str]:
    """`NAME=VALUE` flags as a dictionary. Raises UsageError naming the flag."""
    from pitools.core.errors import UsageError

    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not name or not equals or not rest:
            raise UsageError(f'"{value}" is not NAME=PATH', where=flag, hint=f"{flag} demo=/path/to/dataset")
        found[name] = rest
    return found
