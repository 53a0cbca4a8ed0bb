"""Options that several nouns share, so that they read and behave the same everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from pitools.commands import completion
from pitools.core.fs import require_local_path
from pitools.core.output import FORMATS, default_format

F = TypeVar("F", bound=Callable[..., Any])
DATA_HELP = "Fill in a dataset of the request: its folder, ROOT/NAME for the newest version, or ROOT/NAME@TAG."


class LocalPath(click.Path):
    """A path of this machine: a URL, of which the file system would make a folder `s3:`, is refused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises UsageError for a URL."""
        require_local_path(value, "" if param is None else param.get_error_hint(ctx).strip("'"))
        return super().convert(value, param, ctx)


def format_option(function: F) -> F:
    """`--format auto|table|jsonl|tsv|csv|hosts`, else `PIT_FORMAT`."""
    return _format_option(function, FORMATS)


def rows_format_option(function: F) -> F:
    """`format_option` without `hosts`, for a command whose records have no `node`."""
    return _format_option(function, [form for form in FORMATS if form != "hosts"])


def _format_option(function: F, formats: Sequence[str]) -> F:
    return click.option(
        "--format",
        "form",
        type=click.Choice(formats),
        default=default_format,
        show_default="auto",
        help="Output format. [default: a table on a terminal, JSON Lines in a pipe]",
    )(function)


def _require_single(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """The value of an option that is given once. Raises click's error where it is given again."""
    if len(values) > 1:
        raise click.BadParameter(f"given {len(values)} times (expected once): {', '.join(values)}", ctx, param)
    return values[0] if values else None


SINGLE_VALUE: dict[str, Any] = {"multiple": True, "callback": _require_single}
"""For `click.option`: refuse the option where it is given twice; click takes the last in silence."""


def site_option(function: F) -> F:
    """`--site NAME`, else `PIT_SITE`, else `local`."""
    return click.option(
        "--site",
        "site_name",
        envvar="PIT_SITE",
        default=["local"],
        show_default="local",
        metavar="NAME",
        shell_complete=completion.complete_sites,
        help="The site, as `pit site list` names it.",
        **SINGLE_VALUE,
    )(function)


def sites_option(text: str) -> Callable[[F], F]:
    """`--site NAME`, repeatable, else `PIT_SITE`, else `local`."""
    return click.option(
        "--site",
        "sites",
        envvar="PIT_SITE",
        default=["local"],
        show_default="local",
        metavar="NAME",
        multiple=True,
        shell_complete=completion.complete_sites,
        help=text,
    )


def run_argument(name: str = "run", **options: Any) -> Callable[[F], F]:
    """RUN, an id or a folder, that a shell can complete."""
    return click.argument(name, shell_complete=completion.complete_runs, **options)


def dataset_argument(name: str = "dataset", **options: Any) -> Callable[[F], F]:
    """DATASET, which a shell can complete: a version's folder, ROOT/NAME, ROOT/NAME@TAG or ROOT/NAME/DIGITS."""
    return click.argument(name, shell_complete=completion.complete_datasets, **options)


def data_option(text: str = DATA_HELP) -> Callable[[F], F]:
    """`--data NAME=PATH`, repeatable."""
    return click.option(
        "--data", metavar="NAME=PATH", multiple=True, shell_complete=completion.complete_data, help=text
    )


def request_argument(function: F) -> F:
    """REQUEST, a file that a shell can complete."""
    return click.argument("request", shell_complete=completion.complete_files)(function)


def parse_named_paths(values: tuple[str, ...], flag: str) -> dict[str, str]:
    """Return the paths of `NAME=PATH` flags by name. Raises UsageError naming the flag."""
    from pitools.core.errors import UsageError

    paths = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not name or not equals or not text:
            raise UsageError(f'"{value}" is not NAME=PATH', where=flag, hint=f"{flag} demo=/path/to/dataset")
        paths[name] = text
    return paths


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings of the block as notes, without file and line."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("default", UserWarning)
        yield
    for warning in recorded:
        click.echo(f"pit: note: {warning.message}", err=True)
