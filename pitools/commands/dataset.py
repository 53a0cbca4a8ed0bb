"""`pit dataset`: recordings in, versions that can be trusted, and what a loader makes of them."""

from __future__ import annotations

from importlib import import_module

import click

from pitools.core.errors import UsageError, nearest

# Module, what it calls the command, and a line of help: none is imported but the one that is used.
COMMANDS = {
    "ingest": ("dataset_ingest", "ingest", "Recordings to one version: HDF5, LeRobot, Zarr, JPEG rows."),
    "list": ("dataset_catalog", "list_versions", "The versions in a root, searched by what they hold."),
    "show": ("dataset_catalog", "show", "Arrays and episodes of a version; a picture of an episode."),
    "check": ("dataset_check", "check", "Find damage and bad data: files, values, frames, episodes."),
    "diff": ("dataset_catalog", "diff", "What differs between two versions."),
    "tag": ("dataset_keep", "tag", "Names that move from version to version."),
    "retire": ("dataset_keep", "retire", "Mark versions as no longer wanted, or take that back."),
    "gc": ("dataset_keep", "gc", "Remove retired versions that nothing names."),
    "rebuild": ("dataset_keep", "rebuild", "Make a version again from its recordings, and compare."),
    "plan-packing": ("dataset_packing", "plan_packing", "How episodes fit into rows of a fixed length."),
    "bench": ("dataset_bench", "bench", "What bounds a loader: the disk, decoding, or the device."),
}


class Dataset(click.Group):
    """Its commands, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """By name, in the order of work."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help lines, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"pitools.commands.{module}"), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but naming the nearest command."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise UsageError(f'no command "{args[0]}"', where="pit dataset", hint=nearest(args[0], COMMANDS))
        return super().resolve_command(ctx, args)


@click.group(cls=Dataset, context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Recordings in, verified Zarr datasets out; which versions are kept, and how fast they are read."""
