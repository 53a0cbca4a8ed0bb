"""`pit dataset ingest`: recordings to one published version."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import format_option
from pitools.core.errors import ToolMissing
from pitools.core.output import Output

COLUMNS = ("name", "version", "episodes", "steps", "bytes", "files", "new", "path")


@click.command()
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--to", "root", required=True, type=click.Path(path_type=Path), help="Root of the datasets.")
@click.option("--name", required=True, help="The dataset's name: a folder in the root.")
@click.option("--layout", type=click.Choice(("auto", "robomimic", "aloha")), default="auto", show_default=True)
@click.option(
    "--codec", type=click.Choice(("lz4", "raw", "zstd")), default="lz4", show_default=True,
    help="lz4 or raw to train from NVMe, zstd for the archive.",
)  # fmt: skip
@click.option("--skip", multiple=True, metavar="GLOB", help="Array to leave out, such as 'obs/*_depth'; repeatable.")
@format_option
def ingest(
    files: tuple[Path, ...], root: Path, name: str, layout: str, codec: str, skip: tuple[str, ...], form: str
) -> None:
    """Make one dataset version of HDF5 recordings.

    It appears whole as ROOT/NAME/VERSION, or not at all. The same recordings and options again change nothing.
    """
    try:
        from pitools.dataset.ingest import ingest as run
    except ImportError as error:
        raise ToolMissing(f"{error.name} is not installed", hint="pip install 'pitools-hpc[data]'") from error

    version = run(files, root=root, name=name, layout=layout, codec=codec, skip=skip)
    if not version.new:
        click.echo(f"{name}: nothing to do, these recordings are already there as {version.version}", err=True)
    with Output(form, COLUMNS) as out:
        out(version)
