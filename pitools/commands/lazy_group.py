"""A click group whose commands are in several modules, imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from pitools.core.errors import UsageError, suggest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_group(
    group: click.Group, ctx: click.Context, prefix: str, lines: Mapping[str, str]
) -> list[CompletionItem[str]]:
    """A group's commands, with a line of help each, and then its options."""
    from click.shell_completion import CompletionItem

    items = [CompletionItem(name, help=line) for name, line in lines.items() if name.startswith(prefix)]
    return [*items, *click.Command.shell_complete(group, ctx, prefix)]


def walk_commands(
    command: click.Command, parent: click.Context | None, name: str, **settings: Any
) -> Iterator[tuple[str, click.Context]]:
    """Yield each command below this one with its full name, a group before its commands. Imports all of them.

    settings: of the contexts, such as max_content_width.
    """
    context = click.Context(command, parent=parent, info_name=name, **{**command.context_settings, **settings})
    yield context.command_path, context
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            if found := command.get_command(context, each):
                yield from walk_commands(found, context, each, **settings)


class LazyGroup(click.Group):
    """A group of commands by name.

    table: name → (module below `pitools.commands`, name in it, line of help), in the order of a user's work.
    """

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """By name, in the order of work."""
        return list(self.table)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help lines, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in self.table.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self.table:
            return None
        module, attribute, _ = self.table[cmd_name]
        command: click.Command = getattr(import_module(f"pitools.commands.{module}"), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """As click does, but without importing any command."""
        return complete_group(self, ctx, incomplete, {name: line for name, (_, _, line) in self.table.items()})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but naming the nearest command."""
        if args[0] not in self.table and not (args[0].startswith("-") or ctx.resilient_parsing):
            raise UsageError(f'no command "{args[0]}"', where=ctx.command_path, hint=suggest(args[0], self.table))
        return super().resolve_command(ctx, args)
