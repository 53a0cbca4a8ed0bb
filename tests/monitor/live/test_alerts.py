"""What is an alert, how urgent, and in which order."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pitools.launch.slurm_cache import CachedState
from pitools.monitor.live.alerts import Alert, alerts, firing_alerts
from pitools.monitor.live.feed import Answer, Feed
from pitools.monitor.live.followed_runs import FollowedRuns
from pitools.monitor.live.site_feeds import make_feeds
from pitools.monitor.rules import prometheus_api
from pitools.monitor.rules.prometheus_api import Sample
from pitools.run import run_folder
from pitools.run.cancel_request import CancelRequest
from tests.monitor.fleet import Runs

MakeSite = Callable[..., Runs]


def test_runs_that_need_a_person(make_site: MakeSite) -> None:
    """Stopped ones first, the newest of them on top; then those that wait in vain; not what Slurm runs again."""
    runs = make_site("east", "slurm")
    pending = {"11": "JobHeldUser", "12": "BadConstraints", "13": "Priority"}
    for job_id in pending:
        runs.add(f"p{job_id}", state="PENDING", job_id=job_id)
    for name, job_id in (("again", "21"), ("queued", "22")):
        runs.end(runs.add(name, job_id=job_id), 0, "PREEMPTED", 30)
    run_folder.write_record(runs.add("unwanted", job_id="23") / "cancel.json", CancelRequest(t=runs.at(5)))
    for name, age_s in (("first", 80), ("last", 20), ("second", 40)):
        runs.add(name, state="FAILED", age_s=age_s)
    states = {job_id: CachedState(state="PENDING", age_s=0, reason=reason) for job_id, reason in pending.items()}
    states |= {"21": CachedState(state="RUNNING", age_s=0), "22": CachedState(state="PENDING", age_s=0)}
    (site,) = make_feeds(["east"])
    assert site.runs
    site.runs.answer = Answer(FollowedRuns(runs.root, runs.site).poll(states), time.monotonic(), None)
    listed = [(alert.level, alert.subject.split("-")[0]) for alert in alerts([site])]
    assert listed[:3] == [("error", "last"), ("error", "second"), ("error", "first")]
    assert sorted(listed[3:]) == [("warning", name) for name in ("p11", "p12", "queued", "unwanted")]


@pytest.mark.parametrize(("severity", "level"), [("page", "error"), ("critical", "error"), ("ticket", "warning")])
def test_what_fires(monkeypatch: pytest.MonkeyPatch, severity: str, level: str) -> None:
    """What pages somebody is an error, before what waits for the morning."""
    labels = {"alertname": "PitSloBurn", "severity": severity, "cluster": "east", "slo": "goodput"}
    monkeypatch.setattr(prometheus_api, "query", lambda *_: [Sample(labels, 1.0)])
    (alert,) = firing_alerts("http://x")
    assert (alert.level, alert.site, alert.subject) == (level, "east", "PitSloBurn")
    feed = Feed("prometheus", lambda: list[Alert](), 1.0)
    feed.answer = Answer([alert, Alert("error", "", "x", "", at="2026-11-27T00:00:00Z")], 0.0, None)
    assert alerts([], feed)[0].subject == "x"
