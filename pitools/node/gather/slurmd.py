"""Read what Slurm says of this node: its slurmd, and where that is allowed its controllers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core.errors import PitError
from pitools.node.gather.read import Query, list_names, read_bytes
from pitools.node.types import Row

if TYPE_CHECKING:
    from pitools.slurm.client import Client

_SCONTROL_TIMEOUT_S = 10.0
SLURM_TIMEOUT_S = 2 * _SCONTROL_TIMEOUT_S + 2


def read_slurm(query: Query) -> Iterator[Row]:
    """Yield the one row of table `slurm`; the controllers' part of it by `scontrol ping` and `show node`."""
    pid = find_slurmd(query.proc, query.node)
    row: Row = {"is_node": True, "slurmd_is_running": pid is not None}
    node = query.node or socket.gethostname().partition(".")[0]
    yield row | _ask_controller(node, slurm_client(pid, query.proc))


def find_slurmd(proc: Path = Path("/proc"), node: str = "") -> int | None:
    """Return the process id of this node's slurmd that runs: one that is stopped (SIGSTOP) or dead does not.

    One that was started as another node (`-N`) is not it, nor one of an ordinary user, as its name proves nothing.
    """
    owners = (b"0", str(os.geteuid()).encode())  # slurmd's user is root, or the one that this runs as
    for pid in list_names(proc):
        if not pid.isdigit():
            continue
        head, _, tail = (read_bytes(f"{proc}/{pid}/stat", limit=512) or b"").rpartition(b")")
        if head.partition(b"(")[2] == b"slurmd" and tail[1:2] not in (b"Z", b"X", b"T", b"t"):
            status = read_bytes(f"{proc}/{pid}/status", limit=4096) or b""
            uid = status.partition(b"\nUid:")[2].split()[:1]  # the real one: of a set-uid program it is the user's
            if not uid or uid[0] not in owners:
                continue
            arguments = _command_line(proc, int(pid))
            if arguments[0] and (not node or _option(arguments, "-N") in ("", node)):  # else it has just ended
                return int(pid)
    return None


def _command_line(proc: Path, pid: int) -> list[str]:
    return (read_bytes(f"{proc}/{pid}/cmdline", limit=4096) or b"").decode(errors="replace").split("\0")


def _option(arguments: list[str], option: str) -> str:
    """Return the value of a short option of slurmd; "" if it has none."""
    for argument, following in zip(arguments[1:], [*arguments[2:], ""], strict=False):
        if argument.startswith(option):
            return argument[2:] or following
    return ""


def slurm_client(slurmd: int | None, proc: Path = Path("/proc"), timeout_s: float = _SCONTROL_TIMEOUT_S) -> Client:
    """Return a client with the configuration of this node's slurmd. slurmd: its process id; None if none runs."""
    from pitools.slurm.client import Client, Transport  # 30 ms, which most calls need not pay

    # Where slurmd was started with `-f`, its HealthCheckProgram is not told of that file.
    conf = "" if slurmd is None or os.environ.get("SLURM_CONF") else _option(_command_line(proc, slurmd), "-f")
    return Client(Transport(timeout_s=timeout_s, env={"SLURM_CONF": conf} if conf.startswith("/") else {}))


def _ask_controller(node: str, client: Client) -> Row:
    from pitools.slurm.errors import SlurmReason, SlurmRefused

    row: Row = {}
    try:
        answers = client.controllers()
        if answers:  # none where scontrol finds no configuration
            row |= {"controllers": len(answers), "controllers_up": sum(answers)}
        (one,) = client.nodes(node) if any(answers) else []
        row |= {"node_state": one.state, "node_flags": ",".join(one.flags), "node_reason": one.reason}
    except SlurmRefused as error:
        row["is_node"] = error.reason is not SlurmReason.INVALID_NODE_NAME
    except (PitError, ValueError):  # values that are missing are unknown
        pass
    return row
