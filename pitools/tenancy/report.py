"""Report what teams and users used against their shares, over several sites: hours, charge, budgets, waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pitools.core.record import Record
from pitools.limits.levels import path_up
from pitools.monitor.usage.report import UsageRow
from pitools.slurm import argv
from pitools.slurm.fields import count_gpus, parse_count
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.parse_accounting import parse_associations, parse_qos
from pitools.slurm.parse_cluster import parse_config
from pitools.slurm.parse_nodes import parse_partitions
from pitools.slurm.parse_shares import SHARES, FairShare, parse_shares
from pitools.slurm.transport import Transport

Resource = Literal["gpu", "cpu"]
_TRES = {"gpu": "gres/gpu", "cpu": "cpu"}


class TeamRow(Record, frozen=True, kw_only=True, tag="pit.tenancy-report/1"):
    """What a team, or a user in it, used between two times, and may use. site: "" for all sites together.

    jobs, hours, cost, waits: of the team's own jobs, so that rows add up. charged_gpu_hours, charged_cpu_hours: times
    the UsageFactor that each job's QOS has now (1 if it is gone), as budgets count them. resource: what share, use and
    budgets are of: GPUs, at the sites that have any; CPUs where none has. share, use: of all its hours, what the shares
    grant and what was used, 0 to 1, with the teams below. fair_share: Slurm's factor of a user's jobs. level_fs: share
    by use among siblings, decayed; None if unused, or for several sites. budget_hours, budget_left_hours: now; None
    without a budget, and of a past period.
    """

    since: str
    until: str
    site: str
    team: str
    user: str
    share: float | None
    use: float | None
    jobs: int
    gpu_hours: float
    cpu_hours: float
    node_hours: float
    charged_gpu_hours: float
    charged_cpu_hours: float
    cost: float | None
    currency: str
    wait_p50_s: int | None
    wait_p95_s: int | None
    resource: Resource
    fair_share: float | None
    level_fs: float | None
    budget_hours: float | None
    budget_left_hours: float | None


class SiteShares(NamedTuple):
    """What a site's Slurm grants. factors: QOS → UsageFactor. has_gpus: whether Slurm counts any."""

    shares: Sequence[FairShare]
    factors: Mapping[str, float]
    has_gpus: bool


# What a row takes over from the use of its jobs, and its values without any.
_NO_USE: dict[str, Any] = {"jobs": 0, "currency": "", **dict.fromkeys(("cost", "wait_p50_s", "wait_p95_s"))}
_NO_USE |= dict.fromkeys(("gpu_hours", "cpu_hours", "node_hours"), 0.0)


def read_shares(transport: Transport) -> SiteShares:
    """Read what a site's Slurm grants, in one call. Raises Unreachable and ClusterError."""
    done = run_queries(transport, [SHARES, argv.QOS, argv.associations(), argv.CONFIG, argv.PARTITIONS])
    shares, qos, associations, config, partitions = (stdout_or_raise(transport, each) for each in done)
    cluster = parse_config(config).cluster
    # sshare shows an account that was moved at its old place, until slurmctld reads its configuration again.
    here = (row for row in parse_associations(associations) if row.cluster == cluster and not row.user)
    parents = {row.account: row.parent for row in here}
    rows = [
        row if row.user else msgspec.structs.replace(row, parent=parents.get(row.account, row.parent))
        for row in parse_shares(shares)
    ]
    has_gpus = any(count_gpus(row.tres) for row in parse_partitions(partitions))
    return SiteShares(rows, {row.qos: row.usage_factor for row in parse_qos(qos)}, has_gpus)


def _names(use: UsageRow) -> dict[str, str]:
    """Return the account, site, user and QOS of a group of jobs, "" for all together."""
    names = zip(use.by.split(","), use.group.split(","), strict=True)
    return {"site": "", "user": "", "qos": "", **dict(names)}


class _Site:
    """A site's hours and shares, by account and user; an account's with those of the accounts below."""

    def __init__(self, granted: SiteShares, uses: Iterable[UsageRow]) -> None:
        self.resource: Resource = "gpu" if granted.has_gpus else "cpu"  # what shares and budgets are of
        parents = {row.account: row.parent for row in granted.shares if not row.user}
        self.rows = {(row.account, row.user): row for row in granted.shares}
        self.share = _absolute_shares(granted.shares)
        self.total: dict[str, float] = defaultdict(float)  # by resource
        self.used: dict[tuple[str, ...], float] = defaultdict(float)
        self.charged: dict[tuple[str, ...], float] = defaultdict(float)
        for use in uses:
            names = _names(use)
            own, owner = names["account"], names["user"]
            for resource, hours in (("gpu", use.gpu_hours), ("cpu", use.cpu_hours)):
                self.total[resource] += hours
                for user in {"", owner}:
                    self.charged[resource, own, user] += hours * granted.factors.get(names["qos"], 1.0)
                for team, user in {(own, owner), *((team, "") for team in path_up(own, parents))}:
                    self.used[resource, team, user] += hours

    def budget(self, key: tuple[str, str], resource: Resource) -> tuple[float, float] | None:
        """Return the hours of a budget, and what is left of them."""
        row = self.rows.get(key)
        limit = parse_count(row.grp_tres_mins.get(_TRES[resource], "")) if row else None
        if row is None or limit is None:
            return None
        return limit / 60, max(0.0, limit - (parse_count(row.tres_mins.get(_TRES[resource], "")) or 0)) / 60


