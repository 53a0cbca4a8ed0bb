"""The options of a queued job: the pools where it could run, and its run time there."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.dispatch.journal import QueueJob
from pitools.place.estimate import candidates
from pitools.place.estimate import plan as survey
from pitools.place.types import PlacementOption
from pitools.site.schema import Site

CACHE_S = 300.0  # an estimate changes with the job's data and with nodes, not from tick to tick
_BUDGET_S = 5.0  # of one tick: of a thousand new jobs the first are placed before all are judged


def make_job_plan(job: QueueJob, site: Site, partition: str) -> Plan:
    """The job's plan for a partition of a site, with the time that it needs there.

    Raises ConfigError or DataError where it cannot be there.
    """
    request = candidates.with_time_for_speed(job.request.request, site, partition)
    return planning.make_plan(request, site, job.job_id, request_text=job.request.request_text)


class OptionCache:
    """What each job could have; kept for a while."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[float, frozenset[str], survey.PlacementOptions]] = {}
        self._deadline = 0.0

    def begin_tick(self) -> None:
        """Begin a tick: reset the time budget for new estimates."""
        self._deadline = time.monotonic() + _BUDGET_S

    def options(self, job: QueueJob, snapshots: Mapping[str, tuple[Site, Snapshot]]) -> tuple[PlacementOption, ...]:
        """The options of a job at the sites that answered; none yet where there was no time left to look."""
        answered = frozenset(snapshots) & frozenset(job.request.sites)
        now = time.monotonic()
        cached = self._cached.get(job.job_id)
        if cached is None or not answered <= cached[1] or now - cached[0] > CACHE_S:
            if now > self._deadline:
                return ()
            wanted = survey.PlacementRequest(
                request=job.request.request, origin=job.job_id, text=job.request.request_text
            )
            offered = survey.options_from_snapshots(
                wanted, [snapshots[name] for name in sorted(answered)], timeout_s=_BUDGET_S
            )
            cached = self._cached[job.job_id] = (now, answered, offered)
        return tuple(option for option in cached[2].options if option.pool.partition("/")[0] in answered)

    def unfit_reason(self, job_id: str) -> str:
        """What speaks against every partition that a job was judged for; "" where it fits, or is not judged yet."""
        cached = self._cached.get(job_id)
        return cached[2].reason if cached else ""
