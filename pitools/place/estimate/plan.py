"""Every candidate of a request at several sites, each with its estimate: all sites at once, one deadline for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from pitools.core import units
from pitools.core.errors import ConfigError, PitError, TryLater, UsageError
from pitools.launch.request import Request
from pitools.place.clusters import accounting_history, local_history, pools, snapshot
from pitools.place.clusters.accounting_history import AccountingHistory
from pitools.place.clusters.parallel import GRACE_S, query_all
from pitools.place.clusters.snapshot import SkippedSite, Snapshot
from pitools.place.estimate import data_transfer, estimate, throughput
from pitools.place.estimate.candidates import Candidate, candidates, never
from pitools.place.estimate.data_transfer import DataTransfer
from pitools.place.estimate.estimate import CandidateEstimate, RunEstimate, WaitEstimate
from pitools.place.estimate.throughput import Throughput
from pitools.place.types import PlacementOption
from pitools.site.schema import Site

_ASK_S, _NODES_AGE_S = 5.0, 3600.0  # nodes get no CPUs while one looks
_SNAPSHOT_SHARE = 0.5  # of the time that is left, for what can be done without


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed. origin: its file, for errors; text: what stands in it."""

    request: Request
    origin: str = "request"
    text: str = ""


class SiteEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one site said of a request. starts: pool → when; rates: pool → how fast it ran there before.

    past: what became of jobs there, None where accounting does not tell. timed_out: some of it did not come in time.
    """

    candidates: tuple[Candidate, ...]
    starts: dict[str, WaitEstimate]
    missing: DataTransfer
    rates: dict[str, Throughput]
    past: AccountingHistory | None
    notes: tuple[str, ...]
    timed_out: bool


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. candidates: those that fit first, best first; estimates: pool → of those that fit.

    is_complete: every site has answered every question, so that to ask again changes nothing.
    """

    candidates: tuple[Candidate, ...]
    estimates: dict[str, CandidateEstimate]
    skipped: tuple[SkippedSite, ...]
    notes: tuple[str, ...]
    is_complete: bool = True

    @property
    def best(self) -> Candidate | None:
        """The candidate whose results are there first; None where none fits."""
        return next((one for one in self.candidates if one.fits), None)


def plan_placement(
    request: PlacementRequest, sites: Sequence[Site], *, timeout_s: float, max_age_s: float = snapshot.MAX_AGE_S
) -> PlacementPlan:
    """Ask every site at once. A site that is silent, or makes no sense, is skipped and delays nobody.

    Raises UsageError for no sites at all.
    """
    if not sites:
        raise UsageError("there is no site to ask", hint="write a site file: see site_configs/README.md")
    answers = query_all({site.name: partial(_estimate_site, request, site, max_age_s) for site in sites}, timeout_s)
    skipped = [snapshot.skipped_site(site, error) for site, error in answers.items() if isinstance(error, PitError)]
    known = [one for one in answers.values() if isinstance(one, SiteEstimate)]
    found = [one for at in known for one in at.candidates]
    rates = {pool: rate for at in known for pool, rate in at.rates.items()}
    past = {name: at.past for name, at in answers.items() if isinstance(at, SiteEstimate)}
    works = estimate.estimate_runs(request.request, found, rates, past)
    found = [reject_if_too_long(one, works) for one in found]
    starts = {pool: start for at in known for pool, start in at.starts.items()}
    missing = {one.pool: at.missing for at in known for one in at.candidates}
    estimates = {
        one.pool: CandidateEstimate(wait=starts[one.pool], run=works[one.pool], transfer=missing[one.pool])
        for one in found
        if one.fits
    }
    return PlacementPlan(
        candidates=tuple(sorted(found, key=lambda one: _sort_key(one, estimates))),
        estimates=estimates,
        skipped=tuple(skipped),
        notes=tuple(note for at in known for note in at.notes),
        is_complete=not skipped and not any(at.timed_out for at in known),
    )


class Offered(NamedTuple):
    """Where a dispatcher may put a request. why: what speaks against each partition where there is none, else ""."""

    options: tuple[PlacementOption, ...]
    reason: str


def options_from_snapshots(
    request: PlacementRequest, snapshots: Sequence[tuple[Site, Snapshot]], *, timeout_s: float
) -> Offered:
    """Where a dispatcher may put the request, given what the sites said: no start is asked for.

    At most one call a site, and only where it is far and the request has data; a site that does not tell which data
    it has is left out.
    """
    found = [
        one for site, said in snapshots for one in candidates(request.request, site, said, request.origin, request.text)
    ]
    rates = {
        pools.pool_name(site.name, part): rate
        for site, _ in snapshots
        for part, rate in throughput.measured_throughput(request.request, site).items()
    }
    works = estimate.estimate_runs(
        request.request, found, rates, {site.name: accounting_history.peek_history(site) for site, _ in snapshots}
    )
    found = [reject_if_too_long(one, works) for one in found]
    data = {one.site.name: one.plan.data for one in found if one.plan and one.fits}
    questions = {
        site.name: partial(data_transfer.missing_data, data[site.name], site, said)
        for site, said in snapshots
        if site.name in data
    }
    missing = query_all(questions, timeout_s)
    known = {name: one for name, one in missing.items() if isinstance(one, DataTransfer)}
    fit = [one for one in found if one.fits and one.site.name in known]
    options = estimate.placement_options(fit, works, {one.pool: known[one.site.name] for one in fit})
    against = [f"{one.pool}: {one.reasons[0] if one.reasons else missing.get(one.site.name)}" for one in found]
    return Offered(options, "" if options else "; ".join(against))


