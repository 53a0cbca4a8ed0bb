"""`pit topology run`: a script on the best free nodes of a site."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import click

from pitools.commands.options import format_option, site_option

if TYPE_CHECKING:
    from pitools.topology.acquire.node_filter import By
    from pitools.topology.acquire.options import Then
    from pitools.topology.choose import Objective

COLUMNS = ("job_id", "state", "node_list", "leaves", "is_within", "tries", "is_lifted", "why")
_MOST_LETTERS = 4 << 20  # Slurm's own max_script_size


@click.command()
@click.argument("script", type=click.File())
@site_option
@click.option("--nodes", type=click.IntRange(1), metavar="K", help="Instead of the script's.")
@click.option(
    "--by",
    type=click.Choice(["exclude", "nodelist", "reservation"]),
    default="exclude",
    show_default=True,
    help="Exclude the other leaves, name the nodes, or reserve them (operators only).",
)
@click.option("--objective", type=click.Choice(["pair", "ring", "level", "leaf"]), default="level", show_default=True)
@click.option("--segment", type=click.IntRange(0), default=0, metavar="N", help="So many nodes at a time in a leaf.")
@click.option("--tries", type=click.IntRange(1), default=3, show_default=True, help="Choices at most.")
@click.option("--timeout", metavar="TIME", default="5m", show_default=True, help="For all tries: 90s, 5m, 1h.")
@click.option(
    "--then",
    type=click.Choice(["lift", "keep", "cancel"]),
    default="lift",
    show_default=True,
    help="After the last try: the constraint is lifted or kept, or the job cancelled.",
)
@click.option("-H", "as_hosts", is_flag=True, help="Print the job's nodes as one folded list.")
@format_option
def run(
    script: IO[str],
    site_name: str,
    nodes: int | None,
    by: By,
    objective: Objective,
    segment: int,
    tries: int,
    timeout: str,
    then: Then,
    as_hosts: bool,
    form: str,
) -> None:
    """Submit SCRIPT (- is stdin) to the best free nodes of a site, and choose again when they are lost.

    SCRIPT is an sbatch file; what it does not say is the site's default, as with psbatch. Returns when the job has
    started, or waits without a constraint; exit 75 when it was cancelled, 4 when Slurm could not be asked how it is.
    Interrupted, the job stays, without a constraint.
    """
    from pitools.core import hostlist
    from pitools.core.errors import ClusterError, TryLater, UsageError
    from pitools.core.output import Output
    from pitools.core.units import seconds
    from pitools.launch.submission import exactly_once
    from pitools.site.connect import client
    from pitools.site.load import load
    from pitools.slurm.states import UNKNOWN
    from pitools.topology import discover
    from pitools.topology.acquire import loop, submission
    from pitools.topology.acquire.options import Wish, check

    site = load(site_name)
    slurm = client(site)
    wish = Wish(by=by, tries=tries, timeout_s=seconds(timeout), objective=objective, segment=segment, then=then)
    text = script.read(_MOST_LETTERS + 1)
    if len(text) > _MOST_LETTERS:
        raise UsageError("larger than any script that Slurm takes", where=script.name)
    args = submission.arguments(site, text, name=script.name, nodes=nodes, segment=segment)
    fabric = discover.of_site(site, slurm)
    check(fabric, wish)
    exactly_once.require_cluster(site, slurm)
    job_id = slurm.submit(text, args=[*args, *loop.HELD]).job_id
    click.echo(f"pit: job {job_id}: queued", err=True)
    got = loop.acquire(slurm, job_id, fabric, wish, lambda said: click.echo(f"pit: {said}", err=True))
    if as_hosts:
        if got.node_list:
            click.echo(hostlist.fold(hostlist.expand(got.node_list)))
    else:
        with Output(form, COLUMNS) as out:
            out(got)
    if got.state == "CANCELLED":
        raise TryLater(f"job {job_id} was cancelled: {got.why or 'by somebody'}", where=site.name)
    if got.state == UNKNOWN:
        hint = f"before you submit it again: squeue -j {job_id}; sacct -j {job_id}"
        raise ClusterError(f"what became of job {job_id} is not known: {got.why}", where=site.name, hint=hint)
