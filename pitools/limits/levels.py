"""Find the levels whose limits apply to a job, in Slurm's order, and the use that each of their limits counts.

The order: the partition's QOS, the job's QOS (first if it has the flag OverPartQOS), the user's association, its
account's, those of the accounts above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from pitools.limits import rules
from pitools.limits.records import Binding, JobRequest, LimitState
from pitools.slurm.fields import parse_tres_amounts
from pitools.slurm.records import Association, LimitUsage, Partition, Qos

_NOTHING = LimitUsage()
_INHERITED = ("max_jobs", "max_submit", "max_wall_s", "max_tres", "max_tres_mins", "max_tres_per_node")


class Level(NamedTuple):
    """What may have limits. uses: scope → what is used. inherits_from: for a user, the accounts, nearest first."""

    kind: Literal["qos", "user", "account"]
    name: str
    limits: Qos | Association
    uses: Mapping[str, LimitUsage]
    inherits_from: tuple[Association, ...] = ()


class AppliedLimit(NamedTuple):
    """A limit that applies to a job. name: of rules.RULES. tres: "" where the limit is not on a TRES."""

    level: Level
    name: str
    tres: str
    value: int

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

    @property
    def origin(self) -> str:
        """The name of the level that sets the limit: the highest account with the user's inherited value."""
        name, field = self.level.name, self.rule.field
        value = _value(self.level.limits, field, self.tres)
        for row in self.level.inherits_from if field in _INHERITED else ():
            if _value(row, field, self.tres) not in (None, value):
                break
            if _value(row, field, self.tres) == value:
                name = _association_name(row)
        return name


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
        return [level.limits for level in self.chain if isinstance(level.limits, Qos)]

    def applicable_limits(self, order: Mapping[str, str]) -> Iterator[AppliedLimit]:
        """Yield the limits that apply to the job, in the order of one of slurmctld's tests.

        The first QOS that has a limit on a resource replaces that limit of the next QOS and of all associations, whose
        TRES its LimitFactor multiplies.
        """
        claimed: set[tuple[str, str]] = set()
        factor = next((row.limit_factor for row in self.qos_rows if row.limit_factor != 1), 1.0)
        for level in self.chain:
            for group in order[level.kind].split():
                limits = [
                    AppliedLimit(level, name, tres, int(value * factor) if _is_multiplied(level, name) else value)
                    for name in group.split("+")
                    for tres, value in _values(level, name)
                    if not any((other, tres) in claimed for other in rules.REPLACED_BY.get(name, (name,)))
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
    partition = _find_partition(request, state)
    only = ("", partition.partition if partition else request.partition)
    rows = [row for row in state.associations if row.cluster == state.cluster]
    own = [row for row in rows if row.user == request.user and row.partition in only and account in ("", row.account)]
    own.sort(key=lambda row: not row.partition)
    accounts = {row.account: row for row in rows if not row.user}
    above = _accounts_above(account, accounts)
    qos = request.qos.lower() or _default_qos(own[:1] if account else own, accounts)
    named = {row.qos: row for row in state.qos}
    chain = [
        Level("qos", f'QOS "{row.qos}"', row, _uses_of_qos(row.qos, request.user, account, state))
        for row in _qos_by_precedence(named.get(qos), named.get(partition.qos) if partition else None)
    ]
    if own and account:
        user_row = _inherit(own[0], above)
        chain.append(Level("user", _association_name(user_row), user_row, _uses_of(own[0], state), above))
    chain += [Level("account", _association_name(row), row, _uses_of(row, state)) for row in above]
    names = tuple(row.account for row in above) or ((account,) if account else ())
    levels = Levels(account, qos, tuple(chain) if "limits" in state.enforced else (), named.get(qos), partition, names)
    return levels, _denial(request, levels, own[:1] if account else own, state)


def _find_partition(request: JobRequest, state: LimitState) -> Partition | None:
    rows = [row for row in state.partitions if row.partition == request.partition]
    return next(iter(rows or [row for row in state.partitions if row.is_default and not request.partition]), None)


def _is_multiplied(level: Level, name: str) -> bool:
    return level.kind != "qos" and name in ("GrpTRES", "MaxTRES")


def _values(level: Level, name: str) -> list[tuple[str, int]]:
    """Return a limit's values by TRES; by "" for a limit that is not on TRES."""
    rule = rules.RULES[name]
    value = getattr(level.limits, rule.field, None)
    if isinstance(value, dict):
        return list(parse_tres_amounts(value).items())
    return [] if value is None else [("", value // 60 if rule.asks == "wall" else value)]


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


def _accounts_above(account: str, accounts: Mapping[str, Association]) -> tuple[Association, ...]:
    """Return the rows of the account and of those above it, nearest first."""
    rows: list[Association] = []
    while (row := accounts.get(account)) and row not in rows:
        rows.append(row)
        account = row.parent
    return tuple(rows)


def _inherit(row: Association, above: tuple[Association, ...]) -> Association:
    """Return a user's row with the limits per job of the accounts above, where sacctmgr did not add them."""
    values: dict[str, Any] = {}
    for field in _INHERITED:
        limits = [getattr(level, field) for level in (row, *above)]
        if isinstance(limits[0], dict):
            values[field] = {tres: value for level in reversed(limits) for tres, value in level.items()}
        else:
            values[field] = next((value for value in limits if value is not None), None)
    return msgspec.structs.replace(row, **values)


def _value(row: Association | Qos, field: str, tres: str) -> object:
    value = getattr(row, field)
    return value.get(tres) if isinstance(value, dict) else value


def _association_name(row: Association) -> str:
    return f'{row.user} in account "{row.account}"' if row.user else f'account "{row.account}"'


def _uses_of(row: Association, state: LimitState) -> dict[str, LimitUsage]:
    key = ("", row.account, row.user, row.partition)
    rows = (use for use in state.usage if (use.qos, use.account, use.user, use.partition) == key)
    return {"all": next(rows, _NOTHING)}


def _uses_of_qos(qos: str, user: str, account: str, state: LimitState) -> dict[str, LimitUsage]:
    scopes = {(account, ""): "account", ("", user): "user", ("", ""): "all"}
    return {
        scopes[use.account, use.user]: use
        for use in state.usage
        if use.qos == qos and (use.account, use.user) in scopes
    }
