"""`pit dataset list|show|diff`: list versions, their content and their differences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import LocalPath, dataset_argument, format_option
from pitools.core.errors import UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.dataset.catalog.episodes import EpisodeInfo
    from pitools.store.manifest import Manifest

LIST_COLUMNS = ("name", "version", "tags", "state", "quarantined_episodes", "episodes", "steps", "bytes", "published")
SHOW_COLUMNS = ("array", "shape", "dtype", "bytes", "files", "minimum", "maximum", "non_finite")
EPISODE_COLUMNS = ("episode", "name", "steps", "instruction", "recording", "quarantined")
DIFF_COLUMNS = ("kind", "subject", "change", "before", "after", "count", "bytes", "shift")
ROOT_TYPE = LocalPath(exists=True, file_okay=False)


@click.command(name="list")
@click.argument("root", type=ROOT_TYPE)
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Such as 'episodes>=100', 'instruction~pick', 'array=obs/*_image'; repeatable, all must match.",
)
@click.option("--rebuild-index", is_flag=True, help="Read all manifests again, not only changed ones.")
@format_option
def list_command(root: Path, conditions: tuple[str, ...], rebuild_index: bool, form: str) -> None:
    """List the versions in a root, by name, oldest first; damaged manifests come last.

    \b
    A condition is KEY, an operator and a value:
      name version tag state array instruction parent  =GLOB  !=GLOB  ~TEXT (contains, in either case)
      episodes quarantined_episodes steps files bytes (or size), published (or date)
                                                       =  !=  >=  <=  >  <   (1GiB, 2026-11-01)

    \b
      pit dataset list datasets --where 'instruction~drawer' --where 'episodes>=50' --where 'date>=2026-11-01'
      pit dataset list datasets --where 'tag=prod'
    """
    from pitools.dataset.catalog import search
    from pitools.store.resolve import require_root

    listings, damaged = search.list_versions(root, conditions, rebuild=rebuild_index)
    if not damaged and not listings:
        require_root(root)
    with Output(form, LIST_COLUMNS) as out:
        for listing in listings:
            out(listing)
    for error in damaged[:-1]:
        click.echo(f"pit: error: {error}", err=True)
    if damaged:
        raise damaged[-1]


@click.command()
@dataset_argument()
@click.option("--episodes", is_flag=True, help="List episodes instead of arrays.")
@click.option("--episode", type=click.IntRange(0), metavar="N", help="Show one episode; with --png, plot it.")
@click.option("--png", type=LocalPath(dir_okay=False), metavar="FILE", help="Plot frames and curves of the episode.")
@format_option
def show(dataset: str, episodes: bool, episode: int | None, png: Path | None, form: str) -> None:
    """Show the arrays of one version, or its episodes; or plot one episode.

    DATASET is ROOT/NAME/VERSION (6 digits of it are enough), ROOT/NAME for the newest, or ROOT/NAME@TAG.

    \b
      pit dataset show datasets/reach
      pit dataset show datasets/reach@prod --episode 3 --png episode3.png
    """
    from pitools.dataset.versions import describe_version, list_arrays
    from pitools.store.resolve import resolve_version

    if png and episode is None:
        raise UsageError("--png: needs one episode", where="--png", hint="--episode N --png FILE")
    path = resolve_version(dataset)
    if episodes or episode is not None:
        with Output(form, EPISODE_COLUMNS, ends_with_reader=True) as out:
            for record in _episodes(path, episode):
                out(record)
        if png and episode is not None:
            from pitools.dataset import plot

            plot.draw_episode(path, episode, png)
        return
    version, manifest = describe_version(path)
    with Output(form, SHOW_COLUMNS) as out:
        for array in list_arrays(manifest):
            out(array)
    _print_version_notes(path, version, manifest)


@click.command()
@click.argument("first", metavar="DATASET")
@click.argument("second", metavar="DATASET")
@format_option
def diff(first: str, second: str, form: str) -> int:
    """Compare two versions; exit 0 when they are equal, 1 when they differ.

    Arrays, episodes (by the recording they came from), instructions, statistics, provenance, and how
    many files they share.
    """
    from pitools.dataset.catalog import compare
    from pitools.store.resolve import resolve_version

    differs = False
    with Output(form, DIFF_COLUMNS, ends_with_reader=True) as out:
        for difference in compare.compare_versions(resolve_version(first), resolve_version(second)):
            out(difference)
            differs = differs or difference.change != compare.SHARED
    return int(differs)


def _episodes(path: Path, number: int | None) -> Iterator[EpisodeInfo]:
    from pitools.dataset.catalog.episodes import list_episodes

    return list_episodes(path, number)


def _print_version_notes(path: Path, version: object, manifest: Manifest) -> None:
    """Print tags, parent, retirement and quarantine of a version on stderr."""
    from pitools.dataset.versions import VersionInfo
    from pitools.store import retirement, tags, version_state

    assert isinstance(version, VersionInfo)
    resolved = path.resolve()
    root, name = resolved.parent.parent, resolved.parent.name
    named = sorted(tag for tag, value in tags.read_tags(root, name).items() if value.version == resolved.name)
    quarantine = version_state.read_quarantine(path)
    counted = ((version.episodes, "episode"), (version.steps, "step"))
    parts = [f"{count} {noun}{'s' * (count != 1)}" for count, noun in counted]
    parts += [f"tag {tag}" for tag in named]
    parts += [f"parent {manifest.parent}"] if manifest.parent else []
    parts += [f"a part of version {manifest.subset.whole}"] if manifest.subset else []
    parts += ["retired"] if retirement.retirement_of(root, name, resolved.name, resolved) else []
    if quarantine:
        count = len(quarantine.episodes)
        parts.append(
            "in quarantine" if quarantine.whole_version else f"{count} episode{'s' * (count != 1)} in quarantine"
        )
    click.echo(f"{version.name} {version.version}: {', '.join(parts)}", err=True)
