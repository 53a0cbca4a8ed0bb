"""Report what teams and users used against their shares, over several sites: hours, charge, budgets, waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pitools.core.record import Record
from pitools.slurm import argv
from pitools.slurm.fields import parse_count
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.slurm.parse_accounting import parse_qos
from pitools.slurm.parse_shares import SHARES, FairShare, parse_shares
from pitools.slurm.transport import Transport

_GPU = "gres/gpu"


class TeamRow(Record, frozen=True, kw_only=True, tag="pit.tenancy-report/1"):
    """What a team, or a user in it, used between two times, and may use. site: "" for all sites together.

    jobs, gpu_hours, node_hours, charged_hours, cost, waits: of the team's own jobs, so that rows add up. charged_hours:
    the hours times the UsageFactor of each job's QOS, as budgets count them; of nodes where a site has no GPUs. share,
    use: of all hours of the sites, what the shares grant and what was used, 0 to 1, with the teams below. fair_share:
    Slurm's factor of a user's jobs. level_fs: share by use among siblings, decayed; None if unused, or for several
    sites. budget_hours, budget_left_hours: of GPUs, now; None without a budget, and of a past period.
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
    node_hours: float
    charged_hours: float
    cost: float | None
    currency: str
    wait_p50_s: int | None
    wait_p95_s: int | None
    fair_share: float | None
    level_fs: float | None
    budget_hours: float | None
    budget_left_hours: float | None


class Use(NamedTuple):
    """What a group of jobs used. site, user, qos: "" for all together."""

    site: str
    team: str
    user: str
    qos: str
    jobs: int
    gpu_hours: float
    node_hours: float
    cost: float | None
    currency: str
    wait_p50_s: int | None
    wait_p95_s: int | None


class SiteShares(NamedTuple):
    """What a site's Slurm grants. factors: QOS → UsageFactor."""

    shares: Sequence[FairShare]
    factors: Mapping[str, float]


_UNKNOWN = SiteShares((), {})


def read_shares(transport: Transport) -> SiteShares:
    """Read what a site's Slurm grants, in one call. Raises Unreachable and ClusterError."""
    shares, qos = (stdout_or_raise(transport, done) for done in run_queries(transport, [SHARES, argv.QOS]))
    return SiteShares(parse_shares(shares), {row.qos: row.usage_factor for row in parse_qos(qos)})


class _Site:
    """A site's hours and shares, by account and user; an account's with those of the accounts below."""

    def __init__(self, granted: SiteShares, uses: Iterable[Use]) -> None:
        uses = list(uses)
        self.granted = granted
        self.has_gpus = any(use.gpu_hours for use in uses)
        self.rows = {(row.account, row.user): row for row in granted.shares}
        self.share = _absolute_shares(granted.shares)
        self.used: dict[tuple[str, str], float] = {}
        self.charged: dict[tuple[str, str], float] = {}
        for use in uses:
            hours = use.gpu_hours if self.has_gpus else use.node_hours
            charge = hours * granted.factors.get(use.qos, 1.0)
            for key in ((use.team, ""), (use.team, use.user)):
                self.charged[key] = self.charged.get(key, 0.0) + charge
            for key in ((use.team, use.user), *((team, "") for team in self._path(use.team))):
                self.used[key] = self.used.get(key, 0.0) + hours
        self.total = sum(use.gpu_hours if self.has_gpus else use.node_hours for use in uses)

    def _path(self, team: str) -> list[str]:
        """Return the account and those above it."""
        path = [team]
        while (row := self.rows.get((path[-1], ""))) and row.parent and row.parent not in path:
            path.append(row.parent)
        return path

    def budget(self, key: tuple[str, str]) -> tuple[float, float] | None:
        """Return the GPU hours of a budget, and what is left of them."""
        row = self.rows.get(key)
        limit = parse_count(row.grp_tres_mins.get(_GPU, "")) if row else None
        if row is None or limit is None:
            return None
        return limit / 60, max(0.0, limit - (parse_count(row.tres_mins.get(_GPU, "")) or 0)) / 60


def _absolute_shares(rows: Sequence[FairShare]) -> dict[tuple[str, str], float]:
    """Return each row's part of the whole: its shares by those of its siblings, times the part of the account above."""
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.parent] = totals.get(row.parent, 0) + (row.shares or 0)
    parts: dict[tuple[str, str], float] = {}
    for row in rows:
        if not row.parent:
            parts[row.account, row.user] = 1.0
        elif row.shares is not None and totals[row.parent]:
            parts[row.account, row.user] = parts.get((row.parent, ""), 0.0) * row.shares / totals[row.parent]
    return parts


def report_rows(
    window: tuple[str, str],
    groups: Sequence[Use],
    details: Sequence[Use],
    granted: Mapping[str, SiteShares],
    *,
    by: Sequence[str],
    is_current: bool,
) -> list[TeamRow]:
    """Return a row of each team, or user in it, at each or at all sites, the largest use first.

    groups: what was used by team, with site and user if `by` names them. details: by site, team, user and QOS. granted:
    site → its shares. is_current: whether the window ends now, so that what holds now belongs to it.
    """
    sites = {name: _Site(granted.get(name, _UNKNOWN), (use for use in details if use.site == name)) for name in granted}
    uses: dict[tuple[str, str, str], list[Use | None]] = {}
    for use in groups:
        uses.setdefault((use.site, use.team, use.user), []).append(use)
    for name, each in sites.items():  # what was granted and not used
        for team, user in each.rows:
            if team != "root" and (not user if "user" not in by else user and each.budget((team, user))):
                uses.setdefault((name if "site" in by else "", team, user), [None])
    rows = [
        _row(window, name, (team, user), use, [sites[name]] if name else list(sites.values()), is_current)
        for (name, team, user), own in uses.items()
        for use in own
    ]
    return sorted(rows, key=lambda row: (row.site, -(row.use or 0), -(row.share or 0), row.team, row.user))


def _row(
    window: tuple[str, str], site: str, key: tuple[str, str], use: Use | None, sites: Sequence[_Site], is_current: bool
) -> TeamRow:
    total = sum(each.total for each in sites)
    weights = [each.total if total else 1.0 for each in sites]
    shares = [(each.share[key], weight) for each, weight in zip(sites, weights, strict=True) if key in each.share]
    row = sites[0].rows.get(key) if len(sites) == 1 and is_current else None
    budgets = [budget for each in sites if (budget := each.budget(key))] if is_current else []
    return TeamRow(
        since=window[0],
        until=window[1],
        site=site,
        team=key[0],
        user=key[1],
        share=sum(share * weight for share, weight in shares) / sum(weights) if shares else None,
        use=sum(each.used.get(key, 0.0) for each in sites) / total if total else None,
        jobs=use.jobs if use else 0,
        gpu_hours=use.gpu_hours if use else 0.0,
        node_hours=use.node_hours if use else 0.0,
        charged_hours=sum(each.charged.get(key, 0.0) for each in sites),
        cost=use.cost if use else None,
        currency=use.currency if use else "",
        wait_p50_s=use.wait_p50_s if use else None,
        wait_p95_s=use.wait_p95_s if use else None,
        fair_share=row.fair_share if row else None,
        level_fs=row.level_fs if row else None,
        budget_hours=sum(budget for budget, _ in budgets) if budgets else None,
        budget_left_hours=sum(left for _, left in budgets) if budgets else None,
    )
