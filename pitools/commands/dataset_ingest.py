"""`pit dataset ingest`: recordings to one published version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import ONCE, LocalPath, format_option
from pitools.core.errors import ToolMissing, UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.dataset.ingest.ingest import Spread

COLUMNS = ("name", "version", "episodes", "steps", "bytes", "files", "new", "path")
ARRAY_CPUS = 4  # of each task, where --workers says nothing
LAYOUTS = ("auto", "robomimic", "aloha", "lerobot", "zarr")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=LocalPath(exists=True))
@click.option("--to", "root", required=True, type=LocalPath(), help="Root of the datasets.")
@click.option("--name", required=True, help="The dataset's name: a folder in the root.")
@click.option("--layout", type=click.Choice(LAYOUTS), default="auto", show_default=True)
@click.option(
    "--codec",
    type=click.Choice(("lz4", "raw", "zstd")),
    help="lz4 or raw to train from NVMe, zstd for the archive. [default: lz4, or the parent's]",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="GLOB",
    help="Array to leave out, by its name in the version or in the recording, such as 'obs/*_depth'; repeatable.",
)
@click.option(
    "--schema",
    type=LocalPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="TOML that says how arrays are renamed, dropped, cast, resized and derived.",
)
@click.option("--append", metavar="DATASET", help="Version to begin with, as ROOT/NAME@TAG or ROOT/NAME/VERSION.")
@click.option(
    "--accept-drift", is_flag=True, help="Append even what is not like the parent; else that is refused, and told."
)
@click.option("--skip-refused", is_flag=True, help="Leave out episodes that are not whole, or not like the others.")
@click.option(
    "--report",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="JSON Lines: each episode, accepted or refused, and why.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes. [default: two a core, at most 8]")
@click.option("--array", type=click.IntRange(1), metavar="N", help="Work as a Slurm array of N jobs, and wait.")
@click.option(
    "--site", "site_name", envvar="PIT_SITE", metavar="NAME", **ONCE, help="The site whose Slurm runs the array."
)
@format_option
def ingest(
    files: tuple[Path, ...],
    root: Path,
    name: str,
    layout: str,
    codec: str | None,
    skip: tuple[str, ...],
    schema: Path | None,
    append: str | None,
    accept_drift: bool,
    skip_refused: bool,
    report: Path | None,
    workers: int | None,
    array: int | None,
    site_name: str | None,
    form: str,
) -> None:
    """Make one dataset version of recordings: HDF5 files, or folders of LeRobot or Zarr.

    It appears whole as ROOT/NAME/VERSION, or not at all. The same recordings and options again change nothing; after an
    interrupt they go on where it stopped.
    """
    try:
        from pitools.dataset.ingest.append_policy import to_append
        from pitools.dataset.ingest.ingest import ingest as run
        from pitools.store.resolve import discarded
    except ImportError as error:
        raise ToolMissing(f"{error.name} is not installed", hint="pip install 'pitools-hpc[data]'") from error

    if array:  # tasks may begin in another folder
        files, root = tuple(path.absolute() for path in files), root.absolute()
    version = run(
        files,
        root=root,
        name=name,
        layout=layout,
        codec=codec or "",
        skip=skip,
        schema=schema,
        append=to_append(append) if append else None,
        workers=workers or 0,
        skip_refused=skip_refused,
        refuse_drift=not accept_drift,
        report=report,
        spread=_spread(array, site_name, name, workers or 0) if array else None,
    )
    if not version.new:
        click.echo(f"{name}: nothing to do, these recordings are already there as {version.version}", err=True)
        if why := discarded(Path(version.path)):
            click.echo(f"{name}: but that version is {why}", err=True)
    with Output(form, COLUMNS) as out:
        out(version)


def _spread(count: int, site_name: str | None, name: str, workers: int) -> Spread:
    """What has a site's Slurm do the work."""
    from pitools.dataset.ingest.execute import take_part
    from pitools.launch import array
    from pitools.site.load import load

    if not site_name:
        raise UsageError("--array needs a site", where="--array", hint="--site NAME; see `pit site list`")
    site = load(site_name)

    def spread(work: Path, plan: str, total: int, done: array.Count) -> None:
        calls = [(str(work.absolute()), plan, number, count, workers) for number in range(count)]
        cpus = workers or ARRAY_CPUS
        array.run(site, f"ingest-{name}", take_part, calls, work=work, total=total, done=done, cpus=cpus)

    return spread
