"""The file of service level objectives (SLOs) and alerts: its keys, its checks, and the shipped example.

`slos.toml`, beside this file, works unchanged; `pit monitor rules --example` prints it. An unknown key is an error.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import msgspec

from pitools.core import strict_toml, units
from pitools.core.errors import ConfigError, PitError, UsageError, suggest
from pitools.monitor.rules.alerts import ALERTS
from pitools.monitor.rules.burn import Severity, used_pairs
from pitools.monitor.rules.measures import MEASURES, Measure
from pitools.site.load import load_site, site_names

SHIPPED = Path(__file__).with_name("slos.toml")
_PERIODS = ("7d", "90d")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"hold": "for"}):
    """One table of the file."""


class Slo(Section, frozen=True, kw_only=True):
    """An objective. name: of letters, digits and `-`. objective: share that has to be good, between 0 and 1.

    measure: `goodput` counts accounted GPU-seconds, which are good if productive. The others count events, which are
    good if they end within a time, one of the metric's buckets: `queue-wait` the wait of a job, `staging` the staging
    of an attempt, `recovery` the time from a run's fault to its next ranks.
    period: of the error budget, from 7d to 90d. tier: of `queue-wait`, "" is each tier by itself. for: how long it must
    burn before it alerts. min_events: with fewer in the alert's longer window, nothing alerts; of `goodput` it is
    accounted hours of a GPU, or of a node without.
    """

    name: str
    measure: Measure
    objective: float
    within: str = ""
    tier: str = ""
    period: str = "30d"
    min_events: float = 10
    hold: str = "0s"

    @property
    def period_s(self) -> int:
        """The length of the error budget's period, in seconds."""
        return units.parse_duration(self.period)

    @property
    def within_s(self) -> int:
        """The longest time of a good event, in seconds; 0 for goodput."""
        return units.parse_duration(self.within) if self.within else 0

    @property
    def budget(self) -> float:
        """The share that may be bad."""
        return round(1 - self.objective, 9)


class AlertSetting(Section, frozen=True, kw_only=True):
    """How an alert alerts. limit: in the unit of the alert's text, None without. for: how long it must be true."""

    on: bool = True
    limit: float | None = None
    hold: str = "0s"
    severity: Severity = "ticket"


class SloFile(Section, frozen=True, kw_only=True):
    """The whole file. alerts: all, by name; what a file does not say of one is as in the shipped file."""

    slo: tuple[Slo, ...] = ()
    alerts: dict[str, AlertSetting] = {}


def load_slos(path: Path | None = None) -> SloFile:
    """Load a file of SLOs and alerts; the shipped one without a path. Raises ConfigError with the key and a hint."""
    where = str(path or SHIPPED)
    tables = strict_toml.read_toml(path or SHIPPED)
    settings = tables.setdefault("alerts", {})
    for name, shipped in strict_toml.read_toml(SHIPPED)["alerts"].items() if isinstance(settings, dict) else ():
        if isinstance(own := settings.get(name, {}), dict):
            settings[name] = shipped | own
    slos = strict_toml.convert_tables(tables, SloFile, where)
    names: set[str] = set()
    for slo in slos.slo:
        if problem := _slo_problem(slo):
            raise ConfigError(f'slo "{slo.name}": {problem[1]}', where=where, hint=problem[2], key=f"slo.{problem[0]}")
        if slo.name in names:
            raise ConfigError(f'two SLOs "{slo.name}"', where=where, hint="rename one", key="slo.name")
        names.add(slo.name)
    for name, setting in slos.alerts.items():
        if name not in ALERTS:
            raise ConfigError(f'no alert "{name}"', where=where, hint=suggest(name, ALERTS), key=f"alerts.{name}")
        if _seconds(setting.hold) is None:
            hint = "write 30s, 5m or 1h"
            raise ConfigError(f'"{setting.hold}" is not a duration', where=where, hint=hint, key=f"alerts.{name}.for")
        alert = ALERTS[name]
        has_limit = "LIMIT" in alert.expr
        if setting.limit is not None and not (has_limit and 0 <= setting.limit <= alert.most):
            expected = f"from 0 to {alert.most:g}" if has_limit else "none: leave it out"
            wrong = f'alert "{name}": limit {setting.limit:g} (expected {expected})'
            raise ConfigError(wrong, where=where, key=f"alerts.{name}.limit")
    return slos


def unknown_tiers(slos: SloFile) -> dict[str, str]:
    """Return a line by SLO whose tier no site file has, which can be another QOS's name; none if no site has tiers."""
    known = set()
    for name in site_names(shipped=False):
        with contextlib.suppress(PitError):  # a site that is not used here may be wrong
            known |= set(load_site(name).tiers)
    return {
        slo.name: f'slo "{slo.name}": no site has a tier "{slo.tier}"; {suggest(slo.tier, known)}'
        for slo in slos.slo
        if known and slo.tier not in {"", *known}
    }


def _slo_problem(slo: Slo) -> tuple[str, str, str] | None:
    """Return the key, the problem and a hint of a wrong SLO; None for a right one."""
    measure = MEASURES[slo.measure]
    if not slo.name or not slo.name.replace("-", "").isalnum() or not slo.name.isascii():
        return "name", "expected letters, digits and -", ""
    if not 0 < slo.budget < 1:
        return "objective", f"{slo.objective:.15g} (expected between 0 and 1, such as 0.9)", ""
    low, high = map(units.parse_duration, _PERIODS)
    if not low <= (_seconds(slo.period) or 0) <= high:
        return "period", f'"{slo.period}" (expected from {_PERIODS[0]} to {_PERIODS[1]})', ""
    if not used_pairs(slo.period_s, slo.budget):
        return "objective", f"{slo.objective:g}: if all were bad, it would still not burn fast enough to alert", ""
    if _seconds(slo.hold) is None:
        return "for", f'"{slo.hold}" is not a duration', "write 30s, 5m or 1h"
    if not 0 <= slo.min_events < math.inf:
        return "min_events", f"{slo.min_events:g} (expected 0 or more)", ""
    if slo.tier and "tier" not in measure.by:
        return "tier", f"{slo.measure} has no tiers", "leave tier out"
    if not measure.buckets:
        return ("within", f"{slo.measure} has no time limit", "leave within out") if slo.within else None
    if (_seconds(slo.within) or 0) not in measure.buckets:
        known = ", ".join(units.exact_duration(int(bucket)) for bucket in measure.buckets)
        return "within", f'"{slo.within}" (expected a bucket of {measure.metric})', f"one of {known}"
    return None


def _seconds(text: str) -> int | None:
    try:
        return units.parse_duration(text)
    except UsageError:
        return None
