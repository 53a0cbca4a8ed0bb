"""`pit topology choose`: the best k of the free nodes."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from pitools.commands.options import SINGLE_VALUE, format_option
from pitools.commands.topology_options import load_fabric

if TYPE_CHECKING:
    from pitools.slurm.records import Node
    from pitools.topology.choose import Objective

COLUMNS = ("objective", "cost", "runner_up_cost", "leaves", "pods", "ring_hops", "free", "node_list", "spares")


@click.command()
@click.option("--nodes", "k", type=click.IntRange(1), required=True, metavar="K", help="How many.")
@click.option(
    "--site",
    "site_name",
    envvar="PIT_SITE",
    metavar="NAME",
    **SINGLE_VALUE,
    help="Where; inside a job, its own cluster.",
)
@click.option("--partition", metavar="NAME", help="Free nodes of this partition, instead of the site's default.")
@click.option(
    "--from",
    "source",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The fabric of this file, as `pit topology show --from` reads it.",
)
@click.option("--from-nodes", metavar="LIST", help="Of these nodes, instead of those that are free; - is stdin.")
@click.option("--costs", type=click.File(), metavar="FILE", help="What nodes cost: lines such as `n[01-04] 2.5`.")
@click.option(
    "--objective",
    type=click.Choice(["level", "leaf", "ring", "pair"]),
    default="level",
    show_default=True,
    help="Lowest common switch; fewest leaves; links of a ring; distance of all pairs.",
)
@click.option("--spares", type=click.IntRange(0), default=0, metavar="S", help="So many more, to stand in.")
@click.option("--segment", type=click.IntRange(0), default=0, metavar="N", help="So many nodes at a time in a leaf.")
@click.option("--pods-like-slurm", is_flag=True, help="Only the smallest pod with room, to spare the large ones.")
@click.option("--as-exclude", is_flag=True, help="Print all nodes but those of the chosen leaves, for sbatch -x.")
@click.option("-H", "as_hosts", is_flag=True, help="Print the nodes and spares as one folded list.")
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
    pods_like_slurm: bool,
    as_exclude: bool,
    as_hosts: bool,
    form: str,
) -> None:
    """Choose the best K of a site's free nodes, and tell what they cost and what the next best would.

    \b
      pit topology choose --nodes 16 --site alpha
      sbatch -N16 -x "$(pit topology choose --nodes 16 --site alpha --as-exclude)" train.sh
      pit topology choose --nodes 8 --from hosts.csv --from-nodes 'n[01-40]' --format table
    """
    from msgspec import structs

    from pitools.core import hostlist
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.topology import choose as choosing
    from pitools.topology import fabric_model
    from pitools.topology.acquire import node_filter

    fabric, slurm, site = load_fabric(site_name, source)
    partition = partition or (site.defaults.partition if site else "")
    if slurm is None and from_nodes is None:
        raise UsageError("nobody tells which nodes are free", hint="give --from-nodes LIST, or --site of a Slurm")
    everyone = _of_partition(slurm.nodes(), partition) if slurm and (as_exclude or from_nodes is None) else []
    free = (
        _parse_costs(from_nodes)
        if from_nodes is not None
        else dict.fromkeys(node_filter.free_nodes(everyone, k + spares), 0.0)
    )
    if costs:
        from pitools.topology.choose.node_costs import read_costs

        extra = read_costs(costs.read(), costs.name)
        free = {node: cost + extra.get(node, 0.0) for node, cost in free.items()}
    asked = free if any(free.values()) else list(free)
    choice = choosing.select_nodes(
        fabric, asked, k, objective=objective, spares=spares, segment=segment, pods_like_slurm=pods_like_slurm
    )
    chosen = [*choice.nodes, *choice.spares]
    if choice.warning:
        click.echo(f"pit: {choice.warning}", err=True)
    if as_exclude:
        every = {*fabric_model.nodes_of(fabric), *(node.node for node in everyone), *free}
        if others := every - node_filter.nodes_of_leaves(chosen, fabric):
            click.echo(hostlist.fold(others))
    elif as_hosts or form == "hosts":
        click.echo(hostlist.fold(chosen))
    else:
        second = choosing.runner_up_cost(fabric, asked, choice, pods_like_slurm=pods_like_slurm)
        with Output(form, COLUMNS) as out:
            out(structs.replace(choice, runner_up_cost=second, node_list=hostlist.fold(choice.nodes)))


def _of_partition(nodes: list[Node], partition: str) -> list[Node]:
    from pitools.core.errors import UsageError, suggest

    found = [node for node in nodes if not partition or partition in node.partitions]
    if nodes and not found:
        known = {name for node in nodes for name in node.partitions}
        raise UsageError(f'no nodes in partition "{partition}"', where="--partition", hint=suggest(partition, known))
    return found


def _parse_costs(text: str) -> dict[str, float]:
    """Nodes of a host list, or of stdin, with their costs where it tells them."""
    import sys

    from pitools.core import hostlist
    from pitools.core.errors import UsageError
    from pitools.topology.choose.node_costs import read_costs

    found = read_costs(sys.stdin.read(), "stdin") if text == "-" else dict.fromkeys(hostlist.expand(text), 0.0)
    if not found:
        raise UsageError("no nodes to choose from", where="--from-nodes", hint="give a host list, or - for stdin")
    return found
