"""Nodes of which nothing is heard any more: a node whose slurmd has gone does not say that its ranks have.

<attempt>/silent/<node>.json    pit.silent-node/1
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
from pitools.run.attempt_records import Start
from pitools.slurm.transport import READING, Reach, call

_CONNECT_S = 3.0
_ASK_S = 8.0
_SLURMD = 6818
_STATE = re.compile(r"NodeName=(?P<node>\S+) .*? State=(?P<state>\S+) .*? SlurmdStartTime=(?P<begun>\S+)")
# DOWN, DOWN*, IDLE+NOT_RESPONDING; not POWERED_DOWN or POWERING_DOWN, which is how an idle node of a cloud rests.
_LOST = re.compile(r"\bDOWN\b|NOT_RESPONDING|\*")
_RESTS = re.compile(r"^(?!DOWN).*POWER(ED_DOWN|ING_DOWN|ING_UP)")
_NODE = re.compile(r"NodeName=(\S+).*? NodeAddr=(\S+)(?:.*? Port=(\d+))?")


class Silent(Record, frozen=True, kw_only=True, tag="pit.silent-node/1"):
    """A node whose slurmd could not be reached from the job's first node; or, address "", that Slurm itself lost."""

    t: str
    node: str
    address: str
    error: str


def look(attempt: Path, node_list: str) -> list[Silent]:
    """Try the slurmd of each node of the job once, side by side; what does not answer is written down and returned."""
    try:
        argv = ["scontrol", "-o", "show", "node", node_list]
        told = subprocesses.run(argv, timeout_s=_ASK_S, env={"SLURM_TIME_FORMAT": "standard"}).stdout
    except PitError:  # no controller: nothing is known of any node
        return []
    places = [(name, address, int(port or _SLURMD)) for name, address, port in _NODE.findall(told)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        found = [one for one in pool.map(_try, places) if one]
    _keep(attempt, found)
    return found


def _try(place: tuple[str, str, int]) -> Silent | None:
    node, address, port = place
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        return Silent(t=timestamps.now(), node=node, address=f"{address}:{port}", error=said)
    return None


def fallen(attempt: Path, start: Start, reach: Reach) -> list[Silent]:
    """Which of an attempt's nodes Slurm has lost, after it said NODE_FAIL; they are written down and returned.

    Where it has all of them again it is the first, which ran the job's script, if its slurmd has begun anew since.
    """
    try:
        told = call(reach, ["scontrol", "-o", "show", "node", start.node_list], env=READING)
    except PitError:
        return []
    known = [match for match in map(_STATE.match, told.stdout.splitlines()) if match]
    found = [
        Silent(t=timestamps.now(), node=one["node"], address="", error=f"Slurm has lost it: {one['state']}")
        for one in known
        if _LOST.search(one["state"]) and not _RESTS.match(one["state"])
    ]
    first = next(iter(hostlist.expand(start.node_list)), "")
    begun = next((f"{one['begun']}.000Z" for one in known if one["node"] == first), "")
    if not found and begun[:1].isdecimal() and begun > start.started:  # "None" of one that is powered off
        found = [Silent(t=begun, node=first, address="", error="its slurmd began anew, and the job's script was gone")]
    _keep(attempt, found)
    return found


def _keep(attempt: Path, found: Sequence[Silent]) -> None:
    for one in found:
        with contextlib.suppress(PitError, OSError):  # the log has it too
            run_folder.write(attempt / "silent" / f"{one.node}.json", one)


def text(found: Sequence[Silent]) -> str:
    """The same as lines for a log."""
    return "".join(f"pit: error: node {one.node} does not answer: {one.error} ({one.address})\n" for one in found)
