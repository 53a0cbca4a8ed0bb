"""`pit script`: the sbatch files of a site."""

from __future__ import annotations

from typing import IO

import click

from pitools.commands.options import data_option, format_option, parse_named_paths, site_option


@click.group()
def group() -> None:
    """The sbatch files of a site: list, render, check."""


@group.command("list")
@site_option
@format_option
def list_command(site_name: str, form: str) -> None:
    """List the scripts a site can render."""
    from pitools.core.output import Output
    from pitools.site.load import load_site
    from pitools.site.template import list_templates

    with Output(form, ("script", "origin", "path")) as out:
        for template in list_templates(load_site(site_name)):
            out(template)


@group.command()
@click.argument("script")
@click.argument("command", nargs=-1)
@site_option
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--tasks-per-node", type=click.IntRange(1), default=1, show_default=True)
@click.option("--gpus-per-node", type=click.IntRange(0), help="Default: all of the partition's; none for stage.")
@click.option("--time", metavar="TIME", default="", help="2h, 30m or Slurm's form; default: the site's.")
@click.option("--framework", type=click.Choice(["jax", "torch", "none"]), default="none", show_default=True)
@data_option("Stage this dataset; ranks find it at PIT_DATA_NAME.")
def render(
    script: str,
    command: tuple[str, ...],
    site_name: str,
    nodes: int,
    tasks_per_node: int,
    gpus_per_node: int | None,
    time: str,
    framework: str,
    data: tuple[str, ...],
) -> None:
    """Print SCRIPT as a site's sbatch file, running COMMAND on every rank: `render train … -- python train.py`.

    stage needs no COMMAND: it has no ranks.
    """
    from pitools.site.load import load_site
    from pitools.site.user_scripts import render_for_user

    site = load_site(site_name)
    click.echo(
        render_for_user(
            site,
            script,
            command,
            nodes=nodes,
            tasks_per_node=tasks_per_node,
            gpus_per_node=gpus_per_node,
            time=time,
            framework=framework,
            data=parse_named_paths(data, "--data"),
        ),
        nl=False,
    )


@group.command()
@click.argument("file", type=click.File())
@site_option
@format_option
@click.pass_context
def check(ctx: click.Context, file: IO[str], site_name: str, form: str) -> None:
    """Check an sbatch file (- is stdin): by `bash -n`, and by `sbatch --test-only` where the site has Slurm."""
    from pitools.core.output import Output
    from pitools.site.load import load_site
    from pitools.site.user_scripts import check_script

    bad = 0
    with Output(form, ("check", "ok", "detail")) as out:
        for verdict in check_script(load_site(site_name), file.read()):
            bad += not verdict.ok
            out(verdict)
    if bad:
        ctx.exit(1)
