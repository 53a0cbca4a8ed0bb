"""Multi-window, multi-burn-rate alerts: the windows, and their limits for a period and an objective.

The burn rate is the bad share over the share that may be bad: at 1 the error budget lasts for exactly its period. An
alert's long window has then spent a share of the budget; its short one ends the alert soon after the fault does. The
method is of "The Site Reliability Workbook", chapter 5 (Google, 2018); its factors 14.4, 6, 3 and 1 are for 30 days.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Severity = Literal["page", "ticket"]


class Pair(NamedTuple):
    """Two windows, in seconds, that alert together. spent: the share of the budget that the long one spends."""

    severity: Severity
    short_s: int
    long_s: int
    spent: float


PAIRS = (
    Pair("page", 600, 3600, 0.02),  # in 5 minutes, as there, the exporter may not have looked at the runs
    Pair("page", 1800, 6 * 3600, 0.05),
    Pair("ticket", 2 * 3600, 86400, 0.1),
    Pair("ticket", 6 * 3600, 3 * 86400, 0.1),
)
WINDOWS = tuple(sorted({window for pair in PAIRS for window in (pair.short_s, pair.long_s)}))


def burn_factor(pair: Pair, period_s: float) -> float:
    """Return the burn rate from which a pair alerts: at least 1, because a slower burn keeps the objective."""
    return max(1.0, pair.spent * period_s / pair.long_s)


def used_pairs(period_s: float, budget: float) -> list[tuple[Pair, float]]:
    """Return the pairs that can alert, each with the bad share from which it does, most urgent first.

    Left out is a pair whose limit not even all being bad would reach: each, for an objective near 0.
    """
    limits = [(pair, round(burn_factor(pair, period_s) * budget, 9)) for pair in PAIRS]
    return [(pair, limit) for pair, limit in limits if limit < 1]
