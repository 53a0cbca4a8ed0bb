"""Records of Slurm's output. Times are RFC 3339 UTC text or "", durations whole seconds or None for no limit.

Host lists stay folded, as Slurm prints them (`h[01-04]`); `core/hostlist.py` expands them.
"""

from __future__ import annotations

from typing import Literal

from pitools.core.record import Record


class Node(Record, frozen=True, kw_only=True, tag="pit.node/1"):
    """A node.

    state: base state (`idle`, `mixed`, `allocated`, `down`, ...). flags: flags of the state (`drain`,
    `not_responding`, ...). gres: as configured. gpu_type: `h100`, or several joined by commas, or "".
    gpus_allocated: None if unknown. address: address for slurmctld.
    """

    node: str
    state: str
    flags: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    gres: str = ""
    gpu_type: str = ""
    gpus: int = 0
    gpus_allocated: int | None = None
    cpus: int = 0
    cpus_allocated: int = 0
    memory_mib: int = 0
    features: tuple[str, ...] = ()
    reason: str = ""
    address: str = ""


class Partition(Record, frozen=True, kw_only=True, tag="pit.partition/1"):
    """A partition. allow_*: () means all. max_nodes, max_time_s: None means no limit. tres: of all its nodes.

    restrictions: what else it asks of a job, in scontrol's words: `RootOnly`, `MaxMemPerNode`, ...
    """

    partition: str
    state: str
    is_default: bool = False
    node_list: str = ""
    nodes: int = 0
    cpus: int = 0
    min_nodes: int = 0
    max_nodes: int | None = None
    max_time_s: int | None = None
    grace_s: int = 0
    allow_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    qos: str = ""
    over_subscribe: str = ""
    billing_weights: dict[str, str] = {}
    tres: dict[str, str] = {}
    restrictions: dict[str, str] = {}
    priority_tier: int = 1


class Reservation(Record, frozen=True, kw_only=True, tag="pit.reservation/1"):
    """Nodes reserved from start to end. cpus: reserved CPUs of all nodes, 0 if unknown.

    flags: in lower case, such as `maint`. users, accounts: permitted users and accounts, () for none.
    """

    reservation: str
    start: str
    end: str
    state: str = ""
    node_list: str = ""
    cpus: int = 0
    flags: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


class SlurmJob(Record, frozen=True, kw_only=True, tag="pit.job/1"):
    """A job, array task, het component, or all pending tasks of an array.

    job_id: as Slurm prints it (`4`, `6_0`, `6_[3-9%3]`, `11+1`). raw_id: Slurm's number of the job. array_job_id,
    array_task: "" outside arrays. nodes: number of nodes. start, end: expected times while pending or running.
    priority: None if not set yet. restarts and all later fields: from `scontrol show job` only.
    preempted: time of the preemption; the job may run on for the grace time of its QOS or partition. features: the
    `--constraint`. required_nodes, excluded_nodes: host lists. segment: nodes per segment, 0 for none.
    """

    job_id: str
    raw_id: str
    state: str
    array_job_id: str = ""
    array_task: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    qos: str = ""
    partition: str = ""
    reason: str = ""
    nodes: int = 0
    node_list: str = ""
    start: str = ""
    end: str = ""
    time_limit_s: int | None = None
    elapsed_s: int = 0
    priority: int | None = None
    gres: str = ""
    comment: str = ""
    work_dir: str = ""
    restarts: int | None = None
    preempted: str = ""
    features: str = ""
    required_nodes: str = ""
    excluded_nodes: str = ""
    reservation: str = ""
    segment: int = 0


class AccountingRow(Record, frozen=True, kw_only=True, tag="pit.accounting/1"):
    """Accounting row of a job or of one attempt.

    cancelled_by_uid: user id of the canceller. exit_code, signal: of the batch script. time_limit_s: None
    means no limit. alloc_tres: amounts as Slurm prints them, by name.
    """

    job_id: str
    raw_id: str
    state: str
    cancelled_by_uid: int | None = None
    exit_code: int = 0
    signal: int = 0
    name: str = ""
    user: str = ""
    account: str = ""
    qos: str = ""
    partition: str = ""
    submit: str = ""
    start: str = ""
    end: str = ""
    elapsed_s: int = 0
    time_limit_s: int | None = None
    nodes: int = 0
    node_list: str = ""
    alloc_tres: dict[str, str] = {}
    reason: str = ""
    comment: str = ""
    restarts: int | None = None


