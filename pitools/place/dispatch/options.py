"""A job of the queue as a decision sees it: where it could run, and for how long."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pitools.launch import plan as planning
from pitools.launch.plan import Plan
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.dispatch.journal import Job
from pitools.place.estimate import candidates
from pitools.place.estimate import plan as survey
from pitools.place.types import Option
from pitools.site.schema import Site

KEPT_S = 300.0  # what is foretold of a job changes with its data and with nodes, and not from tick to tick
_SPEND_S = 5.0  # of one tick: of a thousand new jobs the first are placed before all are judged


def plan(job: Job, site: Site, partition: str) -> Plan:
    """The job's plan for a partition of a site, with the time that it needs there.

    Raises ConfigError or DataError where it cannot be there.
    """
    request = candidates.sized(job.asked.request, site, partition)
    return planning.make(request, site, job.job_id, request_text=job.asked.request_text)


class Offers:
    """What each job could have; kept for a while."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, frozenset[str], survey.Offered]] = {}
        self._until = 0.0

    def begin(self) -> None:
        """A tick begins: so long may be spent on what is not known yet."""
        self._until = time.monotonic() + _SPEND_S

    def of(self, job: Job, seen: Mapping[str, tuple[Site, Snapshot]]) -> tuple[Option, ...]:
        """The options of a job at the sites that answered; none yet where there was no time left to look."""
        there = frozenset(seen) & frozenset(job.asked.sites)
        now = time.monotonic()
        known = self._known.get(job.job_id)
        if known is None or not there <= known[1] or now - known[0] > KEPT_S:
            if now > self._until:
                return ()
            wanted = survey.Wanted(request=job.asked.request, where=job.job_id, text=job.asked.request_text)
            offered = survey.offers(wanted, [seen[name] for name in sorted(there)], timeout_s=_SPEND_S)
            known = self._known[job.job_id] = (now, there, offered)
        return tuple(option for option in known[2].options if option.pool.partition("/")[0] in there)

    def why_none(self, job_id: str) -> str:
        """What speaks against every partition that a job was judged for; "" where it fits, or is not judged yet."""
        known = self._known.get(job_id)
        return known[2].why if known else ""
