"""A cluster in memory: a Slurm that may refuse or kill its caller, nodes that report, and the controller."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core import timestamps
from pitools.core.errors import Unreachable
from pitools.core.journal import read_journal
from pitools.node import spool
from pitools.node.check.config import Control, NodeConfig
from pitools.node.control import incidents, policy, tick
from pitools.node.types import BENCH_CHECK, Action, Finding, NodeReport, State
from pitools.slurm.records import Node, Switch

NODES = [f"n{number:02}" for number in range(16)]
LEAVES = {"s1": NODES[:8], "s2": NODES[8:]}


class Killed(BaseException):
    """kill -9 of the controller."""


class Slurm:
    """A client of a Slurm in memory, which may refuse, fail to answer, or be the last that a controller does."""

    def __init__(self, dice: random.Random, share: float) -> None:
        self.dice, self.share = dice, share
        self.reasons: dict[str, str] = {}
        self.resumed: list[tuple[str, str]] = []  # node, its reason before
        self.calls = 0
        self.benched: set[str] | None = None  # nodes whose last report has a bench that passed, where one is wanted

    def strike(self, weight: float = 1.0) -> None:
        self.calls += 1
        if self.dice.random() < self.share * weight:
            raise Killed
        if self.dice.random() < self.share * weight:
            raise Unreachable("connection refused")

    def nodes(self, names: str = "") -> list[Node]:
        self.strike(0.3)
        return [
            Node(
                node=name,
                state="idle",
                flags=("drain",) if name in self.reasons else (),
                partitions=("train", "dev") if name in LEAVES["s1"] else ("train",),
                reason=self.reasons.get(name, ""),
            )
            for name in ([names] if names else NODES)
        ]

    def topology(self) -> list[Switch]:
        self.calls += 1
        return [Switch(switch=name, level=0, node_list=",".join(nodes)) for name, nodes in LEAVES.items()]

    def drain_node(self, node: str, reason: str) -> None:
        self.strike()
        assert node not in self.reasons or incidents.incident_of_reason(self.reasons[node])[0], "a drain of others"
        self.reasons[node] = reason
        self.strike()

    def resume_node(self, node: str) -> None:
        self.strike()
        assert self.benched is None or node in self.benched, "not benched"
        self.resumed.append((node, self.reasons.pop(node)))
        self.strike()


class Clock:
    """The time of the controller and the reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime(2026, 11, 1, tzinfo=UTC)
        monkeypatch.setattr(timestamps, "now_rfc3339", lambda: timestamps.to_rfc3339(self.now))

    def pass_minutes(self, count: float) -> None:
        self.now += timedelta(minutes=count)


class World:
    """A cluster, its spool and a controller that is started anew for each tick."""

    def __init__(self, folder: Path, clock: Clock, seed: int = 0, share: float = 0.0, **limits: Any) -> None:
        self.dice, self.clock = random.Random(seed), clock
        self.slurm = Slurm(self.dice, share)
        self.faulty: dict[str, Action] = {}
        self.slow: dict[str, State] = {}  # what their benches find
        self.boots, self.serials = Counter[str](), Counter[str]()
        defaults: dict[str, Any] = {"max_returns": 1000, "max_share_hour": 1.0}
        self.config = NodeConfig(spool=str(folder), control=Control(**(defaults | limits)))
        self.slurm.benched = set() if self.config.control.bench_before_return else None

    def report(self, *, only: str = "") -> None:
        for name in [only] if only else NODES:
            now = timestamps.now_rfc3339()
            bench: State | None = None
            if spool.is_bench_requested(Path(self.config.spool), name):
                assert incidents.incident_of_reason(self.slurm.reasons.get(name, "x"))[0] or self.slurm.share
                bench = self.slow.get(name, "passed")
            if self.slurm.benched is not None:
                (self.slurm.benched.add if bench == "passed" else self.slurm.benched.discard)(name)
            failed = self.finding(name, "gpu-count", self.faulty.get(name, "none"))
            of_bench = msgspec.structs.replace(self.finding(name, BENCH_CHECK, "report"), state=bench or "passed")
            findings = [failed] * (name in self.faulty) + [of_bench] * (bench in ("failed", "unknown"))
            passed = ["gpu-count"] * (name not in self.faulty) + [BENCH_CHECK] * (bench == "passed")
            spool.write_report(
                Path(self.config.spool),
                NodeReport(
                    node=name,
                    boot_id=f"boot{self.boots[name]}",
                    checked_at=now,
                    hardware={"gpus 0000:01:00.0 serial": f"serial{self.serials[name]}"},
                    findings=tuple(findings),
                    passed=tuple(passed),
                ),
            )

    def finding(self, node: str, check: str, action: Action) -> Finding:
        return Finding(
            node=node,
            check=check,
            state="failed",
            level="critical",
            action=action,
            table="gpus",
            message="gpus: 7 (expected exactly 8)",
            evidence_at=timestamps.now_rfc3339(),
        )

    def tick(self, *, act: bool = True) -> list[policy.ActRow]:
        """Tick once; [] if it is killed or has no answer."""
        try:
            return tick.Controller(self.slurm, self.config).tick(act=act).rows  # type: ignore[arg-type]
        except (Killed, Unreachable):
            return []

    def ours(self) -> set[str]:
        return {node for node, reason in self.slurm.reasons.items() if incidents.incident_of_reason(reason)[0]}

    def entries(self) -> list[incidents.IncidentEntry]:
        return read_journal(Path(self.config.spool) / "control" / "journal.jsonl", incidents.IncidentEntry)
