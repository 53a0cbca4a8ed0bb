"""`pit dataset ingest`: publish recordings as one version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import SINGLE_VALUE, LocalPath, format_option
from pitools.core.errors import UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.dataset.ingest.ingest import SubmitArray

COLUMNS = ("name", "version", "episodes", "steps", "bytes", "files", "new", "path")
ARRAY_CPUS = 4  # CPUs of each array task without --workers
LAYOUTS = ("auto", "robomimic", "aloha", "lerobot", "zarr")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=LocalPath(exists=True))
@click.option("--to", "root", required=True, type=LocalPath(), help="Root of the datasets.")
@click.option("--name", required=True, help="Name of the dataset: a folder in the root.")
@click.option("--layout", type=click.Choice(LAYOUTS), default="auto", show_default=True)
@click.option(
    "--codec",
    type=click.Choice(("lz4", "raw", "zstd")),
    help="lz4 or raw to train from NVMe, zstd for the archive. [default: lz4, or the parent's]",
)
@click.option(
    "--skip-array",
    "skip_arrays",
    multiple=True,
    metavar="GLOB",
    help="Array to leave out, by its name in the version or in the recording, such as 'obs/*_depth'; repeatable.",
)
@click.option(
    "--transform",
    type=LocalPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="TOML file that renames, drops, casts, resizes and derives arrays.",
)
@click.option("--append", metavar="DATASET", help="Version to append to, as ROOT/NAME@TAG or ROOT/NAME/VERSION.")
@click.option(
    "--accept-drift", is_flag=True, help="Append episodes that drift from the parent; without this they are refused."
)
@click.option("--skip-rejected", is_flag=True, help="Leave out incomplete or incompatible episodes.")
@click.option(
    "--report",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="Write one JSON line per episode: accepted, or refused with the reason.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Processes; of each task with --array-jobs. [default: two a core, at most 8; 4 CPUs a task]",
)
@click.option("--array-jobs", type=click.IntRange(1), metavar="N", help="Run as a Slurm array of N jobs, and wait.")
@click.option(
    "--site",
    "site_name",
    envvar="PIT_SITE",
    metavar="NAME",
    **SINGLE_VALUE,
    help="Site whose Slurm runs the array.",
)
@format_option
def ingest(
    files: tuple[Path, ...],
    root: Path,
    name: str,
    layout: str,
    codec: str | None,
    skip_arrays: tuple[str, ...],
    transform: Path | None,
    append: str | None,
    accept_drift: bool,
    skip_rejected: bool,
    report: Path | None,
    workers: int | None,
    array_jobs: int | None,
    site_name: str | None,
    form: str,
) -> None:
    """Publish recordings as one dataset version: HDF5 files, or folders of LeRobot or Zarr.

    ROOT/NAME/VERSION appears whole or not at all. The same command again changes nothing, if the
    parent of an append is named by version or tag; after an interrupt it resumes.
    """
    from pitools.dataset.ingest.append_checks import resolve_parent
    from pitools.dataset.ingest.ingest import ingest as run
    from pitools.store.resolve import require_root, unusable_reason

    require_root(root)
    if array_jobs:  # tasks may begin in another folder
        files, root = tuple(path.absolute() for path in files), root.absolute()
    version = run(
        files,
        root=root,
        name=name,
        layout=layout,
        codec=codec or "",
        skip_arrays=skip_arrays,
        transform=transform,
        append=resolve_parent(append, root) if append else None,
        workers=workers or 0,
        skip_rejected=skip_rejected,
        accept_drift=accept_drift,
        report=report,
        submit_array=_submit_array(array_jobs, site_name, name, workers or 0) if array_jobs else None,
    )
    if not version.new:
        click.echo(f"{name}: nothing to do, version {version.version} has these recordings", err=True)
        if reason := unusable_reason(Path(version.path)):
            click.echo(f"{name}: but that version is {reason}", err=True)
    with Output(form, COLUMNS) as out:
        out(version)


def _submit_array(count: int, site_name: str | None, name: str, workers: int) -> SubmitArray:
    """Return a function that runs the ingest's jobs as a site's Slurm array."""
    from pitools.dataset.ingest.execute import run_part
    from pitools.launch import array
    from pitools.site.load import load_site

    if not site_name:
        raise UsageError("--array-jobs: needs a site", where="--array-jobs", hint="--site NAME; see `pit site list`")
    site = load_site(site_name)

    def spread(work: Path, plan: str, total: int, done: array.DoneCounter) -> None:
        calls = [(str(work.absolute()), plan, number, count, workers) for number in range(count)]
        cpus = workers or ARRAY_CPUS
        array.run_array(site, f"ingest-{name}", run_part, calls, work_dir=work, total=total, count_done=done, cpus=cpus)

    return spread
