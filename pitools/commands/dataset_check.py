"""`pit dataset check`: check a version, and quarantine faulty episodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import LocalPath, dataset_argument, format_option
from pitools.core.errors import UsageError
from pitools.core.output import Output

if TYPE_CHECKING:
    from pitools.dataset.check.finding import CheckSummary
    from pitools.store.version_state import Quarantine

_COLUMNS = ("level", "check", "array", "episode", "step", "problem", "got", "expected", "file")
_EXITS = "Exit codes: 0 at most warnings, 1 faults, 5 damage; 2 usage, 3 the file of thresholds is invalid."


@click.command(epilog=_EXITS)
@dataset_argument()
@click.option("--deep", is_flag=True, help="Decode every frame, not a sample.")
@click.option(
    "--against", metavar="DATASET", help="Compare values with this version. [default: the parent, if present]"
)
@click.option(
    "--thresholds",
    "thresholds_file",
    metavar="FILE",
    type=LocalPath(exists=True, dir_okay=False),
    help="Thresholds, in TOML.",
)
@click.option("--quarantine", is_flag=True, help="Exclude damaged or faulty episodes from training.")
@click.option("--lift-quarantine", is_flag=True, help="Remove the quarantine; check nothing.")
@click.option("--threads", type=click.IntRange(1, 64), help="Threads, each of which reads a file. [default: at most 4]")
@format_option
def check(
    dataset: str,
    deep: bool,
    against: str | None,
    thresholds_file: Path | None,
    quarantine: bool,
    lift_quarantine: bool,
    threads: int | None,
    form: str,
) -> int:
    """Check a version's files, values, frames and episodes, and its drift from its parent.

    DATASET is ROOT/NAME/VERSION, ROOT/NAME for the newest, or ROOT/NAME@TAG. Prints one record per finding; the
    version itself never changes.

    \b
      pit dataset check datasets/reach
      pit dataset check datasets/reach@train --deep --quarantine
      pit dataset check datasets/reach --against datasets/reach@golden --thresholds thresholds.toml
    """
    from pitools.dataset import check as checking
    from pitools.dataset.check import thresholds
    from pitools.dataset.check.finding import CheckSummary, Finding
    from pitools.dataset.check.quarantine import quarantine_episodes as keep
    from pitools.store.resolve import resolve_version

    path = resolve_version(dataset)
    if lift_quarantine:
        if quarantine or deep or against or thresholds_file:
            raise UsageError(
                "--lift-quarantine: allows no other option",
                where="--lift-quarantine",
                hint="pit dataset check DATASET --lift-quarantine",
            )
        return _lift(path)
    limits = thresholds.load_thresholds(thresholds_file) if thresholds_file else thresholds.Thresholds()
    parent = resolve_version(against) if against else None
    records = checking.check_version(path, thresholds=limits, parent=parent, deep=deep, readers=threads or 0)
    kept = None
    if quarantine:  # before a record is printed: a reader that ends early, such as `head`, ends this process
        records = iter(judged := list(records))
        kept = keep(path, [record for record in judged if isinstance(record, Finding)])
    summary = None
    with Output(form, _COLUMNS, ends_with_reader=True) as out:
        for record in records:
            if isinstance(record, CheckSummary):
                summary = record
            else:
                out(record)
    assert summary is not None
    _print_summary(summary)
    if quarantine:
        _print_quarantine(kept, path, summary)
    return 5 if summary.damage else 1 if summary.faults else 0


def _print_summary(summary: CheckSummary) -> None:
    from pitools.core.units import format_duration, format_size

    counts = ", ".join(
        f"{count} {noun if count == 1 else noun + 's'}" if noun != "damage" else f"{count} damaged"
        for count, noun in ((summary.damage, "damage"), (summary.faults, "fault"), (summary.warnings, "warning"))
        if count
    )
    part = f", a part of version {summary.part_of}" if summary.part_of else ""
    frames = f", {summary.frames} frames checked" if summary.frames else ""
    click.echo(
        f"{summary.name} {summary.version}{part}: {counts or 'nothing found'}; "
        f"read {format_size(summary.read_bytes)} in {summary.files} files{frames}, {format_duration(summary.wall_s)}",
        err=True,
    )


def _print_quarantine(record: Quarantine | None, path: Path, summary: CheckSummary) -> None:
    from pitools.store import version_state

    if record is None:
        earlier = (
            "; the earlier quarantine stays: --lift-quarantine lifts it" if version_state.read_quarantine(path) else ""
        )
        of_all = ": no fault is of one episode alone" if summary.faults else ""
        click.echo(f"nothing to put in quarantine{of_all}{earlier}", err=True)
    elif record.whole_version:
        click.echo("in quarantine: the whole version", err=True)
    else:
        click.echo(f"in quarantine: {_format_episodes(record)}", err=True)
        click.echo("the manifest's statistics and instruction counts still include them", err=True)


def _format_episodes(record: Quarantine) -> str:
    count = len(record.episodes)
    return f"{count} episode{'s' * (count != 1)}"


def _lift(path: Path) -> int:
    from pitools.dataset.check.quarantine import lift_quarantine as lift

    lifted = lift(path)
    if lifted is None:
        click.echo("nothing is in quarantine", err=True)
    else:
        click.echo(f"lifted: {'the whole version' if lifted.whole_version else _format_episodes(lifted)}", err=True)
    return 0
