"""`pit dataset check`: whether a version can be trusted, and what is to be kept from training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import LocalPath, format_option
from pitools.core.errors import ToolMissing, UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.dataset.check.finding import Summary
    from pitools.store.version_state import Quarantine

_COLUMNS = ("level", "check", "array", "episode", "step", "what", "got", "expected", "file")
_EXITS = "Exit codes: 0 nothing but warnings, 1 faults, 5 damage; 2 usage, 3 a file of bounds is wrong."


@click.command(epilog=_EXITS)
@click.argument("dataset")
@click.option("--deep", is_flag=True, help="Look at every frame, not at some of them.")
@click.option("--against", metavar="DATASET", help="Compare values with this version; else with the parent, if here.")
@click.option(
    "--bounds",
    "bounds_file",
    metavar="FILE",
    type=LocalPath(exists=True, dir_okay=False),
    help="What is still all right, in TOML.",
)
@click.option("--quarantine", is_flag=True, help="Keep what is damaged, or has faults, from training.")
@click.option("--release", is_flag=True, help="Lift the quarantine, and check nothing.")
@click.option("--readers", type=click.IntRange(1, 64), help="Files read at once (default: at most 4).")
@format_option
def check(
    dataset: str,
    deep: bool,
    against: str | None,
    bounds_file: Path | None,
    quarantine: bool,
    release: bool,
    readers: int | None,
    form: str,
) -> int:
    """Check a version's files, values, frames and episodes, and its drift from the version before.

    DATASET is ROOT/NAME/VERSION, ROOT/NAME for the newest, or ROOT/NAME@TAG. One record for each finding; the version
    itself is never touched.

    \b
      pit dataset check datasets/reach
      pit dataset check datasets/reach@train --deep --quarantine
      pit dataset check datasets/reach --against datasets/reach@golden --bounds bounds.toml
    """
    try:
        from pitools.dataset import check as checking
        from pitools.dataset.check import thresholds
        from pitools.dataset.check.finding import Summary
        from pitools.dataset.check.quarantine import quarantine as keep
        from pitools.store.resolve import resolve
    except ImportError as error:
        raise ToolMissing(f"{error.name} is not installed", hint="pip install 'pitools-hpc[data]'") from error

    path = resolve(dataset)
    if release:
        if quarantine or deep or against or bounds_file:
            raise UsageError("--release stands alone", where="--release", hint="check again afterwards")
        return _release(path)
    limits = thresholds.load(bounds_file) if bounds_file else thresholds.Bounds()
    other = resolve(against) if against else None
    found = []
    summary = None
    with Output(form, _COLUMNS) as out:
        for record in checking.version(path, bounds=limits, against=other, deep=deep, readers=readers or 0):
            if isinstance(record, Summary):
                summary = record
            else:
                out(record)
                found.append(record)
    assert summary is not None
    _say(summary)
    if quarantine:
        _told(keep(path, found), path, summary)
    return 5 if summary.damage else 1 if summary.faults else 0


def _say(summary: Summary) -> None:
    from pitools.core.units import duration_text, size_text

    counts = ", ".join(
        f"{count} {word if count == 1 else word + 's'}" if word != "damage" else f"{count} damaged"
        for count, word in ((summary.damage, "damage"), (summary.faults, "fault"), (summary.warnings, "warning"))
        if count
    )
    frames = f", {summary.frames} frames looked at" if summary.frames else ""
    click.echo(
        f"{summary.name} {summary.version}: {counts or 'nothing found'}; read {size_text(summary.read_bytes)} in "
        f"{summary.files} files{frames}, {duration_text(summary.wall_s)}",
        err=True,
    )


def _told(record: Quarantine | None, path: Path, summary: Summary) -> None:
    from pitools.store import version_state

    if record is None:
        stands = "; what was put there before stays: --release lifts it" if version_state.quarantine(path) else ""
        of_all = ": no fault is of one episode alone" if summary.faults else ""
        click.echo(f"nothing to put in quarantine{of_all}{stands}", err=True)
    elif record.whole:
        click.echo("in quarantine: the whole version", err=True)
    else:
        click.echo(f"in quarantine: {_episodes(record)}", err=True)


def _episodes(record: Quarantine) -> str:
    count = len(record.episodes)
    return f"{count} episode{'s' * (count != 1)}"


def _release(path: Path) -> int:
    from pitools.dataset.check.quarantine import release as lift

    lifted = lift(path)
    if lifted is None:
        click.echo("nothing is in quarantine", err=True)
    else:
        click.echo(f"released: {'the whole version' if lifted.whole else _episodes(lifted)}", err=True)
    return 0
