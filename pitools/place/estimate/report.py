"""A placement plan as records and as a table: the chosen candidate, and the reasons against each other one."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from pitools.core import output
from pitools.core.errors import TryLater
from pitools.core.record import Record
from pitools.core.units import format_duration, format_size
from pitools.place.clusters.snapshot import SkippedSite
from pitools.place.estimate.candidates import Candidate
from pitools.place.estimate.estimate import CandidateEstimate
from pitools.place.estimate.plan import PlacementPlan

_MIN_DIFFERENCE_S = 60.0  # smaller differences are not reported


class RankedCandidate(Record, frozen=True, kw_only=True, tag="pit.ranked-candidate/1"):
    """One candidate. rank: 1 is the best, 0 does not fit. partition: "" for a site that was skipped.

    Times are seconds from now. start_*: percentiles of the start. slurm_start_s: Slurm's estimate. copy_s: copying
    copy_bytes, before the submission. run_s: the run. loss_s: expected loss by failures. end_s: the expected end.
    p_fail: of at least one failure. reason: why it was chosen or not.
    """

    rank: int
    site: str
    partition: str
    start_q10_s: float | None = None
    start_q50_s: float | None = None
    start_q90_s: float | None = None
    slurm_start_s: float | None = None
    copy_s: float | None = None
    copy_bytes: int | None = None
    run_s: float | None = None
    loss_s: float | None = None
    end_s: float | None = None
    limit_s: int | None = None
    cost: float | None = None
    currency: str = ""
    p_fail: float | None = None
    units: int = 0
    able_nodes: int = 0
    nodes: int = 0
    unhealthy_nodes: int = 0
    reason: str = ""


def unfit_exit_code(placement: PlacementPlan, broken: Sequence[SkippedSite]) -> int:
    """Return the exit code of a plan without a fit: 75 if a site did not answer, 1 if one did, else the errors'."""
    codes = {site.exit_code for site in (*broken, *placement.skipped)}
    if TryLater.exit_code in codes or not placement.is_complete:
        return TryLater.exit_code
    return 1 if placement.candidates else max(codes, default=1)


def rank_candidates(plan: PlacementPlan, unloadable: Sequence[SkippedSite] = ()) -> list[RankedCandidate]:
    """Return every candidate, best first, then those that do not fit, then the sites that were skipped.

    unloadable: sites whose files could not be loaded.
    """
    best = plan.best
    rows = [_ranked_candidate(plan, rank, candidate, best) for rank, candidate in enumerate(plan.candidates, start=1)]
    skipped = (*plan.skipped, *unloadable)
    return rows + [
        RankedCandidate(rank=0, site=site.site, partition="", reason=f"skipped: {site.reason}") for site in skipped
    ]


def _ranked_candidate(plan: PlacementPlan, rank: int, candidate: Candidate, best: Candidate | None) -> RankedCandidate:
    row = RankedCandidate(
        rank=0,
        site=candidate.site.name,
        partition=candidate.partition,
        units=candidate.units,
        able_nodes=candidate.able_nodes,
        nodes=candidate.total_nodes,
        unhealthy_nodes=candidate.unhealthy_nodes,
        reason="; ".join(candidate.reasons),
    )
    if not candidate.fits or best is None or candidate.plan is None:
        return row
    estimate = plan.estimates[candidate.pool]
    return msgspec.structs.replace(
        row,
        rank=rank,
        start_q10_s=_round_s(estimate.wait.q10_s),
        start_q50_s=_round_s(estimate.wait.q50_s),
        start_q90_s=_round_s(estimate.wait.q90_s),
        slurm_start_s=_round_s(estimate.wait.slurm_s),
        copy_s=_round_s(estimate.transfer.wall_s),
        copy_bytes=estimate.transfer.bytes,
        run_s=_round_s(estimate.run.run_s),
        loss_s=_round_s(estimate.run.loss_s),
        end_s=_round_s(estimate.end_s),
        limit_s=candidate.plan.job.time_s,
        cost=round(estimate.run.cost, 2),
        currency=candidate.site.currency,
        p_fail=round(estimate.run.p_fail, 4),
        reason=basis_text(estimate)
        if candidate.pool == best.pool
        else reason_against(estimate, plan.estimates[best.pool], best),
    )


