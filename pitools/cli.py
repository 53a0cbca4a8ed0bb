"""The umbrella `pit`: a noun, its one-line help, and an import only when it is used."""

from __future__ import annotations

import gc
import os
import select
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from pitools import __version__
from pitools.commands import lazy_group
from pitools.core.errors import INTERNAL, ClusterError, PitError, ToolMissing, UsageError, suggest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

NOUNS = {
    "capacity": "What to buy, rent or change: waits, use and cost, from accounting.",
    "checkpoint": "What a run could go on from: list, check, prune.",
    "dataset": "Recordings in, verified Zarr datasets out.",
    "launch": "Run a training job on a site, as a folder you can follow.",
    "monitor": "What the fleet does with its hours: usage, goodput, metrics, alerts, a live view.",
    "node": "Check nodes, drain and return them, and show what was wrong.",
    "perf": "Where the time of training steps goes, and what limits them.",
    "place": "Which site, when, and what it costs; one queue over several sites.",
    "script": "The sbatch files of a site: list, render, check.",
    "site": "List, show, check and generate site files.",
    "stage": "Move datasets to a node's own NVMe, verified (also: pit-stage).",
    "tenancy": "Who may have what: a policy of teams, tiers and limits, and Slurm's accounting.",
    "topology": "Choose nodes and order ranks by the network fabric.",
}
# Packages that only some commands import, by the extra that installs them.
_EXTRAS = {
    "data": ("PIL", "crc32c", "h5py", "numcodecs", "scipy", "zarr"),
    "jax": ("jax", "orbax"),
    "lerobot": ("av", "pyarrow"),
    "monitor": ("prometheus_client",),
    "plot": ("matplotlib",),
    "s3": ("obstore",),
    "torch": ("torch",),
    "tui": ("textual",),
}


class Umbrella(click.Group):
    """Nouns are looked up by name; an unknown noun runs `pit-<noun>` from the PATH, so anyone can add one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The nouns, without importing any."""
        return sorted(NOUNS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help lines, without importing any noun."""
        with formatter.section("Nouns"):
            formatter.write_dl(sorted(NOUNS.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a noun's group, or stand in for `pit-<noun>`."""
        if cmd_name in NOUNS:
            command: click.Command = import_module(f"pitools.commands.{cmd_name}").group
            return command
        import shutil

        path = shutil.which(f"pit-{cmd_name}")
        return _external(cmd_name, path) if path else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """As click does, but without importing any noun."""
        return lazy_group.complete_group(self, ctx, incomplete, NOUNS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but naming the nearest noun."""
        if self.get_command(ctx, args[0]) is None and not (args[0].startswith("-") or ctx.resilient_parsing):
            raise UsageError(f'no noun "{args[0]}"', hint=suggest(args[0], NOUNS))
        return super().resolve_command(ctx, args)


def _external(name: str, path: str) -> click.Command:
    @click.command(
        name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def run_it(args: tuple[str, ...]) -> None:
        os.execv(path, [path, *args])

    return run_it


def _print_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Print the help of every command, for a pager or grep, and end."""
    if value and not ctx.resilient_parsing:
        for path, context in lazy_group.walk_commands(ctx.command, None, "pit"):
            click.echo(f"{path}\n{'=' * len(path)}\n{context.get_help()}\n")
        ctx.exit()


@click.command(cls=Umbrella, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pit")
@click.option(
    "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_print_all, help="Help of all commands."
)
def group() -> None:
    """From a script and a dataset to a measured run on the right nodes of a Slurm cluster."""


def run(command: click.Command, name: str) -> int:
    """Run a click command; the exit code is design: an error's own class decides it (`core/errors.py`)."""
    _open_standard_streams()
    try:
        code = command.main(prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except PitError as error:
        report(name, error)
        return error.exit_code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo(f"{name}: interrupted", err=True)
        return 130
    except SystemExit as error:
        if error.code != 1:
            raise
        if not _reader_is_gone():  # click exits with 1 for any EPIPE, also of another pipe than these
            report(name, ClusterError("a pipe to another process is broken", hint="run this again"))
            return ClusterError.exit_code
        _discard_stdout()  # the reader (`head`, `less`) has enough, which is no failure
        return 0
    except OSError as error:
        where = str(error.filename or "")
        hint = _whose(where) if isinstance(error, PermissionError) and where else ""
        report(name, ClusterError(error.strerror or str(error), where=where, hint=hint))
        try:
            sys.stdout.flush()
        except OSError:
            _discard_stdout()
        return ClusterError.exit_code
    except UnicodeError as error:
        report(name, ClusterError(f"not UTF-8 text: {error}"))
        return ClusterError.exit_code
    except Exception as error:  # noqa: BLE001 (the last catch: Python's own exit code, 1, is an answer)
        if missing_package := _missing_package(error):
            report(name, missing_package)
            return missing_package.exit_code
        # A mistake of ours: its traceback is what a report of it needs.
        import traceback

        traceback.print_exc()
        return INTERNAL


def _missing_package(error: Exception) -> ToolMissing | None:
    """Return the error for a package of an extra that cannot be imported; None for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    for extra, packages in _EXTRAS.items():
        if package in packages:
            return ToolMissing(f"package {package}: {error}", hint=f"pip install 'pitools-hpc[{extra}]'")
    return None


def _open_standard_streams() -> None:
    """Open the standard streams that the caller closed (`>&-`) on /dev/null: else other files take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is just this one; inheritable, as standard streams are.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def _reader_is_gone() -> bool:
    """Return whether the reader of stdout or stderr has closed its end."""
    poller = select.poll()
    for descriptor in (1, 2):
        poller.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))


def _discard_stdout() -> None:
    """Send what is left in stdout's buffer to /dev/null: else Python complains once more at exit, with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _whose(path: str) -> str:
    """Who could allow it: the owner of what can be seen of a path."""
    from pathlib import Path

    from pitools.core.trust import user_name

    for at in (Path(path), *Path(path).parents):
        try:
            return f"{at} is {user_name(at.stat().st_uid)}'s: ask them, or do it as them"
        except OSError:  # not to be seen
            continue
    return ""


def report(name: str, error: PitError) -> None:
    """What was wrong, where, and what next, on stderr."""
    click.echo(f"{name}: error: {error.message}", err=True)
    if error.where:
        click.echo(f"  where: {error.where}", err=True)
    if error.hint:
        click.echo(f"  next:  {error.hint}", err=True)
    elif error.retry:
        click.echo("  next:  run the same command again later", err=True)


def _collect_rarely() -> None:
    """Look for cyclic garbage less often than Python does by itself: what is imported and listed is none."""
    gc.set_threshold(100_000)


def main() -> None:
    """Entry point of `pit`."""
    _collect_rarely()
    sys.exit(run(group, "pit"))


def stage() -> None:
    """Entry point of `pit-stage`. Ends without taking the interpreter down, which is a fifth of a small run's time."""
    _collect_rarely()
    code = run(import_module("pitools.commands.stage").group, "pit-stage")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python flushes once more, and says what is wrong
    os._exit(code)


def psbatch() -> None:
    """Entry point of `psbatch`."""
    sys.exit(run(import_module("pitools.commands.psbatch").command, "psbatch"))
