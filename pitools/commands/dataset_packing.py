"""`pit dataset plan-packing`: compute how episodes pack into rows of a fixed length."""

from __future__ import annotations

from typing import Literal

import click

from pitools.commands.options import dataset_argument, format_option, warnings_as_notes
from pitools.core.output import Output

COLUMNS = ("name", "length", "episodes", "sequences", "rows", "fill", "padding_steps", "cut", "dropped")


@click.command(name="plan-packing")
@dataset_argument(metavar="DATASET")
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    required=True,
    metavar="STEPS",
    help="Steps per row; repeatable, to compare.",
)
@click.option(
    "--when-too-long",
    "when_too_long",
    type=click.Choice(("cut", "drop", "refuse")),
    default="cut",
    show_default=True,
    help="Treatment of an episode longer than a row.",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="STEPS",
    help="Cut episodes at multiples of this.",
)
@click.option("--split", "splits", multiple=True, metavar="NAME", help="Only episodes of this split; repeatable.")
@click.option(
    "--instruction",
    "instructions",
    multiple=True,
    metavar="GLOB",
    help="Only episodes of this instruction, or `re:REGEX`; repeatable.",
)
@format_option
def plan_packing(
    dataset: str,
    lengths: tuple[int, ...],
    when_too_long: Literal["refuse", "cut", "drop"],
    window: int,
    splits: tuple[str, ...],
    instructions: tuple[str, ...],
    form: str,
) -> None:
    """Show how episodes pack into rows of --length steps: rows, fill, padding, cut and dropped episodes.

    DATASET is ROOT/NAME/VERSION, ROOT/NAME for the newest, or ROOT/NAME@TAG. Episodes in quarantine are left out.

    \b
      pit dataset plan-packing /data/pick --length 512 --length 1024 --split train
    """
    from pitools.loader.sampling.episode_filter import EpisodeFilters, filter_episodes
    from pitools.loader.sampling.packing import packing_report
    from pitools.store.reader.version_reader import VersionReader
    from pitools.store.resolve import resolve_version

    arrays = VersionReader(resolve_version(dataset))
    with warnings_as_notes():
        episodes = filter_episodes(arrays, EpisodeFilters(splits=splits, instructions=instructions))
    with Output(form, COLUMNS) as out:
        for length in lengths:
            out(packing_report(arrays, episodes, length, window=window, when_too_long=when_too_long))
