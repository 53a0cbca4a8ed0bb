"""Predict the wait of a job as quantiles, from past predictions and the actual waits of those jobs.

Slurm's estimate assumes full time limits and is mostly far too late, by a factor that depends on the site, the job's
size and the hour. The model is the distribution of that factor over similar jobs, of which recent ones weigh more.

Pending jobs count as censored (Kaplan and Meier): each has waited at least this long. Started jobs alone would bias the
quantiles to short waits. With few similar jobs the quantiles are wider: the job itself counts as one more, of any wait.
Quantiles that failed to cover recent waits are widened, and those that covered too many are narrowed (adaptive
conformal inference).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import exp, log, log2
from typing import TYPE_CHECKING, NamedTuple

from pitools.place.clusters.wait_log import WaitLine, WaitPredicted
from pitools.place.types import PoolState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEVELS = (0.1, 0.5, 0.9)
MIN_WAITS = 20  # no prediction from fewer
_MAX_WAITS = 1000
_HALF_WEIGHT = 400  # a wait's weight halves after so many later starts
_OFFSET_S = 60.0  # added to waits before taking logs: differences below a minute do not matter
_STEP = 0.12
_MAX_CORRECTION = (
    (-1.2, -1.0, -0.6),
    (0.6, 1.0, 1.2),
)  # bounds of the correction of each quantile, as the log of a factor
_MIN_WEIGHT = 1e-3  # weight of a dissimilar job
_FORGET_AFTER_S = 14 * 86400.0  # the end of a job that seems to wait longer was never recorded


class Quantiles(NamedTuple):
    """10th, 50th and 90th percentile of the wait, in seconds."""

    q10: float
    q50: float
    q90: float


class WaitFeatures(NamedTuple):
    """Features of a job at submission. queued_ahead: units requested by earlier pending jobs ÷ units of the pool."""

    units: int
    limit_s: float
    queued_ahead: float = 0.0

    @classmethod
    def from_log(cls, logged: Mapping[str, float]) -> WaitFeatures:
        """Return the features from a log record."""
        return cls(int(logged.get("units", 1)), logged.get("limit_s", 3600.0), logged.get("queued_ahead", 0.0))


def log_features(pool: PoolState | None, units: int, limit_s: float, *, own_units: int = 0) -> dict[str, float]:
    """Return the features of a wait in a pool, for the log and for `calibrate`.

    own_units: units of earlier tickets of the queue, where the pool does not count them as others'.
    """
    queued_ahead = (pool.others_pending + own_units) / pool.units if pool and pool.units else 0.0
    return {"units": float(units), "limit_s": float(limit_s), "queued_ahead": queued_ahead}


class _PendingWait(NamedTuple):
    submitted_s: float
    estimate_s: float
    vector: tuple[float, ...]
    predicted: Quantiles | None


class WaitModel:
    """The wait model of one pool. Call `add_submission`, `add_start` and `remove` in order of time."""

    def __init__(self) -> None:
        self._pending: dict[str, _PendingWait] = {}
        self._overdue_times: list[tuple[float, str]] = []  # (time at which a pending job exceeds its q90, job)
        self._vectors: list[tuple[float, ...]] = []
        self._log_ratios: list[float] = []
        self._corrections = [0.0, 0.0, 0.0]

    def add_submission(
        self, job: str, now_s: float, estimate_s: float, features: WaitFeatures, predicted: Quantiles | None
    ) -> None:
        """Add a submitted job. estimate_s: Slurm's estimate of the wait. predicted: the result of `predict`."""
        self._pending[job] = _PendingWait(now_s, estimate_s, _feature_vector(estimate_s, features), predicted)
        if predicted:
            heappush(self._overdue_times, (now_s + predicted.q90, job))

    def add_start(self, job: str, now_s: float) -> None:
        """Add the start of a job; an unknown job is ignored."""
        self._record_overdue(now_s)
        wait = self._pending.pop(job, None)
        if wait is None:
            return
        wait_s = max(0.0, now_s - wait.submitted_s)
        self._vectors.append(wait.vector)
        self._log_ratios.append(_log_ratio(wait_s, wait.estimate_s))
        if len(self._vectors) > 2 * _MAX_WAITS:
            del self._vectors[:_MAX_WAITS], self._log_ratios[:_MAX_WAITS]
        if wait.predicted:
            self._correct(0, LEVELS[0] - (wait_s < wait.predicted.q10))
            self._correct(1, 0.3 * (LEVELS[1] - (wait_s <= wait.predicted.q50)))
            if wait_s <= wait.predicted.q90:
                self._correct(2, LEVELS[2] - 1)

    def remove(self, job: str) -> None:
        """Remove a job that was withdrawn before it started."""
        self._pending.pop(job, None)

    def predict(self, now_s: float, estimate_s: float, features: WaitFeatures) -> Quantiles | None:
        """Return the predicted wait of a job submitted now; None with too few waits."""
        import numpy as np

        if len(self._vectors) < MIN_WAITS:
            return None
        self._record_overdue(now_s)
        pending = list(self._pending.values())
        vectors = np.array(self._vectors[-_MAX_WAITS:] + [wait.vector for wait in pending])
        n_done = min(len(self._vectors), _MAX_WAITS)
        log_ratios = np.array(
            self._log_ratios[-_MAX_WAITS:] + [_log_ratio(now_s - wait.submitted_s, wait.estimate_s) for wait in pending]
        )
        age = np.r_[np.arange(n_done)[::-1], np.zeros(len(pending))]
        similarity = np.exp(-0.5 * ((vectors - np.array(_feature_vector(estimate_s, features))) ** 2).sum(axis=1))
        weights = (similarity + _MIN_WEIGHT) * 0.5 ** (age / _HALF_WEIGHT)
        quantiles = _censored_quantiles(log_ratios, weights, np.arange(len(vectors)) >= n_done)
        corrected = np.sort(quantiles + np.array(self._corrections)).clip(log_ratios.min(), max(0.0, log_ratios.max()))
        low, middle, high = (max(0.0, exp(log_ratio) * (estimate_s + _OFFSET_S) - _OFFSET_S) for log_ratio in corrected)
        return Quantiles(low, middle, high)

    def _record_overdue(self, now_s: float) -> None:
        """Correct the 90th percentile for pending jobs that have already waited longer."""
        while self._overdue_times and self._overdue_times[0][0] < now_s:
            _, job = heappop(self._overdue_times)
            if job in self._pending:
                self._correct(2, LEVELS[2])

    def _correct(self, level: int, step: float) -> None:
        correction = self._corrections[level] + _STEP * step
        self._corrections[level] = min(max(correction, _MAX_CORRECTION[0][level]), _MAX_CORRECTION[1][level])


