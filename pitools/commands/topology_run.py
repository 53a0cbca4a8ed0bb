"""`pit topology run`: run a script on the best free nodes of a site."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import click

from pitools.commands.options import format_option, site_option

if TYPE_CHECKING:
    from pitools.topology.acquire.node_filter import ConstraintKind
    from pitools.topology.acquire.options import OnFailure
    from pitools.topology.choose import Objective

COLUMNS = ("job_id", "state", "node_list", "leaves", "is_within", "tries", "is_released", "reason")
_MAX_SCRIPT_BYTES = 4 << 20  # Slurm's own max_script_size


@click.command()
@click.argument("script", type=click.File())
@site_option
@click.option("--nodes", type=click.IntRange(1), metavar="K", help="Number of nodes; by default the script's.")
@click.option(
    "--by",
    type=click.Choice(["exclude", "nodelist", "reservation"]),
    default="exclude",
    show_default=True,
    help="Exclude the other leaves, list the nodes, or reserve them (operators only).",
)
@click.option("--objective", type=click.Choice(["pair", "ring", "level", "leaf"]), default="level", show_default=True)
@click.option(
    "--segment", type=click.IntRange(0), default=0, metavar="N", help="Choose multiples of N nodes in each leaf."
)
@click.option("--tries", type=click.IntRange(1), default=3, show_default=True, help="Maximum number of choices.")
@click.option(
    "--timeout", metavar="TIME", default="5m", show_default=True, help="Time limit of all tries: 90s, 5m, 1h."
)
@click.option(
    "--on-failure",
    type=click.Choice(["release", "keep", "cancel"]),
    default="release",
    show_default=True,
    help="After the last try, remove or keep the constraint, or cancel the job.",
)
@click.option("-H", "as_hosts", is_flag=True, help="Print the job's nodes as one host list.")
@format_option
def run(
    script: IO[str],
    site_name: str,
    nodes: int | None,
    by: ConstraintKind,
    objective: Objective,
    segment: int,
    tries: int,
    timeout: str,
    on_failure: OnFailure,
    as_hosts: bool,
    form: str,
) -> None:
    """Submit SCRIPT (- is stdin) to the best free nodes of a site, and choose again if other jobs take them.

    SCRIPT is an sbatch file; options it lacks get the site's defaults, as with psbatch. Returns when the job has
    started, or is pending without a constraint. Exit 75: the job was cancelled; 4: its state is unknown. After an
    interrupt the job stays, without a constraint.
    """
    from pitools.core import hostlist
    from pitools.core.errors import ClusterError, TryLater, UsageError
    from pitools.core.output import Output
    from pitools.core.units import parse_duration
    from pitools.launch.submission import exactly_once
    from pitools.node.site_suspicion import costs_at_site
    from pitools.site.connect import client
    from pitools.site.load import load_site
    from pitools.slurm.states import UNKNOWN
    from pitools.topology import discover
    from pitools.topology.acquire import loop, submission
    from pitools.topology.acquire.options import AcquireOptions, require_choosable
    from pitools.topology.fabric_model import nodes_of

    site = load_site(site_name)
    slurm = client(site)
    options = AcquireOptions(
        by=by,
        tries=tries,
        timeout_s=parse_duration(timeout),
        objective=objective,
        segment=segment,
        on_failure=on_failure,
    )
    text = script.read(_MAX_SCRIPT_BYTES + 1)
    if len(text) > _MAX_SCRIPT_BYTES:
        raise UsageError(f"script larger than Slurm's {_MAX_SCRIPT_BYTES >> 20} MiB", where=script.name)
    args = submission.sbatch_arguments(site, text, name=script.name, nodes=nodes, segment=segment)
    fabric = discover.fabric_of_site(site, slurm)
    require_choosable(fabric, options)
    options = options._replace(avoid=costs_at_site(site, nodes_of(fabric)))
    exactly_once.require_cluster(site, slurm)
    job_id = slurm.submit(text, args=[*args, *loop.DELAYED_START_ARGS]).job_id
    click.echo(f"pit: job {job_id}: queued", err=True)
    acquired = loop.run_acquire_loop(
        slurm, job_id, fabric, options, lambda message: click.echo(f"pit: {message}", err=True)
    )
    if as_hosts or form == "hosts":
        if acquired.node_list:
            click.echo(hostlist.fold(hostlist.expand(acquired.node_list)))
    else:
        with Output(form, COLUMNS) as out:
            out(acquired)
    if acquired.state == "CANCELLED":
        raise TryLater(f"job {job_id} was cancelled: {acquired.reason or 'by a user'}", where=site.name)
    if acquired.state == UNKNOWN:
        hint = f"check before you submit again: squeue -j {job_id}; sacct -j {job_id}"
        raise ClusterError(f"the state of job {job_id} is unknown: {acquired.reason}", where=site.name, hint=hint)
