"""Schema of site files: keys, units and defaults. `site_configs/README.md` documents them for users.

A site file is data: an unknown key is an error, and nothing is executed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pitools.core.record import Record


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of a site file."""


class Connection(Section, frozen=True, kw_only=True):
    """How commands run at the site: on this host, or over `ssh host`."""

    kind: Literal["local", "ssh"] = "local"
    host: str = ""
    timeout_s: float = 20.0


class Slurm(Section, frozen=True, kw_only=True):
    """The site's Slurm. conf: SLURM_CONF for its commands, if not the host's default.

    bin: folder of its commands, at the site and on nodes, if the PATH does not have them or has another Slurm's.
    cluster: its ClusterName; jobs are placed only if the controller reports this name. "": not checked.
    """

    conf: str = ""
    bin: str = ""
    cluster: str = ""


class Dialect(Section, frozen=True, kw_only=True):
    """The form of sbatch flags that the site accepts.

    gpus: the flag that requests GPUs; `none` for no flag. gpu_type: include the type (`gpu:h100:8`).
    refuse: long flags of sbatch that requests may not set under [sbatch], such as `reservation`.
    account, qos, signal, requeue: whether a request's flag is used. exclusive: whether `--exclusive` is added.
    memory: `ask` for the request's memory, `all` for that of the node (`--mem=0`), `none` for no flag.
    segment: `--segment` of block topologies. extra: additional flags, unchanged.
    """

    gpus: Literal["gres", "gpus-per-node", "none"] = "gres"
    gpu_type: bool = False
    account: bool = True
    qos: bool = True
    memory: Literal["ask", "all", "none"] = "ask"
    exclusive: bool = False
    signal: bool = True
    requeue: bool = True
    segment: bool = False
    extra: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()


class SitePartition(Section, frozen=True, kw_only=True):
    """A partition. Prices are in the site's currency per node and hour.

    max_time: as in sbatch; "" and Slurm's UNLIMITED and INFINITE mean no limit. speed: of a node, relative to other
    partitions, for requests without a measurement. throughput: request name → samples per second and node.
    """

    nodes: int = 0
    gpu: str = ""
    gpus_per_node: int = 0
    gpu_memory_gib: int = 0
    max_time: str = ""
    price_per_node_hour: float = 0.0
    speed: float = 1.0
    throughput: dict[str, float] = {}


def hourly_price(partition: SitePartition, nodes: int, gpus: int) -> float:
    """Return the price of an hour of a job: of its nodes, by the share of their GPUs that it has, 1 without GPUs."""
    shared = min(nodes, gpus / partition.gpus_per_node) if partition.gpus_per_node else nodes
    return shared * partition.price_per_node_hour


PreflightMode = Literal["none", "quick"]


class Defaults(Section, frozen=True, kw_only=True):
    """Defaults for requests. preflight: `quick` tests the nodes of each attempt before its ranks start."""

    partition: str = ""
    account: str = ""
    time: str = "1h"
    tier: str = "normal"
    preflight: PreflightMode = "none"


class Paths(Section, frozen=True, kw_only=True):
    """Folders. `{node}`, `{user}` and `{job}` are replaced on the node.

    runs: run folders, on storage shared by login and compute nodes. data: datasets, on shared storage too.
    nvme: folder of pit-stage on each node. python: path on the nodes of an interpreter with pitools.
    runs_access: readers of a run's folder: its owner, or its group too. Only the owner may write there.
    """

    runs: str = "runs"
    runs_access: Literal["owner", "group"] = "owner"
    data: str = ""
    nvme: str = ""
    python: str = ""


class Network(Section, frozen=True, kw_only=True):
    """Rendezvous of ranks. ports: first and last coordinator port, below the ephemeral range and open between nodes.

    host_suffix: appended to rank 0's node name for its address in the fast network (`n01` → `n01i`).
    env: variables of every rank, such as NCCL_SOCKET_IFNAME.
    """

    ports: tuple[int, int] = (20000, 31999)
    host_suffix: str = ""
    env: dict[str, str] = {}


class Stage(Section, frozen=True, kw_only=True):
    """Staging to `paths.nvme`. fanout: the nodes of a job read the source once and copy from each other.

    quota: limit of a user's folder. min_free: minimum free space of the disk. Both such as `500GiB`, "" for no limit;
    the least recently used sets are evicted.
    """

    fanout: bool = False
    quota: str = ""
    min_free: str = ""


class Topology(Section, frozen=True, kw_only=True):
    """A description of the fabric that replaces Slurm's.

    file: a topology.conf, topology.yaml, a CSV of host and switches, or a measured matrix; relative to the site file.
    dims, nodes: a torus and its nodes, the last dimension the fastest.
    """

    file: str = ""
    dims: tuple[int, ...] = ()
    nodes: str = ""


