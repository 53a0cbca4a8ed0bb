"""What a site file says. Every key, its unit and its default; `site_configs/README.md` is the same for readers.

A site is data: a misspelt key is an error, and nothing in it is executed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pitools.core.record import Record


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of a site file."""


class Connection(Section, frozen=True, kw_only=True):
    """How commands get to the site: on this host, or through `ssh host`."""

    kind: Literal["local", "ssh"] = "local"
    host: str = ""
    timeout_s: float = 20.0


class Slurm(Section, frozen=True, kw_only=True):
    """The site's Slurm. conf: value of SLURM_CONF for its commands, when it is not the host's default.

    bin: the folder of its commands, there and on the nodes, where the PATH does not lead to them or to another Slurm's.

    cluster: its ClusterName; jobs are placed here only when it answers to that. "" is not compared.
    """

    conf: str = ""
    bin: str = ""
    cluster: str = ""


class Dialect(Section, frozen=True, kw_only=True):
    """Which spelling of each sbatch flag the site accepts.

    gpus: how GPUs are asked for; `none` emits nothing. gpu_type: put the type in (`gpu:h100:8`).
    account, qos, memory, exclusive, signal, requeue: whether the flag is emitted at all. `memory="all"` asks for all
    memory of the node (`--mem=0`). segment: `--segment` of block topologies. extra: flags added as they stand.
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


class SitePartition(Section, frozen=True, kw_only=True):
    """One partition. Prices are in the site's currency per node and hour.

    max_time: as in sbatch; "" and Slurm's UNLIMITED and INFINITE are no limit. speed: of one node, beside any other
    partition's, for requests that nobody has measured. throughput: request name → samples per second and node, as
    measured or known.
    """

    nodes: int = 0
    gpu: str = ""
    gpus_per_node: int = 0
    gpu_memory_gib: int = 0
    max_time: str = ""
    price_per_node_hour: float = 0.0
    speed: float = 1.0
    throughput: dict[str, float] = {}


class Defaults(Section, frozen=True, kw_only=True):
    """What is used when a request does not say."""

    partition: str = ""
    account: str = ""
    time: str = "1h"
    tier: str = "normal"


class Paths(Section, frozen=True, kw_only=True):
    """Folders. `{node}`, `{user}` and `{job}` are filled in on the node.

    runs: run folders, on storage that the login and compute nodes share. data: datasets, likewise.
    nvme: where pit-stage puts datasets on each node. python: an interpreter that has pitools, as the nodes see it.
    runs_access: who may read a run's folder: its owner alone, or its group too. Nobody else may write there.
    """

    runs: str = "runs"
    runs_access: Literal["owner", "group"] = "owner"
    data: str = ""
    nvme: str = ""
    python: str = ""


class Network(Section, frozen=True, kw_only=True):
    """How ranks meet. ports: first and last coordinator port, below the ephemeral range and open between nodes.

    host_suffix: appended to rank 0's node address where the fast network has names of its own (`n01` → `n01i`).
    env: variables of every rank, such as NCCL_SOCKET_IFNAME.
    """

    ports: tuple[int, int] = (20000, 31999)
    host_suffix: str = ""
    env: dict[str, str] = {}


class Stage(Section, frozen=True, kw_only=True):
    """How jobs stage to `paths.nvme`. fanout: nodes of a job read the source once and pass it on to each other.

    quota: the most that a user's folder there may hold. min_free: what must stay free on the disk. Both such as
    `500GiB`, "" for no limit; the least recently used sets make room.
    """

    fanout: bool = False
    quota: str = ""
    min_free: str = ""


class Topology(Section, frozen=True, kw_only=True):
    """What describes the fabric better than Slurm does.

    file: a topology.conf, topology.yaml, a CSV of host and switches, or a measured matrix; relative to the site file.
    dims, nodes: a torus and its nodes, the last dimension the fastest.
    """

    file: str = ""
    dims: tuple[int, ...] = ()
    nodes: str = ""


class Place(Section, frozen=True, kw_only=True):
    """What `pit place` may do here. max_queued_jobs: the most of its jobs that may wait in the site's queue at a time.

    bandwidth: what a second of copying brings to `paths.data`, such as `200MiB`, until it was measured.
    failures_per_node_day: how often a node is lost, as far as accounting has not seen it. gpu_hours: what all our jobs
    may use in 30 days; 0 is no limit.
    """

    max_queued_jobs: int = 4
    bandwidth: str = "100MiB"
    failures_per_node_day: float = 0.0
    gpu_hours: float = 0.0


class Recovery(Section, frozen=True, kw_only=True):
    """How runs go on here after a fault, a preemption, or their time limit.

    chain: "fresh" submits a new job, "requeue" puts the same one back in the queue wherever that will do, "none" leaves
    it to a person. submit_from: "node" where compute nodes may call sbatch, else "login": `pit launch tick`, `watch`
    and `--wait` do it. grace_s: between SIGTERM and SIGKILL at preemption. exclude_share: of a partition's nodes, the
    most that runs keep away from at a time; exclude_for: how long they do.
    """

    chain: Literal["fresh", "requeue", "none"] = "fresh"
    submit_from: Literal["node", "login"] = "node"
    grace_s: float = 30.0
    exclude_share: float = 0.1
    exclude_for: str = "24h"


class Container(Section, frozen=True, kw_only=True):
    """What ranks run in. Staging and rank order always run on the host."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    image: str = ""
    mounts: tuple[str, ...] = ()


class Site(Section, frozen=True, kw_only=True):
    """One site file, all layers merged.

    accounts: names you may charge. tiers: a request's tier → the site's QOS. modules: `module load` lines.
    environment: variables of the whole job, never secrets. templates: script name → file, beside the shipped ones; a
    relative path starts at the site file's folder.
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
    recovery: Recovery = Recovery()
    container: Container = Container()


class SiteRow(Record, frozen=True, kw_only=True, tag="pit.site/1"):
    """A line of `pit site list`."""

    site: str
    scheduler: str
    connection: str
    partitions: tuple[str, ...]
    gpus: tuple[str, ...]
    description: str


class SiteSetting(Record, frozen=True, kw_only=True, tag="pit.setting/1"):
    """One key of a site, its value as JSON, and the file, variable or `default` it came from."""

    key: str
    value: str
    origin: str


def site_row(site: Site) -> SiteRow:
    """A site as one line."""
    gpus = {f"{part.gpu}:{part.gpus_per_node}" for part in site.partitions.values() if part.gpus_per_node}
    return SiteRow(
        site=site.name,
        scheduler=site.scheduler,
        connection=f"ssh {site.connection.host}" if site.connection.kind == "ssh" else "local",
        partitions=tuple(site.partitions),
        gpus=tuple(sorted(gpus)),
        description=site.description,
    )
