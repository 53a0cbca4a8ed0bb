"""What needs a person, most urgent first: sites that do not answer, runs that stopped, nodes out of service, SLOs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from pitools.core import timestamps
from pitools.monitor.live.feed import Feed
from pitools.monitor.live.followed_runs import FollowedRun
from pitools.monitor.live.site_feeds import SiteFeeds
from pitools.monitor.rules import prometheus_api
from pitools.node.control.incidents import incident_of_reason
from pitools.slurm.states import is_held, may_never_start

_RECENT = timedelta(days=1)  # then a stopped run is no news


class Alert(NamedTuple):
    """One line. at: RFC 3339, "" if unknown. subject: a run's id, a node, an alert's name, or "" for the site itself.

    next: a command to type.
    """

    level: Literal["error", "warning"]
    site: str
    subject: str
    text: str
    at: str = ""
    next: str = ""


def alerts(sites: Iterable[SiteFeeds], firing: Feed[list[Alert]] | None = None) -> list[Alert]:
    """Return the alerts of all sites, and of a Prometheus: errors first, then the newest first."""
    since = timestamps.to_rfc3339(datetime.now(UTC) - _RECENT)
    listed = [alert for site in sites for alert in _of_site(site, since)]
    if firing:
        listed += firing.answer.value or ()
        if error := firing.answer.error:
            listed.append(Alert("error", "", "prometheus", str(error), next=error.hint))
    listed.sort(key=lambda alert: alert.at, reverse=True)
    return sorted(listed, key=lambda alert: alert.level)


def firing_alerts(url: str) -> list[Alert]:
    """Return the alerts that fire at a Prometheus, such as those of `pit monitor rules`. Raises PitError."""
    return [_firing_alert(sample.labels) for sample in prometheus_api.query(url, 'ALERTS{alertstate="firing"}')]


def _firing_alert(labels: dict[str, str]) -> Alert:
    shown = ("__name__", "alertname", "alertstate", "cluster", "severity")
    rest = " ".join(f"{name}={value}" for name, value in sorted(labels.items()) if name not in shown)
    severity = labels.get("severity", "")
    level: Literal["error", "warning"] = "error" if severity in ("page", "critical") else "warning"
    return Alert(level, labels.get("cluster", ""), labels.get("alertname", ""), f"fires: {severity} {rest}".rstrip())


def _of_site(site: SiteFeeds, since: str) -> Iterator[Alert]:
    runs = site.runs.answer if site.runs else None
    slurm = site.slurm.answer if site.slurm else None
    for error in (site.problem, slurm.error if slurm else None, runs.error if runs else None):
        if error:
            # A site where nobody has run anything yet, or whose folder of runs is not on this host, has none.
            is_absent = runs is not None and error is runs.error and runs.value is None
            text = error.message if error.where == site.name else str(error)
            yield Alert("warning" if is_absent else "error", site.name, "", text, next=error.hint)
    yield from _of_runs(site.name, (runs.value if runs else None) or (), since)
    for node in slurm.value.unusable if slurm and slurm.value else ():
        incident, check = incident_of_reason(node.reason)
        state = "+".join((node.state, *node.flags))
        text = f"{state}: {node.reason or 'no reason given'}"
        command = f"pit node show {node.node} --site {site.name}" if incident else f"scontrol show node {node.node}"
        yield Alert("error" if node.state == "down" or check else "warning", site.name, node.node, text, next=command)


def _of_runs(site: str, runs: Sequence[FollowedRun], since: str) -> Iterator[Alert]:
    for run in runs:
        if run.problem:
            yield Alert("error", site, run.run_dir.name, run.problem.message, next=run.problem.hint)
        record = run.record
        if record is None:
            continue
        why = f"pit launch why {record.run_id}"
        if record.is_over and record.state not in ("COMPLETED", "CANCELLED"):
            if run.ended_at >= since:
                yield Alert("error", site, record.run_id, f"{record.cause}: {record.reason}", run.ended_at, why)
        elif record.cancel_requested:
            yield Alert("warning", site, record.run_id, record.reason, record.cancel_requested)
        elif record.pending_reason and (is_held(record.pending_reason) or may_never_start(record.pending_reason)):
            text = f"waits, and may never start: {record.pending_reason}"
            yield Alert("warning", site, record.run_id, text, next=f"scontrol show job {record.job_id}")
        elif not record.is_over and record.cause and record.state != "RUNNING":
            yield Alert("warning", site, record.run_id, f"{record.cause}: {record.reason}", next=why)
