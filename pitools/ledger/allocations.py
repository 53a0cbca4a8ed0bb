"""Find the allocations of a run: in Slurm's accounting, or else by its attempts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pitools.core.timestamps import rfc3339_to_unix
from pitools.ledger.evidence import Attempt
from pitools.slurm.fields import count_gpus
from pitools.slurm.records import AccountingRow

_CLOCKS_S = 2.0  # that the clocks of a node and of slurmctld may differ by
_SLURM_ROUNDS_S = 1.0
_HOUR_S = 3600.0
Repeated = tuple[Attempt, int | None]  # an attempt, and the step at which a later one began again, None without one


class Allocation(NamedTuple):
    """Resources that a job held. begin, end: Unix time, s. resources: their number. is_open: it has not ended.

    suspended_s: for how long it was suspended in between, which Slurm does not count.
    """

    begin: float
    end: float
    resources: int
    attempts: tuple[Repeated, ...] = ()
    is_open: bool = False
    suspended_s: float = 0.0

    @property
    def length_s(self) -> float:
        """For how long the job had its resources, s."""
        return self.end - self.begin - self.suspended_s


def with_repeats(attempts: Sequence[Attempt]) -> list[Repeated]:
    """Return each attempt with the lowest step from which a later one began; tasks of an array are apart.

    An attempt that made no step tells that only if none after it did.
    """
    pairs: list[Repeated] = []
    lowest: dict[str, int] = {}
    for attempt in reversed(attempts):
        pairs.append((attempt, lowest.get(attempt.task)))
        if attempt.first_step is not None and (attempt.steps or attempt.task not in lowest):
            lowest[attempt.task] = min(attempt.first_step, lowest.get(attempt.task, attempt.first_step))
    return pairs[::-1]


def in_order(rows: Iterable[AccountingRow]) -> list[AccountingRow]:
    """Return rows by their start; those that never started come last."""
    return sorted(rows, key=lambda row: (not row.start, row.start, row.submit))


def is_of(row: AccountingRow, attempt: Attempt) -> bool:
    """Return whether a row is of an attempt's job."""
    return attempt.job_id in (row.job_id, row.raw_id)


def from_rows(
    rows: Sequence[AccountingRow], pairs: Sequence[Repeated], gpus_per_node: int | None, now: float
) -> list[Allocation]:
    """Return the allocation of each row that has started.

    pairs: attempts of the rows' jobs. gpus_per_node: where Slurm does not track them; None counts nodes. now: Unix
    time, s.
    """
    spans = [(row, span) for row in rows if (span := _span(row, now))]
    held: list[list[Repeated]] = [[] for _ in spans]
    for pair in pairs:
        own = [(index, span) for index, (row, span) in enumerate(spans) if is_of(row, pair[0])]
        begun = [each for each in own if each[1][0] <= pair[0].started + _CLOCKS_S] or own[:1]
        if begun and pair[0].started <= begun[-1][1][1] + _CLOCKS_S:  # else nothing of it is in the allocation
            held[begun[-1][0]].append(pair)
    return [
        _allocation(row, begin, end, of_row, gpus_per_node)
        for (row, (begin, end)), of_row in zip(spans, held, strict=True)
    ]


def _allocation(
    row: AccountingRow, begin: float, end: float, pairs: Sequence[Repeated], gpus_per_node: int | None
) -> Allocation:
    """Return a row's allocation with its attempts on one clock: Slurm's whole seconds are rounded down."""
    resources = row.nodes if gpus_per_node is None else count_gpus(row.alloc_tres) or row.nodes * gpus_per_node
    if pairs:
        early = begin - pairs[0][0].started
        pairs = [(attempt.later(early), again_at) for attempt, again_at in pairs] if early > 0 else pairs
        if row.end:
            late = max(attempt.last_evidence for attempt, _ in pairs) - end
            first = pairs[0][0]
            worked = min((float(times.end[0] - times.wall[0]) for times in first.steps), default=first.started)
            phase = min(max(late, 0.0), _SLURM_ROUNDS_S, max(worked - begin, 0.0))
            begin, end = begin + phase, end + phase
    suspended_s = end - begin - row.elapsed_s if row.end else 0.0
    return Allocation(begin, end, resources, tuple(pairs), not row.end, suspended_s)


def _span(row: AccountingRow, now: float) -> tuple[float, float] | None:
    """Return a row's begin and end; None before its start.

    By its end and length, unless it was suspended: in the hour that comes twice its start may be wrong by an hour.
    """
    begin, end = rfc3339_to_unix(row.start), rfc3339_to_unix(row.end)
    if begin is None:
        return None
    if end is None:
        return begin, max(begin, now)
    other_s = end - begin - row.elapsed_s
    return (begin if other_s > _SLURM_ROUNDS_S and other_s != _HOUR_S else end - row.elapsed_s), end


def queued_s(rows: Sequence[AccountingRow], now: float) -> float:
    """Return for how long the rows' jobs were queued, s, the requeued ones each time."""
    waits = ((rfc3339_to_unix(row.start or row.end) or now) - (rfc3339_to_unix(row.submit) or now) for row in rows)
    return sum(max(wait, 0.0) for wait in waits)


def from_folder(
    pairs: Sequence[Repeated], submitted: dict[str, float], per_node: int, now: float | None
) -> tuple[list[Allocation], float]:
    """Return the allocations of attempts of which there is no row, and for how long their jobs were queued, s.

    An allocation lasts from its first attempt to the end of the last, as far as that is known. submitted: job id → when
    it was submitted. now: Unix time, s, if the last attempt still runs, else None.
    """
    groups: dict[tuple[int, str, int], list[Repeated]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].job_number, pair[0].job_id, pair[0].start), []).append(pair)
    free_since, waited_s, allocations = dict(submitted), 0.0, []
    for index, ((_, job_id, _), group) in enumerate(groups.items()):
        begin = group[0][0].started
        end = max(begin, *(attempt.last_evidence for attempt, _ in group))
        is_open = now is not None and index == len(groups) - 1
        end = max(end, now or 0.0) if is_open else end
        waited_s += max(begin - free_since.get(job_id, begin), 0.0)
        free_since[job_id] = end
        allocations.append(Allocation(begin, end, group[-1][0].nodes * per_node, tuple(group), is_open))
    return allocations, waited_s
