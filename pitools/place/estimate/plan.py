"""Plan a placement: every candidate of a request, with its estimate. All sites are queried in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from pitools.core import units
from pitools.core.errors import ConfigError, PitError, TryLater, UsageError
from pitools.launch.request import Request
from pitools.place.clusters import accounting_history, pools, snapshot, wait_log
from pitools.place.clusters.accounting_history import AccountingHistory
from pitools.place.clusters.parallel import GRACE_S, query_all
from pitools.place.clusters.snapshot import SkippedSite, Snapshot
from pitools.place.estimate import data_transfer, estimate, throughput
from pitools.place.estimate.candidates import Candidate, candidates, never_reasons
from pitools.place.estimate.data_transfer import DataTransfer
from pitools.place.estimate.estimate import CandidateEstimate, RunEstimate, WaitEstimate
from pitools.place.estimate.throughput import Throughput
from pitools.place.types import PlacementOption
from pitools.site.schema import Site

_QUERY_TIMEOUT_S, _NODES_AGE_S = 5.0, 3600.0  # the sizes of nodes seldom change
_HISTORY_SHARE = 0.5  # of the remaining time: a plan does without the history


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place. origin: its file, for errors. text: its content."""

    request: Request
    origin: str = "request"
    text: str = ""


class SiteEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one site. waits: pool → wait. rates: pool → throughput of earlier runs.

    history: None if accounting does not answer. timed_out: an answer that matters did not arrive in time.
    """

    candidates: tuple[Candidate, ...]
    waits: dict[str, WaitEstimate]
    missing: DataTransfer
    rates: dict[str, Throughput]
    history: AccountingHistory | None
    notes: tuple[str, ...]
    timed_out: bool


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of all sites. candidates: those that fit first, best first. estimates: pool → estimate, for those that
    fit.

    is_complete: every site that is not skipped has answered every query.
    """

    candidates: tuple[Candidate, ...]
    estimates: dict[str, CandidateEstimate]
    skipped: tuple[SkippedSite, ...]
    notes: tuple[str, ...]
    is_complete: bool = True

    @property
    def best(self) -> Candidate | None:
        """Return the candidate with the earliest expected end; None if none fits."""
        return next((candidate for candidate in self.candidates if candidate.fits), None)


def plan_placement(
    request: PlacementRequest, sites: Sequence[Site], *, timeout_s: float, max_age_s: float = snapshot.MAX_AGE_S
) -> PlacementPlan:
    """Query all sites in parallel. A site without a valid answer is skipped and does not delay the others.

    Raises UsageError without sites.
    """
    if not sites:
        raise UsageError("no site to plan for", hint="write a site file: see site_configs/README.md")
    answers = query_all({site.name: partial(_estimate_site, request, site, max_age_s) for site in sites}, timeout_s)
    skipped = [snapshot.skipped_site(site, error) for site, error in answers.items() if isinstance(error, PitError)]
    complete = [answer for answer in answers.values() if isinstance(answer, SiteEstimate)]
    ranked = [c for answer in complete for c in answer.candidates]
    rates = {pool: rate for answer in complete for pool, rate in answer.rates.items()}
    histories = {name: answer.history for name, answer in answers.items() if isinstance(answer, SiteEstimate)}
    runs = estimate.estimate_runs(request.request, ranked, rates, histories)
    ranked = [reject_if_too_long(c, runs) for c in ranked]
    waits = {pool: start for answer in complete for pool, start in answer.waits.items()}
    missing = {c.pool: answer.missing for answer in complete for c in answer.candidates}
    estimates = {
        c.pool: CandidateEstimate(wait=waits[c.pool], run=runs[c.pool], transfer=missing[c.pool])
        for c in ranked
        if c.fits
    }
    return PlacementPlan(
        candidates=tuple(sorted(ranked, key=lambda c: _sort_key(c, estimates))),
        estimates=estimates,
        skipped=tuple(skipped),
        notes=tuple(note for answer in complete for note in answer.notes),
        is_complete=not any(answer.timed_out for answer in complete),
    )


class PlacementOptions(NamedTuple):
    """Options for the dispatcher. reason: without an option, what excludes each partition; else ""."""

    options: tuple[PlacementOption, ...]
    reason: str


def options_from_snapshots(
    request: PlacementRequest, snapshots: Sequence[tuple[Site, Snapshot]], *, timeout_s: float
) -> PlacementOptions:
    """Return the dispatcher's options for a request from snapshots, without querying the start.

    Makes one call to a remote site if the request has data. A site that does not answer which data it has is left out.
    """
    job, origin, text = request.request, request.origin, request.text
    all_candidates = [c for site, state in snapshots for c in candidates(job, site, state, origin, text)]
    rates = {
        pools.pool_name(site.name, part): rate
        for site, _ in snapshots
        for part, rate in throughput.measured_throughput(request.request, site).items()
    }
    runs = estimate.estimate_runs(
        request.request,
        all_candidates,
        rates,
        {site.name: accounting_history.peek_history(site) for site, _ in snapshots},
    )
    all_candidates = [reject_if_too_long(c, runs) for c in all_candidates]
    data = {c.site.name: c.plan.data for c in all_candidates if c.plan and c.fits}
    queries = {
        site.name: partial(data_transfer.missing_data, data[site.name], site, state)
        for site, state in snapshots
        if site.name in data
    }
    transfers = query_all(queries, timeout_s)
    received = {name: transfer for name, transfer in transfers.items() if isinstance(transfer, DataTransfer)}
    fit = [c for c in all_candidates if c.fits and c.site.name in received]
    options = estimate.placement_options(fit, runs, {c.pool: received[c.site.name] for c in fit})
    reasons = [f"{c.pool}: {c.reasons[0] if c.reasons else transfers.get(c.site.name)}" for c in all_candidates]
    return PlacementOptions(options, "" if options else "; ".join(reasons))


