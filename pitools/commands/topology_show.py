"""`pit topology show` and `score`: the fabric and who is on it, and how well jobs sit on it."""

from __future__ import annotations

from pathlib import Path

import click

from pitools.commands.options import SINGLE_VALUE, format_option
from pitools.commands.topology_options import load_fabric

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--site",
    "site_name",
    envvar="PIT_SITE",
    metavar="NAME",
    **SINGLE_VALUE,
    help="Whose fabric; inside a job, its own.",
)
@click.option("--from", "source", type=_FILE, metavar="FILE", help="Of this file; with --site, who is on it there.")
@click.option("--png", type=_FILE, metavar="FILE", help="Draw it.")
@click.option("--svg", type=_FILE, metavar="FILE", help="Draw it, to be scaled.")
@click.option("--as", "form_as", type=click.Choice(["conf", "yaml"]), help="Print it as Slurm's topology file.")
@click.option("--nvlink-here", is_flag=True, help="Print the NVLink domain of this node, as NVML tells it.")
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
    """Show a fabric with its occupancy: a tree on a terminal, a record a leaf in a pipe, or a picture.

    \b
      pit topology show --site alpha
      pit topology show --from hosts.csv --as conf > topology.conf
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
        click.echo("pit: no topology is known there: nothing to show", err=True)
    if form_as:
        from pitools.topology.formats import yaml

        click.echo(conf.write_conf(fabric) if form_as == "conf" else yaml.write_yaml(fabric), nl=False)
        return
    of = occupancy.node_states(slurm.nodes()) if slurm else {}
    if lost := discover.unknown_nodes(fabric, of):
        told = ", ".join(lost[:5]) + (", …" if len(lost) > 5 else "")
        click.echo(f"pit: {len(lost)} of {len(of)} nodes are not in the topology: {told}", err=True)
    title = site_name or (source.stem if source else "this cluster")
    for path, suffix in ((png, ".png"), (svg, ".svg")):
        if path:
            if path.suffix != suffix:
                raise UsageError(f'"{path.name}" does not end in {suffix}', where=f"--{suffix[1:]}")
            from pitools.topology.show import draw

            draw.draw_fabric(fabric, of, path, title=title)
    if png or svg:
        return
    if form == "table" or (form == "auto" and sys.stdout.isatty()):
        import os
        import shutil

        width = shutil.get_terminal_size((100, 24)).columns
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for line in text.draw_text(fabric, of, title=title, width=width, colour=colour):
            click.echo(line)
        return
    if form == "hosts":
        click.echo(conf.fold_nodes(fabric_model.nodes_of(fabric)))
        return
    with Output(form, ("leaf", *occupancy.STATES) if form == "tsv" else ()) as out:
        for leaf in occupancy.leaf_states(fabric, of):
            out(leaf)


@click.command()
@click.argument("jobs", nargs=-1)
@click.option(
    "--site", "site_name", envvar="PIT_SITE", metavar="NAME", **SINGLE_VALUE, help="Where they run; inside a job, here."
)
@click.option("--from", "source", type=_FILE, metavar="FILE", help="On the fabric of this file.")
@click.option("--nodes", metavar="LIST", help="Of these nodes, in rank order; - reads them from stdin.")
@format_option
def score(jobs: tuple[str, ...], site_name: str | None, source: Path | None, nodes: str | None, form: str) -> None:
    """Tell how well running JOBS sit on their switches; without JOBS, all of yours.

    Their ranks are taken to run in the order in which Slurm lists their nodes. Give another one with --nodes.
    """
    import sys

    from pitools.core.errors import ClusterError, UsageError
    from pitools.core.output import Output
    from pitools.topology.fabric_model import expand_ordered
    from pitools.topology.show.score import PlacementScore
    from pitools.topology.show.score import score_job as judge

    fabric, slurm, _ = load_fabric(site_name, source)
    columns = ("job_id", "name", "nodes", "leaves", "best_leaves", "ring_hops", "reordered_ring_hops", "locality")
    waiting: list[str] = []
    with Output(form, columns if form != "jsonl" else ()) as out:

        def tell(order: list[str], job_id: str = "", name: str = "") -> PlacementScore:
            return judge(order, fabric, job_id=job_id, name=name)

        if nodes:
            if jobs:
                raise UsageError("both jobs and nodes", where="--nodes", hint="score one or the other")
            for line in sys.stdin if nodes == "-" else [nodes]:
                if order := _order(line):
                    out(tell(order))
            return
        if slurm is None:
            raise UsageError("no Slurm to ask for jobs", hint="--site NAME, or --nodes LIST")
        found = slurm.jobs(jobs) if jobs else slurm.jobs(user=slurm.user())
        for job in found:
            if job.node_list and job.state != "PENDING":
                out(tell(expand_ordered(job.node_list), job.job_id, job.name))
            elif jobs:
                waiting.append(f"{job.job_id} is {job.state}")
        answered = {name for job in found for name in (job.job_id, job.raw_id, job.array_job_id)}
        waiting += [f"{job} is not known" for job in jobs if job not in answered]
    if waiting:
        raise ClusterError(f"no nodes to score: {', '.join(waiting)}", hint="score it while it runs, or give --nodes")


def _order(line: str) -> list[str]:
    """The nodes of a line: a host list, or a record with `nodes` in rank order. Raises UsageError."""
    import json

    from pitools.core.errors import UsageError
    from pitools.topology.fabric_model import expand_ordered

    if not line.startswith("{"):
        return expand_ordered(line.strip())
    try:
        found = json.loads(line)["nodes"]
        if isinstance(found, list) and all(isinstance(node, str) for node in found):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(
        f"{line[:80]!r} is no record with nodes", where="stdin", hint="pit topology choose … | … score --nodes -"
    )
