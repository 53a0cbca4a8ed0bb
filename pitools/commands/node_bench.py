"""`pit node bench`: measure nodes alone and in groups, and compare them with their past and their peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pitools.commands.node_check import config_option, load_node_config
from pitools.commands.options import LocalPath, format_option, site_option

if TYPE_CHECKING:
    from pitools.node.bench.compare import BenchResult

COLUMNS = ("node", "measure", "value", "verdict", "of_peers", "of_past", "problem")


@click.command()
@click.option("--single", "mode", flag_value="single", default="single", help="Each node: CPU, memory, disk, GPUs.")
@click.option("--pairs", "mode", flag_value="pairs", help="All-reduce in pairs of nodes, and pair the slow ones anew.")
@click.option(
    "--bisect",
    "mode",
    flag_value="bisect",
    help="As --pairs, then all good nodes in one group; a group that fails is halved.",
)
@click.option(
    "--folder",
    type=LocalPath(),
    default="/var/tmp",  # noqa: S108 (an unnamed file)
    show_default=True,
    help="Folder on the disk to measure; writes a 1 GiB file.",
)
@click.option(
    "--timeout", metavar="TIME", default="2m", show_default=True, help="Time limit of each test: 30s, 2m; 5 is minutes."
)
@config_option
@site_option
@format_option
@click.pass_context
def bench(
    ctx: click.Context, mode: str, folder: Path, timeout: str, config_path: Path | None, site_name: str, form: str
) -> None:
    """Measure the nodes of this job, or with --single, outside of a job, this node.

    Prints a line for each node and measure, rates in bytes or operations per second. Results are kept in the spool,
    and compared with the node's own past and with nodes of the same hardware; a node that is slow is measured again.
    Exit 1: a node is slow, wrong or failed.

    \b
    salloc -N 16 --exclusive pit node bench --bisect
    """
    from pitools.core import hostlist
    from pitools.core.errors import PitError, UsageError
    from pitools.core.output import Output
    from pitools.core.units import parse_duration
    from pitools.node.bench import history, run
    from pitools.node.bench.bisect import find_bad, max_rounds
    from pitools.node.bench.compare import compare, compare_twice
    from pitools.node.check.this_node import node_name
    from pitools.slurm import job_step

    spool = load_node_config(config_path, site_name).spool
    timeout_s = parse_duration(timeout)
    if not timeout_s:
        raise UsageError(f'"{timeout}": no time to measure in (expected 1s or more)', where="--timeout", hint="2m")
    nodes = job_step.nodes_of_job()
    past = history.read_past(Path(spool), nodes or [node_name()]) if spool else []

    def report(text: str) -> None:
        click.echo(f"pit: {text}", err=True)

    def measure(some: list[str]) -> list[BenchResult]:
        report(f"measures {hostlist.fold(some)}, within {run.limit_s(timeout_s):g} s")
        return run.measure_nodes(some, folder, timeout_s, in_job=bool(nodes))

    if mode == "single":
        if not (nodes or folder.is_dir()):
            hint = "--folder /var/tmp"
            raise UsageError(f"{folder}: no such folder on this machine", where="--folder", hint=hint)
        results = compare_twice(measure(nodes or [node_name()]), past, measure)
    else:
        if len(nodes) < 2:
            hint = f"salloc -N 8 --exclusive pit node bench --{mode}"
            problem = f"{len(nodes)} nodes in this job" if nodes else "not in a job"
            raise UsageError(f"{problem} (expected 2 nodes or more)", where=f"--{mode}", hint=hint)
        report(f"{len(nodes)} nodes, at most {max_rounds(len(nodes))} rounds")
        tester = run.GroupTester(timeout_s=timeout_s, ranks_per_node=job_step.gpus_per_node() or 1, report=report)
        found = find_bad(nodes, tester.test_round, together=mode == "bisect")
        results = compare(run.to_results(found, nodes, tester.tests, tester.devices), past, is_judged=True)
    with Output(form, COLUMNS) as out:
        for result in results:
            out(result)
    if spool:
        try:
            history.append_results(Path(spool), results)
        except PitError as error:
            report(f"note: results are not kept: {error}")
    ctx.exit(any(result.verdict != "ok" for result in results))