def require_feasible(requests: Iterable[Request], sites: Sequence[Site]) -> None:
    """Raise ConfigError for a request that is larger than all sites' nodes; not if a site has not answered in time."""
    snapshots, _ = snapshot.read_snapshots(sites, _QUERY_TIMEOUT_S, max_age_s=_NODES_AGE_S)
    by_site = {row.site: row for row in snapshots}
    if len(by_site) < len(sites):
        return
    for request in requests:
        if reasons := never_reasons(request, [(site, by_site[site.name]) for site in sites]):
            raise ConfigError(f'no site can run "{request.name}"', hint="; ".join(reasons))


def _sort_key(candidate: Candidate, estimates: Mapping[str, CandidateEstimate]) -> tuple[bool, float, float, bool, str]:
    """Earliest end first; on a tie the cheaper, then the site's default partition."""
    is_other_partition = candidate.partition != candidate.site.defaults.partition
    if candidate.fits:
        estimated = estimates[candidate.pool]
        return False, round(estimated.end_s), estimated.run.cost, is_other_partition, candidate.pool
    return True, 0.0, 0.0, is_other_partition, candidate.pool


def reject_if_too_long(candidate: Candidate, runs: Mapping[str, RunEstimate]) -> Candidate:
    """Return the candidate, with a reason against it if the run would exceed its time limit."""
    if not candidate.plan or runs[candidate.pool].run_s <= candidate.plan.job.time_s:
        return candidate
    took, limit = units.format_duration(runs[candidate.pool].run_s), units.format_duration(candidate.plan.job.time_s)
    reason = f"expected run time {took} by earlier runs (time limit {limit})"
    return msgspec.structs.replace(candidate, reasons=(*candidate.reasons, reason))


def _estimate_site(request: PlacementRequest, site: Site, max_age_s: float, timeout_s: float) -> SiteEstimate:
    """Query a site: first a snapshot, then everything else in parallel. Raises as `snapshot.read_snapshot`."""
    deadline = time.monotonic() + timeout_s
    state = snapshot.read_snapshot(site, timeout_s=timeout_s, max_age_s=max_age_s)
    every = candidates(request.request, site, state, request.origin, request.text)
    data = next((c.plan.data for c in every if c.plan), ())
    fit = {c.pool: c for c in every if c.fits}
    queries: dict[str, Callable[[float], float | AccountingHistory | DataTransfer | dict[str, Throughput]]] = {
        pool: partial(estimate.query_start, c, state) for pool, c in fit.items()
    }
    if fit:
        queries |= {
            " waits": lambda left_s: accounting_history.read_history(site, left_s * _HISTORY_SHARE),
            " data": lambda left_s: data_transfer.missing_data(data, site, state, left_s),
            " rates": lambda _left_s: throughput.measured_throughput(request.request, site),
        }
    # End before the deadline of all sites: one partition without an answer must not discard the others' answers.
    answers = query_all(queries, max(0.0, deadline - GRACE_S - time.monotonic()))
    history, missing, rates = (answers.get(f" {query}") for query in ("waits", "data", "rates"))
    notes = [f"{site.name}: {note}" for note in state.notes]
    notes += [f"{site.name}: no history of jobs: {history}"] if isinstance(history, PitError) else []
    if isinstance(missing, PitError):
        # The start depends on the time to copy missing data.
        every = [msgspec.structs.replace(c, reasons=(*c.reasons, f"its data: {missing}")) for c in every]
    waits = {}
    pool_states = {pool.pool: pool for pool in pools.pool_states(state, (), site)} if fit else {}
    past_waits: list[wait_log.WaitLine] = []
    try:
        past_waits = wait_log.read_waits(site.name) if fit else []
    except PitError as error:
        notes.append(f"{site.name}: the log of past waits is not readable: {error}")
    accounting = history if isinstance(history, AccountingHistory) else None
    for position, candidate in enumerate(every):
        slurm_s = answers.get(candidate.pool)
        if isinstance(slurm_s, PitError):
            every[position] = msgspec.structs.replace(candidate, reasons=(*candidate.reasons, slurm_s.message))
        elif isinstance(slurm_s, float):
            pool = pool_states.get(candidate.pool)
            waits[candidate.pool] = estimate.estimate_wait(candidate, slurm_s, state, pool, accounting, past_waits)
    return SiteEstimate(
        candidates=tuple(every),
        waits=waits,
        missing=missing if isinstance(missing, DataTransfer) else DataTransfer(),
        rates={pools.pool_name(site.name, part): rate for part, rate in rates.items()}
        if isinstance(rates, dict)
        else {},
        history=accounting,
        notes=tuple(notes),
        timed_out=isinstance(missing, TryLater) or any(isinstance(answers.get(pool), TryLater) for pool in fit),
    )
