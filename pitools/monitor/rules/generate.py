"""Prometheus' rules of a file of SLOs and alerts: recording rules for each window, and alerts."""

from __future__ import annotations

from typing import Any

from pitools.core.units import exact_duration, parse_duration
from pitools.monitor.rules.alerts import ALERTS
from pitools.monitor.rules.burn import PAIRS, WINDOWS, Severity, used_pairs
from pitools.monitor.rules.measures import MEASURES, bad_share, event_count
from pitools.monitor.rules.schema import AlertSetting, Slo, SloFile

REMAINING = "pit:slo_budget_remaining:ratio"
_SLOW_S = 86400  # windows of this length and more are evaluated less often: they read more and change less
_SLOW_INTERVAL = "2m"
_HEAD = """\
# Made by pit monitor rules: change its file of SLOs and alerts, not this. For rule_files in prometheus.yml; the error
# budgets need its --storage.tsdb.retention.time to be at least the longest period.
"""

Rule = dict[str, Any]


def rules_text(slos: SloFile) -> str:
    """Return the rules as YAML."""
    import yaml  # 20 ms, for this command alone

    groups = [group for slo in slos.slo for group in _slo_groups(slo)]
    alerts = [_alert(name, slos.alerts[name]) for name in ALERTS if slos.alerts[name].on]
    if alerts:
        groups.append({"name": "pit-alerts", "rules": alerts})
    return _HEAD + str(yaml.safe_dump({"groups": groups}, sort_keys=False, width=1 << 20))


def left_out(slos: SloFile) -> list[str]:
    """Return a line for each pair of windows that could never alert, because the objective allows too much."""
    lines = []
    for slo in slos.slo:
        used = {pair for pair, _ in used_pairs(slo.period_s, slo.budget)}
        windows = [
            f"{exact_duration(pair.short_s)} and {exact_duration(pair.long_s)}" for pair in PAIRS if pair not in used
        ]
        if windows:
            lines.append(
                f'slo "{slo.name}": objective {slo.objective:g} leaves no alert of {"; ".join(windows)}: all being bad'
                " would not burn fast enough"
            )
    return lines


def record_name(window_s: int) -> str:
    """Return the name of the recorded bad share of a window."""
    return f"pit:slo_bad:ratio_rate{exact_duration(window_s)}"


def _slo_groups(slo: Slo) -> list[dict[str, Any]]:
    """Return an SLO's groups: windows of hours, which page, and windows of days, which need a ticket, with the budget.

    An alert follows what it compares, so that both are of one moment.
    """
    labels = {"slo": slo.name}
    fast, slow = (
        [
            {"record": record_name(window), "expr": bad_share(slo, window), "labels": dict(labels)}
            for window in sorted({*WINDOWS, slo.period_s})
            if (window >= _SLOW_S) == is_slow
        ]
        for is_slow in (False, True)
    )
    period = f'{record_name(slo.period_s)}{{slo="{slo.name}"}}'
    slow.append({"record": REMAINING, "expr": f"1 - {period} / {slo.budget:g}", "labels": dict(labels)})
    return [
        {"name": f"pit-slo-{slo.name}", "rules": fast + _burn_alert(slo, "page")},
        {"name": f"pit-slo-{slo.name}.days", "interval": _SLOW_INTERVAL, "rules": slow + _burn_alert(slo, "ticket")},
    ]


def _burn_alert(slo: Slo, severity: Severity) -> list[Rule]:
    """Return an SLO's alert of a severity, of its pairs of windows that can alert; none without one."""
    info = MEASURES[slo.measure]
    terms = []
    for pair, limit in used_pairs(slo.period_s, slo.budget):
        if pair.severity != severity:
            continue
        long, short = (
            f'{record_name(window)}{{slo="{slo.name}"}} > {limit:g}' for window in (pair.long_s, pair.short_s)
        )
        count = event_count(slo, pair.long_s)
        terms.append(f"({long} and {short} and on ({info.by}) {count} >= {slo.min_events:g})")
    if not terms:
        return []
    bad = info.bad.format(within=slo.within)
    where = ", ".join(f"{label} {{{{ $labels.{label} }}}}" for label in info.by.split(", "))
    rule = _rule(
        "PitSloBurn",
        " or ".join(terms),
        slo.hold,
        {"severity": severity, "slo": slo.name},
        summary=f"{slo.name}: {{{{ $value | humanizePercentage }}}} {bad} ({where})",
        description=f"The error budget of {slo.period} (objective {slo.objective:g}) is being spent too fast."
        f' How much is left: {REMAINING}{{slo="{slo.name}"}}',
        runbook=info.runbook,
    )
    return [rule]


def _alert(name: str, setting: AlertSetting) -> Rule:
    alert, limit = ALERTS[name], setting.limit or 0
    expr, summary = (
        text.replace("LIMIT", f"{limit:.15g}").replace("WINDOW", exact_duration(max(1, round(limit))))
        for text in (alert.expr, alert.summary)
    )
    return _rule(name, expr, setting.hold, {"severity": setting.severity}, summary=summary, runbook=alert.runbook)


def _rule(name: str, expr: str, hold: str, labels: dict[str, str], **annotations: str) -> Rule:
    held = {"for": exact_duration(hold_s)} if (hold_s := parse_duration(hold)) else {}
    return {"alert": name, "expr": expr, **held, "labels": labels, "annotations": annotations}
