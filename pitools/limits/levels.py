"""Find the levels whose limits apply to a job, in Slurm's order, and the use that each of their limits counts.

The order: the partition's QOS, the job's QOS (first if it has the flag OverPartQOS), the user's association, its
account's, those of the accounts above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from pitools.limits import rules
from pitools.limits.records import Binding, JobRequest, LimitState
from pitools.slurm.fields import parse_tres_amounts
from pitools.slurm.records import Association, LimitUsage, Partition, Qos

_NOTHING = LimitUsage()
_MULTIPLIED = ("GrpTRES", "MaxTRES")  # of associations, by a QOS's LimitFactor
_Row = Qos | Association


class Level(NamedTuple):
    """What may have limits. rows: its own; for a user, then the accounts', nearest first: it inherits their Max*.

    keys: scope → the row of use that its limits count, without numbers. uses: those with numbers that are known.
    """

    kind: Literal["qos", "user", "account"]
    name: str
    rows: tuple[_Row, ...]
    keys: Mapping[rules.Scope, LimitUsage]
    uses: Mapping[rules.Scope, LimitUsage]


class AppliedLimit(NamedTuple):
    """A limit that applies to a job. name: of rules.RULES. tres: "" where the limit is not on a TRES.

    origin: the name of the level that sets it; for a user the highest account with the inherited value.
    """

    level: Level
    name: str
    tres: str
    value: int
    origin: str

    @property
    def rule(self) -> rules.Rule:
        """What the limit counts, of which jobs."""
        return rules.RULES[self.name]

    @property
    def label(self) -> str:
        """Slurm's name of the limit with its TRES: `GrpTRES=node`."""
        return f"{self.name}={self.tres}" if self.tres else self.name

    @property
    def use(self) -> LimitUsage:
        """What the jobs that share the limit use; nothing for a limit of each job."""
        return self.level.uses.get(self.rule.scope, _NOTHING)

    @property
    def used(self) -> int:
        """What is used of the limit, in its units."""
        use = self.use
        if self.rule.asks == "minutes":
            spent = use.tres_mins.get(self.tres, 0) if self.name == "GrpTRESMins" else 0
            return spent + use.tres_run_mins.get(self.tres, 0)
        counts = {"jobs": use.jobs, "submitted": use.submitted, "wall": use.wall_s // 60}
        return counts.get(self.rule.asks, use.tres.get(self.tres, 0))


class Levels(NamedTuple):
    """The levels of a job. account, qos: the job's, with defaults, "" if unknown. accounts: its own and those above.

    chain: in Slurm's order, () where no limits are enforced. job_qos, partition: None if unknown.
    """

    account: str
    qos: str
    chain: tuple[Level, ...]
    job_qos: Qos | None
    partition: Partition | None
    accounts: tuple[str, ...]

    @property
    def job_flags(self) -> tuple[str, ...]:
        """The flags of the job's QOS."""
        return self.job_qos.flags if self.job_qos else ()

    @property
    def qos_rows(self) -> list[Qos]:
        """The QOS whose limits apply."""
        return [row for level in self.chain for row in level.rows if isinstance(row, Qos)]

    def applicable_limits(self, order: Mapping[str, str]) -> Iterator[AppliedLimit]:
        """Yield the limits that apply to the job, in the order of one of slurmctld's tests.

        The first QOS that has a limit on a resource replaces that limit of the next QOS and of all associations.
        """
        claimed: set[tuple[str, str]] = set()
        factor = next((row.limit_factor for row in self.qos_rows if row.limit_factor != 1), 1.0)
        for level in self.chain:
            for group in order[level.kind].split():
                limits = [
                    limit
                    for name in group.split("+")
                    for limit in _limits(level, name, factor)
                    if not any((other, limit.tres) in claimed for other in rules.REPLACED_BY.get(name, (name,)))
                ]
                if level.kind == "qos":
                    claimed |= {(limit.name, limit.tres) for limit in limits}
                yield from sorted(limits, key=lambda limit: rules.tres_position(limit.tres))


def find_levels(request: JobRequest, state: LimitState) -> tuple[Levels, Binding | None]:
    """Return the levels of a job, and what refuses it before any limit: no association, or a QOS not allowed.

    Without an account and a default account in the state, no association's limits apply: which ones is unknown.
    """
    # Slurm keeps the names of accounts and QOS in lower case, and takes any case in a request.
    account = request.account.lower() or state.default_accounts.get(request.user, "")
    partition = next((row for row in state.partitions if row.partition == request.partition), None)
    if not request.partition:
        partition = partition or next((row for row in state.partitions if row.is_default), None)
    only = ("", partition.partition if partition else request.partition)
    rows = [row for row in state.associations if row.cluster == state.cluster]
    own = [row for row in rows if row.user == request.user and row.partition in only and account in ("", row.account)]
    own.sort(key=lambda row: not row.partition)
    accounts = {row.account: row for row in rows if not row.user}
    path = path_up(account, {name: row.parent for name, row in accounts.items()})
    above = tuple(accounts[name] for name in path if name in accounts)
    qos = request.qos.lower() or _default_qos(own[:1] if account else own, accounts)
    named = {row.qos: row for row in state.qos}
    chain: list[tuple[_Row, ...]] = []
    if "limits" in state.enforced:
        chain += [(row,) for row in _qos_by_precedence(named.get(qos), named.get(partition.qos) if partition else None)]
        chain += [(own[0], *above)] if own and account else []
        chain += [(row,) for row in above]
    levels = Levels(
        account=account,
        qos=qos,
        chain=tuple(_level(rows, request.user, account, state) for rows in chain),
        job_qos=named.get(qos),
        partition=partition,
        accounts=tuple(row.account for row in above) or ((account,) if account else ()),
    )
    return levels, _denial(request, levels, own[:1] if account else own, state)


def _level(rows: tuple[_Row, ...], user: str, account: str, state: LimitState) -> Level:
    row = rows[0]
    keys: dict[rules.Scope, LimitUsage]
    if isinstance(row, Qos):
        keys = {
            "account": LimitUsage(qos=row.qos, account=account),
            "user": LimitUsage(qos=row.qos, user=user),
            "all": LimitUsage(qos=row.qos),  # last, so that it wins over the first where the account is unknown
        }
    else:
        keys = {"all": LimitUsage(account=row.account, user=row.user, partition=row.partition)}
    scopes = {(key.qos, key.account, key.user, key.partition): scope for scope, key in keys.items()}
    uses = [(scopes.get((use.qos, use.account, use.user, use.partition)), use) for use in state.usage]
    kind: Literal["qos", "user", "account"] = "qos" if isinstance(row, Qos) else "user" if row.user else "account"
    return Level(kind, _name(row), rows, keys, {scope: use for scope, use in uses if scope})


def _name(row: _Row) -> str:
    if isinstance(row, Qos):
        return f'QOS "{row.qos}"'
    return f'{row.user} in account "{row.account}"' if row.user else f'account "{row.account}"'


def _limits(level: Level, name: str, factor: float) -> Iterator[AppliedLimit]:
    """Yield the level's limits of this name, by TRES. factor: LimitFactor."""
    rule = rules.RULES[name]
    set_by: dict[str, tuple[int, str]] = {}
    differing: set[str] = set()
    for row in level.rows if name.startswith("Max") else level.rows[:1]:
        value = getattr(row, rule.field, None)
        amounts = parse_tres_amounts(value) if isinstance(value, dict) else {} if value is None else {"": value}
        for tres, amount in amounts.items():
            # sacctmgr also prints in a user's row what it inherits: the highest account with the same value sets it.
            if amount == set_by.get(tres, (amount,))[0] and tres not in differing:
                set_by[tres] = (amount, _name(row))
            else:
                differing.add(tres)
    for tres, (amount, origin) in set_by.items():
        scaled = int(amount * factor) if name in _MULTIPLIED and level.kind != "qos" else amount
        yield AppliedLimit(level, name, tres, scaled // 60 if rule.asks == "wall" else scaled, origin)


def _qos_by_precedence(job_qos: Qos | None, partition_qos: Qos | None) -> list[Qos]:
    """Return the partition's QOS, then the job's; the job's first if it has the flag OverPartQOS; each once."""
    over = job_qos is not None and "OverPartQOS" in job_qos.flags
    order = (job_qos, partition_qos) if over else (partition_qos, job_qos)
    return list({row.qos: row for row in order if row}.values())


def _denial(request: JobRequest, levels: Levels, own: list[Association], state: LimitState) -> Binding | None:
    account, qos, user = levels.account, levels.qos, request.user
    reason, message = "InvalidQOS", ""
    allowed = {name for row in own for name in row.qos}
    if "associations" in state.enforced and not own:
        reason = "InvalidAccount"
        message = f"{user} has no association with " + (f'account "{account}"' if account else "any account")
    elif "qos" in state.enforced and qos and allowed and qos not in allowed:
        message = f'QOS "{qos}" is not allowed for the account (allowed: {", ".join(sorted(allowed))})'
    elif "qos" in state.enforced and "RequiresReservation" in levels.job_flags and not request.in_reservation:
        message = f'QOS "{qos}" is for jobs in a reservation (RequiresReservation)'
    if not message:
        return None
    return Binding(level=f"user {user}", limit="", reason=reason, effect="refused", message=message)


def _default_qos(own: list[Association], accounts: Mapping[str, Association]) -> str:
    """Return the QOS of a job that names none, "" if it is unknown."""
    candidates = {row.default_qos or (row.qos[0] if len(row.qos) == 1 else "") for row in own}
    if len(candidates) != 1:
        return ""
    root = accounts.get("root")
    return candidates.pop() or (root.default_qos if root else "") or "normal"


def path_up(account: str, parents: Mapping[str, str]) -> list[str]:
    """Return an account and those above it, nearest first."""
    path = [account]
    while (account := parents.get(account, "")) and account not in path:
        path.append(account)
    return path
