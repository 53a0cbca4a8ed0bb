"""The shares of SLOs without a Prometheus: from what the runs of sites recorded in their folders.

A run counts as a whole in each window in which it ended, or goes on. Its wait is that of all its jobs; what other jobs
waited is not recorded.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pitools.core.errors import PitError
from pitools.core.timestamps import unix_to_rfc3339
from pitools.launch.plan import load_plan
from pitools.ledger.believed import believed_runs, in_turn
from pitools.ledger.run_ledger import fleet_runs
from pitools.monitor.export.runs import count_run
from pitools.monitor.export.samples import Samples
from pitools.monitor.export.state import RunMark
from pitools.monitor.rules.judge import Owner, Share, Shares
from pitools.monitor.rules.measures import MEASURES
from pitools.monitor.rules.schema import Slo
from pitools.site.load import load_site
from pitools.site.schema import Site

_MAX_RUNS = 1000


class RunCounts(NamedTuple):
    """What a run recorded. until: its end or now, RFC 3339. counts: as the exporter's."""

    site: str
    until: str
    counts: Samples


def record_shares(sites: Iterable[str], period_s: float, report: Callable[[str], None]) -> Shares:
    """Return the shares that the runs of sites in a period recorded. report: gets a line for each that is left out.

    Raises PitError, OSError.
    """
    now_s = time.time()
    since = unix_to_rfc3339(now_s - period_s)
    runs = [run for name in dict.fromkeys(sites) for run in _read_runs(load_site(name), since, report)]

    def shares(slo: Slo, window_s: int) -> dict[Owner, Share | None]:
        begin = unix_to_rfc3339(now_s - window_s)
        return dict.fromkeys(_shares(slo, runs)) | _shares(slo, [run for run in runs if run.until >= begin])

    return shares


def _read_runs(site: Site, since: str, report: Callable[[str], None]) -> list[RunCounts]:
    def note(name: str, error: PitError) -> None:
        report(f"{name}: {error.message}" if name else f"{site.name}: copies of runs count: {error}")

    runs = []
    run_dirs = in_turn(fleet_runs(site, since, lambda run_dir, error: note(run_dir.name, error)))
    if len(run_dirs) > _MAX_RUNS:
        report(f"{site.name}: only {_MAX_RUNS} runs are judged, the newest of each owner")
    for run_dir, ledger, rows in believed_runs(site, run_dirs[:_MAX_RUNS], note):
        if ledger is None:
            continue
        counts = Samples()
        try:
            count_run(run_dir, ledger, RunMark(), counts, rows)
            tier = load_plan(run_dir).request.tier or site.defaults.tier
        except PitError as error:
            note(run_dir.name, error)
            continue
        if ledger.allocations:
            counts.observe("pit_queue_wait_seconds", ledger.queue_s, tier)
        runs.append(RunCounts(site.name, ledger.until, counts))
    return runs


def _shares(slo: Slo, runs: Iterable[RunCounts]) -> dict[Owner, Share]:
    info = MEASURES[slo.measure]
    by, last = info.by.split(", ")[1:], bisect_left(info.buckets, slo.within_s)
    good: dict[Owner, float] = defaultdict(float)
    total: dict[Owner, float] = defaultdict(float)
    for run in runs:
        for (name, labels), values in run.counts.items():
            if name != info.metric or labels[-1:] == ("unaccounted",) or (slo.tier and labels != (slo.tier,)):
                continue
            owner = (run.site, *labels[: len(by)])
            if info.buckets:  # a count for each bucket and above, and their sum
                good[owner] += sum(values[: last + 1])
                total[owner] += sum(values[:-1])
            else:
                good[owner] += values[0] if labels[-1] == "productive" else 0.0
                total[owner] += values[0]
    return {
        owner: Share(1 - good[owner] / count, count if info.buckets else count / 3600)
        for owner, count in total.items()
        if count
    }