class Place(Section, frozen=True, kw_only=True):
    """Parameters of `pit place`.

    max_queued_jobs: limit of its pending jobs in each partition. bandwidth: expected rate of copies to `paths.data` in
    bytes per second, such as `200MiB`; measured rates replace it. failures_per_node_day: expected failures per node and
    day, weighted like 100 node-days of accounting. max_gpu_hours: limit of all jobs of this user in 30 days,
    or 0.
    """

    max_queued_jobs: int = 4
    bandwidth: str = "100MiB"
    failures_per_node_day: float = 0.0
    max_gpu_hours: float = 0.0


class NodeHealth(Section, frozen=True, kw_only=True):
    """Health of the site's nodes. config: the file of checks and limits, on this machine; relative to the site file.

    "": /etc/pitools/node.toml.
    """

    config: str = ""


class Monitor(Section, frozen=True, kw_only=True):
    """What `pit monitor` reads besides. slurm_metrics_url: of slurmctld with MetricsType (Slurm 25.11 and later).

    slurm_metrics_token: a file with the JSON web token for it, on this machine, that only you may read.
    """

    slurm_metrics_url: str = ""
    slurm_metrics_token: str = ""


class Recovery(Section, frozen=True, kw_only=True):
    """Recovery of runs after a fault, a preemption or their time limit.

    chain: "fresh" submits a new job, "requeue" requeues the job where possible, "none" does nothing. submit_from:
    "node" if compute nodes may call sbatch, else "login": `pit launch tick`, `watch` and `--wait` submit. grace_s: from
    SIGTERM to SIGKILL at preemption. exclude_share: maximum share of a partition's nodes that runs exclude;
    exclude_for: duration of an exclusion.
    """

    chain: Literal["fresh", "requeue", "none"] = "fresh"
    submit_from: Literal["node", "login"] = "node"
    grace_s: float = 30.0
    exclude_share: float = 0.1
    exclude_for: str = "24h"


class Container(Section, frozen=True, kw_only=True):
    """The container of ranks. Staging and rank order always run on the host."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    image: str = ""
    mounts: tuple[str, ...] = ()


HookEvent = Literal["verdict", "retry", "nan", "slo"]


class Hook(Section, frozen=True, kw_only=True):
    """A program that is started, as the run's user, when something happens to a run: see `launch/hooks.py`.

    on: "verdict" (the run has ended), "retry" (it continues after a fault), "nan" (the first loss of an attempt that is
    NaN or infinite); and, not by itself, "slo" (`pit monitor check --notify`: an SLO burns, or no longer).
    command: the program and its arguments; it gets the event's record on stdin.
    """

    command: tuple[str, ...]
    on: tuple[HookEvent, ...] = ("verdict", "retry", "nan")

    def __post_init__(self) -> None:
        """Raise ValueError, which the decoder turns into an error of its own, for a hook without a program."""
        if not self.command or not self.command[0]:
            raise ValueError("command: no program")


class Site(Section, frozen=True, kw_only=True):
    """One site file, all layers merged.

    accounts: permitted accounts. tiers: a request's tier → the site's QOS. modules: `module load` lines.
    environment: variables of the whole job, never secrets. templates: script name → file, in addition to
    the shipped ones; a relative path starts at the site file's folder. hooks: for every user's runs.
    """

    name: str
    description: str = ""
    scheduler: Literal["slurm", "none"] = "slurm"
    currency: str = "USD"
    accounts: tuple[str, ...] = ()
    tiers: dict[str, str] = {}
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    templates: dict[str, str] = {}
    partitions: dict[str, SitePartition] = {}
    connection: Connection = Connection()
    slurm: Slurm = Slurm()
    dialect: Dialect = Dialect()
    defaults: Defaults = Defaults()
    paths: Paths = Paths()
    network: Network = Network()
    stage: Stage = Stage()
    topology: Topology = Topology()
    place: Place = Place()
    node: NodeHealth = NodeHealth()
    monitor: Monitor = Monitor()
    recovery: Recovery = Recovery()
    container: Container = Container()
    hooks: tuple[Hook, ...] = ()


class SiteRow(Record, frozen=True, kw_only=True, tag="pit.site/1"):
    """A line of `pit site list`."""

    site: str
    scheduler: str
    connection: str
    partitions: tuple[str, ...]
    gpus: tuple[str, ...]
    description: str


class SiteSetting(Record, frozen=True, kw_only=True, tag="pit.setting/1"):
    """A key of a site. value: as JSON. origin: its file, its variable or `default`."""

    key: str
    value: str
    origin: str


def site_row(site: Site) -> SiteRow:
    """Return the row of a site."""
    gpus = {f"{part.gpu}:{part.gpus_per_node}" for part in site.partitions.values() if part.gpus_per_node}
    return SiteRow(
        site=site.name,
        scheduler=site.scheduler,
        connection=f"ssh {site.connection.host}" if site.connection.kind == "ssh" else "local",
        partitions=tuple(site.partitions),
        gpus=tuple(sorted(gpus)),
        description=site.description,
    )
