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

from pitools.core import clock, proc
from pitools.core.errors import PitError
from pitools.core.record import Record
from pitools.run import folder

_CONNECT_S = 3.0
_ASK_S = 8.0
_SLURMD = 6818
_NODE = re.compile(r"NodeName=(\S+).*? NodeAddr=(\S+)(?:.*? Port=(\d+))?")


class Silent(Record, frozen=True, kw_only=True, tag="pit.silent-node/1"):
    """A node whose slurmd could not be reached from the job's first node."""

    t: str
    node: str
    address: str
    error: str


def look(attempt: Path, node_list: str) -> list[Silent]:
    """Try the slurmd of each node of the job once, side by side; what does not answer is written down and returned."""
    try:
        argv = ["scontrol", "-o", "show", "node", node_list]
        told = proc.run(argv, timeout_s=_ASK_S, env={"SLURM_TIME_FORMAT": "standard"}).stdout
    except PitError:  # no controller: nothing is known of any node
        return []
    places = [(name, address, int(port or _SLURMD)) for name, address, port in _NODE.findall(told)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        found = [one for one in pool.map(_try, places) if one]
    for one in found:
        with contextlib.suppress(PitError, OSError):  # the log has it too
            folder.write(attempt / "silent" / f"{one.node}.json", one)
    return found


def _try(place: tuple[str, str, int]) -> Silent | None:
    node, address, port = place
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        return Silent(t=clock.now(), node=node, address=f"{address}:{port}", error=said)
    return None


def text(found: Sequence[Silent]) -> str:
    """The same as lines for a log."""
    return "".join(f"pit: error: node {one.node} does not answer: {one.error} ({one.address})\n" for one in found)
