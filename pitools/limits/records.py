"""Records of limits: the state of a cluster's accounting, a job that asks, and what binds it."""

from __future__ import annotations

from typing import Literal

import msgspec

from pitools.core.record import Record
from pitools.limits.rules import Scope
from pitools.slurm.records import Association, LimitUsage, Partition, Qos

Effect = Literal["may-run", "pends", "refused"]


class LimitState(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a cluster and what is used of them.

    enforced: words of AccountingStorageEnforce, () if slurmctld enforces none. associations, qos: all of the cluster.
    usage: () counts no other job: what binds then binds for ever. part_limits: EnforcePartLimits of slurm.conf, in
    lower case. groups: the user's Unix groups, () if unknown. default_accounts: user → account. submit_plugins:
    JobSubmitPlugins. priority_flags, private: words of PriorityFlags and PrivateData, in lower case.
    """

    cluster: str = ""
    version: tuple[int, ...] = ()
    enforced: tuple[str, ...] = ()
    associations: tuple[Association, ...] = ()
    qos: tuple[Qos, ...] = ()
    partitions: tuple[Partition, ...] = ()
    usage: tuple[LimitUsage, ...] = ()
    part_limits: str = "no"
    groups: frozenset[str] = frozenset()
    default_accounts: dict[str, str] = {}
    submit_plugins: str = ""
    priority_flags: tuple[str, ...] = ()
    private: tuple[str, ...] = ()


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job that may be submitted. cpus, memory_mib, gres: of all its nodes together.

    account, qos: "" for the user's default. memory_mib: None if unknown, then no limit on memory binds. gres: amounts
    by TRES name (`gres/gpu`, `gres/gpu:h100`). tasks: of an array, 1 for a single job. is_exclusive: shares no node.
    """

    user: str
    partition: str
    time_s: int
    account: str = ""
    qos: str = ""
    nodes: int = 1
    cpus: int = 1
    memory_mib: int | None = None
    gres: dict[str, int] = {}
    tasks: int = 1
    is_exclusive: bool = False
    in_reservation: bool = False

    @property
    def tres(self) -> dict[str, int]:
        """What it asks for, by TRES name."""
        memory = {} if self.memory_mib is None else {"mem": self.memory_mib}
        return {"cpu": self.cpus, "node": self.nodes, **self.gres, **memory}


class Binding(Record, frozen=True, kw_only=True, tag="pit.limit-binding/1"):
    """A limit that keeps a job from starting. level: what has it, such as `account "dept"`, `partition "gpu"`.

    limit: Slurm's name (`GrpTRES=gres/gpu`), "" for a missing permission. value: of the limit, used: by other jobs,
    asked: by this job; minutes for times, MiB for memory, None where there is no number. scope: whose jobs share it,
    "" for a limit of each job. reason: Slurm's own (`AssocGrpGRES`). message: the same as a sentence.
    """

    level: str
    limit: str
    reason: str
    effect: Effect
    message: str
    value: int | None = None
    used: int | None = None
    asked: int | None = None
    scope: Scope = ""


class Verdict(Record, frozen=True, kw_only=True, tag="pit.limit-verdict/1"):
    """Whether limits let the job run now. bindings: every limit that binds, as Slurm would name them, its own first.

    not_judged: limits and permissions that may refuse or hold the job and are unknown, as text.
    """

    effect: Effect
    bindings: tuple[Binding, ...] = ()
    account: str = ""
    qos: str = ""
    not_judged: tuple[str, ...] = ()
