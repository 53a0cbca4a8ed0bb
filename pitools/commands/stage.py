"""`pit stage`, also `pit-stage`: move dataset versions to a node's own disk, verified."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from pitools.commands.options import format_option
from pitools.core import units
from pitools.core.errors import UsageError
from pitools.core.output import Output

_FOLDER = click.Path(path_type=Path)
_RUN_COLUMNS = ("dataset", "version", "state", "files", "bytes", "copied_bytes", "wall_s", "path")
_PLAN_COLUMNS = ("dataset", "version", "state", "files", "copy_bytes", "free_bytes", "fits", "path")


def _place(text: str) -> Path:
    """A path in which `{node}`, `{user}` and `{job}` are filled in, so that one srun line serves every node."""
    if "{" in text:
        from pitools.site.template import fill

        text = fill(text)
    return Path(text).absolute()


readers_option = click.option(
    "--readers",
    type=click.IntRange(1, 64),
    default=None,
    help="Files read at once (default: two per core, at most 16).",
)


@click.group("stage", context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Move datasets to a node's own NVMe, verified; a reader sees a whole dataset or none."""


@group.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=_FOLDER)
@click.option(
    "--to",
    "root",
    required=True,
    metavar="ROOT",
    type=_place,
    help="The node's staging folder; {node}, {user}, {job} are filled in.",
)
@format_option
def plan(sources: tuple[Path, ...], root: Path, form: str) -> int:
    """What `run` would copy, and whether it fits. Exit 1 when it does not.

    SOURCE is <root>/<name>/<version>, or <root>/<name> where there is one version.
    """
    from pitools.stage import plan as planning
    from pitools.stage import source

    fits = True
    with Output(form, _PLAN_COLUMNS) as out:
        for record in planning.plan([source.load(source.find(path)) for path in sources], root):
            out(record)
            fits = fits and record.fits
    return 0 if fits else 1


@group.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--to",
    "root",
    metavar="ROOT",
    type=_place,
    help="The node's staging folder; {node}, {user}, {job} are filled in.",
)
@click.option("--verify", is_flag=True, help="Read a copy that is already there, and replace it if it is damaged.")
@readers_option
@click.option("--timeout", default="1h", show_default=True, metavar="TIME", help="Wait for another process this long.")
@click.option("--receipt", type=_place, metavar="FILE", help="Also write the records here, when all are staged.")
@format_option
def run(
    sources: tuple[str, ...], root: Path | None, verify: bool, readers: int | None, timeout: str,
    receipt: Path | None, form: str,
) -> None:  # fmt: skip
    """Copy dataset versions to ROOT/objects/<version>, verified; safe to repeat.

    SOURCE is <root>/<name>/<version>, or <root>/<name> where there is one version, or - for `plan`'s records.
    """
    import msgspec

    from pitools.core.files import os_error, write_atomic
    from pitools.core.progress import bar
    from pitools.stage import source
    from pitools.stage.run import stage

    timeout_s = units.seconds(timeout)
    lines = []
    if receipt:
        try:
            receipt.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # before the copy, which may take an hour
            raise os_error(error, receipt.parent) from error
    with _stoppable(), Output(form, _RUN_COLUMNS) as out:
        for folder, to in _work(sources, root):
            dataset = source.load(folder)
            with bar(dataset.manifest.name, dataset.manifest.total_bytes) as advance:
                record = stage(
                    dataset, to, verify=verify, readers=readers or 0, timeout_s=timeout_s, advance=advance,
                    waiting=lambda: click.echo("waiting for another process that stages this version", err=True),
                )  # fmt: skip
            out(record)
            lines.append(msgspec.json.encode(record) + b"\n")
        if receipt:
            write_atomic(receipt, b"".join(lines))


@group.command()
@click.argument("path", type=_place)
@readers_option
@format_option
def check(path: Path, readers: int | None, form: str) -> int:
    """Read everything and compare it with the manifest: one record per finding, then a summary. Exit 1 on findings.

    PATH is a staging ROOT, a dataset, or one version of it.
    """
    from pitools.stage.verify import Check, Finding
    from pitools.stage.verify import check as judge
    from pitools.stage.workers import default_readers

    summary: Check | None = None
    with Output(form) as out:
        for record in judge(path, readers=readers or default_readers()):
            if isinstance(record, Finding):
                out(record)
            else:
                summary = record
    assert summary is not None
    with Output(form) as out:  # its own table: other columns
        out(summary)
    return 1 if summary.findings else 0


@group.command("list")
@click.argument("root", type=_place)
@format_option
def list_(root: Path, form: str) -> None:
    """The dataset versions staged at ROOT."""
    from pitools.stage.listing import staged

    with Output(form) as out:
        for record in staged(root):
            out(record)


def _work(sources: tuple[str, ...], root: Path | None) -> Iterator[tuple[Path, Path]]:
    """Pairs of version folder and staging root, from the command line or from plans on stdin."""
    from pitools.stage import plan as planning
    from pitools.stage import source

    if "-" in sources:
        if len(sources) > 1 or root:
            raise UsageError("- stands alone: the plans say what goes where", hint="pit-stage plan … | pit-stage run -")
        for record in planning.read(sys.stdin):
            yield Path(record.source), Path(record.root)
        return
    if root is None:
        raise UsageError("where to?", where="--to", hint="name the staging folder on this node, such as --to /nvme/pit")
    for text in sources:
        yield source.find(Path(text)), root


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM end the work with everything cleaned up; more of them do not disturb the cleaning."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]

    def stop(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = [(number, signal.signal(number, stop)) for number in numbers]
    stopped = False
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        stopped = True  # and still deaf: the process is about to end, with the code of the first signal
        raise
    finally:
        for number, handler in before if not stopped else ():
            signal.signal(number, handler)
