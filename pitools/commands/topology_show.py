"""`pit topology show` and `score`: show a fabric with its occupancy, and score the placement of jobs."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import SINGLE_VALUE, format_option
from pitools.commands.topology_fabric import load_fabric

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--site",
    "site_name",
    envvar="PIT_SITE",
    metavar="NAME",
    **SINGLE_VALUE,
    help="Site of the fabric; by default the cluster that Slurm's commands use.",
)
@click.option("--fabric", "source", type=_FILE, metavar="FILE", help="Read the fabric from this file.")
@click.option("--png", type=_FILE, metavar="FILE", help="Draw the fabric into a PNG file.")
@click.option("--svg", type=_FILE, metavar="FILE", help="Draw the fabric into an SVG file.")
@click.option("--as", "form_as", type=click.Choice(["conf", "yaml"]), help="Print the fabric as Slurm's topology file.")
@click.option("--nvlink-here", is_flag=True, help="Print the NVLink domain of this node, from NVML.")
@format_option
def show(
    site_name: str | None,
    source: Path | None,
    png: Path | None,
    svg: Path | None,
    form_as: str | None,
    nvlink_here: bool,
    form: str,
) -> None:
    """Show a fabric with its occupancy: a tree on a terminal, a record per leaf in a pipe, or a picture.

    \b
      pit topology show --site alpha
      pit topology show --fabric hosts.csv --as conf > topology.conf
      srun -N4 --ntasks-per-node=1 pit topology show --nvlink-here > nvlink.jsonl
    """
    import sys

    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.topology import discover, fabric_model
    from pitools.topology.formats import conf
    from pitools.topology.show import occupancy, text

    if nvlink_here:
        from pitools.topology.formats import nvlink

        with Output(form) as out:
            out(nvlink.local_domain())
        return
    fabric, slurm, _ = load_fabric(site_name, source)
    if fabric.kind == "flat":
        click.echo("pit: the topology is unknown", err=True)
    if form_as:
        from pitools.topology.formats import yaml

        click.echo(conf.write_conf(fabric) if form_as == "conf" else yaml.write_yaml(fabric), nl=False)
        return
    states = occupancy.node_states(slurm.nodes()) if slurm else {}
    if outside := discover.unknown_nodes(fabric, states):
        names = ", ".join(outside[:5]) + (", …" if len(outside) > 5 else "")
        click.echo(f"pit: {len(outside)} of {len(states)} nodes are not in the topology: {names}", err=True)
    title = site_name or (source.stem if source else "this cluster")
    for path, suffix in ((png, ".png"), (svg, ".svg")):
        if path:
            if path.suffix != suffix:
                raise UsageError(f'"{path.name}" does not end in {suffix}', where=f"--{suffix[1:]}")
            from pitools.topology.show import draw

            draw.draw_fabric(fabric, states, path, title=title)
    if png or svg:
        return
    if form == "table" or (form == "auto" and sys.stdout.isatty()):
        import os
        import shutil

        width = shutil.get_terminal_size((100, 24)).columns
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for line in text.draw_text(fabric, states, title=title, width=width, colour=colour):
            click.echo(line)
        return
    if form == "hosts":
        click.echo(conf.fold_nodes(fabric_model.nodes_of(fabric)))
        return
    with Output(form, ("leaf", *occupancy.STATES) if form == "tsv" else ()) as out:
        for leaf in occupancy.leaf_states(fabric, states):
            out(leaf)


@click.command()
@click.argument("jobs", nargs=-1)
@click.option(
    "--site",
    "site_name",
    envvar="PIT_SITE",
    metavar="NAME",
    **SINGLE_VALUE,
    help="Site of the jobs; default: this one.",
)
@click.option("--fabric", "source", type=_FILE, metavar="FILE", help="Read the fabric from this file.")
@click.option("--nodes", metavar="LIST", help="Score these nodes, in rank order; - reads lists from stdin.")
@format_option
def score(jobs: tuple[str, ...], site_name: str | None, source: Path | None, nodes: str | None, form: str) -> None:
    """Score the placement of running JOBS, by default all of yours.

    Ranks are assumed to be in the order of Slurm's node list. Give another order with --nodes.
    """
    import sys

    from pitools.core.errors import ClusterError, UsageError
    from pitools.core.output import Output
    from pitools.topology.fabric_model import expand_ordered
    from pitools.topology.show.score import PlacementScore, score_job

    fabric, slurm, _ = load_fabric(site_name, source)
    columns = ("job_id", "name", "nodes", "leaves", "best_leaves", "ring_hops", "reordered_ring_hops", "locality")
    problems: list[str] = []
    with Output(form, columns if form != "jsonl" else ()) as out:

        def score_order(order: list[str], job_id: str = "", name: str = "") -> PlacementScore:
            return score_job(order, fabric, job_id=job_id, name=name)

        if nodes:
            if jobs:
                raise UsageError("both jobs and nodes", where="--nodes", hint="score one or the other")
            for line in sys.stdin if nodes == "-" else [nodes]:
                if order := _parse_order(line):
                    out(score_order(order))
            return
        if slurm is None:
            raise UsageError("jobs need a site with Slurm", hint="give --site NAME, or --nodes LIST")
        found_jobs = slurm.jobs(jobs) if jobs else slurm.jobs(user=slurm.user())
        for job in found_jobs:
            if job.node_list and job.state != "PENDING":
                out(score_order(expand_ordered(job.node_list), job.job_id, job.name))
            elif jobs:
                problems.append(f"{job.job_id} is {job.state}")
        known_ids = {name for job in found_jobs for name in (job.job_id, job.raw_id, job.array_job_id)}
        problems += [f"{job} not found" for job in jobs if job not in known_ids]
    if problems:
        raise ClusterError(f"no nodes to score: {', '.join(problems)}", hint="score running jobs, or give --nodes")


def _parse_order(line: str) -> list[str]:
    """Return the nodes in a line: a host list, or a record with `nodes` in rank order. Raises UsageError."""
    import json

    from pitools.core.errors import UsageError
    from pitools.topology.fabric_model import expand_ordered

    if not line.startswith("{"):
        return expand_ordered(line.strip())
    try:
        nodes = json.loads(line)["nodes"]
        if isinstance(nodes, list) and all(isinstance(node, str) for node in nodes):
            return nodes
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{line[:80]!r} has no nodes", where="stdin", hint="pit topology choose … | … score --nodes -")
