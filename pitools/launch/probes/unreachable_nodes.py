"""Find nodes of a job with an unreachable slurmd: such a node does not report that its ranks have ended.

<attempt>/unreachable/<node>.json    pit.unreachable-node/1
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pitools.core import hostlist, subprocesses, timestamps
from pitools.core.errors import PitError
from pitools.core.record import Record
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.slurm.transport import QUERY_ENV, Transport, run_command

_CONNECT_S = 3.0
_CALL_TIMEOUT_S = 8.0
_SLURMD_PORT = 6818
_STATE = re.compile(r"NodeName=(?P<node>\S+) .*? State=(?P<state>\S+) .*? SlurmdStartTime=(?P<begun>\S+)")
# DOWN, DOWN*, IDLE+NOT_RESPONDING; not POWERED_DOWN or POWERING_DOWN, the states of an idle cloud node.
_LOST_STATE = re.compile(r"\bDOWN\b|NOT_RESPONDING|\*")
_POWER_SAVING = re.compile(r"^(?!DOWN).*POWER(ED_DOWN|ING_DOWN|ING_UP)")
_NODE = re.compile(r"NodeName=(\S+).*? NodeAddr=(\S+)(?:.*? Port=(\d+))?")


class UnreachableNode(Record, frozen=True, kw_only=True, tag="pit.unreachable-node/1"):
    """A node with a slurmd that the job's first node cannot reach. address: "" if Slurm itself lost the node."""

    t: str
    node: str
    address: str
    error: str


def probe_slurmds(attempt: Path, node_list: str) -> list[UnreachableNode]:
    """Connect once to the slurmd of each node of the job, in parallel; record and return failures."""
    try:
        argv = ["scontrol", "-o", "show", "node", node_list]
        output = subprocesses.run(argv, timeout_s=_CALL_TIMEOUT_S, env={"SLURM_TIME_FORMAT": "standard"}).stdout
    except PitError:  # no controller, so no addresses
        return []
    addresses = [(name, address, int(port or _SLURMD_PORT)) for name, address, port in _NODE.findall(output)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        unreachable = [result for result in pool.map(_probe_slurmd, addresses) if result]
    _write_records(attempt, unreachable)
    return unreachable


def _probe_slurmd(node_address: tuple[str, str, int]) -> UnreachableNode | None:
    node, address, port = node_address
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
        return UnreachableNode(t=timestamps.now_rfc3339(), node=node, address=f"{address}:{port}", error=problem)
    return None


def nodes_lost_by_slurm(attempt: Path, start: AttemptStart, transport: Transport) -> list[UnreachableNode]:
    """Record and return the nodes of an attempt that Slurm has lost, after a NODE_FAIL.

    If all nodes are back, return the first, which ran the job's script, if its slurmd has restarted since.
    """
    try:
        answer = run_command(transport, ["scontrol", "-o", "show", "node", start.node_list], env=QUERY_ENV)
    except PitError:
        return []
    states = [match for match in map(_STATE.match, answer.stdout.splitlines()) if match]
    lost_nodes = [
        UnreachableNode(
            t=timestamps.now_rfc3339(), node=fields["node"], address="", error=f"Slurm has lost it: {fields['state']}"
        )
        for fields in states
        if _LOST_STATE.search(fields["state"]) and not _POWER_SAVING.match(fields["state"])
    ]
    first = next(iter(hostlist.expand(start.node_list)), "")
    slurmd_started = next((f"{row['begun']}.000Z" for row in states if row["node"] == first), "")
    if (
        not lost_nodes and slurmd_started[:1].isdecimal() and slurmd_started > start.started
    ):  # "None" of one that is powered off
        lost_nodes = [
            UnreachableNode(
                t=slurmd_started, node=first, address="", error="slurmd restarted; the job's script was lost"
            )
        ]
    _write_records(attempt, lost_nodes)
    return lost_nodes


def _write_records(attempt: Path, nodes: Sequence[UnreachableNode]) -> None:
    for record in nodes:
        with contextlib.suppress(PitError, OSError):  # the caller also logs it
            run_folder.write_record(attempt / "unreachable" / f"{record.node}.json", record)


def as_log_lines(nodes: Sequence[UnreachableNode]) -> str:
    """Return a line for a log for each node."""
    return "".join(f"pit: error: node {node.node} does not answer: {node.error} ({node.address})\n" for node in nodes)
