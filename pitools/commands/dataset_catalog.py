"""`pit dataset list|show`: the versions in a root, and what one holds."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import format_option
from pitools.core.errors import PitError
from pitools.core.output import Output


@click.command(name="list")
@click.argument("root", type=click.Path(exists=True, file_okay=False, path_type=Path))
@format_option
def list_versions(root: Path, form: str) -> None:
    """The versions in a root, oldest first; damaged manifests are named last."""
    from pitools.dataset import catalog

    damaged: list[PitError] = []
    with Output(form, ("name", "version", "episodes", "steps", "bytes", "files", "published")) as out:
        for path in catalog.versions(root):
            try:
                out(catalog.describe(path)[0])
            except PitError as error:
                damaged.append(error)
    if damaged:
        raise damaged[0]


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@format_option
def show(path: Path, form: str) -> None:
    """The arrays of one version, ROOT/NAME/VERSION."""
    from pitools.dataset import catalog

    with Output(form) as out:
        for array in catalog.arrays(catalog.describe(path)[1]):
            out(array)
