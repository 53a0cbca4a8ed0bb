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

    NODES is a host list such as n[01-16], or - to read lists or records from stdin. Without NODES, inside an
    allocation, its own. With --hostfile, a fabric that cannot be read is no reason to stop: the order is by name then.
    """
    import os
    import sys

    from pitools.core import hosts
    from pitools.core.errors import PitError, UsageError
    from pitools.core.output import Output
    from pitools.site.connect import client
    from pitools.site.load import load
    from pitools.slurm.client import Client
    from pitools.topology import discover, order
    from pitools.topology.model import Fabric

    slurm = client(load(site_name)) if site_name else Client()
    if job:
        running = slurm.jobs(ids=[job])
        nodes = running[0].node_list if running else ""
    elif nodes == "-":
        nodes = _named(sys.stdin.read())
    elif nodes is None:
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise UsageError("no nodes to order", hint="give a host list, - for stdin, or --job ID of a running job")
    names = hosts.expand(nodes)
    try:
        fabric = discover.fabric(slurm)
    except PitError as error:
        if not hostfile:
            raise
        # A job that has waited for hours for its nodes is not ended for want of a better order.
        click.echo(f"pit: ranks in name order: {error}", err=True)
        fabric = Fabric(leaves=())
    slots = order.order(names, fabric)
    if hostfile:
        click.echo("".join(f"{slot.node}\n" * hostfile for slot in slots), nl=False)
    elif form == "hosts":
        click.echo(",".join(slot.node for slot in slots))  # folding would sort
    else:
        with Output(form, ("position", "node", "leaf")) as out:
            for slot in slots:
                out(slot)


def _named(text: str) -> str:
    """The nodes that lines of text name: host lists, or records with a `node`."""
    import json

    from pitools.core.errors import UsageError

    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line)["node"] if line.startswith("{") else ",".join(line.split()))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{line!r} is no record with a node", where="stdin") from error
    return ",".join(filter(None, found))