def calibrate(
    estimate_s: float, features: Mapping[str, float], log: Sequence[WaitLine], now_s: float
) -> Quantiles | None:
    """Predict the wait of a job submitted to a pool now. log: the pool's records, oldest first."""
    model = WaitModel()
    recent = log[-4 * _MAX_WAITS :]
    ended = {line.ticket for line in recent if not isinstance(line, WaitPredicted)}
    for line in recent:
        if isinstance(line, WaitPredicted):
            if line.ticket not in ended and line.t_s < now_s - _FORGET_AFTER_S:
                continue
            quantiles = Quantiles(*line.quantiles) if line.quantiles else None
            model.add_submission(
                line.ticket, line.t_s, line.estimate_s, WaitFeatures.from_log(line.features), quantiles
            )
        elif line.started:
            model.add_start(line.ticket, line.t_s)
        else:
            model.remove(line.ticket)
    return model.predict(now_s, estimate_s, WaitFeatures.from_log(features))


def combine(predicted: Quantiles, observed: Sequence[float]) -> Quantiles:
    """Combine predicted quantiles with observed waits of other jobs: the geometric mean of each pair.

    Each has information that the other lacks: combined, they lose a fifth less than the better of the two
    (perf/place/bench_wait.py). The lower quantile stays, unless others waited less: jobs that did not wait are not in
    `observed`.
    """
    low, middle, high = (
        exp((log(ours + _OFFSET_S) + log(others + _OFFSET_S)) / 2) - _OFFSET_S
        for ours, others in zip(predicted, observed, strict=True)
    )
    return Quantiles(max(0.0, min(low, predicted.q10)), middle, high)


def _feature_vector(estimate_s: float, features: WaitFeatures) -> tuple[float, ...]:
    """Return a job's features on scales where a distance below 1 means similar."""
    return (
        log(max(0.0, estimate_s) + _OFFSET_S) / 0.7,
        log2(max(1, features.units)) / 1.5,
        log(max(1.0, features.limit_s)) / 1.5,
        log(max(0.0, features.queued_ahead) + 0.1) / 1.5,
    )


def _log_ratio(wait_s: float, estimate_s: float) -> float:
    # After the clock was set back, a wait may be negative.
    return log((max(0.0, wait_s) + _OFFSET_S) / (max(0.0, estimate_s) + _OFFSET_S))


def _censored_quantiles(
    log_ratios: NDArray[np.float64], weights: NDArray[np.float64], is_censored: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the quantiles LEVELS of weighted log ratios, of which censored ones are lower bounds (Kaplan-Meier)."""
    import numpy as np

    order = np.argsort(log_ratios, kind="stable")
    log_ratios, weights, is_censored = log_ratios[order], weights[order], is_censored[order]
    at_risk = np.cumsum(weights[::-1])[::-1]
    share = 1 - np.cumprod(1 - np.where(is_censored, 0, weights / at_risk))
    similar_weight = 0.35 * weights.sum()
    levels = [max(0.0, 0.1 - 0.9 / similar_weight), 0.5, min(1.0, 0.9 * (similar_weight + 1) / similar_weight)]
    return log_ratios[np.minimum(np.searchsorted(share, levels), len(log_ratios) - 1)]
