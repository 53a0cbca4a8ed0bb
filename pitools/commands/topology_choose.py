"""`pit topology choose`: choose the best k of the free nodes."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from pitools.commands.options import SINGLE_VALUE, format_option
from pitools.commands.topology_fabric import load_fabric

if TYPE_CHECKING:
    from pitools.slurm.records import Node
    from pitools.topology.choose import Objective
    from pitools.topology.choose.problem import FreeInput

COLUMNS = ("objective", "cost", "runner_up_cost", "leaves", "pods", "ring_hops", "free", "node_list", "spares")


@click.command()
@click.option("--nodes", "k", type=click.IntRange(1), required=True, metavar="K", help="Number of nodes.")
@click.option(
    "--site",
    "site_name",
    envvar="PIT_SITE",
    metavar="NAME",
    **SINGLE_VALUE,
    help="Site of the nodes; by default the cluster that Slurm's commands use.",
)
@click.option("--partition", metavar="NAME", help="Partition of the nodes; by default the site's.")
@click.option(
    "--fabric",
    "source",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read the fabric from this file.",
)
@click.option("--from-nodes", metavar="LIST", help="Choose from these nodes; by default the free ones; - is stdin.")
@click.option("--costs", type=click.File(), metavar="FILE", help="Costs of nodes: lines such as `n[01-04] 2.5`.")
@click.option(
    "--objective",
    type=click.Choice(["level", "leaf", "ring", "pair"]),
    default="level",
    show_default=True,
    help="Minimize the common switch's level, the leaves, the links of a ring, or all pairs' distance.",
)
@click.option("--spares", type=click.IntRange(0), default=0, metavar="S", help="Spare nodes in addition to K.")
@click.option(
    "--segment", type=click.IntRange(0), default=0, metavar="N", help="Choose multiples of N nodes in each leaf."
)
@click.option(
    "--within-slurms-subtree",
    "slurms_subtree",
    is_flag=True,
    help="Choose below the switch that Slurm would: the fullest of the lowest with enough nodes.",
)
@click.option("--as-exclude", is_flag=True, help="Print all nodes except the chosen leaves', for sbatch -x.")
@click.option("-H", "as_hosts", is_flag=True, help="Print nodes and spares as one host list.")
@format_option
def choose(
    k: int,
    site_name: str | None,
    partition: str | None,
    source: Path | None,
    from_nodes: str | None,
    costs: IO[str] | None,
    objective: Objective,
    spares: int,
    segment: int,
    slurms_subtree: bool,
    as_exclude: bool,
    as_hosts: bool,
    form: str,
) -> None:
    """Choose the best K of a site's free nodes; print the choice, its cost and the runner-up's cost.

    Nodes that `pit node list` shows as suspected cost more, or are left out where the others suffice.

    \b
      pit topology choose --nodes 16 --site alpha
      sbatch -N16 -x "$(pit topology choose --nodes 16 --site alpha --as-exclude)" train.sh
      pit topology choose --nodes 8 --fabric hosts.csv --from-nodes 'n[01-40]' --format table
    """
    from msgspec import structs

    from pitools.core import hostlist
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.node import site_suspicion
    from pitools.topology import choose as choosing
    from pitools.topology import fabric_model
    from pitools.topology.acquire import node_filter

    fabric, slurm, site = load_fabric(site_name, source)
    partition = partition or (site.defaults.partition if site else "")
    if slurm is None and from_nodes is None:
        raise UsageError("free nodes are unknown without Slurm", hint="give --from-nodes LIST, or --site of a Slurm")
    all_nodes = _nodes_of_partition(slurm.nodes(), partition) if slurm and (as_exclude or from_nodes is None) else []
    free = (
        _parse_costs(from_nodes)
        if from_nodes is not None
        else dict.fromkeys(node_filter.free_nodes(all_nodes, k + spares), 0.0)
    )
    if costs:
        from pitools.topology.choose.node_costs import read_costs

        extra = read_costs(costs.read(), costs.name)
        free = {node: cost + extra.get(node, 0.0) for node, cost in free.items()}
    available: FreeInput = free if any(free.values()) else list(free)
    suspected = site_suspicion.costs_at_site(site, set(free)) if site else {}
    choice, available = choosing.avoid_nodes(
        available,
        suspected,
        lambda each: choosing.select_nodes(
            fabric, each, k, objective=objective, spares=spares, segment=segment, slurms_subtree=slurms_subtree
        ),
    )
    chosen = [*choice.nodes, *choice.spares]
    avoided = suspected.keys() - {*chosen}
    if suspected:
        click.echo(f"pit: suspected: {hostlist.fold(suspected)}: see pit node list", err=True)
    if choice.warning:
        click.echo(f"pit: {choice.warning}", err=True)
    if as_exclude:
        all_names = {*fabric_model.nodes_of(fabric), *(node.node for node in all_nodes), *free}
        if excluded := all_names - (node_filter.nodes_of_leaves(chosen, fabric) - avoided):
            click.echo(hostlist.fold(excluded))
    elif as_hosts or form == "hosts":
        click.echo(hostlist.fold(chosen))
    else:
        runner_up_cost = choosing.runner_up_cost(fabric, available, choice, slurms_subtree=slurms_subtree)
        with Output(form, COLUMNS) as out:
            out(structs.replace(choice, runner_up_cost=runner_up_cost, node_list=hostlist.fold(choice.nodes)))


def _nodes_of_partition(nodes: list[Node], partition: str) -> list[Node]:
    from pitools.core.errors import UsageError, suggest

    in_partition = [node for node in nodes if not partition or partition in node.partitions]
    if nodes and not in_partition:
        partitions = {name for node in nodes for name in node.partitions}
        raise UsageError(
            f'no nodes in partition "{partition}"', where="--partition", hint=suggest(partition, partitions)
        )
    return in_partition


def _parse_costs(text: str) -> dict[str, float]:
    """Return node → cost, of a host list (cost 0), or of lines on stdin for "-"."""
    import sys

    from pitools.core import hostlist
    from pitools.core.errors import UsageError
    from pitools.topology.choose.node_costs import read_costs

    costs = read_costs(sys.stdin.read(), "stdin") if text == "-" else dict.fromkeys(hostlist.expand(text), 0.0)
    if not costs:
        raise UsageError("no nodes to choose from", where="--from-nodes", hint="give a host list, or - for stdin")
    return costs
