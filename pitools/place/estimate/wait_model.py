"""How long a job will wait, as quantiles, learnt from what was foretold before and how long those jobs then waited.

What Slurm foretells is made of time limits and is mostly far too late, by a factor that depends on the site, the size
of the job and the hour. Here the factors of similar jobs, the recent ones above all, become a distribution:

- Jobs that still wait count too, as longer than they have waited so far (Kaplan and Meier's estimate): a history of
  those that started alone would be one of the lucky.
- Of few similar jobs the quantiles lie further out (the job itself counts as one that could be anywhere), and what
  failed to cover lately is widened, what covered too much is narrowed (adaptive conformal inference).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import exp, log, log2
from typing import TYPE_CHECKING, NamedTuple

from pitools.place.clusters.local_history import WaitLine, WaitPredicted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEVELS = (0.1, 0.5, 0.9)
MIN_WAITS = 20  # of fewer, nothing is said
_MAX_WAITS = 1000
_HALF_WEIGHT = 400  # this many starts later a wait weighs half
_OFFSET_S = 60.0  # a minute more or less is no difference
_STEP = 0.12
_MAX_CORRECTION = (
    (-1.2, -1.0, -0.6),
    (0.6, 1.0, 1.2),
)  # how far what is learnt may move each quantile, as a log of a factor
_MIN_WEIGHT = 1e-3  # what a job that is not at all similar weighs
_FORGET_AFTER_S = 14 * 86400.0  # of a job that has waited longer nobody noted the end


class Quantiles(NamedTuple):
    """Seconds that a job waits no longer than, in one, five and nine of ten cases."""

    q10: float
    q50: float
    q90: float


class WaitFeatures(NamedTuple):
    """What is known of a job when it is put into a queue. queued_ahead: units asked for before it ÷ units of the
    pool."""

    units: int
    limit_s: float
    queued_ahead: float = 0.0

    @classmethod
    def from_log(cls, logged: Mapping[str, float]) -> WaitFeatures:
        """Those that a log has kept."""
        return cls(int(logged.get("units", 1)), logged.get("limit_s", 3600.0), logged.get("ahead", 0.0))


class _PendingWait(NamedTuple):
    asked_s: float
    raw_s: float
    position: tuple[float, ...]
    predicted: Quantiles | None


class WaitModel:
    """What one pool has taught. Tell it what happens in order of time: `add_submission`, `add_start`, `remove`."""

    def __init__(self) -> None:
        self._open: dict[str, _PendingWait] = {}
        self._late: list[tuple[float, str]] = []  # when each open job outstays its q90
        self._at: list[tuple[float, ...]] = []
        self._factor: list[float] = []
        self._shift = [0.0, 0.0, 0.0]

    def add_submission(
        self, job: str, now_s: float, raw_s: float, features: WaitFeatures, predicted: Quantiles | None
    ) -> None:
        """A job was put into the queue. raw_s: the wait that Slurm foretold; predicted: what `quantiles` did."""
        self._open[job] = _PendingWait(now_s, raw_s, _position(raw_s, features), predicted)
        if predicted:
            heappush(self._late, (now_s + predicted.q90, job))

    def add_start(self, job: str, now_s: float) -> None:
        """It has started; unknown jobs are left alone."""
        self._record_overdue(now_s)
        wait = self._open.pop(job, None)
        if wait is None:
            return
        wait_s = max(0.0, now_s - wait.asked_s)
        self._at.append(wait.position)
        self._factor.append(_log_ratio(wait_s, wait.raw_s))
        if len(self._at) > 2 * _MAX_WAITS:
            del self._at[:_MAX_WAITS], self._factor[:_MAX_WAITS]
        if wait.predicted:
            self._adjust(0, LEVELS[0] - (wait_s < wait.predicted.q10))
            self._adjust(1, 0.3 * (LEVELS[1] - (wait_s <= wait.predicted.q50)))
            if wait_s <= wait.predicted.q90:
                self._adjust(2, LEVELS[2] - 1)

    def remove(self, job: str) -> None:
        """It was withdrawn before it started, and teaches nothing."""
        self._open.pop(job, None)

    def predict(self, now_s: float, raw_s: float, features: WaitFeatures) -> Quantiles | None:
        """The wait of a job that is put into the queue now; None as long as too little was seen."""
        import numpy as np

        if len(self._at) < MIN_WAITS:
            return None
        self._record_overdue(now_s)
        waiting = list(self._open.values())
        at = np.array(self._at[-_MAX_WAITS:] + [wait.position for wait in waiting])
        n_done = min(len(self._at), _MAX_WAITS)
        factor = np.array(
            self._factor[-_MAX_WAITS:] + [_log_ratio(now_s - wait.asked_s, wait.raw_s) for wait in waiting]
        )
        age = np.r_[np.arange(n_done)[::-1], np.zeros(len(waiting))]
        near = np.exp(-0.5 * ((at - np.array(_position(raw_s, features))) ** 2).sum(axis=1))
        weight = (near + _MIN_WEIGHT) * 0.5 ** (age / _HALF_WEIGHT)
        found = _survival(factor, weight, np.arange(len(at)) >= n_done)
        shifted = np.sort(found + np.array(self._shift)).clip(factor.min(), max(0.0, factor.max()))
        low, middle, high = (max(0.0, exp(x) * (raw_s + _OFFSET_S) - _OFFSET_S) for x in shifted)
        return Quantiles(low, middle, high)

    def _record_overdue(self, now_s: float) -> None:
        """Whoever waits longer than nine in ten should is known to be late before it starts."""
        while self._late and self._late[0][0] < now_s:
            _, job = heappop(self._late)
            if job in self._open:
                self._adjust(2, LEVELS[2])

    def _adjust(self, which: int, step: float) -> None:
        moved = self._shift[which] + _STEP * step
        self._shift[which] = min(max(moved, _MAX_CORRECTION[0][which]), _MAX_CORRECTION[1][which])


def calibrate(raw_s: float, features: Mapping[str, float], noted: Sequence[WaitLine], now_s: float) -> Quantiles | None:
    """The wait of a job that is put into a pool's queue now, from what was noted of that pool, oldest first."""
    waits = WaitModel()
    recent = noted[-4 * _MAX_WAITS :]
    ended = {line.job for line in recent if not isinstance(line, WaitPredicted)}
    for line in recent:
        if isinstance(line, WaitPredicted):
            if line.job not in ended and line.t_s < now_s - _FORGET_AFTER_S:
                continue
            said = Quantiles(*line.quantiles) if line.quantiles else None
            waits.add_submission(line.job, line.t_s, line.slurm_s, WaitFeatures.from_log(line.features), said)
        elif line.started:
            waits.add_start(line.job, line.t_s)
        else:
            waits.remove(line.job)
    return waits.predict(now_s, raw_s, WaitFeatures.from_log(features))


