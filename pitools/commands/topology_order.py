"""`pit topology order`: nodes in rank order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pitools.commands.options import SINGLE_VALUE, format_option
from pitools.commands.topology_options import load_fabric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pitools.core.record import Record
    from pitools.slurm.client import Client
    from pitools.topology.fabric_model import Fabric
    from pitools.topology.rank_order import NodeSlot


@click.command()
@click.argument("nodes", required=False)
@click.option(
    "--site",
    "site_name",
    envvar="PIT_SITE",
    metavar="NAME",
    **SINGLE_VALUE,
    help="Whose fabric; inside a job, its own.",
)
@click.option("--job", metavar="ID", help="Order the nodes of this running job.")
@click.option("--hostfile", type=click.IntRange(1), metavar="N", help="Short for --as hostfile --gpus N.")
@click.option(
    "--as",
    "shape",
    type=click.Choice(["hostfile", "torchrun", "rankfile", "jax", "ranks"]),
    help="For srun, torchrun, Open MPI or JAX; or every rank with its groups.",
)
@click.option("--gpus", type=click.IntRange(1), default=1, metavar="N", help="GPUs of a node, a rank each.")
@click.option("--cpus", type=click.IntRange(1), default=1, metavar="N", help="Cores of a rank, for rankfile.")
@click.option("--tensor", type=click.IntRange(1), default=1, metavar="T", help="Ranks of a tensor group.")
@click.option("--pipeline", type=click.IntRange(1), default=1, metavar="P", help="Stages of a pipeline.")
@click.option("-H", "as_hosts", is_flag=True, help="One line of nodes, in order.")
@format_option
def order(
    nodes: str | None,
    site_name: str | None,
    job: str | None,
    hostfile: int | None,
    shape: str | None,
    gpus: int,
    cpus: int,
    tensor: int,
    pipeline: int,
    as_hosts: bool,
    form: str,
) -> None:
    """Put NODES in rank order: depth first over the switch tree.

    NODES is a host list such as n[01-16], or - to read lists or records from stdin. Without NODES, inside an
    allocation, its own. With --as hostfile, a fabric that cannot be read is no reason to stop: the order is by name
    then.
    """
    import os
    import sys

    from pitools.core import hostlist
    from pitools.core.errors import UsageError
    from pitools.site.connect import client
    from pitools.site.load import load_site
    from pitools.slurm.client import Client
    from pitools.topology import rank_layout, rank_order
    from pitools.topology.fabric_model import expand_ordered

    site = load_site(site_name) if site_name else None
    slurm = client(site) if site and site.scheduler == "slurm" else Client()
    if job:
        running = [each for each in slurm.jobs(ids=[job]) if each.node_list]
        if len(running) > 1:
            hint = f"name one of them: {', '.join(each.job_id for each in running[:4])}"
            raise UsageError(f"job {job} is {len(running)} jobs", where="--job", hint=hint)
        if not running:
            raise UsageError(f"job {job} holds no nodes", where="--job", hint="it must run: squeue -j ID")
        nodes = running[0].node_list
    elif nodes == "-":
        nodes = _node_names(sys.stdin.read())
    elif nodes is None:
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise UsageError("no nodes to order", hint="give a host list, - for stdin, or --job ID of a running job")
    if hostfile and shape not in (None, "hostfile"):
        raise UsageError(f"both --hostfile and --as {shape}", hint="give one of them")
    if as_hosts and (shape or hostfile):
        raise UsageError("both -H and --as", hint="give one of them")
    shape, gpus = ("hostfile", hostfile) if hostfile else (shape, gpus)
    nodes = ",".join(nodes.split())
    expand_ordered(nodes)  # before it is expanded: it may stand for more names than there is memory
    fabric = _fabric(site_name, must=shape != "hostfile")
    slots = rank_order.rank_order(hostlist.expand(nodes), fabric, rank_layout.nodes_per_replica(gpus, tensor, pipeline))
    if fabric.leaves and (strange := [slot.node for slot in slots if not slot.leaf]):
        told = ", ".join(strange[:5]) + (", …" if len(strange) > 5 else "")
        click.echo(f"pit: {len(strange)} of {len(slots)} nodes are not in the topology, so come last: {told}", err=True)
    if shape:
        _print_layout(shape, slots, nodes, slurm, gpus=gpus, cpus=cpus, tensor=tensor, pipeline=pipeline, form=form)
    elif as_hosts or form == "hosts":
        click.echo(",".join(slot.node for slot in slots))  # folding would sort
    else:
        _records(slots, ("position", "node", "leaf"), form)


def _fabric(site_name: str | None, *, must: bool) -> Fabric:
    from pitools.core.errors import PitError
    from pitools.topology.fabric_model import Fabric

    try:
        return load_fabric(site_name)[0]
    except PitError as error:
        if must:
            raise
        # A job that has waited for hours for its nodes is not ended for want of a better order.
        click.echo(f"pit: ranks in name order: {error}", err=True)
        return Fabric(leaves=())


def _print_layout(
    shape: str,
    slots: Sequence[NodeSlot],
    nodes: str,
    slurm: Client,
    *,
    gpus: int,
    cpus: int,
    tensor: int,
    pipeline: int,
    form: str,
) -> None:
    from pitools.topology import rank_layout
    from pitools.topology.fabric_model import expand_ordered

    seats = rank_layout.place_ranks(
        slots, gpus, tensor, pipeline
    )  # also where only the nodes are printed: what cannot be is said
    if shape == "hostfile":
        click.echo(rank_layout.format_hostfile(slots, gpus), nl=False)
    elif shape == "torchrun":
        click.echo(rank_layout.format_torchrun(slots, gpus, _addresses(slurm, slots[0].node)), nl=False)
    elif shape == "rankfile":
        click.echo(rank_layout.format_rankfile(slots, gpus, cpus), nl=False)
    elif shape == "jax":
        _records([rank_layout.jax_mesh(seats, expand_ordered(nodes))], (), "jsonl" if form == "auto" else form)
    else:
        _records(seats, ("rank", "node", "local_rank", "data", "pipeline", "tensor", "leaf"), form)


def _addresses(slurm: Client, node: str) -> dict[str, str]:
    """Where the first node is reached: its name need not resolve on the others."""
    from pitools.core.errors import PitError

    try:
        return {node: slurm.address(node)}
    except PitError as error:
        click.echo(f"pit: the master by its name: {error}", err=True)
        return {}


def _records(records: Sequence[Record], columns: tuple[str, ...], form: str) -> None:
    from pitools.core.output import Output

    with Output(form, columns) as out:
        for record in records:
            out(record)


def _node_names(text: str) -> str:
    """The nodes that lines of text name: host lists, or records with a `node` or, as of a choice, with `nodes`."""
    import json

    from pitools.core.errors import UsageError

    found = []
    for line in text.splitlines():
        try:
            if not line.startswith("{"):
                found.append(line)
                continue
            record = json.loads(line)
            found.append(",".join(record["nodes"] if "nodes" in record else [record["node"]]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{line[:80]!r} is no record with a node", where="stdin") from error
    return ",".join(filter(None, found))