class Association(Record, frozen=True, kw_only=True, tag="pit.association/1"):
    """A row of the accounting tree: user "" is the account itself, partition "" is every partition.

    parent: the account's parent account; "" for a user's row, whose parent is `account`. A user's row also has the
    limits per job (max_*) of the accounts above, as sacctmgr prints them. None, {}: no limit.
    """

    cluster: str
    account: str
    user: str = ""
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    grp_tres: dict[str, str] = {}
    max_tres: dict[str, str] = {}
    parent: str = ""
    grp_jobs: int | None = None
    grp_submit: int | None = None
    grp_wall_s: int | None = None
    grp_tres_mins: dict[str, str] = {}
    grp_tres_run_mins: dict[str, str] = {}
    max_jobs: int | None = None
    max_submit: int | None = None
    max_wall_s: int | None = None
    max_tres_mins: dict[str, str] = {}
    max_tres_per_node: dict[str, str] = {}


class Qos(Record, frozen=True, kw_only=True, tag="pit.qos/1"):
    """A quality of service. preempt: the QOS that it may preempt. max_*, min_tres: limits of a job. None, {}: none."""

    qos: str
    priority: int = 0
    preempt: tuple[str, ...] = ()
    grace_s: int = 0
    flags: tuple[str, ...] = ()
    grp_tres: dict[str, str] = {}
    max_tres_per_user: dict[str, str] = {}
    max_wall_s: int | None = None
    max_tres: dict[str, str] = {}
    grp_jobs: int | None = None
    grp_submit: int | None = None
    grp_wall_s: int | None = None
    grp_tres_mins: dict[str, str] = {}
    grp_tres_run_mins: dict[str, str] = {}
    max_tres_mins: dict[str, str] = {}
    max_tres_per_node: dict[str, str] = {}
    min_tres: dict[str, str] = {}
    max_jobs_per_user: int | None = None
    max_submit_per_user: int | None = None
    max_jobs_per_account: int | None = None
    max_submit_per_account: int | None = None
    max_tres_per_account: dict[str, str] = {}
    preempt_mode: str = ""
    usage_factor: float = 1.0
    limit_factor: float = 1.0
    max_tres_run_mins_per_user: dict[str, str] = {}
    max_tres_run_mins_per_account: dict[str, str] = {}


class LimitUsage(Record, frozen=True, kw_only=True, tag="pit.limit-usage/1"):
    """What slurmctld counts against limits now: of a QOS, of one user or account in it, or of an association.

    qos: "" for an association's row. jobs: running. submitted: running and pending. wall_s, tres_mins: used so far,
    decayed. tres: allocated, memory in MiB. tres_run_mins: what the running jobs may still use until their time limits.
    hidden: what the user may not see and so is not counted: "amounts" but jobs, nodes and GPUs; or "jobs" of others.
    """

    qos: str = ""
    account: str = ""
    user: str = ""
    partition: str = ""
    jobs: int = 0
    submitted: int = 0
    wall_s: int = 0
    tres: dict[str, int] = {}
    tres_mins: dict[str, int] = {}
    tres_run_mins: dict[str, int] = {}
    hidden: Literal["", "amounts", "jobs"] = ""


class Config(Record, frozen=True, kw_only=True, tag="pit.config/1"):
    """Configuration of slurmctld. values: by name as in slurm.conf, "" if unset. version: (25, 5, 9)."""

    cluster: str
    version: tuple[int, ...]
    values: dict[str, str]


class Switch(Record, frozen=True, kw_only=True, tag="pit.switch/1"):
    """A switch of a tree. level: 0 for a leaf. node_list: all nodes below it. switches: folded list, "" for a leaf."""

    switch: str
    level: int
    node_list: str
    switches: str = ""


class Block(Record, frozen=True, kw_only=True, tag="pit.block/1"):
    """A block. is_aggregated: consists of the blocks in its folded name. size: configured nodes per block."""

    block: str
    index: int
    node_list: str
    size: int
    is_aggregated: bool = False


class StartEstimate(Record, frozen=True, kw_only=True, tag="pit.estimate/1"):
    """Estimated start and nodes of a job."""

    start: str
    cpus: int
    node_list: str
    partition: str
    cluster: str = ""


class Submitted(Record, frozen=True, kw_only=True, tag="pit.submitted/1"):
    """A submitted job. cluster: "" unless Slurm printed it."""

    job_id: str
    cluster: str = ""
