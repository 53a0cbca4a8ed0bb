"""What a development cluster consists of, and where each thing lies: pure values, decided once and kept in the root."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from devcluster_parts.errors import ClusterProblem, UsageProblem

DEFAULT_ROOT = Path("/var/tmp/pit-devcluster")
DEFAULT_BASE_PORT = 17000
FIRST_DYNAMIC_PORT = 32768  # from here the kernel hands ports out to anyone's outgoing connections
PORTS_PER_CLUSTER = 100
MAX_NODES = 90
SOCKET_ADDRESS_BYTES = 107
CLOUD = "cloud"
RESERVED = (CLOUD, "log", "db", "slurmdbd", "processes", "runs", "sites")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `up`, kept in the root's marker file, so that later calls need none.

    `cloud` is None, or the folded node list of the controller-only cluster. Slurm's own requeue delay is 120 s.
    """

    clusters: tuple[str, ...] = ("alpha", "beta")
    nodes: int = 8
    base_port: int = DEFAULT_BASE_PORT
    cloud: str | None = None
    requeue_delay_s: int = 10


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One slurmctld and the nodes that have a slurmd; the cloud cluster has none of those, and no `leaves` here."""

    name: str
    folder: Path
    nodes: tuple[str, ...]
    leaves: tuple[tuple[str, ...], ...]
    controller_port: int

    @property
    def conf(self) -> Path:
        """The slurm.conf that a client names in SLURM_CONF."""
        return self.folder / "slurm.conf"

    def node_port(self, node: str) -> int:
        """The port on which the node's slurmd listens."""
        return self.controller_port + 1 + self.nodes.index(node)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every path and port under one root."""

    root: Path
    settings: Settings

    @property
    def marker(self) -> Path:
        """The file that marks the root as a devcluster's, and holds the settings."""
        return self.root / "devcluster.json"

    @property
    def records(self) -> Path:
        """One file per started process: its identity."""
        return self.root / "processes"

    @property
    def logs(self) -> Path:
        """One log per daemon, and what each wrote before it opened its log."""
        return self.root / "log"

    @property
    def database(self) -> Path:
        """MariaDB's data, socket and temporary files; nobody else may enter."""
        return self.root / "db"

    @property
    def socket(self) -> Path:
        """The only way into MariaDB."""
        return self.database / "s"

    @property
    def sites(self) -> Path:
        """The site files of the clusters, for PIT_SITE_PATH."""
        return self.root / "sites"

    @property
    def accounting(self) -> Path:
        """The folder of slurmdbd.conf."""
        return self.root / "slurmdbd"

    @property
    def accounting_port(self) -> int:
        """The port of slurmdbd."""
        return self.settings.base_port

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The clusters in order, the cloud last."""
        real = tuple(self._cluster(i, name) for i, name in enumerate(self.settings.clusters))
        return (*real, self._cloud(len(real))) if self.settings.cloud else real

    def _cluster(self, index: int, name: str) -> Cluster:
        width = max(2, len(str(self.settings.nodes)))
        nodes = tuple(f"{name}{n:0{width}d}" for n in range(1, self.settings.nodes + 1))
        half = (len(nodes) + 1) // 2
        # The first cluster's leaves alternate, so that an order by topology differs from an order by name.
        leaves = (nodes[0::2], nodes[1::2]) if index == 0 else (nodes[:half], nodes[half:])
        port = self.settings.base_port + PORTS_PER_CLUSTER * (index + 1)
        return Cluster(
            name=name,
            folder=self.root / name,
            nodes=nodes,
            leaves=tuple(leaf for leaf in leaves if leaf),
            controller_port=port,
        )

    def _cloud(self, index: int) -> Cluster:
        port = self.settings.base_port + PORTS_PER_CLUSTER * (index + 1)
        return Cluster(name=CLOUD, folder=self.root / CLOUD, nodes=(), leaves=(), controller_port=port)


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the command line says; None where it says nothing. `cloud_topology` is the text of a topology.conf."""

    clusters: tuple[str, ...] | None = None
    nodes: int | None = None
    base_port: int | None = None
    cloud: str | None = None
    requeue_delay_s: int | None = None
    cloud_topology: str = ""


def resolve(root: Path, current: Settings | None, overrides: Overrides) -> Settings:
    """Return the settings of a root: those kept in it, with the overrides.

    A cloud cluster may be added to what is up; anything else that differs raises ClusterProblem.
    """
    fields = ("clusters", "nodes", "base_port", "cloud", "requeue_delay_s")
    given = {field: value for field in fields if (value := getattr(overrides, field)) is not None}
    settings = replace(current or Settings(), **given)
    _check_settings(settings)
    _check_socket_addresses(root, settings)
    if current is not None and settings != (current if current.cloud else replace(current, cloud=settings.cloud)):
        changed = ", ".join(field for field in fields if getattr(current, field) != getattr(settings, field))
        raise ClusterProblem(
            f"the clusters here have other settings: {changed}", where=str(root), hint="`devcluster down` first"
        )
    return settings


def _check_settings(settings: Settings) -> None:
    for name in settings.clusters:
        if not re.fullmatch(r"[a-z][a-z_]{0,15}", name):
            raise UsageProblem(f"cluster name {name!r} is not 1 to 16 lower-case letters", where="--clusters")
        if name in RESERVED:
            raise UsageProblem(f"the name {name!r} is used by devcluster itself", where="--clusters")
    if not settings.clusters or len(set(settings.clusters)) != len(settings.clusters):
        raise UsageProblem("needs one or more names, each once", where="--clusters")
    if not 1 <= settings.nodes <= MAX_NODES:
        raise UsageProblem(f"{settings.nodes} is not between 1 and {MAX_NODES}", where="--nodes")
    if not 5 <= settings.requeue_delay_s <= 3600:
        what = f"{settings.requeue_delay_s} s is not between 5 and 3600"
        raise UsageProblem(what, where="--requeue-delay")
    last = settings.base_port + PORTS_PER_CLUSTER * (len(settings.clusters) + 2) - 1
    if settings.base_port < 1024 or last >= FIRST_DYNAMIC_PORT:
        what = f"ports {settings.base_port} to {last} are not within 1024 to {FIRST_DYNAMIC_PORT - 1}"
        raise UsageProblem(what, where="--base-port")


def _check_socket_addresses(root: Path, settings: Settings) -> None:
    node = max((c.nodes[-1] for c in Layout(root=root, settings=settings).clusters if c.nodes), key=len)
    name = node.rstrip("0123456789")
    longest = f"{root}/{name}/spool/{node}/{node}_1234567.4294967291"  # slurmstepd's socket
    over = len(longest) - SOCKET_ADDRESS_BYTES
    if over > 0:
        raise UsageProblem(f"{root} is {over} characters too long for a socket's address", where="--root")


def check_root_path(root: Path) -> None:
    """Raise UsageProblem for a path that Slurm's configuration files cannot hold."""
    if not re.fullmatch(r"(/[A-Za-z0-9_.-]+)+", str(root)) or ".." in root.parts:
        raise UsageProblem(
            f"{str(root)!r} is not an absolute path of letters, digits, '_', '.' and '-'", where="--root"
        )
