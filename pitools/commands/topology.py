"""`pit topology`: which rank sits where."""

from __future__ import annotations

import click

from pitools.commands.options import format_option


@click.group()
def group() -> None:
    """Which rank sits where on the site's switches."""


@group.command()
@click.argument("nodes", required=False)
@click.option("--site", "site_name", envvar="PIT_SITE", metavar="NAME", help="Whose fabric; inside a job, its own.")
@click.option("--job", metavar="ID", help="Order the nodes of this running job.")
@click.option("--hostfile", type=click.IntRange(1), metavar="N", help="Print each node N times, for SLURM_HOSTFILE.")
@format_option
def order(nodes: str | None, site_name: str | None, job: str | None, hostfile: int | None, form: str) -> None:
    """Put NODES in rank order: depth first over the switch tree.

    NODES is a host list such as n[01-16], or - to read one from stdin. Without NODES, inside an allocation, its own.
    """
    import os
    import sys

    from pitools.core import hosts
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.site.connect import client
    from pitools.site.load import load
    from pitools.slurm.client import Client
    from pitools.topology import discover, order

    slurm = client(load(site_name)) if site_name else Client()
    if job:
        running = slurm.jobs(ids=[job])
        nodes = running[0].node_list if running else ""
    elif nodes == "-":
        nodes = ",".join(sys.stdin.read().split())
    elif nodes is None:
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise UsageError("no nodes to order", hint="give a host list, - for stdin, or --job ID of a running job")
    slots = order.order(hosts.expand(nodes), discover.fabric(slurm))
    if hostfile:
        for slot in slots:
            for _ in range(hostfile):
                click.echo(slot.node)
        return
    with Output(form, ("position", "node", "leaf")) as out:
        for slot in slots:
            out(slot)
