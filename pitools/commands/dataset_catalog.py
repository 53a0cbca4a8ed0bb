"""`pit dataset list|show|diff`: which versions there are, what they hold, and how they differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import LocalPath, format_option
from pitools.core.errors import ToolMissing, UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.dataset.catalog.episodes import Episode

LIST = ("name", "version", "tags", "state", "quarantined_episodes", "episodes", "steps", "bytes", "published")
SHOW = ("array", "shape", "dtype", "bytes", "files", "minimum", "maximum", "bad")
EPISODES = ("episode", "name", "steps", "language", "source", "quarantined")
DIFF = ("kind", "what", "change", "before", "after", "count", "bytes", "shift")
_DATA_HINT = "pip install 'pitools-hpc[data]'"
ROOT = LocalPath(exists=True, file_okay=False)


@click.command(name="list")
@click.argument("root", type=ROOT)
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Such as 'episodes>=100', 'task~pick', 'field=obs/*_image'; repeatable, all must hold.",
)
@click.option("--rebuild-index", is_flag=True, help="Read all manifests again, not only what changed.")
@format_option
def list_versions(root: Path, conditions: tuple[str, ...], rebuild_index: bool, form: str) -> None:
    """The versions in a root, by name, oldest first; damaged manifests are named last.

    \b
    A condition is KEY, an operator and a value:
      name version tag state field task parent     =GLOB  !=GLOB  ~TEXT (contains, in either case)
      episodes steps files size date               =  !=  >=  <=  >  <   (1GiB, 2026-11-01)

    \b
      pit dataset list datasets --where 'task~drawer' --where 'episodes>=50' --where 'date>=2026-11-01'
      pit dataset list datasets --where 'tag=prod'
    """
    from pitools.dataset.catalog import index, search
    from pitools.store.resolve import check_root

    known, damaged = index.load(root, rebuild=rebuild_index)
    if not damaged and not any(home.rows for home in known.homes.values()):
        check_root(root)
    with Output(form, LIST) as out:
        for found in search.find(root, known, conditions):
            out(found)
    for error in damaged[:-1]:
        click.echo(f"pit: error: {error}", err=True)
    if damaged:
        raise damaged[-1]


@click.command()
@click.argument("dataset")
@click.option("--episodes", is_flag=True, help="Its episodes, not its arrays.")
@click.option("--episode", type=click.IntRange(0), metavar="N", help="One episode; with --png, draw it.")
@click.option("--png", type=LocalPath(dir_okay=False), metavar="FILE", help="Frames and curves of it.")
@format_option
def show(dataset: str, episodes: bool, episode: int | None, png: Path | None, form: str) -> None:
    """The arrays of one version, or its episodes; or a picture of one episode.

    DATASET is ROOT/NAME/VERSION (6 digits of it are enough), ROOT/NAME for the newest, or ROOT/NAME@TAG.

    \b
      pit dataset show datasets/reach
      pit dataset show datasets/reach@prod --episode 3 --png episode3.png
    """
    from pitools.dataset.versions import arrays, describe
    from pitools.store.resolve import resolve

    if png and episode is None:
        raise UsageError("--png draws one episode", where="--png", hint="--episode N --png FILE")
    path = resolve(dataset)
    if episodes or episode is not None:
        with Output(form, EPISODES) as out:
            for known in _episodes(path, episode):
                out(known)
        if png and episode is not None:
            from pitools.dataset import plot

            plot.draw(path, episode, png)
        return
    version, manifest = describe(path)
    with Output(form, SHOW) as out:
        for array in arrays(manifest):
            out(array)
    _say(path, version, manifest.parent)


@click.command()
@click.argument("first", metavar="DATASET")
@click.argument("second", metavar="DATASET")
@format_option
def diff(first: str, second: str, form: str) -> int:
    """What differs between two versions; exit 0 when nothing does, 1 when something does.

    Arrays, episodes (by the recording they came from), tasks, statistics, provenance, and how many files they share.
    """
    from pitools.store.resolve import resolve

    try:
        from pitools.dataset.catalog import compare
    except ImportError as error:
        raise ToolMissing(f"{error.name} is not installed", hint=_DATA_HINT) from error

    differs = False
    with Output(form, DIFF) as out:
        for found in compare.compare(resolve(first), resolve(second)):
            out(found)
            differs = differs or found.change != compare.SAME
    return int(differs)


def _episodes(path: Path, number: int | None) -> Iterator[Episode]:
    try:
        from pitools.dataset.catalog.episodes import episodes
    except ImportError as error:
        raise ToolMissing(f"{error.name} is not installed", hint=_DATA_HINT) from error

    return episodes(path, number)


def _say(path: Path, version: object, parent: str) -> None:
    """On stderr, what is known of the version as a whole."""
    from pitools.dataset.versions import Version
    from pitools.store import retirement, tags, version_state

    assert isinstance(version, Version)
    whole = path.resolve()
    root, name = whole.parent.parent, whole.parent.name
    named = sorted(tag for tag, value in tags.read(root, name).items() if value.version == whole.name)
    held = version_state.quarantine(path)
    parts = [f"{version.episodes} episodes", f"{version.steps} steps"]
    parts += [f"tag {tag}" for tag in named]
    parts += [f"parent {parent}"] if parent else []
    parts += ["retired"] if retirement.of(root, name, whole.name, whole) else []
    if held:
        parts.append("in quarantine" if held.whole else f"{len(held.episodes)} episodes in quarantine")
    click.echo(f"{version.name} {version.version}: {', '.join(parts)}", err=True)
