"""Shipped checks drain no healthy node, whatever noise its counters, its log, its clock and its polls make."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pitools.core import timestamps
from pitools.node.check.config import load_shipped
from pitools.node.check.evaluate import evaluate
from pitools.node.tables import TABLES
from pitools.node.types import FactTable, NodeFacts, Row, Value

POLL_S = 300.0
# Events in an hour of a healthy node: a cable that is cleaned, a job that ends, a switch that is restarted.
COUNTERS: dict[str, dict[str, float]] = {
    "rdma_ports": {
        "link_downed": 0.01, "link_error_recovery": 0.02, "symbol_errors": 3, "rx_errors": 20, "tx_discards": 200,
        "buffer_overruns": 0.005, "link_integrity_errors": 0.01, "rnr_nak_retry_errors": 0.05, "ack_timeouts": 30,
        "roce_slow_restarts": 10,
    },
    "interfaces": {"carrier_changes": 0.05, "rx_crc_errors": 0.5, "rx_dropped": 500, "rx_errors": 1},
    "gpus": {"pcie_replays": 5, "nvlink_errors": 1, "ecc_corrected": 2, "ecc_uncorrected": 0.001},
    "dimms": {"corrected": 0.5},
    "cpus": {"throttled": 5},
    "block_devices": {"media_errors": 0.001},
    "pci_devices": {"nonfatal_errors": 0.1},
}  # fmt: skip
STEADY: dict[str, Row] = {
    "system": {"clock_is_synchronized": True, "clocksource": "tsc"},
    "rdma_ports": {"kind": "infiniband", "physical_state": "LinkUp", "state": "ACTIVE", "is_virtual": False},
    "interfaces": {"kind": "ethernet"},
    "gpus": {
        "vendor": "nvidia", "recovery_action": "none", "remap_failed": False, "sram_threshold_exceeded": False,
        "remapped_rows_pending": False, "fabric_state": "completed", "is_persistent": True, "nvlinks": 18,
        "vbios": "96", "slowdowns": "", "pcie_width": 16, "temperature_c": 60, "retired_pages_pending": False,
    },
    "dimms": {"uncorrected": 0},
    "cpus": {"governor": "performance"},
    "block_devices": {"device": "nvme0n1", "state": "live", "smart_passed": True, "is_read_only": False},
    "pci_devices": {"fatal_errors": 0},
    "mounts": {"type": "ext4", "responds": True, "is_read_only": False, "used_share": 0.5, "inodes_used_share": 0.1},
    "slurm": {"slurmd_is_running": True, "controllers_up": 2},
    "raid_arrays": {"state": "active"},
}  # fmt: skip
ROWS = {"rdma_ports": 8, "gpus": 8, "dimms": 4, "cpus": 4, "mounts": 3, "interfaces": 2}
# Kind, state and code of lines that jobs and servers cause, by the hour.
LINES: tuple[tuple[float, str, str, int | None], ...] = (
    (0.02, "xid", "", 13), (0.02, "xid", "", 31), (0.1, "xid", "", 43), (0.1, "xid", "", 45),
    (0.2, "oom", "job", None), (0.02, "nfs", "timeout", None), (0.1, "edac", "", None), (0.02, "link", "down", None),
    (0.02, "hang", "", None), (0.02, "thermal", "", None),
)  # fmt: skip


class HealthyNode:
    """A node that reboots at times, whose counters rise, and whose values cannot always be read."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._now = datetime(2026, 11, 1, tzinfo=UTC)
        self._uptime_s = 0.0
        self._boots = 0
        self._reboot()

    def _reboot(self) -> None:
        self._boots += 1
        self._uptime_s = 100.0
        self._counts: Counter[tuple[str, int, str]] = Counter()
        self._log: list[Row] = []

    def polls(self, hours: float) -> Iterator[NodeFacts]:
        """Yield a gathering each five minutes, about."""
        for _ in range(round(hours * 3600 / POLL_S)):
            elapsed_s = POLL_S * self._dice.choice([0.01, 0.5, 1, 1, 1, 1, 1, 1.1, 2])
            self._uptime_s += elapsed_s
            self._now += timedelta(seconds=elapsed_s)
            if self._dice.random() < 0.002:
                self._reboot()
            if self._dice.random() < 0.002:  # the clock is set
                self._now += timedelta(seconds=self._dice.choice([-4000, -60, 60, 4000]))
            self._happen(elapsed_s / 3600)
            tables = {name: self._table(name) for name in (*STEADY, "kernel_log")}
            boot = f"boot-{self._boots}" if self._dice.random() > 0.005 else ""
            yield NodeFacts(node="n1", boot_id=boot, gathered_at=self._time(), tables=tables)

    def _time(self) -> str:
        return timestamps.to_rfc3339(self._now)

    def _happen(self, hours: float) -> None:
        for table, rates in COUNTERS.items():
            for number in range(ROWS.get(table, 1)):
                for key, rate in rates.items():
                    self._counts[table, number, key] += self._events(rate * hours)
        for rate, kind, state, code in LINES:
            for _ in range(self._events(rate * hours)):
                device = f"0000:{self._dice.randrange(8)}b:00.0"
                self._line(kind, state, code, device)
                if kind == "nfs":
                    self._line(kind, "ok", code, device)
        del self._log[:-60]

    def _events(self, mean: float) -> int:
        """Return a number of events, now and then many at once."""
        if self._dice.random() < 0.0005:
            mean *= 20
        whole, rest = divmod(mean, 1)
        return int(whole) + (self._dice.random() < rest)

    def _line(self, kind: str, state: str, code: int | None, device: str) -> None:
        at = self._time() if self._dice.random() > 0.01 else ""
        row: Row = {"kind": kind, "state": state, "code": code, "device": device, "at": at, "began": at, "text": kind}
        self._log.append({"event": len(self._log), "part": "", "action": "", "is_fatal": None, "count": 1, **row})

    def _table(self, name: str) -> FactTable:
        is_unknown = self._dice.random() < 0.01
        rows = list(self._log) if name == "kernel_log" else [self._row(name, n) for n in range(ROWS.get(name, 1))]
        return FactTable(
            table=name,
            source="simulation",
            read_at=self._time(),
            uptime_s=self._uptime_s,
            cost_s=0.01,
            rows=() if is_unknown else tuple(rows),
            unknown="no answer within 5 s" if is_unknown else "",
        )

    def _row(self, name: str, number: int) -> Row:
        counts: dict[str, Value] = {key: self._counts[name, number, key] for key in COUNTERS.get(name, ())}
        row: Row = {TABLES[name].subject or "-": number, **STEADY[name], **counts}
        if self._dice.random() < 0.05:
            row[self._dice.choice(list(row))] = None
        return row


SLOW = [pytest.param(seed, 1000, marks=pytest.mark.slow) for seed in range(10)]


@pytest.mark.parametrize(("seed", "hours"), [(17, 50), *SLOW])
def test_no_healthy_node_is_drained(seed: int, hours: int) -> None:
    """In so many hours no check fails whose action is more than `watch`; those that are watched fail seldom."""
    checks = load_shipped().check
    previous: NodeFacts | None = None
    failed: Counter[str] = Counter()
    for facts in HealthyNode(random.Random(seed)).polls(hours):
        findings = [finding for finding in evaluate(checks, facts, previous) if finding.state == "failed"]
        assert not [finding for finding in findings if finding.action != "watch"]
        failed.update({finding.check for finding in findings})
        previous = facts
    assert sum(failed.values()) < hours * 3600 / POLL_S, failed
