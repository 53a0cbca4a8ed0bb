"""Every daemon of a layout: how it is started, and where it can be reached."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster_parts.config import LOOPBACK
from devcluster_parts.errors import ClusterProblem
from devcluster_parts.layout import Layout
from devcluster_parts.process import Identity, is_alive, read_record, spawn
from devcluster_parts.tools import environment

LOG_TAIL_LINES = 15


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """One process to keep running. `port` is 0 for MariaDB, which has only a Unix socket."""

    name: str
    kind: str
    cluster: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    port: int
    log: Path
    record: Path

    @property
    def output(self) -> Path:
        """What it wrote to stdout and stderr."""
        return self.log.with_suffix(".out")

    def identity(self) -> Identity | None:
        """The process that runs now; None when it does not."""
        who = read_record(self.record)
        return who if who is not None and is_alive(who) else None


def daemons(layout: Layout) -> list[Daemon]:
    """In the order in which they are started."""
    found = [_database(layout), _accounting(layout)]
    for cluster in layout.clusters:
        argv = ("slurmctld", "-D", "-f", str(cluster.conf))
        found.append(
            _daemon(layout, f"{cluster.name}-slurmctld", "slurmctld", cluster.name, argv, cluster.controller_port)
        )
    for cluster in layout.clusters:
        for node in cluster.nodes:
            node_argv = ("slurmd", "-D", "-N", node, "-f", str(cluster.conf))
            found.append(_daemon(layout, f"slurmd-{node}", "slurmd", cluster.name, node_argv, cluster.node_port(node)))
    return found


def _daemon(layout: Layout, name: str, kind: str, cluster: str, argv: tuple[str, ...], port: int, **env: str) -> Daemon:
    log = layout.logs / f"{name}.log"
    record = layout.records / f"{name}.json"
    return Daemon(
        name=name, kind=kind, cluster=cluster, argv=argv, env=tuple(env.items()), port=port, log=log, record=record
    )


def _database(layout: Layout) -> Daemon:
    data = layout.database
    argv = (
        "mariadbd",
        "--no-defaults",
        f"--datadir={data}/data",
        f"--socket={layout.socket}",
        f"--pid-file={data}/pid",
        f"--tmpdir={data}",
        f"--log-error={layout.logs}/mariadbd.log",
        f"--user={environment()['USER']}",
        "--skip-networking",
        "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900",
        # The accounts live as long as the clusters do: they must outlive a killed process, not a power cut.
        "--innodb-flush-log-at-trx-commit=2",
        "--innodb-doublewrite=0",
        "--innodb-fast-shutdown=2",
    )
    return _daemon(layout, "mariadbd", "mariadbd", "", argv, 0)


def _accounting(layout: Layout) -> Daemon:
    # slurmdbd looks for slurmdbd.conf beside the file that SLURM_CONF names, and its MariaDB client for this socket.
    conf = f"{layout.accounting}/slurm.conf"
    env = {"SLURM_CONF": conf, "MYSQL_UNIX_PORT": str(layout.socket)}
    return _daemon(layout, "slurmdbd", "slurmdbd", "", ("slurmdbd", "-D"), layout.accounting_port, **env)


def start(daemon: Daemon) -> None:
    """Start it, whatever else runs."""
    spawn(daemon.argv, env=environment(**dict(daemon.env)), output=daemon.output, record=daemon.record)


def check_port(daemon: Daemon) -> None:
    """Raise Problem when its port belongs to another."""
    if not daemon.port:
        return
    with contextlib.closing(socket.socket()) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((LOOPBACK, daemon.port))
        except OSError as error:
            what = f"port {daemon.port} for {daemon.name} cannot be had ({error.strerror})"
            raise ClusterProblem(what, hint="name another --base-port") from error


def wait_for(waiting: Sequence[Daemon], ready: Callable[[], str], *, until: float, poll_s: float = 0.1) -> None:
    """Poll until `ready` returns ""; otherwise it returns what is still awaited.

    Raises ClusterProblem with the tail of a log as soon as a daemon has ended, or at the monotonic time `until`.
    """
    while lacking := ready():
        for daemon in waiting:
            if daemon.identity() is None:
                raise ClusterProblem(f"{daemon.name} ended:\n{tail(daemon)}", where=str(daemon.log))
        if time.monotonic() > until:
            shown = waiting[0]
            raise ClusterProblem(
                f"gave up waiting: {lacking}\n{tail(shown)}",
                where=str(shown.log),
                hint="run `devcluster up` again with a longer --timeout, or `devcluster down`",
            )
        time.sleep(poll_s)


def tail(daemon: Daemon) -> str:
    """The last lines of its log, or of its output when it never opened a log."""
    for path in (daemon.log, daemon.output):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
    return "    (no log)"


def is_listening(address: str | os.PathLike[str], port: int = 0) -> bool:
    """Whether something listens at this address and port, or on this Unix socket when there is no port."""
    family = socket.AF_INET if port else socket.AF_UNIX
    with contextlib.closing(socket.socket(family)) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect((address, port) if port else os.fspath(address))
        except OSError:
            return False
    return True
