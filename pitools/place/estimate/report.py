"""A survey as records and as a table for eyes: what was chosen, and why not each of the others."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from pitools.core import output
from pitools.core.record import Record
from pitools.core.units import format_duration, format_size
from pitools.place.clusters.snapshot import SkippedSite
from pitools.place.estimate.candidates import Candidate
from pitools.place.estimate.estimate import CandidateEstimate
from pitools.place.estimate.plan import PlacementPlan

_EQUAL_WITHIN_S = 60.0  # less than that is no reason


class RankedCandidate(Record, frozen=True, kw_only=True, tag="pit.ranked-candidate/1"):
    """One candidate. rank: 1 is the best, 0 does not fit. partition: "" for a site that was skipped.

    Times are seconds from now: start_*: until it starts, in 10, 50 and 90 % of cases; stage_s: copying stage_bytes,
    which goes on while it waits; run_s: the run, loss_s: what failures add to it on average; done_s: until the results
    are there. p_fail: of at least one failure. reason: it was chosen, or not.
    """

    rank: int
    site: str
    partition: str
    start_q10_s: float | None = None
    start_q50_s: float | None = None
    start_q90_s: float | None = None
    raw_start_s: float | None = None
    stage_s: float | None = None
    stage_bytes: int | None = None
    run_s: float | None = None
    loss_s: float | None = None
    done_s: float | None = None
    limit_s: int | None = None
    cost: float | None = None
    currency: str = ""
    p_fail: float | None = None
    units: int = 0
    able_nodes: int = 0
    nodes: int = 0
    unhealthy_nodes: int = 0
    reason: str = ""


def rank_candidates(plan: PlacementPlan, broken: Sequence[SkippedSite] = ()) -> list[RankedCandidate]:
    """Every candidate, best first, then those that do not fit, then the sites that were skipped.

    broken: sites of which there was nothing to ask.
    """
    best = plan.best
    rows = [_ranked_candidate(plan, rank, one, best) for rank, one in enumerate(plan.candidates, start=1)]
    skipped = (*plan.skipped, *broken)
    return rows + [
        RankedCandidate(rank=0, site=one.site, partition="", reason=f"skipped: {one.reason}") for one in skipped
    ]


def _ranked_candidate(survey: PlacementPlan, rank: int, one: Candidate, best: Candidate | None) -> RankedCandidate:
    row = RankedCandidate(
        rank=0,
        site=one.site.name,
        partition=one.partition,
        units=one.units,
        able_nodes=one.able_nodes,
        nodes=one.suited_nodes,
        unhealthy_nodes=one.unhealthy_nodes,
        reason="; ".join(one.reasons),
    )
    if not one.fits or best is None or one.plan is None:
        return row
    said = survey.estimates[one.pool]
    return msgspec.structs.replace(
        row,
        rank=rank,
        start_q10_s=_round_s(said.wait.q10_s),
        start_q50_s=_round_s(said.wait.q50_s),
        start_q90_s=_round_s(said.wait.q90_s),
        raw_start_s=_round_s(said.wait.slurm_s),
        stage_s=_round_s(said.transfer.wall_s),
        stage_bytes=said.transfer.bytes,
        run_s=_round_s(said.run.run_s),
        loss_s=_round_s(said.run.loss_s),
        done_s=_round_s(said.done_s),
        limit_s=one.plan.job.time_s,
        cost=round(said.run.cost, 2),
        currency=one.site.currency,
        p_fail=round(said.run.p_fail, 4),
        reason=basis_text(said) if one.pool == best.pool else reason_against(said, survey.estimates[best.pool], best),
    )


def _round_s(seconds: float) -> float:
    return float(round(seconds)) if math.isfinite(seconds) else seconds


def basis_text(estimate: CandidateEstimate) -> str:
    """On what the estimate of the best stands."""
    return f"its results are there first; the start is {estimate.wait.basis}, the run {estimate.run.basis}"


def reason_against(estimate: CandidateEstimate, best: CandidateEstimate, chosen: Candidate) -> str:
    """Why a candidate that fits is not the best: what takes it longer, the longest first, and what does not."""
    parts = [
        (estimate.wait.q50_s - best.wait.q50_s, "waits"),
        (
            max(0.0, estimate.transfer.wall_s - estimate.wait.q50_s) - max(0.0, best.transfer.wall_s - best.wait.q50_s),
            "copies",
        ),
        (estimate.run.run_s - best.run.run_s, "runs"),
        (estimate.run.loss_s - best.run.loss_s, "loses to failures"),
    ]
    later = estimate.done_s - best.done_s
    said_of = [
        f"{verb} {format_duration(abs(by_s))} {'longer' if by_s > 0 else 'less'}"
        for by_s, verb in sorted(parts, reverse=True)
        if abs(by_s) >= min(_EQUAL_WITHIN_S, max(1.0, later))
    ]
    if not said_of:
        dearer = estimate.run.cost - best.run.cost
        same = f"as good as {chosen.pool}"
        return f"{same}, and costs {dearer:.2f} more" if dearer >= 0.01 else same
    return f"done {format_duration(max(0.0, later))} after {chosen.pool}: {', '.join(said_of)}"


def plan_table(rows: Sequence[RankedCandidate], *, all_candidates: bool, width: int = 0) -> Iterator[str]:
    """Lines for eyes, durations as people say them; without `all_candidates`, those that fit, and no reasons.

    width: of the terminal, 0 for none: where that is too narrow, the reasons stand below the rest.
    """
    names = ["rank", "site", "partition", "start_10/50/90%", "stage", "run", "done_by", "cost", "p_fail", "reason"]
    cells = [_cells(row) for row in rows if row.rank or all_candidates]
    if not cells:
        return
    whole = list(output.format_table(names, cells))
    if all_candidates and (not width or max(map(len, whole)) <= width):
        yield from whole
        return
    fit = [row[:-1] for row in cells if row[0] != "-"]
    if fit:
        yield from output.fit_table(names[:-1], fit, width) if width else output.format_table(names[:-1], fit)
    for row in cells if all_candidates else ():
        yield from textwrap.wrap(f"{row[1]}/{row[2]}: {row[-1]}", width, subsequent_indent="    ")


def _cells(row: RankedCandidate) -> list[str]:
    why = output.format_cell(row.reason)
    if not row.rank:
        return ["-", row.site, row.partition or "-", "-", "-", "-", "-", "-", "-", why]
    start = " / ".join(_format_duration(one) for one in (row.start_q10_s, row.start_q50_s, row.start_q90_s))
    stage = f"{_format_duration(row.stage_s)} ({format_size(row.stage_bytes)})" if row.stage_bytes else "-"
    cost = f"{row.cost:.2f} {row.currency}" if row.cost else "-"
    risk = f"{row.p_fail:.1%}" if row.p_fail else "-"
    return [
        str(row.rank),
        row.site,
        row.partition,
        start,
        stage,
        _format_duration(row.run_s),
        _format_duration(row.done_s),
        cost,
        risk,
        why,
    ]


def _format_duration(seconds: float | None) -> str:
    """`now`, `40s`, `12m`, `3h05m`, `2d04h`."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return "now"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 48 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"
