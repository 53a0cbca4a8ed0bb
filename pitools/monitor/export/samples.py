"""Samples of metrics: values by name and labels, with a bounded number of series."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator

from pitools.core.output import printable
from pitools.monitor.export.metrics import BY_NAME, LABEL_LIMITS, METRICS, OTHER, Metric

Key = tuple[str, tuple[str, ...]]
Row = tuple[str, tuple[str, ...], tuple[float, ...]]
_MAX_LABEL = 100  # characters


class Samples(dict[Key, list[float]]):
    """Values by metric and label values. A histogram's: a count for each bucket and the last, and their sum."""

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter or a gauge. labels: values, in the order of the table."""
        self._values(name, labels)[0] += amount

    def touch(self, name: str, *labels: str) -> None:
        """Have a counter or histogram there before its first count, which Prometheus does not see otherwise."""
        self._values(name, labels)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Count a value in a histogram."""
        values = self._values(name, labels)
        values[bisect_left(BY_NAME[name].buckets, value)] += 1
        values[-1] += value

    def merge(self, increments: Samples) -> None:
        """Add counters and histograms; a value of a label beyond the label's limit is added to OTHER."""
        known: dict[tuple[str, int], set[str]] = defaultdict(set)
        for name, labels in self:
            for place, label in enumerate(labels):
                known[name, place].add(label)
        for (name, labels), values in increments.items():
            kept = []
            for place, (label, kind) in enumerate(zip(labels, BY_NAME[name].labels, strict=True)):
                names = known[name, place]
                kept.append(label if label in names or len(names - {OTHER}) < LABEL_LIMITS[kind] else OTHER)
                names.add(kept[-1])
            total = self._values(name, tuple(kept))
            total[:] = [before + value for before, value in zip(total, values, strict=True)]

    def bounded(self, tiers: Collection[str] = ()) -> Samples:
        """Return these gauges with at most LABEL_LIMITS values of a label, those with the largest sums, and OTHER.

        tiers: those that the counters have, which are kept, so that both have the same.
        """
        sums: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (name, labels), values in self.items():
            for place, label in enumerate(labels):
                sums[name, place][label] += values[0]
        kept = {
            (name, place): set(sorted(by_label, key=lambda one: (-by_label[one], one))[: _limit(name, place)])
            for (name, place), by_label in sums.items()
        }
        if tiers:
            kept["pit_queue_age_seconds", 0] = set(tiers)
        result = Samples()
        for (name, labels), values in self.items():
            label_values = (label if label in kept[name, i] else OTHER for i, label in enumerate(labels))
            total = result._values(name, tuple(label_values))
            total[0] = max(total[0], values[0]) if name.endswith("_seconds") else total[0] + values[0]
        return result

    def rows(self) -> tuple[Row, ...]:
        """Return the samples as a record's field."""
        return tuple((name, labels, tuple(values)) for (name, labels), values in self.items())

    def _values(self, name: str, labels: tuple[str, ...]) -> list[float]:
        # A label that is not UTF-8, as a name in Slurm may be, would make a whole scrape unreadable.
        key = name, tuple(label if label.isascii() and label.isprintable() else _clean(label) for label in labels)
        if key not in self:
            self[key] = [0.0] * (_width(BY_NAME[name]))
        return self[key]


def read_rows(rows: tuple[Row, ...]) -> Samples:
    """Return the samples of a record's field. Metrics that are no more, or whose shape changed, are left out."""
    samples = Samples()
    for name, labels, values in rows:
        metric = BY_NAME.get(name)
        if metric and len(labels) == len(metric.labels) and len(values) == _width(metric):
            samples[name, labels] = list(values)
    return samples


def max_series() -> int:
    """Return the most series that a site exports of the metrics of the table."""
    return sum(_max_series(metric) for metric in METRICS)


def cumulative(metric: Metric, values: list[float]) -> Iterator[tuple[str, float]]:
    """Yield the buckets of a histogram as Prometheus has them: upper bound and the count up to there."""
    count = 0.0
    for bound, value in zip([*map(str, metric.buckets), "+Inf"], values, strict=False):
        count += value
        yield bound, count


def _max_series(metric: Metric) -> int:
    combinations = 1
    for label in metric.labels:
        combinations *= LABEL_LIMITS[label] + 1
    return combinations * (len(metric.buckets) + 3 if metric.kind == "histogram" else 1)


def _limit(name: str, place: int) -> int:
    return LABEL_LIMITS[BY_NAME[name].labels[place]]


def _width(metric: Metric) -> int:
    return len(metric.buckets) + 2 if metric.kind == "histogram" else 1


def _clean(label: str) -> str:
    return printable(label.encode(errors="replace").decode())[:_MAX_LABEL]