def combine(learnt: Quantiles, others: Sequence[float]) -> Quantiles:
    """Our quantiles and those of how long others waited lately, made one: half-way between both, as factors.

    Neither knows what the other does; together they lose a fifth less than the better one (perf/place/bench_wait.py).
    The lower quantile stays where it is, unless others waited less: whoever did not wait is not among the others.
    """
    low, middle, high = (
        exp((log(mine + _OFFSET_S) + log(theirs + _OFFSET_S)) / 2) - _OFFSET_S
        for mine, theirs in zip(learnt, others, strict=True)
    )
    return Quantiles(max(0.0, min(low, learnt.q10)), middle, high)


def _position(raw_s: float, features: WaitFeatures) -> tuple[float, ...]:
    """Where a job lies among others: two are similar when they are less than one apart."""
    return (
        log(max(0.0, raw_s) + _OFFSET_S) / 0.7,
        log2(max(1, features.units)) / 1.5,
        log(max(1.0, features.limit_s)) / 1.5,
        log(max(0.0, features.queued_ahead) + 0.1) / 1.5,
    )


def _log_ratio(wait_s: float, raw_s: float) -> float:
    # A clock that was set back makes a wait less than none.
    return log((max(0.0, wait_s) + _OFFSET_S) / (max(0.0, raw_s) + _OFFSET_S))


def _survival(
    factor: NDArray[np.float64], weight: NDArray[np.float64], waits: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """LEVELS of the weighted factors, where those of jobs that still wait are lower bounds."""
    import numpy as np

    order = np.argsort(factor, kind="stable")
    factor, weight, waits = factor[order], weight[order], waits[order]
    at_risk = np.cumsum(weight[::-1])[::-1]
    share = 1 - np.cumprod(1 - np.where(waits, 0, weight / at_risk))
    alike = 0.35 * weight.sum()
    outward = [max(0.0, 0.1 - 0.9 / alike), 0.5, min(1.0, 0.9 * (alike + 1) / alike)]
    return factor[np.minimum(np.searchsorted(share, outward), len(factor) - 1)]
