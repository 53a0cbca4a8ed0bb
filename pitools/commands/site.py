"""`pit site`: list, show and check site files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pitools.commands import completion
from pitools.commands.options import rows_format_option

if TYPE_CHECKING:
    from pitools.core.errors import PitError


@click.group()
def group() -> None:
    """List, show, check and generate site files."""


@group.command("list")
@rows_format_option
def list_command(form: str) -> None:
    """List the sites of this machine."""
    from pitools.core.errors import PitError
    from pitools.core.output import Output
    from pitools.site import load, schema

    failed: list[PitError] = []
    with Output(form, ("site", "scheduler", "connection", "partitions", "gpus", "description")) as out:
        for name in load.site_names():
            try:
                out(schema.site_row(load.load_site(name)))
            except PitError as error:  # one bad file must not hide the others
                failed.append(error)
    _raise_last(failed)


def _raise_last(failed: list[PitError]) -> None:
    """Print all errors but the last, and raise the last."""
    for error in failed[:-1]:
        click.echo(f"pit: {error}" + (f"; {error.hint}" if error.hint else ""), err=True)
    if failed:
        raise failed[-1]


@group.command()
@click.argument("name")
@click.option("--origin", is_flag=True, help="Print the file or variable of each value.")
@rows_format_option
def show(name: str, origin: bool, form: str) -> None:
    """Show the effective settings of a site."""
    from pitools.core.output import Output
    from pitools.site import load

    with Output(form, ("key", "value", "origin") if origin else ("key", "value")) as out:
        for setting in load.setting_origins(name):
            out(setting)


@group.command()
@click.argument("names", nargs=-1)
@click.option("--live", is_flag=True, help="Compare with the running cluster too.")
@rows_format_option
@click.pass_context
def check(ctx: click.Context, names: tuple[str, ...], live: bool, form: str) -> None:
    """Check site files. Exit 1: a site has a finding; 75: a site is unreachable."""
    from pitools.core.errors import PitError, UsageError
    from pitools.core.output import Output
    from pitools.site import check as site_check
    from pitools.site import load

    findings = 0
    failed: list[PitError] = []
    with Output(form, ("site", "key", "problem", "hint")) as out:
        for name in names or load.site_names():
            try:
                for finding in site_check.check_site(name, live=live):
                    findings += 1
                    out(finding)
            except UsageError:
                raise
            except PitError as error:  # an unreachable site must not prevent the check of the next one
                error.where = f"site {name}: {error.where}" if error.where else f"site {name}"
                failed.append(error)
    _raise_last(failed)
    if findings:
        ctx.exit(1)


@group.command()
@click.argument("name")
@click.option("--host", metavar="HOST", default="", help="Run the cluster's commands over ssh on this host.")
@click.option("--conf", metavar="FILE", default="", help="SLURM_CONF of the cluster, if not the host's own.")
def probe(name: str, host: str, conf: str) -> None:
    """Print a site file for the running cluster, generated from its Slurm."""
    from pitools.site import probe

    click.echo(probe.make_site_file(name, host=host, conf=conf), nl=False)


@group.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("name", shell_complete=completion.complete_sites)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_command(name: str, command: tuple[str, ...]) -> None:
    """Run COMMAND with the Slurm of a site: its slurm.conf and its commands, over ssh where the site is elsewhere.

    As `pit site exec alpha -- squeue --me`. The exit code is the command's; 254 for its 255 over ssh.
    """
    import sys

    from pitools.site.interactive import interactive_call
    from pitools.site.load import load_site

    interactive_call(load_site(name), command, terminal=sys.stdin.isatty() and sys.stdout.isatty()).execute()


@group.command()
@click.argument("name", shell_complete=completion.complete_sites)
def shell(name: str) -> None:
    """Open a shell with the Slurm of a site, over ssh where the site is elsewhere."""
    import os

    from pitools.site.interactive import interactive_call
    from pitools.site.load import load_site

    site = load_site(name)
    program = "bash" if site.connection.kind == "ssh" else os.environ.get("SHELL") or "bash"
    interactive_call(site, [program, "-i"], env={"PIT_SITE": site.name}).execute()
