"""`pit dataset bench`: find whether disk, decoding or transform limits a loader."""

from __future__ import annotations

import click

from pitools.commands.options import dataset_argument, format_option, warnings_as_notes
from pitools.core.output import Output

COLUMNS = ("stage", "cache", "threads", "samples", "samples_per_s", "bytes_per_s", "bound")


@click.command()
@dataset_argument(metavar="DATASET")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Samples per batch.")
@click.option("--length", type=click.IntRange(min=1), default=16, show_default=True, help="Steps per sample.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Reader threads.")
@click.option("--arrays", metavar="NAME,...", default="", help="Arrays to load, such as 'action,obs/eye'; else all.")
@click.option(
    "--batch-transform", metavar="MODULE:FUNCTION", default="", help="Function applied to each batch on the CPU."
)
@click.option(
    "--seconds",
    "limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time to measure each stage.",
)
@format_option
def bench(
    dataset: str,
    batch_size: int,
    length: int,
    threads: int,
    arrays: str,
    batch_transform: str,
    limit_s: float,
    form: str,
) -> None:
    """Measure what limits a loader of DATASET: disk, decoding or transform.

    DATASET's files are dropped from the page cache first, so that the disk is measured and not memory; other readers
    are slower for a while.
    """
    from pitools.dataset.formats.derive_functions import find_function
    from pitools.loader.benchmark.benchmark import benchmark_loader as run
    from pitools.store.resolve import resolve_version

    names = [name.strip() for name in arrays.split(",") if name.strip()]
    function = find_function(batch_transform) if batch_transform else None
    with warnings_as_notes():
        stages = run(
            resolve_version(dataset),
            batch_size=batch_size,
            length=length,
            threads=threads,
            names=names,
            transform=function,
            limit_s=limit_s,
        )
    with Output(form, COLUMNS) as out:
        for stage in stages:
            out(stage)
    click.echo(stages[-1].advice, err=True)
