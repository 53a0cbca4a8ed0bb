"""Nodes that are healthy, with the noise of real ones, and a cluster of them with Slurm and the controller.

Lines of the kernel's log are real lines, read by the real parser; other tables are rows, with values at the level of
node_exporter's and gpud's public fixtures. Everything comes from one seed.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template
from typing import Any

from pitools.core import timestamps
from pitools.core.errors import Unreachable
from pitools.node import spool
from pitools.node.check.config import Control, NodeConfig
from pitools.node.check.evaluate import evaluate
from pitools.node.check.rule import Check
from pitools.node.check.this_node import NodeCheck
from pitools.node.control import incidents, policy, tick
from pitools.node.gather.kernel_log import event_rows
from pitools.node.report import make_report
from pitools.node.types import FactTable, Finding, NodeFacts, Row
from pitools.slurm.records import Node, Switch

START = datetime(2026, 11, 1, tzinfo=UTC)
POLL_S = 300.0
OTHER_GPUS = ("amdgpu", "NVRM|SXid|amdgpu", "NVRM|SXid|amdgpu", "NVRM|SXid")  # by kind of node: who does not log there
LEAF = 16  # nodes of a leaf switch


def read_blocks(name: str) -> list[tuple[str, list[str]]]:
    """Return the lines of a file of this folder by their headings, which begin with @."""
    blocks = re.split(r"^@ ", (Path(__file__).parent / name).read_text(), flags=re.MULTILINE)[1:]
    return [(heading, lines) for heading, *lines in map(str.splitlines, blocks)]


NOISE = [(float(per_hour), lines) for per_hour, lines in read_blocks("healthy_log.txt")]
# Of values that rise on healthy nodes: the mean increase in an hour.
RISES: dict[str, dict[str, float]] = {
    "cpus": {"throttled": 0.05, "package_throttled": 0.05},
    "dimms": {"corrected": 0.02},
    "pci_devices": {"corrected_errors": 0.5, "nonfatal_errors": 0.01},
    "block_devices": {"power_on_h": 1.0, "media_errors": 0.0005},
    "interfaces": {"carrier_changes": 0.02, "rx_errors": 0.01, "rx_dropped": 40.0, "rx_crc_errors": 0.02},
    "rdma_ports": {
        **dict.fromkeys(("link_downed", "link_error_recovery", "link_integrity_errors", "buffer_overruns"), 0.002),
        **dict.fromkeys(("symbol_errors", "rx_errors", "rnr_nak_retry_errors", "vl15_dropped"), 0.02),
        **dict.fromkeys(("tx_discards", "ack_timeouts", "roce_slow_restarts"), 0.5),
    },
    "gpus": {"ecc_corrected": 0.1, "pcie_replays": 0.05, "nvlink_errors": 0.05, "remapped_rows": 0.0005},
}


def healthy_tables(kind: int) -> dict[str, list[Row]]:
    """Return the rows of a healthy node: with H100, with disks behind an Intel RAID, without disks, with MI300."""
    system = {"clocksource": "tsc", "clock_is_synchronized": True, "memory_used_share": 0.4, "load_1m": 12.0}
    nic = {"kind": "ethernet", "state": "up", "is_virtual": False, "has_default_route": True}
    root = {"target": "/", "device": "/dev/sda2", "type": "ext4", "responds": True}
    root |= {"is_read_only": False, "is_forced_read_only": False}
    disk = {"is_read_only": False, "state": "live", "smart_passed": True, "temperature_c": 41.0, "media_errors": 0}
    tables: dict[str, list[Row]] = {
        "system": [{**system}],
        "processes": [{"pid": n, "name": "python3", "state": "S", "is_blocked": False} for n in range(20)],
        "cpus": [{"cpu": n, "governor": "performance", "throttled": 0, "package_throttled": 0} for n in range(8)],
        "sensors": [{"sensor": f"nct6798/in{n}", "kind": "voltage", "has_alarm": n == 3} for n in range(4)],
        "dimms": [{"dimm": f"mc0/dimm{n}", "corrected": 0, "uncorrected": 0} for n in range(16)],
        "ipmi_events": [
            {
                "event": 1,
                "at": "2026-10-30T10:00:00.000Z",
                "sensor": "Memory #0x87",
                "text": "Correctable ECC | Asserted",
            },
            {"event": 2, "at": None, "sensor": "Fan #0x30", "text": "Redundancy Lost | Asserted"},
        ],
        "pci_devices": [
            {"pci": f"0000:{n:02x}:00.0", "fatal_errors": 0, "nonfatal_errors": 0, "corrected_errors": 0}
            for n in range(12)
        ],
        "mounts": [
            {**root, "used_share": 0.5, "root_used_share": 0.4, "inodes_used_share": 0.1},
            {**root, "target": "/tmp", "used_share": 0.9, "inodes_used_share": 0.3},
            {
                **root,
                "target": "/snap/core/1",
                "type": "squashfs",
                "is_read_only": True,
                "used_share": 1.0,
                "inodes_used_share": 1.0,
            },
            {
                **root,
                "target": "/home",
                "type": "nfs4",
                "device": "nas1:/home",
                "used_share": 0.97,
                "inodes_used_share": 0.4,
            },
            {**root, "target": "/scratch", "type": "lustre", "used_share": 0.8, "inodes_used_share": 0.2},
            {**root, "target": "/run/user/1000/doc", "type": "fuse.portal", "responds": None},
        ],
        "block_devices": [
            {
                "device": "nvme0n1",
                **disk,
                "critical_warning": 0,
                "wear_share": 0.7,
                "power_on_h": 9000,
                "responds": True,
            }
        ],
        "raid_arrays": [],
        "interfaces": [{"interface": name, **nic} | dict.fromkeys(RISES["interfaces"], 0) for name in ("eno1", "eno2")],
        "rdma_ports": [],
        "gpus": [],
        "slurm": [{"is_node": True, "slurmd_is_running": True, "controllers_up": 2, "controllers": 2}],
    }
    if kind in (0, 3):
        tables["rdma_ports"] = [
            {
                "port": f"mlx5_{n}/1",
                "kind": "infiniband",
                "state": "ACTIVE",
                "physical_state": "LinkUp",
                "is_virtual": False,
                **dict.fromkeys(RISES["rdma_ports"], 0),
            }
            for n in range(8)
        ]
        tables["gpus"] = [gpu_row(n, "nvidia" if kind == 0 else "amd") for n in range(8)]
        tables["raid_arrays"] = [{"device": "md0", "level": "raid0", "state": "clean", "disks": 4, "disks_active": 4}]
    elif kind == 1:  # the container of an Intel RAID is never active
        tables["raid_arrays"] = [
            {"device": "md126", "level": "raid1", "state": "active", "disks": 2, "disks_active": 2},
            {"device": "md127", "level": "", "state": "inactive", "disks": 0, "disks_active": 0},
        ]
        tables["block_devices"] += [
            {**disk, "device": "sda", "state": "running"},
            {"device": "sdb", "state": "running"},
        ]
    else:  # its image, read-only and full to the last block
        tables["mounts"][0] |= {"type": "squashfs", "is_read_only": True, "used_share": 1.0, "inodes_used_share": 1.0}
        tables["block_devices"] = []
    return tables


def gpu_row(number: int, vendor: str) -> Row:
    row: Row = {
        "index": number,
        "responds": True,
        "is_lost": False,
        "error": "",
        "pci": f"0000:{0x10 + number:02x}:00.0",
        "serial": f"16549220000{number}",
        "vendor": vendor,
        "vbios": "96.00.89.00.01",
        "temperature_c": 61,
        "memory_temperature_c": 78,
        "slowdowns": "SwPowerCap",
        "pcie_width": 16,
    }
    row |= dict.fromkeys(("ecc_corrected", "ecc_uncorrected", "remapped_rows", "pcie_replays", "nvlink_errors"), 0)
    if vendor == "amd":
        return row
    row |= {"is_persistent": True, "nvlinks": 18, "fabric_state": "completed", "recovery_action": "none"}
    return row | dict.fromkeys(("sram_threshold_exceeded", "remapped_rows_pending", "remap_failed"), False)


def poisson(dice: random.Random, mean: float) -> int:
    """Return a number of events whose mean is small."""
    count, product, limit = 0, dice.random(), math.exp(-mean)
    while product > limit:
        count, product = count + 1, product * dice.random()
    return count


class SimulatedNode:
    """A healthy node. Its clock may be wrong by minutes; its log and counters begin anew at a boot.

    noise: 0 for a node whose values stand still.
    """

    def __init__(self, name: str, kind: int, seed: object, noise: float = 1.0) -> None:
        self.name, self.kind, self.noise = name, kind, noise
        self.dice = random.Random(f"{seed} {name}")
        self.boots = 0
        self.clock_s = 0.0  # ahead of the true time
        self.boot(START - timedelta(hours=self.dice.uniform(1, 500)))
        self.previous: NodeFacts | None = None

    def boot(self, at: datetime) -> None:
        self.boots += 1
        self.booted_at = at
        self.tables = healthy_tables(self.kind)
        self.log: list[tuple[datetime, str]] = []
        self._log_rows: tuple[object, list[Row]] = (None, [])

    def say(self, at: datetime, *lines: str) -> None:
        """Log lines of the kernel, of some GPU, process or device."""
        dice = self.dice
        words = {"pci": f"{dice.randrange(16, 24):02x}:00", "pid": dice.randrange(2000, 90000), "n": dice.randrange(8)}
        texts = [Template(line).safe_substitute(words) for line in lines]
        self.log += [(at + timedelta(milliseconds=number), text) for number, text in enumerate(texts)]
        self.log = self.log[-200:]  # the buffer is a ring

    def pass_time(self, now: datetime, step_s: float) -> None:
        """Let noise happen up to `now`."""
        self.now = now
        hours = step_s / 3600 * self.noise
        for per_hour, lines in NOISE:
            for _ in range(poisson(self.dice, per_hour * hours)):
                if not re.search(OTHER_GPUS[self.kind], lines[0]):
                    self.say(now - timedelta(seconds=self.dice.uniform(0, step_s)), *lines)
        self.log.sort(key=lambda pair: pair[0])
        for table, keys in RISES.items():
            for key, per_hour in keys.items():
                rows = self.tables[table]
                for _ in range(poisson(self.dice, per_hour * hours * len(rows)) if rows else 0):
                    row = self.dice.choice(rows)
                    if isinstance(row.get(key), int):
                        row[key] = int(row[key] or 0) + 1  # type: ignore[arg-type]
        for mount in self.tables["mounts"][: 2 if self.kind != 2 else 0]:
            share = float(mount["used_share"] or 0) + self.noise * self.dice.gauss(0, 0.02)
            mount["used_share"] = min(1.0, max(0.2, share))  # by users, who do not get what is kept for root
        if self.dice.random() < 0.02 * hours:  # NTP corrects it, or an operator does by hand
            self.clock_s = self.dice.choice((0.0, 0.0, self.dice.uniform(-400, 400)))

    def facts(self, now: datetime, *, changes: dict[str, list[Row]] | None = None) -> NodeFacts:
        """Return what a gathering finds now. changes: tables that this one gathering finds otherwise."""
        at = timestamps.to_rfc3339(now + timedelta(seconds=self.clock_s))
        uptime_s = (now - self.booted_at).total_seconds()
        tables = {}
        for name, rows in {**self.tables, "kernel_log": self._events(), **(changes or {})}.items():
            unknown = "timed out" if self.dice.random() < 0.003 * self.noise else ""
            kept = [self._with_gaps(row) for row in rows] if self.noise and not unknown else rows
            tables[name] = FactTable(
                table=name,
                source="simulated",
                read_at=at,
                cost_s=0.0,
                uptime_s=uptime_s,
                rows=() if unknown else tuple(dict(row) for row in kept),
                unknown=unknown,
            )
        boot_id = f"{self.name}-{self.boots}"
        return NodeFacts(node=self.name, boot_id=boot_id, gathered_at=at, tables=tables)

    def _events(self) -> list[Row]:
        key = (len(self.log), self.log[-1] if self.log else None, self.clock_s)
        if self._log_rows[0] != key:
            messages = [(at.timestamp() + self.clock_s, line) for at, line in self.log]
            self._log_rows = (key, event_rows(messages))
        return self._log_rows[1]

    def _with_gaps(self, row: Row) -> Row:
        """Return a row in which now and then a value cannot be read."""
        if "event" in row or self.dice.random() > 0.003:
            return row
        gap = self.dice.choice([*row][1:] or [*row])
        return {**row, gap: None}


class Slurm:
    """A client of a Slurm in memory, which does not answer now and then."""

    def __init__(self, names: Sequence[str], dice: random.Random, failing: float) -> None:
        self.names, self.dice, self.failing = names, dice, failing
        self.reasons: dict[str, str] = {}
        self.drains: list[tuple[str, str]] = []
        self.resumed: list[str] = []

    def nodes(self, names: str = "") -> list[Node]:
        if self.dice.random() < self.failing:
            raise Unreachable("connection refused")
        return [
            Node(
                node=name,
                state="idle",
                flags=("drain",) if name in self.reasons else (),
                partitions=("train",),
                reason=self.reasons.get(name, ""),
            )
            for name in ([names] if names else self.names)
        ]

    def topology(self) -> list[Switch]:
        leaves = [self.names[number : number + LEAF] for number in range(0, len(self.names), LEAF)]
        return [Switch(switch=f"s{number}", level=0, node_list=",".join(leaf)) for number, leaf in enumerate(leaves)]

    def drain_node(self, node: str, reason: str) -> None:
        self.reasons[node] = reason
        self.drains.append((node, reason))

    def resume_node(self, node: str) -> None:
        self.resumed.append(node)
        del self.reasons[node]


class Cluster:
    """Simulated nodes that check themselves and report, and the controller. now: the true time."""

    def __init__(
        self,
        folder: Path,
        checks: Sequence[Check],
        count: int,
        *,
        seed: object = 0,
        noise: float = 1.0,
        control: Control | None = None,
    ) -> None:
        dice = random.Random(f"{seed} slurm")
        self.nodes = {
            name: SimulatedNode(name, number % 4 if noise else 0, seed, noise)
            for number, name in enumerate(f"n{number:03}" for number in range(count))
        }
        self.slurm = Slurm(list(self.nodes), dice, 0.01 * noise)
        self.now, self.checks = START, checks
        self.config = NodeConfig(spool=str(folder), check=tuple(checks), control=control or Control())
        self.findings: list[Finding] = []  # all that failed

    def report(self, node: SimulatedNode, facts: NodeFacts) -> list[Finding]:
        """Judge a node's facts, and write its report as `pit node check --report` does."""
        findings = evaluate(self.checks, facts, node.previous)
        node.previous = facts
        failed = [one for one in findings if one.state == "failed"]
        self.findings += failed
        report = make_report(NodeCheck(facts, findings, list(self.checks)))
        spool.write_report(Path(self.config.spool), report)
        return failed

    def step(self, change: Callable[[SimulatedNode], dict[str, list[Row]] | None] = lambda _: None) -> None:
        """Let five minutes pass, in which each node checks itself once. change: see `SimulatedNode.facts`."""
        self.now += timedelta(seconds=POLL_S)
        for node in self.nodes.values():
            node.pass_time(self.now, POLL_S)
            if self.now >= node.booted_at:
                self.report(node, node.facts(self.now, changes=change(node)))

    def tick(self) -> list[policy.ActRow]:
        try:
            return tick.Controller(self.slurm, self.config).tick(act=True).rows  # type: ignore[arg-type]
        except Unreachable:
            return []

    def incidents(self) -> list[incidents.Incident]:
        path = Path(self.config.spool) / "control" / "journal.jsonl"
        return list(incidents.read_incidents(path).incidents.values())


def replaced(rows: list[Row], number: int, **values: Any) -> list[Row]:
    """Return rows, one of them with other values."""
    return [{**row, **values} if number == at else row for at, row in enumerate(rows)]
