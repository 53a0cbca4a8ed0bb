"""Random policies and jobs for `bench_limits`: every kind of limit, on QOS, accounts three deep, and users."""

from __future__ import annotations

import random
from dataclasses import dataclass

USERS = ("daemon", "bin", "sys", "games", "man", "lp", "mail", "news", "www-data", "backup", "list", "irc")
_AMOUNTS = {
    "cpu": (1, 2, 4, 6, 8, 12, 16, 24, 32, 64),
    "node": (1, 1, 2, 3, 4, 5),
    "mem": (2000, 4000, 8000, 16000, 32000),
    "gres/gpu": (0, 1, 2, 4, 6, 8, 12),
}
_GROUP = {
    "GrpJobs": "count",
    "GrpSubmit": "submits",
    "GrpTRES": "tres",
    "GrpTRESMins": "minutes",
    "GrpTRESRunMins": "minutes",
    "GrpWall": "wall",
}
QOS_LIMITS = {
    **_GROUP,
    "MaxJobsPerUser": "count",
    "MaxJobsPerAccount": "count",
    "MaxSubmitJobsPerUser": "submits",
    "MaxSubmitJobsPerAccount": "submits",
    "MaxTRESPerJob": "tres",
    "MaxTRESPerNode": "per-node",
    "MaxTRESPerUser": "tres",
    "MaxTRESPerAccount": "tres",
    "MaxTRESMinsPerJob": "minutes",
    "MaxWall": "wall",
    "MinTRES": "tres",
}
ACCOUNT_LIMITS = {
    **_GROUP,
    "MaxJobs": "count",
    "MaxSubmit": "submits",
    "MaxTRES": "tres",
    "MaxTRESPerNode": "per-node",
    "MaxTRESMins": "minutes",
    "MaxWall": "wall",
}
_FLAGS = {
    "DenyOnLimit": 0.15,
    "OverPartQOS": 0.2,
    "PartitionTimeLimit": 0.15,
    "PartitionMaxNodes": 0.15,
    "PartitionMinNodes": 0.15,
    "RequiresReservation": 0.02,
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A partition's policy: lines for sacctmgr, QOS before accounts; settings for scontrol. name: begins all names."""

    name: str
    partition: str
    qos: list[str]
    accounts: list[str]
    settings: list[str]
    users: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that a user submits. tasks: of its array, 1 for none."""

    user: str
    account: str
    qos: str
    partition: str
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    memory_mib: int
    gpus: int
    minutes: int
    tasks: int
    is_exclusive: bool

    def flags(self) -> list[str]:
        """Return the flags of sbatch."""
        flags = [
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.tasks_per_node}",
            f"--cpus-per-task={self.cpus_per_task}",
            f"--mem={self.memory_mib}",
            f"--account={self.account}",
            f"--partition={self.partition}",
            f"--time={self.minutes}",
        ]
        flags += [f"--gres=gpu:{self.gpus}"] if self.gpus else []
        flags += [f"--qos={self.qos}"] if self.qos else []
        flags += ["--exclusive"] if self.is_exclusive else []
        return flags + ([f"--array=0-{self.tasks - 1}"] if self.tasks > 1 else [])


def make_policy(rng: random.Random, name: str, partition: str, cluster: str) -> Policy:
    """Return a random policy: three QOS, accounts r > m > l and o, two users, perhaps a row of the partition."""
    density = rng.choice((0.04, 0.08, 0.12, 0.25))
    qos = []
    for kind in "abp":
        flags = [flag for flag, share in _FLAGS.items() if rng.random() < share]
        extra = ""
        if rng.random() < 0.2:
            extra += f" UsageFactor={rng.choice((0, 0.5, 2))}"
            flags += ["UsageFactorSafe"] if rng.random() < 0.5 else []
        extra += f" LimitFactor={rng.choice((0.5, 1.5, 2))}" if rng.random() < 0.15 else ""
        extra += f" flags={','.join(flags)}" if flags else ""
        qos.append(f"add qos name={name}q{kind} {_limits(rng, QOS_LIMITS, density)}{extra}")
    accounts = [
        f"add account name={name}{own} parent={parent} cluster={cluster} {_limits(rng, ACCOUNT_LIMITS, density * 0.8)}"
        for own, parent in (("r", "root"), ("m", f"{name}r"), ("l", f"{name}m"), ("o", f"{name}m"))
    ]
    first, second = rng.sample(USERS, 2)
    rows = [(first, "l", ""), (first, "o", ""), (second, "l", "")]
    rows += [(first, "l", f"partition={partition}")] if rng.random() < 0.3 else []
    for user, account, only in rows:
        default = f"qos={name}qa,{name}qb defaultqos={name}q{rng.choice('ab')}"
        limits = _limits(rng, ACCOUNT_LIMITS, density * 0.8)
        accounts.append(f"add user name={user} account={name}{account} cluster={cluster} {only} {limits} {default}")
    return Policy(
        name=name,
        partition=partition,
        qos=qos,
        accounts=accounts,
        settings=_partition_settings(rng, name, first),
        users=(first, second),
    )


def _partition_settings(rng: random.Random, name: str, group: str) -> list[str]:
    choices = {
        f"qos={name}qp": 0.6,
        f"MaxNodes={rng.choice((1, 2))}": 0.1,
        "MinNodes=2": 0.07,
        f"MaxTime={rng.choice(('30:00', '1:00:00', '2:00:00'))}": 0.12,
        f"AllowQos={name}qa": 0.08,
        f"DenyQos={name}qb": 0.08,
        f"AllowAccounts={name}{rng.choice('lmo')}": 0.08,
        f"DenyAccounts={name}{rng.choice('lm')}": 0.05,
        f"AllowGroups={group}": 0.05,
        "OverSubscribe=EXCLUSIVE": 0.06,
        "RootOnly=YES": 0.02,
        "ReqResv=YES": 0.02,
        f"State={rng.choice(('DOWN', 'DRAIN', 'INACTIVE'))}": 0.04,
    }
    return [setting for setting, share in choices.items() if rng.random() < share]


def make_job(rng: random.Random, policy: Policy, *, is_filler: bool = False) -> Job:
    """Return a random job. is_filler: a small one, which holds resources while others are judged."""
    user, name = rng.choice(policy.users), policy.name
    account = "m" if not is_filler and rng.random() < 0.03 else "l" if user == policy.users[1] else rng.choice("llo")
    qos = rng.choice((f"{name}qa", f"{name}qa", f"{name}qb", ""))
    return Job(
        user=user,
        account=name + account,
        qos="normal" if not is_filler and rng.random() < 0.04 else qos,
        partition=policy.partition,
        nodes=rng.choice((1, 1, 1, 2) if is_filler else (1, 1, 2, 2, 3)),
        tasks_per_node=rng.choice((1, 1, 2)),
        cpus_per_task=rng.choice((1, 1, 2, 4)),
        memory_mib=rng.choice((1000, 2000, 4000)),
        gpus=rng.choice((0, 0, 1, 2, 4)),
        minutes=rng.choice((10, 30, 60, 120, 600)),
        tasks=rng.choice((2, 3, 8)) if not is_filler and rng.random() < 0.1 else 1,
        is_exclusive=rng.random() < 0.05,
    )


def _limits(rng: random.Random, table: dict[str, str], density: float) -> str:
    weights = {"wall": 0.35, "submits": 0.35, "count": 1.0}
    chosen = [name for name, kind in table.items() if rng.random() < density * weights.get(kind, 1.3)]
    return " ".join(f"{name}={_value(rng, table[name])}" for name in chosen)


def _value(rng: random.Random, kind: str) -> str:
    if kind == "count":
        return str(rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6)))
    if kind == "submits":
        return str(rng.choice((0, 4, 6, 7, 8, 9, 10, 12)))
    if kind == "wall":
        return rng.choice(("10", "30", "60", "120", "300", "1440"))
    names = [name for name in _AMOUNTS if kind != "per-node" or name != "node"]
    scale = rng.choice((10, 60, 240, 2000)) if kind == "minutes" else 1
    chosen = rng.sample(names, rng.choice((1, 1, 2)))
    return ",".join(f"{name}={rng.choice(_AMOUNTS[name]) * scale}" for name in chosen)
