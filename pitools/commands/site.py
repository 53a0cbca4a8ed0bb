"""`pit site`: clusters as files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pitools.commands.options import format_option

if TYPE_CHECKING:
    from pitools.core.errors import PitError


@click.group()
def group() -> None:
    """Clusters as files: list, show, check, probe."""


@group.command("list")
@format_option
def list_command(form: str) -> None:
    """List the sites this machine knows."""
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
    """Raise what went wrong last, when everything before it has been said."""
    for error in failed[:-1]:
        click.echo(f"pit: {error}" + (f"; {error.hint}" if error.hint else ""), err=True)
    if failed:
        raise failed[-1]


@group.command()
@click.argument("name")
@click.option("--origin", is_flag=True, help="Say which file or variable each value came from.")
@format_option
def show(name: str, origin: bool, form: str) -> None:
    """Show every setting of a site in force."""
    from pitools.core.output import Output
    from pitools.site import load

    with Output(form, ("key", "value", "origin") if origin else ("key", "value")) as out:
        for setting in load.setting_origins(name):
            out(setting)


@group.command()
@click.argument("names", nargs=-1)
@click.option("--live", is_flag=True, help="Compare with the running cluster too.")
@format_option
@click.pass_context
def check(ctx: click.Context, names: tuple[str, ...], live: bool, form: str) -> None:
    """Judge site files; exit 1 when one has a finding, 75 when one is away."""
    from pitools.core.errors import PitError, UsageError
    from pitools.core.output import Output
    from pitools.site import check as judge
    from pitools.site import load

    findings = 0
    failed: list[PitError] = []
    with Output(form, ("site", "key", "problem", "hint")) as out:
        for name in names or load.site_names():
            try:
                for finding in judge.check_site(name, live=live):
                    findings += 1
                    out(finding)
            except UsageError:
                raise
            except PitError as error:  # a site that is away is no reason not to judge the next one
                error.where = f"site {name}: {error.where}" if error.where else f"site {name}"
                failed.append(error)
    _raise_last(failed)
    if findings:
        ctx.exit(1)


@group.command()
@click.argument("name")
@click.option("--host", metavar="HOST", default="", help="Reach the cluster through ssh to this host.")
@click.option("--conf", metavar="FILE", default="", help="SLURM_CONF of the cluster, if not the host's own.")
def probe(name: str, host: str, conf: str) -> None:
    """Print a site file for the cluster that is reached here, filled in from Slurm's own answers."""
    from pitools.site import probe

    click.echo(probe.make_site_file(name, host=host, conf=conf), nl=False)
