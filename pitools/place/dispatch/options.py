"""Estimate the options of a queued job: the pools where it could run, and its run time there."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.dispatch import continuation
from pitools.place.dispatch.journal import QueueJob
from pitools.place.estimate import candidates, plan
from pitools.place.types import PlacementOption, site_of
from pitools.site.schema import Site

CACHE_S = 300.0  # an estimate changes with the job's data and with nodes, not from tick to tick
_BUDGET_S = 5.0  # of one tick: of a thousand new jobs the first are placed before all are estimated


def make_job_plan(job: QueueJob, site: Site, partition: str) -> Plan:
    """Return the job's plan for a partition of a site, with its time limit there. Raises ConfigError, DataError."""
    request = candidates.with_time_for_speed(continuation.request_to_run(job), site, partition)
    return planning.make_plan(request, site, job.job_id, request_text=job.request.request_text)


class OptionCache:
    """Caches each job's options for CACHE_S."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[float, frozenset[str], plan.PlacementOptions]] = {}
        self._deadline = 0.0
        self._postponed: dict[str, None] = {}  # in order

    def begin_tick(self) -> None:
        """Begin a tick: reset the time budget for new estimates."""
        self._deadline = time.monotonic() + _BUDGET_S
        self._postponed.clear()

    def options(self, job: QueueJob, snapshots: Mapping[str, tuple[Site, Snapshot]]) -> tuple[PlacementOption, ...]:
        """Return the job's options at the sites that answered; past the time budget, older ones or none."""
        answered = frozenset(snapshots) & frozenset(job.request.sites)
        now = time.monotonic()
        cached = self._cached.get(job.job_id)
        is_stale = cached is None or not answered <= cached[1] or now - cached[0] > CACHE_S
        if is_stale and now > self._deadline:
            self._postponed[job.job_id] = None
        elif is_stale:
            wanted = plan.PlacementRequest(
                request=continuation.request_to_run(job), origin=job.job_id, text=job.request.request_text
            )
            offered = plan.options_from_snapshots(
                wanted, [snapshots[name] for name in sorted(answered)], timeout_s=_BUDGET_S
            )
            cached = self._cached[job.job_id] = (now, answered, offered)
        return tuple(option for option in (cached[2].options if cached else ()) if site_of(option.pool) in answered)

    @property
    def postponed(self) -> tuple[str, ...]:
        """The ids of the jobs for whose estimates this tick had no time, in the order of the calls."""
        return tuple(self._postponed)

    def unfit_reason(self, job_id: str) -> str:
        """Return why the job has no options, for `list`; "" if it has some."""
        if cached := self._cached.get(job_id):
            return f"it fits nowhere now: {cached[2].reason}" if cached[2].reason else ""
        return "not estimated yet: the tick had no time left" if job_id in self._postponed else ""
