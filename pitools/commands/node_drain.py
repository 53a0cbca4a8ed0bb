"""`pit node list|drain|return|watch`: the controller of a site's drains."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.node_check import config_option, load_node_config
from pitools.commands.options import format_option, rows_format_option, site_option

if TYPE_CHECKING:
    from pitools.node.control.policy import ActRow
    from pitools.node.control.tick import Controller

NODE_COLUMNS = (
    "node",
    "state",
    "incident",
    "phase",
    "report_age_s",
    "failed",
    "unknown",
    "finding",
    "reason",
    "suspicion",
)
ACT_COLUMNS = ("node", "act", "done", "incident", "check", "why", "error")
act_option = click.option(
    "--act/--dry-run", default=None, help="Act, or only print what would be done, whatever [control] act says."
)


def load_controller(config_path: Path | None, site_name: str) -> Controller:
    """Return the controller of a site. Raises PitError."""
    return _load(config_path, site_name)[0]


def _load(config_path: Path | None, site_name: str) -> tuple[Controller, bool]:
    """Return the controller of a site, and whether its file allows it to act."""
    from pitools.node.control.tick import Controller
    from pitools.site.connect import client
    from pitools.site.load import load_site

    os.umask(0o022)  # all users read the journal, to choose nodes
    site = load_site(site_name)
    config = load_node_config(config_path, site_name)
    return Controller(client(site), config), config.control.act


@click.command("list")
@config_option
@site_option
@format_option
def list_command(config_path: Path | None, site_name: str, form: str) -> None:
    """List all nodes: Slurm's state, the open incident, the last report, and the users whose runs suspect it."""
    from msgspec import structs

    from pitools.core.output import Output
    from pitools.node.site_suspicion import read_suspicions

    controller = load_controller(config_path, site_name)
    rows, problems = controller.node_rows()
    suspected = read_suspicions(controller.config, {row.node for row in rows})
    with Output(form, NODE_COLUMNS) as out:
        for row in rows:
            one = suspected.get(row.node)
            out(structs.replace(row, suspicion=one.summary) if one else row)
    _print_lines(problems)


@click.command()
@act_option
@config_option
@site_option
@format_option
def drain(act: bool | None, config_path: Path | None, site_name: str, form: str) -> None:
    """Drain nodes whose reports say so, and return those that have recovered; a line for each act. For cron.

    Only prints what it would do without --act or [control] act = true. It never touches a drain that a person or
    another tool made, and drains within the limits of [control]. While another tick runs, this one ends at once, with
    exit 0. On stderr, once: what is held back, or wrong with reports.
    Exit 4: an act failed; 75: Slurm does not answer, and nothing was changed.
    """
    from pitools.core.errors import ClusterError, NoSpace, TryLater, Unreachable
    from pitools.core.output import Output

    controller, may_act = _load(config_path, site_name)
    is_acting = may_act if act is None else act
    try:
        result = controller.tick(act=is_acting)
    except TryLater as error:
        if isinstance(error, Unreachable | NoSpace):
            raise
        _print_lines([str(error)])  # another tick is at work
        return
    with Output(form, ACT_COLUMNS) as out:
        for row in result.rows:
            out(row)
    _print_lines(result.problems)
    if result.rows and not is_acting:
        _print_lines(["a dry run: nothing was changed; to act: pit node drain --act"])
    if failed := [row for row in result.rows if row.error]:
        raise ClusterError(
            f"{len(failed)} acts failed: {failed[0].node}: {failed[0].error}",
            hint="mend that; the next tick tries it again",
        )


@click.command("return")
@click.argument("nodes", nargs=-1, required=True, shell_complete=completion.complete_nodes)
@config_option
@site_option
@format_option
@click.pass_context
def return_command(
    ctx: click.Context, nodes: tuple[str, ...], config_path: Path | None, site_name: str, form: str
) -> None:
    """Return NODES (host lists) that pit node drained, at once: for a person who repaired them.

    A node returns if it is up, was checked since its drain, and no check that drains fails.
    Exit 1: a node was not returned.
    """
    from pitools.core import hostlist
    from pitools.core.output import Output

    names = list(dict.fromkeys(name for text in nodes for name in hostlist.expand(text)))
    result = load_controller(config_path, site_name).return_nodes(names)
    with Output(form, ACT_COLUMNS) as out:
        for row in result.rows:
            out(row)
    _print_lines(result.problems)
    if left := [row for row in result.rows if not row.done]:
        _print_lines(f"{row.node} is not returned: {row.error or row.why}" for row in left)
        if ours := hostlist.fold(row.node for row in left if row.incident):
            command = f"scontrol update nodename={ours} state=resume"
            _print_lines([f"to resume ours all the same, until a new report asks for a drain: {command}"])
        ctx.exit(1)


@click.command()
@act_option
@click.option("--every", default="60s", show_default=True, metavar="TIME", help="From one tick's end to the next.")
@config_option
@site_option
@rows_format_option
def watch(act: bool | None, every: str, config_path: Path | None, site_name: str, form: str) -> None:
    """Do what `pit node drain` does repeatedly, and print each act when it is new. The file is read once."""
    import sys
    import time

    from pitools.core.errors import PitError, UsageError
    from pitools.core.output import Output
    from pitools.core.units import parse_duration

    every_s = parse_duration(every)
    if every_s <= 0:
        raise UsageError(f'--every: "{every}" is no time between ticks (expected at least 1s)', hint="--every 60s")
    controller, may_act = _load(config_path, site_name)
    shown: list[ActRow] = []
    # A table would be printed at the end.
    lines = "tsv" if form == "table" or (form == "auto" and sys.stdout.isatty()) else form
    with Output(lines, ACT_COLUMNS, ends_with_reader=True) as out:
        while True:
            try:
                rows, problems = controller.tick(act=may_act if act is None else act)
            except PitError as error:  # as cron does: the next tick may not have it
                rows, problems = shown, controller.new_lines([str(error)])
            for row in rows:
                if row not in shown:
                    out(row)
            _print_lines(problems)
            shown = rows
            time.sleep(every_s)


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines on stderr."""
    for line in lines:
        click.echo(f"pit: {line}", err=True)
