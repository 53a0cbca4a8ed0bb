"""Run one command on each node of a list, in a separate job step that overlaps the ranks' step."""

from __future__ import annotations

from collections.abc import Sequence

from pitools.core import hostlist, subprocesses


def run_on_nodes(argv: Sequence[str], node_list: str, timeout_s: float) -> subprocesses.Completed:
    """Run a command once on each node, its output dropped, and return srun's exit code and stderr.

    node_list: nodes of this job, folded. Raises ToolMissing without srun, Unreachable on time-out.
    """
    nodes = hostlist.count_hosts(node_list)
    srun = [
        "srun",
        "--overlap",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--nodelist={node_list}",
        "--distribution=block",
        "--mem=0",
        "--output=none",
        "--error=none",
        "--input=none",
    ]
    return subprocesses.run([*srun, *argv], timeout_s=timeout_s, unset=("SLURM_HOSTFILE", "SLURM_DISTRIBUTION"))