def refuse_what_never_fits(requests: Iterable[Request], sites: Sequence[Site]) -> None:
    """Raise ConfigError for a request that no site's nodes are made for; one that does not answer soon may take it."""
    seen, _ = snapshot.read_snapshots(sites, _ASK_S, max_age_s=_NODES_AGE_S)
    said = {one.site: one for one in seen}
    if len(said) < len(sites):
        return
    for request in requests:
        if why := never(request, [(site, said[site.name]) for site in sites]):
            raise ConfigError(f'no site could take "{request.name}"', hint="; ".join(why))


def _sort_key(one: Candidate, estimates: Mapping[str, CandidateEstimate]) -> tuple[bool, float, float, bool, str]:
    """The first results first; of equals the cheaper, then the site's default."""
    other = one.partition != one.site.defaults.partition
    if one.fits:
        return False, round(estimates[one.pool].done_s), estimates[one.pool].run.cost, other, one.pool
    return True, 0.0, 0.0, other, one.pool


def reject_if_too_long(candidate: Candidate, works: Mapping[str, RunEstimate]) -> Candidate:
    """The candidate; with a reason against it where the run would outlast its time limit."""
    if not candidate.plan or works[candidate.pool].run_s <= candidate.plan.job.time_s:
        return candidate
    took, limit = units.format_duration(works[candidate.pool].run_s), units.format_duration(candidate.plan.job.time_s)
    reason = f"it would take {took}, as it ran before, and its time limit is {limit}"
    return msgspec.structs.replace(candidate, reasons=(*candidate.reasons, reason))


def _estimate_site(wanted: PlacementRequest, site: Site, max_age_s: float, timeout_s: float) -> SiteEstimate:
    """What the site says: a snapshot, then everything else at once. Raises what the snapshot does."""
    deadline = time.monotonic() + timeout_s
    seen = snapshot.read_snapshot(site, timeout_s=timeout_s, max_age_s=max_age_s)
    found = candidates(wanted.request, site, seen, wanted.origin, wanted.text)
    data = next((one.plan.data for one in found if one.plan), ())
    fit = {one.pool: one for one in found if one.fits}
    questions: dict[str, Callable[[float], float | AccountingHistory | DataTransfer | dict[str, Throughput]]] = {
        pool: partial(estimate.query_start, one, seen) for pool, one in fit.items()
    }
    if fit:
        questions |= {
            " waits": lambda left_s: accounting_history.read_history(site, left_s * _SNAPSHOT_SHARE),
            " data": lambda left_s: data_transfer.missing_data(data, site, seen, left_s),
            " rates": lambda _left_s: throughput.measured_throughput(wanted.request, site),
        }
    # Before the deadline of all sites: of two partitions, one that is silent must not take the other's answer with it.
    said = query_all(questions, max(0.0, deadline - GRACE_S - time.monotonic()))
    known, missing, rates = (said.get(f" {what}") for what in ("waits", "data", "rates"))
    notes = [f"{site.name}: {note}" for note in seen.notes]
    notes += [f"{site.name}: no history of jobs: {known}"] if isinstance(known, PitError) else []
    if isinstance(missing, PitError):
        # Without it nobody can say when the job could start.
        found = [msgspec.structs.replace(one, reasons=(*one.reasons, f"its data: {missing}")) for one in found]
    starts = {}
    full = {pool.pool: pool for pool in pools.pool_states(seen, (), site)} if fit else {}
    noted: list[local_history.WaitLine] = []
    try:
        noted = local_history.read_waits(site.name) if fit else []
    except PitError as error:
        notes.append(f"{site.name}: planned without what was learnt of its waits: {error}")
    past = known if isinstance(known, AccountingHistory) else None
    for position, one in enumerate(found):
        raw_s = said.get(one.pool)
        if isinstance(raw_s, PitError):
            found[position] = msgspec.structs.replace(one, reasons=(*one.reasons, raw_s.message))
        elif isinstance(raw_s, float):
            starts[one.pool] = estimate.estimate_wait(one, raw_s, seen, full.get(one.pool), past, noted)
    return SiteEstimate(
        candidates=tuple(found),
        starts=starts,
        missing=missing if isinstance(missing, DataTransfer) else DataTransfer(),
        rates={pools.pool_name(site.name, part): rate for part, rate in rates.items()}
        if isinstance(rates, dict)
        else {},
        past=past,
        notes=tuple(notes),
        timed_out=isinstance(missing, TryLater) or any(isinstance(said.get(pool), TryLater) for pool in fit),
    )
