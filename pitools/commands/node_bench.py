"""`pit node bench`: measure nodes alone and in groups, and compare them with their past and their peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.options import LocalPath, format_option

if TYPE_CHECKING:
    from pitools.node.bench.compare import BenchResult
    from pitools.node.bench.run import GroupTest

COLUMNS = ("node", "measure", "value", "verdict", "of_peers", "of_past", "problem")


@click.command()
@click.option("--alone", "mode", flag_value="alone", default="alone", help="Each node alone: CPU, memory, disk, GPUs.")
@click.option("--pairs", "mode", flag_value="pairs", help="All-reduce in pairs of nodes, and pair the slow ones anew.")
@click.option("--bisect", "mode", flag_value="bisect", help="As --pairs, then all good nodes together; halve if bad.")
@click.option(
    "--folder",
    type=LocalPath(),
    default="/var/tmp",  # noqa: S108 (an unnamed file)
    show_default=True,
    help="Of the disk to measure, by a 1 GiB file.",
)
@click.option("--timeout", metavar="TIME", default="2m", show_default=True, help="Time limit of each test: 90s, 2m.")
@click.option("--config", type=LocalPath(), help="The file of node checks, which names the spool.")
@format_option
@click.pass_context
def bench(ctx: click.Context, mode: str, folder: Path, timeout: str, config: Path | None, form: str) -> None:
    """Measure the nodes of this job, or with --alone, outside of a job, this node.

    Prints a line for each node and measure, rates in bytes or operations per second. Results are kept in the spool,
    and compared with the node's own past and with nodes of the same hardware. Exit 1: a node is slow, wrong or failed.

    \b
    salloc -N 16 --exclusive pit node bench --bisect
    """
    from pitools.core.errors import UsageError
    from pitools.core.output import Output
    from pitools.core.units import parse_duration
    from pitools.node.bench import run, single
    from pitools.node.bench.bisect import max_rounds
    from pitools.node.check.config import load_config

    spool = load_config(config).spool
    timeout_s = parse_duration(timeout)
    nodes = run.nodes_of_job()
    if mode == "alone":
        measured = run.measure_nodes(nodes, folder, timeout_s) if nodes else list(single.measure_node(folder))
        results = _compare(measured, spool)
    else:
        if len(nodes) < 2:
            hint = f"salloc -N 8 --exclusive pit node bench --{mode}"
            raise UsageError(f"{len(nodes)} nodes in this job (expected 2 or more)", where=f"--{mode}", hint=hint)
        click.echo(f"pit: {len(nodes)} nodes, at most {max_rounds(len(nodes))} rounds", err=True)
        tester = run.GroupTester(timeout_s=timeout_s, ranks_per_node=run.gpus_per_node() or 1, on_test=_show_test)
        found = run.find_bad(nodes, tester.test_round, together=mode == "bisect")
        judged = run.to_results(found, nodes, tester.tests, tester.devices)
        results = _compare(judged, spool, is_judged=True)
    with Output(form, COLUMNS) as out:
        for result in results:
            out(result)
    ctx.exit(any(result.verdict != "ok" for result in results))


def _show_test(test: GroupTest) -> None:
    speed = "-" if test.bytes_per_s is None else f"{test.bytes_per_s / 1e9:.3g} GB/s"
    verdict = f"{test.verdict}: {test.problem}" if test.problem else test.verdict
    click.echo(f"pit: round {test.round}: {test.nodes}: {speed}: {verdict}", err=True)


def _compare(results: list[BenchResult], spool: str, *, is_judged: bool = False) -> list[BenchResult]:
    """Compare results with those in the spool, and add them there if this user may."""
    from pitools.core.errors import ClusterError
    from pitools.node.bench import history
    from pitools.node.bench.compare import compare

    if not spool:
        return compare(results, [], is_judged=is_judged)
    past = history.read_past(Path(spool), {result.node for result in results})
    compared = compare(results, past, is_judged=is_judged)
    try:
        history.append_results(Path(spool), compared)
    except ClusterError as error:
        click.echo(f"pit: note: results are not kept: {error}", err=True)
    return compared
