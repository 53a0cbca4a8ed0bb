"""`pit perf attribute`: the parts of each step, what limits a run, and a picture of both."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from pitools.commands import completion
from pitools.commands.options import LocalPath, rows_format_option, site_option
from pitools.commands.perf import find_profiles, find_source

# `transfer` and `skew` are what the records sum up as communication, so that the columns sum to the wall time, too.
_PARTS = ("wall", "compute", "transfer", "skew", "copy", "input", "host", "compile", "checkpoint", "idle")
COLUMNS = ("rank", "step", *(f"{part}_ms" for part in _PARTS))
_HANG_COLUMNS = ("group", "operation", "sequence", "missing", "waiting", "no_dump")


@click.command()
@click.argument(
    "sources", metavar="FILE|FOLDER|RUN...", nargs=-1, required=True, shell_complete=completion.complete_runs
)
@click.option("--step", type=int, help="The rows of this step alone, and its timeline; the verdict is of all.")
@click.option("--rank", type=int, help="The rows of this rank alone.")
@click.option("--plot", type=LocalPath(), metavar="FILE", help="Also a picture: FILE.png, .svg or .html.")
@site_option
@rows_format_option
def attribute(
    sources: tuple[str, ...], step: int | None, rank: int | None, plot: Path | None, site_name: str, form: str
) -> None:
    """Split each step of each rank into parts that sum to its wall time, and say what limits the run.

    Reads traces of PyTorch's profiler, XLA profiles, dumps of NCCL Inspector, and step logs of runs; and says of Flight
    Recorder dumps which rank a hang waits for. Name annotations `input` and `checkpoint` to see these parts.

    JSON Lines end with the verdict and its evidence; beside a table, these are on stderr.

    \b
    pit perf attribute profile/ --plot profile.html
    """
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.perf.attribute.buckets import split_steps
    from pitools.perf.attribute.verdict import judge
    from pitools.perf.read.files import UNREADABLE
    from pitools.perf.read.flight_recorder import find_hangs
    from pitools.perf.read.read import read_table

    if plot is not None and plot.suffix not in (".png", ".svg", ".html"):
        raise UsageError(f'"{plot.name}" (expected .png, .svg or .html)', where="--plot")
    found = find_profiles([find_source(source, site_name) for source in sources])
    if dumps := [each.path for each in found if each.form == "flight"]:
        unread: list[str] = []
        hangs = find_hangs(dumps, unread)
        with Output(form, _HANG_COLUMNS) as out:
            for hang in hangs:
                out(hang)
        for line in unread:
            click.echo(f"pit: note: {line}", err=True)
        if not hangs:
            click.echo(
                f"pit: {len(dumps) - len(unread)} Flight Recorder dumps, and no collective that waits for a rank",
                err=True,
            )
        if all(each.form in ("flight", UNREADABLE) for each in found):
            return
    table = read_table(found)
    buckets = split_steps(table)
    verdict = judge(buckets, table.notes)
    records = [each for each in buckets.records() if rank in (None, each.rank) and step in (None, each.step)]
    if not records:
        expected = f"ranks {_span(table.ranks)}, steps {_span(map(int, table.windows.step))}"
        raise UsageError(f"no such step of such a rank (expected {expected})", where="--step, --rank")
    with Output(form, COLUMNS) as out:
        for record in records:
            out(record)
        if out.form == "jsonl":
            out(verdict)
    if out.form != "jsonl":
        _report(verdict.verdict, verdict.evidence, verdict.notes)
        for each in verdict.advice:
            gain = f"gains about {each.gain_ms:.3g} ms of {verdict.wall_ms:.4g} ms, at most {each.ceiling_ms:.3g} ms"
            click.echo(f"pit: {each.cause}: {each.remedy}: {gain}", err=True)
    if plot is not None:
        from pitools.perf.attribute.plot import draw

        draw(table, buckets, verdict, plot, step)


def _span(numbers: Iterable[int]) -> str:
    """Return the lowest and highest of numbers, as text."""
    known = sorted(set(numbers))
    return f"{known[0]} to {known[-1]}" if known else "none"


def _report(verdict: str, evidence: list[str], notes: list[str]) -> None:
    click.echo(f"pit: verdict: {verdict}: {evidence[0] if evidence else ''}", err=True)
    for line in evidence[1:]:
        click.echo(f"pit:   {line}", err=True)
    for line in notes:
        click.echo(f"pit: note: {line}", err=True)