def _round_s(seconds: float) -> float:
    return float(round(seconds)) if math.isfinite(seconds) else seconds


def basis_text(estimate: CandidateEstimate) -> str:
    """Return the basis of the best candidate's estimate, as text."""
    return f"earliest end; start: {estimate.wait.basis}, run: {estimate.run.basis}"


def reason_against(estimate: CandidateEstimate, best: CandidateEstimate, chosen: Candidate) -> str:
    """Return why a candidate that fits is not the best: its differences in time, longest first."""
    parts = [
        (estimate.wait.q50_s - best.wait.q50_s, "waits"),
        (
            max(0.0, estimate.transfer.wall_s - estimate.wait.q50_s) - max(0.0, best.transfer.wall_s - best.wait.q50_s),
            "copies",
        ),
        (estimate.run.run_s - best.run.run_s, "runs"),
        (estimate.run.loss_s - best.run.loss_s, "loses to failures"),
    ]
    later_s = estimate.end_s - best.end_s
    differences = [
        f"{verb} {format_duration(abs(by_s))} {'longer' if by_s > 0 else 'less'}"
        for by_s, verb in sorted(parts, reverse=True)
        if abs(by_s) >= min(_MIN_DIFFERENCE_S, max(1.0, later_s))
    ]
    if not differences:
        dearer = estimate.run.cost - best.run.cost
        same = f"as good as {chosen.pool}"
        return f"{same}, but costs {dearer:.2f} more" if dearer >= 0.01 else same
    return f"ends {format_duration(max(0.0, later_s))} after {chosen.pool}: {', '.join(differences)}"


def plan_table(rows: Sequence[RankedCandidate], *, all_candidates: bool, width: int = 0) -> Iterator[str]:
    """Yield the lines of a table; without `all_candidates`, only those that fit, and no reasons.

    width: of the terminal, 0 for none. If the table is wider, the reasons follow below.
    """
    names = ["rank", "site", "partition", "start_10/50/90%", "copy", "run", "end", "cost", "p_fail", "reason"]
    cells = [_cells(row) for row in rows if row.rank or all_candidates]
    if not cells:
        return
    full_table = list(output.format_table(names, cells))
    if all_candidates and (not width or max(map(len, full_table)) <= width):
        yield from full_table
        return
    fit = [row[:-1] for row in cells if row[0] != "-"]
    if fit:
        yield from output.fit_table(names[:-1], fit, width) if width else output.format_table(names[:-1], fit)
    for row in cells if all_candidates else ():
        yield from textwrap.wrap(f"{row[1]}/{row[2]}: {row[-1]}", width, subsequent_indent="    ")


def _cells(row: RankedCandidate) -> list[str]:
    reason = output.format_cell(row.reason)
    if not row.rank:
        return ["-", row.site, row.partition or "-", "-", "-", "-", "-", "-", "-", reason]
    start = " / ".join(_format_duration(quantile) for quantile in (row.start_q10_s, row.start_q50_s, row.start_q90_s))
    copy = f"{_format_duration(row.copy_s)} ({format_size(row.copy_bytes)})" if row.copy_bytes else "-"
    cost = f"{row.cost:.2f} {row.currency}" if row.cost else "-"
    risk = f"{row.p_fail:.1%}" if row.p_fail else "-"
    return [
        str(row.rank),
        row.site,
        row.partition,
        start,
        copy,
        _format_duration(row.run_s),
        _format_duration(row.end_s),
        cost,
        risk,
        reason,
    ]


def _format_duration(seconds: float | None) -> str:
    """Format a duration: `now`, `40s`, `12m`, `3h05m`, `2d04h`."""
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
