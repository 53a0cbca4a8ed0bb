"""`pit perf collectives`: how fast the nodes of a job exchange data, and whether that is normal."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import LocalPath, rows_format_option, site_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pitools.perf.collectives.fit import CollectiveFit
    from pitools.perf.collectives.run import CollectiveResult, Placement

_SPEEDS = ("wall_s", "algbw_bytes_per_s", "busbw_bytes_per_s")
COLUMNS = (
    "operation",
    "placement",
    "n_nodes",
    "ranks",
    "bytes",
    *_SPEEDS,
    "wrong",
    "verdict",
    "of_baseline",
    "problem",
)


@click.command()
@click.option("--framework", type=click.Choice(["torch", "jax"]), default="torch", show_default=True)
@click.option("--operations", metavar="LIST", help="Such as all_reduce,send_recv. [default: all]")
@click.option("--sizes", metavar="LIST", help="Of messages, such as 64KiB,16MiB. [default: 4 KiB to 16 MiB, or 1 GiB]")
@click.option("--timeout", metavar="TIME", default="5m", show_default=True, help="Time limit of each placement.")
@click.option("--compare", "compared", type=LocalPath(), metavar="STORE", help="Compare with what is kept there.")
@click.option("--add", "added", type=LocalPath(), metavar="STORE", help="Keep what is right and not slow.")
@site_option
@rows_format_option
@click.pass_context
def collectives(
    ctx: click.Context,
    framework: str,
    operations: str | None,
    sizes: str | None,
    timeout: str,
    compared: Path | None,
    added: Path | None,
    site_name: str,
    form: str,
) -> None:
    """Measure collectives between the nodes of this job, a rank for each GPU, or for each node without.

    Times torch.distributed or jax, by NCCL or gloo, with messages of several sizes: under one leaf switch, as many
    nodes across leaf switches, and all nodes. Bandwidths are algbw and busbw of nccl-tests; every element is checked.
    Then fits alpha + bytes / beta.

    STORE is a file that is made by the first --add; a baseline is eight runs and more of the same site, partition,
    device and kind of placement. What is slow is measured three times again. Exit 1: a result is slow, wrong or failed.

    \b
    salloc -N 4 --exclusive pit perf collectives --compare perf.sqlite --add perf.sqlite
    """
    from pitools.core import hostlist
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.core.timestamps import now_rfc3339
    from pitools.core.units import parse_duration
    from pitools.node.bench.run import limit_s
    from pitools.perf.collectives import baseline as baselines
    from pitools.perf.collectives.fit import fit_results
    from pitools.perf.collectives.run import run_placement
    from pitools.perf.regression.store import add_points, read_series
    from pitools.slurm.job_step import gpus_per_node

    names, options = _worker_options(operations, sizes)
    timeout_s = parse_duration(timeout)
    if not timeout_s:
        raise UsageError(f'"{timeout}": no time to measure in (expected 1s or more)', where="--timeout", hint="5m")
    ranks_per_node = gpus_per_node() or 1
    placements = _placements(site_name, ranks_per_node)
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    is_first = compared == added and not (added and added.exists())
    series = read_series(compared) if compared and not is_first else []
    baseline = baselines.to_baseline(series, site_name, partition)
    results: list[CollectiveResult] = []

    def measure(placement: Placement) -> list[CollectiveResult]:
        where = f"{placement.name}: {hostlist.fold(placement.nodes)}"
        click.echo(f"pit: measures {where}, within {limit_s(timeout_s):g} s", err=True)
        return run_placement(placement, framework, options, ranks_per_node=ranks_per_node, timeout_s=timeout_s)

    with Output(form, COLUMNS, ends_with_reader=not added) as out:
        for placement in placements:
            measured = baselines.measure_and_judge(partial(measure, placement), baseline)
            for result in measured:
                out(result)
            results += measured
        fits = fit_results(results)
        if out.form == "jsonl":
            for fit in fits:
                out(fit)
        else:
            _show_fits(fits)
    _show_notes(results, names, framework, is_compared=bool(compared))
    if added:
        source = f"job {os.environ['SLURM_JOB_ID']}"
        points = baselines.to_points(results, site=site_name, partition=partition, t=now_rfc3339(), source=source)
        click.echo(f"pit: {add_points(added, points)} results kept", err=True)
    ctx.exit(any(result.verdict != "ok" for result in results))


def _show_fits(fits: Iterable[CollectiveFit]) -> None:
    for fit in fits:
        beta = f"{fit.beta_busbw_bytes_per_s / 1e9:.3g} GB/s" if fit.beta_busbw_bytes_per_s else "no limit"
        text = f"{fit.operation}: alpha {fit.alpha_s * 1e6:.3g} us, busbw at most {beta}; off by {fit.residual:.0%}"
        click.echo(f"pit: {fit.placement} of {fit.n_nodes}: {text}", err=True)


def _show_notes(
    results: Sequence[CollectiveResult], names: Iterable[str], framework: str, *, is_compared: bool
) -> None:
    """Say which operations the framework lacks, and which results have no baseline."""
    from pitools.perf.collectives.baseline import MIN_RUNS

    measured = [each for each in results if each.operation]
    lacking = [name for name in names if name not in {each.operation for each in measured}]
    if measured and lacking:
        click.echo(f"pit: note: {framework} has no {', '.join(lacking)} on {measured[0].device}", err=True)
    if is_compared and (new := sum(each.of_baseline is None for each in measured)):
        reason = f"fewer than {MIN_RUNS} earlier runs"
        click.echo(f"pit: note: {new} of {len(measured)} results were not compared: {reason}", err=True)


def _worker_options(operations: str | None, sizes: str | None) -> tuple[list[str], list[str]]:
    """Return the operations and the options of a rank. Raises UsageError."""
    from pitools.core.errors import UsageError, suggest
    from pitools.core.units import parse_size
    from pitools.perf.collectives.operations import OPERATIONS

    names = operations.split(",") if operations else list(OPERATIONS)
    for name in names:
        if name not in OPERATIONS:
            expected = ", ".join(OPERATIONS)
            problem = f'no operation "{name}" (expected some of {expected})'
            raise UsageError(problem, where="--operations", hint=suggest(name, OPERATIONS))
    n_bytes = ",".join(str(parse_size(size)) for size in sizes.split(",")) if sizes else ""
    return names, [f"--operations={','.join(names)}", f"--sizes={n_bytes}"]


def _placements(site_name: str, ranks_per_node: int) -> list[Placement]:
    """Return the placements of this job's nodes, by the site's fabric. Raises UsageError without two ranks."""
    from pitools.core.errors import UsageError
    from pitools.perf.collectives.run import choose_placements
    from pitools.site.load import load_site
    from pitools.slurm.client import Client
    from pitools.slurm.job_step import nodes_of_job
    from pitools.topology.discover import fabric_of_site

    nodes = nodes_of_job()
    if len(nodes) * ranks_per_node < 2:
        hint = "salloc -N 4 --exclusive pit perf collectives"
        raise UsageError(f"{len(nodes)} nodes in this job (expected 2 or more, or GPUs)", hint=hint)
    fabric = fabric_of_site(load_site(site_name), Client())
    leaf_of = {node: leaf.path[-1] for leaf in fabric.leaves for node in leaf.nodes}
    return choose_placements(nodes, leaf_of, ranks_per_node)