def _absolute_shares(rows: Sequence[FairShare]) -> dict[tuple[str, str], float]:
    """Return each row's part of the whole: its shares by those of its siblings, times the part of the account above.

    What is below an account without shares of its own (`parent`) is a sibling of that account.
    """
    accounts = {row.account: row for row in rows if not row.user}
    without = {row.account: row.parent for row in accounts.values() if row.shares is None}
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[path_up(row.parent, without)[-1]] += row.shares or 0

    def part(row: FairShare, depth: int) -> float:
        if not row.parent:
            return 1.0
        parent = path_up(row.parent, without)[-1]
        above = accounts.get(parent)
        own = (row.shares or 0) / totals[parent] if totals[parent] else 0.0
        return own * part(above, depth - 1) if above and depth else 0.0

    return {(row.account, row.user): part(row, len(rows)) for row in rows if row.shares is not None or not row.parent}


def report_rows(
    window: tuple[str, str],
    groups: Sequence[UsageRow],
    details: Sequence[UsageRow],
    granted: Mapping[str, SiteShares],
    *,
    by: Sequence[str],
    is_current: bool,
) -> list[TeamRow]:
    """Return a row of each team, or user in it, at each or at all sites, the largest use first.

    groups: what was used by account, with site and user if `by` names them. details: by account, site, user and QOS.
    granted: site → its shares. is_current: whether the window ends now, so that what holds now belongs to it.
    """
    sites = {
        name: _Site(each, (use for use in details if _names(use)["site"] == name)) for name, each in granted.items()
    }
    uses: dict[tuple[str, str, str], list[UsageRow | None]] = {}
    for use in groups:
        names = _names(use)
        uses.setdefault((names["site"], names["account"], names["user"]), []).append(use)
    for name, each in sites.items():  # what was granted and not used
        for team, user in each.rows:
            is_row = not user if "user" not in by else user and each.budget((team, user), each.resource)
            if team != "root" and is_row:
                uses.setdefault((name if "site" in by else "", team, user), [None])
    rows = [
        _row(window, name, (team, user), use, [sites[name]] if name else list(sites.values()), is_current)
        for (name, team, user), own in uses.items()
        for use in own
    ]
    return sorted(rows, key=lambda row: (row.site, -(row.use or 0), -(row.share or 0), row.team, row.user))


def _row(
    window: tuple[str, str],
    site: str,
    key: tuple[str, str],
    use: UsageRow | None,
    sites: Sequence[_Site],
    is_current: bool,
) -> TeamRow:
    resource: Resource = "gpu" if any(each.resource == "gpu" for each in sites) else "cpu"
    counted = [each for each in sites if each.resource == resource]
    total = sum(each.total[resource] for each in counted)
    weights = [each.total[resource] if total else 1.0 for each in counted]
    shares = [(each.share[key], weight) for each, weight in zip(counted, weights, strict=True) if key in each.share]
    row = sites[0].rows.get(key) if len(sites) == 1 and is_current else None
    budgets = [budget for each in counted if (budget := each.budget(key, resource))] if is_current else []
    return TeamRow(
        since=window[0],
        until=window[1],
        site=site,
        team=key[0],
        user=key[1],
        share=sum(share * weight for share, weight in shares) / sum(weights) if shares else None,
        use=sum(each.used[resource, *key] for each in counted) / total if total else None,
        **{name: getattr(use, name, nothing) for name, nothing in _NO_USE.items()},
        charged_gpu_hours=sum(each.charged["gpu", *key] for each in sites),
        charged_cpu_hours=sum(each.charged["cpu", *key] for each in sites),
        resource=resource,
        fair_share=row.fair_share if row else None,
        level_fs=row.level_fs if row else None,
        budget_hours=sum(budget for budget, _ in budgets) if budgets else None,
        budget_left_hours=sum(left for _, left in budgets) if budgets else None,
    )
