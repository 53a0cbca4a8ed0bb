"""`pit topology order`: put nodes in rank order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pitools.commands.options import SINGLE_VALUE, format_option
from pitools.commands.topology_fabric import load_fabric

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
    help="Site of the fabric; by default the cluster that Slurm's commands use.",
)
@click.option("--job", metavar="ID", help="Order the nodes of this running job.")
@click.option(
    "--as",
    "shape",
    type=click.Choice(["hostfile", "torchrun", "rankfile", "jax", "ranks"]),
    help="Output for srun, torchrun, Open MPI or JAX, or a record per rank.",
)
@click.option("--gpus", type=click.IntRange(1), default=1, metavar="N", help="GPUs, and ranks, per node.")
@click.option("--cpus", type=click.IntRange(1), default=1, metavar="N", help="Cores per rank, for rankfile.")
@click.option("--tensor", type=click.IntRange(1), default=1, metavar="T", help="Ranks per tensor group.")
@click.option("--pipeline", type=click.IntRange(1), default=1, metavar="P", help="Pipeline stages.")
@click.option("-H", "as_hosts", is_flag=True, help="Print one line of nodes, in order.")
@format_option
def order(
    nodes: str | None,
    site_name: str | None,
    job: str | None,
    shape: str | None,
    gpus: int,
    cpus: int,
    tensor: int,
    pipeline: int,
    as_hosts: bool,
    form: str,
) -> None:
    """Put NODES in rank order: depth first over the switch tree.

    NODES is a host list such as n[01-16], or - to read lists or records from stdin; by default the nodes of the
    current allocation. With --as hostfile, Slurm's fabric is used if the site's cannot be read, and the order of the
    names if that cannot.
    """
    import os
    import sys

    from pitools.core import hostlist
    from pitools.core.errors import UsageError
    from pitools.site.connect import client
    from pitools.site.load import load_site
    from pitools.slurm.client import Client
    from pitools.topology import rank_layout, rank_order
    from pitools.topology.fabric_model import Fabric, expand_ordered

    site = load_site(site_name) if site_name and (job or shape != "hostfile") else None
    slurm = client(site) if site and site.scheduler == "slurm" else Client()
    if job:
        running = [each for each in slurm.jobs(ids=[job]) if each.node_list]
        if len(running) > 1:
            hint = f"name one of them: {', '.join(each.job_id for each in running[:4])}"
            raise UsageError(f"job {job} has {len(running)} running parts", where="--job", hint=hint)
        if not running:
            raise UsageError(f"job {job} has no nodes", where="--job", hint=f"check that it runs: squeue -j {job}")
        nodes = running[0].node_list
    elif nodes == "-":
        nodes = _parse_node_names(sys.stdin.read())
    elif nodes is None:
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise UsageError("no nodes given", hint="give a host list, - for stdin, or --job ID of a running job")
    if as_hosts and shape:
        raise UsageError("both -H and --as", hint="give one of the two")
    nodes = ",".join(nodes.split())
    expand_ordered(nodes)  # checks the count first: a list may expand to more names than fit in memory
    node_names = hostlist.expand(nodes)
    if shape == "hostfile" and len(node_names) == 1:
        fabric = Fabric(leaves=())  # of one node there is one order: the runs of a sweep query no topology
    else:
        fabric = _load_fabric_or_flat(site_name, is_required=shape != "hostfile")
    slots = rank_order.rank_order(node_names, fabric, rank_layout.nodes_per_replica(gpus, tensor, pipeline))
    if fabric.leaves and (outside := [slot.node for slot in slots if not slot.leaf]):
        names = ", ".join(outside[:5]) + (", …" if len(outside) > 5 else "")
        click.echo(f"pit: {len(outside)} of {len(slots)} nodes are not in the topology and are last: {names}", err=True)
    if shape:
        _print_layout(shape, slots, nodes, slurm, gpus=gpus, cpus=cpus, tensor=tensor, pipeline=pipeline, form=form)
    elif as_hosts or form == "hosts":
        click.echo(",".join(slot.node for slot in slots))  # folding would sort
    else:
        _print_records(slots, ("position", "node", "leaf"), form)


def _load_fabric_or_flat(site_name: str | None, *, is_required: bool) -> Fabric:
    from pitools.core.errors import ConfigError, PitError, UsageError
    from pitools.topology.fabric_model import Fabric

    try:
        return load_fabric(site_name)[0]
    except PitError as error:
        if is_required:
            raise
        if site_name and isinstance(error, (ConfigError, UsageError)):  # a node may lack the files
            click.echo(f"pit: the fabric is Slurm's: {error}", err=True)
            return _load_fabric_or_flat(None, is_required=False)
        # A job that has waited hours for its nodes must not fail for lack of an order.
        click.echo(f"pit: ranks are ordered by node name: {error}", err=True)
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

    seats = rank_layout.place_ranks(slots, gpus, tensor, pipeline)  # validates the axes for every shape
    if shape == "hostfile":
        click.echo(rank_layout.format_hostfile(slots, gpus), nl=False)
    elif shape == "torchrun":
        click.echo(rank_layout.format_torchrun(slots, gpus, _query_address(slurm, slots[0].node)), nl=False)
    elif shape == "rankfile":
        click.echo(rank_layout.format_rankfile(slots, gpus, cpus), nl=False)
    elif shape == "jax":
        _print_records([rank_layout.jax_mesh(seats, expand_ordered(nodes))], (), "jsonl" if form == "auto" else form)
    else:
        _print_records(seats, ("rank", "node", "local_rank", "data", "pipeline", "tensor", "leaf"), form)


def _query_address(slurm: Client, node: str) -> dict[str, str]:
    """Return the node's address: its name may not resolve on other nodes."""
    from pitools.core.errors import PitError

    try:
        return {node: slurm.address(node)}
    except PitError as error:
        click.echo(f"pit: using the node name as master address: {error}", err=True)
        return {}


def _print_records(records: Sequence[Record], columns: tuple[str, ...], form: str) -> None:
    from pitools.core.output import Output

    with Output(form, columns) as out:
        for record in records:
            out(record)


def _parse_node_names(text: str) -> str:
    """Return the nodes in lines of text: host lists, or records with `node` or `nodes`. Raises UsageError."""
    import json

    from pitools.core.errors import UsageError

    lists = []
    for line in text.splitlines():
        try:
            if not line.startswith("{"):
                lists.append(line)
                continue
            record = json.loads(line)
            lists.append(",".join(record["nodes"] if "nodes" in record else [record["node"]]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{line[:80]!r} has no node (expected a record with node or nodes)", where="stdin"
            ) from error
    return ",".join(filter(None, lists))
