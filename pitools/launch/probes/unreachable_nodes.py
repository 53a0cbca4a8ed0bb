"""Nodes of which nothing is heard any more: a node whose slurmd has gone does not say that its ranks have.

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
# DOWN, DOWN*, IDLE+NOT_RESPONDING; not POWERED_DOWN or POWERING_DOWN, which is how an idle node of a cloud rests.
_LOST = re.compile(r"\bDOWN\b|NOT_RESPONDING|\*")
_POWER_SAVING = re.compile(r"^(?!DOWN).*POWER(ED_DOWN|ING_DOWN|ING_UP)")
_NODE = re.compile(r"NodeName=(\S+).*? NodeAddr=(\S+)(?:.*? Port=(\d+))?")


class UnreachableNode(Record, frozen=True, kw_only=True, tag="pit.unreachable-node/1"):
    """A node whose slurmd could not be reached from the job's first node; or, address "", that Slurm itself lost."""

    t: str
    node: str
    address: str
    error: str


def probe_slurmds(attempt: Path, node_list: str) -> list[UnreachableNode]:
    """Try the slurmd of each node of the job once, side by side; what does not answer is written down and returned."""
    try:
        argv = ["scontrol", "-o", "show", "node", node_list]
        output = subprocesses.run(argv, timeout_s=_CALL_TIMEOUT_S, env={"SLURM_TIME_FORMAT": "standard"}).stdout
    except PitError:  # no controller: nothing is known of any node
        return []
    addresses = [(name, address, int(port or _SLURMD_PORT)) for name, address, port in _NODE.findall(output)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        unreachable = [one for one in pool.map(_probe_slurmd, addresses) if one]
    _write_records(attempt, unreachable)
    return unreachable


def _probe_slurmd(place: tuple[str, str, int]) -> UnreachableNode | None:
    node, address, port = place
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        return UnreachableNode(t=timestamps.now_rfc3339(), node=node, address=f"{address}:{port}", error=said)
    return None


def nodes_lost_by_slurm(attempt: Path, start: AttemptStart, reach: Transport) -> list[UnreachableNode]:
    """Which of an attempt's nodes Slurm has lost, after it said NODE_FAIL; they are written down and returned.

    Where it has all of them again it is the first, which ran the job's script, if its slurmd has begun anew since.
    """
    try:
        answer = run_command(reach, ["scontrol", "-o", "show", "node", start.node_list], env=QUERY_ENV)
    except PitError:
        return []
    states = [match for match in map(_STATE.match, answer.stdout.splitlines()) if match]
    lost = [
        UnreachableNode(
            t=timestamps.now_rfc3339(), node=one["node"], address="", error=f"Slurm has lost it: {one['state']}"
        )
        for one in states
        if _LOST.search(one["state"]) and not _POWER_SAVING.match(one["state"])
    ]
    first = next(iter(hostlist.expand(start.node_list)), "")
    slurmd_started = next((f"{one['begun']}.000Z" for one in states if one["node"] == first), "")
    if (
        not lost and slurmd_started[:1].isdecimal() and slurmd_started > start.started
    ):  # "None" of one that is powered off
        lost = [
            UnreachableNode(
                t=slurmd_started, node=first, address="", error="its slurmd began anew, and the job's script was gone"
            )
        ]
    _write_records(attempt, lost)
    return lost


def _write_records(attempt: Path, nodes: Sequence[UnreachableNode]) -> None:
    for one in nodes:
        with contextlib.suppress(PitError, OSError):  # the log has it too
            run_folder.write_record(attempt / "unreachable" / f"{one.node}.json", one)


def as_log_lines(nodes: Sequence[UnreachableNode]) -> str:
    """The same as lines for a log."""
    return "".join(f"pit: error: node {one.node} does not answer: {one.error} ({one.address})\n" for one in nodes)
