"""Judge SLOs now: how fast each error budget is spent, and how much of it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from pitools.core.record import Record
from pitools.monitor.rules import prometheus_api
from pitools.monitor.rules.burn import PAIRS, to_window, used_pairs
from pitools.monitor.rules.measures import MEASURES, bad_share, event_count
from pitools.monitor.rules.schema import Slo, SloFile

Burning = Literal["", "ticket", "page"]


class SloState(Record, frozen=True, kw_only=True, tag="pit.slo/1"):
    """An error budget now. cluster, tier, resource: whose it is, "" for none. burning: how urgent, or "".

    bad: the share that was bad in the period. budget_left: of the error budget, below 0 if it is spent; both None
    without events. burn_1h, burn_1d: burn rates, 1 spends the budget in its period. reason: of burning. hint: what to
    type next.
    """

    cluster: str
    slo: str
    tier: str = ""
    resource: str = ""
    burning: Burning = ""
    objective: float
    period: str
    bad: float | None = None
    budget_left: float | None = None
    burn_1h: float | None = None
    burn_1d: float | None = None
    reason: str = ""
    hint: str = ""


class Share(NamedTuple):
    """What was bad in a window. events: their number, infinite for hours."""

    bad: float
    events: float


Owner = tuple[str, ...]
"""Values of the labels that an error budget is kept for, in the measure's order."""
Shares = Callable[[Slo, int], dict[Owner, Share]]
"""Return the shares of an SLO in a window, in seconds."""


def judge_slos(slos: SloFile, shares: Shares) -> list[SloState]:
    """Return the state of each error budget that has events in its period, worst first within an SLO."""
    states = []
    for slo in slos.slo:
        windows = {window for pair in PAIRS for window in (pair.short_s, pair.long_s)} | {slo.period_s}
        by_window = {window: shares(slo, window) for window in sorted(windows)}
        owners = sorted({owner for found in by_window.values() for owner in found})
        rows = [
            _judge(slo, owner, {window: found.get(owner) for window, found in by_window.items()}) for owner in owners
        ]
        states += sorted(rows, key=lambda row: row.budget_left if row.budget_left is not None else 1.0)
    return states


def _judge(slo: Slo, owner: Owner, shares: dict[int, Share | None]) -> SloState:
    info, burning, reason = MEASURES[slo.measure], "", ""
    for pair, limit in used_pairs(slo.period_s, slo.budget):
        long, short = shares[pair.long_s], shares[pair.short_s]
        if long and short and long.events >= slo.min_events and min(long.bad, short.bad) > limit:
            burning = pair.severity
            reason = (
                f"{long.bad:.1%} {info.bad.format(within=slo.within)} in {to_window(pair.long_s)}, {short.bad:.1%} in"
                f" {to_window(pair.short_s)} (expected at most {limit:.1%})"
            )
            break
    labels = dict(zip(info.by.split(", "), owner, strict=True))
    period = shares[slo.period_s]
    burn_1h, burn_1d = (share and round(share.bad / slo.budget, 6) for share in (shares[3600], shares[86400]))
    return SloState(
        **labels,
        slo=slo.name,
        burning=burning,  # type: ignore[arg-type]
        objective=slo.objective,
        period=slo.period,
        bad=period and round(period.bad, 9),
        budget_left=period and round(1 - period.bad / slo.budget, 6),
        burn_1h=burn_1h,
        burn_1d=burn_1d,
        reason=reason,
        hint=info.runbook.replace("{{ $labels.cluster }}", labels["cluster"]) if burning else "",
    )


def prometheus_shares(url: str, clusters: Iterable[str]) -> Shares:
    """Return the shares that a Prometheus knows of clusters; of all without names. They raise as its queries do."""
    names = set(clusters)

    def shares(slo: Slo, window_s: int) -> dict[Owner, Share]:
        by = MEASURES[slo.measure].by.split(", ")

        def ask(expression: str) -> dict[Owner, float]:
            samples = prometheus_api.finite(prometheus_api.query(url, expression))
            found = {tuple(sample.labels.get(label, "") for label in by): sample.value for sample in samples}
            return {owner: value for owner, value in found.items() if not names or owner[0] in names}

        bad, count = ask(bad_share(slo, window_s)), event_count(slo, window_s)
        events = ask(count) if count and bad else {}
        return {owner: Share(share, events.get(owner, 0.0) if count else float("inf")) for owner, share in bad.items()}

    return shares
