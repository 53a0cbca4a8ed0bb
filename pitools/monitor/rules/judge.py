"""Judge SLOs now: how fast each error budget is spent, and how much of it is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from pitools.core.record import Record
from pitools.core.units import exact_duration
from pitools.monitor.rules import prometheus_api
from pitools.monitor.rules.burn import WINDOWS, Pair, used_pairs
from pitools.monitor.rules.measures import MEASURES, bad_share, event_count
from pitools.monitor.rules.schema import Slo, SloFile
from pitools.site.load import load_site

Burning = Literal["", "ticket", "page"]


class SloState(Record, frozen=True, kw_only=True, tag="pit.slo/1"):
    """An error budget now. cluster, tier, resource: whose it is, "" for none. burning: how urgent, or "".

    is_known: false if samples are missing, such as of a dead exporter, with which it could burn, or burn faster.
    bad: the share that was bad in the period. budget_left: of the error budget, below 0 if it is spent; both None
    without events. burn_1h, burn_1d: burn rates, 1 spends the budget in its period. reason: of burning, or why that is
    unknown. hint: what to type next.
    """

    cluster: str
    slo: str
    tier: str = ""
    resource: str = ""
    burning: Burning = ""
    is_known: bool = True
    objective: float
    period: str
    bad: float | None = None
    budget_left: float | None = None
    burn_1h: float | None = None
    burn_1d: float | None = None
    reason: str = ""
    hint: str = ""


class Share(NamedTuple):
    """What was bad in a window. events: their number; of goodput, of its accounted hours."""

    bad: float
    events: float


Owner = tuple[str, ...]
"""Values of the labels that an error budget is kept for, in the measure's order."""
Shares = Callable[[Slo, int], dict[Owner, Share | None]]
"""Return the shares of an SLO in a window, in seconds: None without events; an owner without samples is absent."""


def judge_slos(slos: SloFile, shares: Shares) -> list[SloState]:
    """Return the state of each error budget that has events in its period, worst first within an SLO."""
    states = []
    for slo in slos.slo:
        by_window = {window: shares(slo, window) for window in {*WINDOWS, slo.period_s}}
        owners = sorted({owner for found in by_window.values() for owner, share in found.items() if share})
        rows = [
            _judge(slo, owner, {window: found[owner] for window, found in by_window.items() if owner in found})
            for owner in owners
        ]
        states += sorted(rows, key=lambda row: row.budget_left if row.budget_left is not None else 1.0)
    return states


def _judge(slo: Slo, owner: Owner, shares: dict[int, Share | None]) -> SloState:
    info, reason, is_known = MEASURES[slo.measure], "", True
    burning: Burning = ""
    for pair, limit in used_pairs(slo.period_s, slo.budget):
        burns = _burns(pair, limit, shares, slo.min_events)
        is_known &= burns is not None
        if burns:
            burning = pair.severity
            bad, short_bad = (share.bad for window in (pair.long_s, pair.short_s) if (share := shares[window]))
            reason = (
                f"{bad:.1%} {info.bad.format(within=slo.within)} in {exact_duration(pair.long_s)}, {short_bad:.1%} in"
                f" {exact_duration(pair.short_s)} (expected at most {limit:.1%})"
            )
            break
    labels = dict(zip(info.by.split(", "), owner, strict=True))
    period = shares.get(slo.period_s)
    burn_1h, burn_1d = (share and round(share.bad / slo.budget, 6) for share in map(shares.get, (3600, 86400)))
    return SloState(
        **labels,
        slo=slo.name,
        burning=burning,
        is_known=is_known,
        objective=slo.objective,
        period=slo.period,
        bad=period and round(period.bad, 9),
        budget_left=period and round(1 - period.bad / slo.budget, 6),
        burn_1h=burn_1h,
        burn_1d=burn_1d,
        reason=reason or ("" if is_known else "unknown: no samples lately"),
        hint=info.runbook.replace("{{ $labels.cluster }}", labels["cluster"]) if burning else "",
    )


def _burns(pair: Pair, limit: float, shares: dict[int, Share | None], min_events: float) -> bool | None:
    """Return whether a pair of windows alerts; None if the samples that decide it are missing."""
    known = [shares[window] for window in (pair.long_s, pair.short_s) if window in shares]
    long = shares.get(pair.long_s)
    if any(share is None or share.bad <= limit for share in known) or (long and long.events < min_events):
        return False
    return True if len(known) == 2 else None


def prometheus_shares(url: str, clusters: Iterable[str]) -> Shares:
    """Return the shares that a Prometheus knows of clusters; of all without names. They raise as its queries do.

    Raises UsageError for a cluster that neither has metrics nor is a site of this machine.
    """
    names = set(clusters)
    if names:
        exported = prometheus_api.query(url, "group by (cluster) (last_over_time(pit_collector_success[7d]))")
        for name in sorted(names - {sample.labels.get("cluster", "") for sample in exported}):
            load_site(name)

    def shares(slo: Slo, window_s: int) -> dict[Owner, Share | None]:
        by = MEASURES[slo.measure].by.split(", ")

        def ask(expression: str) -> dict[Owner, float]:
            samples = prometheus_api.query(url, expression)
            found = {tuple(sample.labels.get(label, "") for label in by): sample.value for sample in samples}
            return {owner: value for owner, value in found.items() if not names or owner[0] in names}

        bad, count = ask(bad_share(slo, window_s)), event_count(slo, window_s)
        events = ask(count) if bad else {}
        return {
            owner: Share(share, events.get(owner, 0.0)) if math.isfinite(share) else None
            for owner, share in bad.items()  # a ratio of no events is NaN
        }

    return shares
