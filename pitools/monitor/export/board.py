"""The newest state of each worker of each site, as metrics of prometheus_client; and the threads that renew it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from pitools.core.errors import PitError, TryLater
from pitools.monitor.export import collect, state
from pitools.monitor.export.collect import WORKERS, Worker
from pitools.monitor.export.metrics import BY_NAME, METRICS, Metric
from pitools.monitor.export.samples import cumulative, read_rows
from pitools.monitor.export.state import Queried, WorkerState
from pitools.place.clusters.parallel import site_error
from pitools.site.schema import Site

_ALWAYS = {"slurm": ("jobs", "nodes"), "runs": ("runs",)}  # collectors that count as failed before their first answer


class _Slot(NamedTuple):
    """A worker's newest state.

    is_read: whether the state is that of its file, or follows it. began: of time.monotonic, when its present cycle
    began; 0 between two. ended_s: Unix time of the last one's end. error: why the state is not kept, or "".
    """

    site: Site
    worker: Worker
    state: WorkerState
    is_read: bool = False
    began: float = 0.0
    ended_s: float = 0.0
    error: str = ""


class Board(Collector):
    """Holds what is exported of all sites. A scrape reads it, and never waits for a site."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._lock = threading.Lock()
        self._slots = {(site.name, one.name): _Slot(site, one, WorkerState()) for site in sites for one in WORKERS}

    def run_once(self, changed: Callable[[], None], report: Callable[[str], None]) -> bool:
        """Run one cycle of each worker, each in a thread; return whether all collectors succeeded.

        Of a worker that another exporter holds, what that one has left is exported. changed: called after each that
        ends; one that hangs is not waited for beyond its limit. report: gets a line for each collector that begins, or
        ceases, to fail. Raises TryLater if others hold all.
        """
        ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        taken = self._take_all(report)

        def run(key: tuple[str, str], lock: contextlib.ExitStack) -> None:
            with lock:
                self._cycle(key, report)
            ended.put(key)

        for key, lock in taken.items():
            threading.Thread(target=run, args=(key, lock), daemon=True).start()
        deadline = time.monotonic() + max(collect.limit_s(slot.site, slot.worker) for slot in self._slots.values())
        idle = self._slots.keys() - taken.keys()
        for _ in taken:
            try:
                idle.add(ended.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
            self._read_newer(idle)
            changed()
        self._read_newer(idle)
        changed()
        slots = self._slots.values()
        return not any(slot.error for slot in slots) and all(all(self._success(slot).values()) for slot in slots)

    def run_forever(self, every_s: float, report: Callable[[str], None]) -> None:
        """Start a thread for each worker, whose cycles begin `every_s` apart, or one after the other if they last.

        A worker that another exporter holds begins when that one ends. Raises TryLater if others hold all.
        """

        def run(key: tuple[str, str], lock: contextlib.ExitStack | None) -> None:
            while not lock:
                time.sleep(every_s)
                lock = state.take(*key)
            while True:
                started = time.monotonic()
                self._cycle(key, report)
                time.sleep(max(0.0, every_s - (time.monotonic() - started)))

        taken = self._take_all(report)
        for key in self._slots:
            threading.Thread(target=run, args=(key, taken.get(key)), daemon=True).start()

    def _take_all(self, report: Callable[[str], None]) -> dict[tuple[str, str], contextlib.ExitStack]:
        taken = {key: lock for key in self._slots if (lock := state.take(*key))}
        if not taken:
            hint = "let a service or cron export a site, not both; see: ps -C pit"
            raise TryLater("other exporters of this account export all of these sites", hint=hint)
        for site in dict.fromkeys(site for site, worker in self._slots.keys() - taken.keys()):
            report(f"site {site}: skipped: another exporter of this account, or its cycle before, goes on")
        return taken

    def _read_newer(self, keys: Iterable[tuple[str, str]]) -> None:
        """Read what later cycles of cron have left of workers: so counters in the file do not go back."""
        for key in keys:
            with contextlib.suppress(PitError):
                if not self._slots[key].error:
                    self._read_left(key)

    def _read_left(self, key: tuple[str, str]) -> _Slot:
        """Put what a process has left of a worker into its slot, which is returned. Raises PitError."""
        left = state.read_state(state.state_path(*key))
        ended_s = max((one.began_s + one.duration_s for one in left.queried.values()), default=0.0)
        self._put(key, slot := self._slots[key]._replace(state=left, is_read=True, ended_s=ended_s))
        return slot

    def collect(self) -> Iterator[Family]:
        """Yield the families of metrics, each with the samples of all sites."""
        with self._lock:
            slots = list(self._slots.values())
        good = {(slot.site.name, name) for slot in slots for name, is_good in self._success(slot).items() if is_good}
        families = {metric.name: _family(metric) for metric in METRICS}
        for site in {slot.site.name: slot.site for slot in slots}.values():
            is_kept = not any(slot.error for slot in slots if slot.site is site)
            name = "pit_collector_success"
            _add(families[name], site, name, ("state",), (float(is_kept),))
        for slot in slots:
            _add_collectors(families, slot, self._success(slot))
            if slot.worker.name == "slurm" and slot.ended_s:
                name = "pit_exporter_cycle_timestamp_seconds"
                _add(families[name], slot.site, name, (), (slot.ended_s,))
            for row in (row for one in slot.state.queried.values() for row in read_rows(one.gauges).rows()):
                if (slot.site.name, BY_NAME[row[0]].collector) in good:
                    _add(families[row[0]], slot.site, *row)
            for row in () if slot.error else state.totals_of(slot.state).rows():
                if (slot.site.name, BY_NAME[row[0]].collector) in good:
                    _add(families[row[0]], slot.site, *row)
            if (slot.site.name, "native") in good and (queried := slot.state.queried.get("native")):
                _add_native(families, slot.site, queried)
        yield from (family for family in families.values() if family.samples)

    def _cycle(self, key: tuple[str, str], report: Callable[[str], None]) -> None:
        slot = self._slots[key]._replace(began=time.monotonic())
        error, lines = "", list[str]()
        self._put(key, slot)
        try:
            if not slot.is_read:  # what another process has left
                slot = self._read_left(key)
        except Exception as problem:  # noqa: BLE001 - a thread must not die of one site's state
            error = str(site_error(slot.site.name, problem))
        try:
            after, lines = collect.run_cycle(slot.site, slot.worker, slot.state)
            has_changed, slot = after is not slot.state or bool(slot.error), slot._replace(state=after)
            if slot.is_read and has_changed:
                state.write_state(state.state_path(*key), after)
        except Exception as problem:  # noqa: BLE001
            error = str(site_error(slot.site.name, problem))
        if bool(error) != bool(slot.error):
            lines = [*lines, f"site {slot.site.name}: state: {error or 'succeeds again'}"]
        self._put(key, slot._replace(began=0.0, ended_s=time.time(), error=error))
        for line in lines:
            with contextlib.suppress(Exception):  # who reads the lines may be gone: the thread must not go with them
                report(line)

    def _put(self, key: tuple[str, str], slot: _Slot) -> None:
        with self._lock:
            self._slots[key] = slot

    @staticmethod
    def _success(slot: _Slot) -> dict[str, bool]:
        """Return for each collector of a worker whether its values are exported."""
        is_hung = slot.began and time.monotonic() - slot.began > collect.limit_s(slot.site, slot.worker)
        if is_hung:
            return dict.fromkeys({*slot.state.queried, *_ALWAYS[slot.worker.name]}, False)
        now_s = time.time()
        limits = {"topology": collect.TOPOLOGY_EVERY_S}
        fresh = {
            name: now_s - one.began_s <= limits.get(name, 0.0) + slot.worker.max_age_s
            for name, one in slot.state.queried.items()
        }
        # Without its state cron does not know what it asked last: what it has not asked since is no failure of Slurm's.
        return {
            name: is_fresh and not slot.state.queried[name].error
            for name, is_fresh in fresh.items()
            if is_fresh or not slot.error
        }


def _family(metric: Metric) -> Family:
    return Family(
        metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name, metric.help, metric.kind
    )


def _add(family: Family, site: Site, name: str, labels: tuple[str, ...], values: Sequence[float]) -> None:
    metric = BY_NAME[name]
    pairs = {"cluster": site.name, **dict(zip(metric.labels, labels, strict=True))}
    if metric.kind != "histogram":
        family.add_sample(name, pairs, values[0])
        return
    count = 0.0
    for bound, count in cumulative(metric, list(values)):
        family.add_sample(f"{name}_bucket", {**pairs, "le": bound}, count)
    family.add_sample(f"{name}_count", pairs, count)
    family.add_sample(f"{name}_sum", pairs, values[-1])


def _add_collectors(families: dict[str, Family], slot: _Slot, success: dict[str, bool]) -> None:
    for name, is_good in success.items():
        queried = slot.state.queried.get(name, Queried())
        values = (
            ("pit_collector_success", float(is_good)),
            ("pit_collector_duration_seconds", queried.duration_s),
            ("pit_collector_last_success_timestamp_seconds", queried.success_s),
        )
        for metric, value in values:
            if value or metric == "pit_collector_success":
                _add(families[metric], slot.site, metric, (name,), (value,))


def _add_native(families: dict[str, Family], site: Site, queried: Queried) -> None:
    """Add Slurm's own families, which another site may have too."""
    for name, labels, values in queried.gauges:
        family = families.setdefault(name, Family(name, queried.helps.get(name, ""), "gauge"))
        family.add_sample(name, {"cluster": site.name, **dict(zip(("partition",), labels, strict=False))}, values[0])
