"""Jobs that wait in a real Slurm, and what is done to them on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.core import hostlist, subprocesses
from pitools.site.connect import client
from pitools.site.load import load_site
from pitools.slurm.client import Client
from pitools.slurm.records import SlurmJob
from pitools.topology import discover
from pitools.topology.acquire import loop, node_filter
from pitools.topology.acquire.options import Acquired, AcquireOptions

SCRIPT = "#!/bin/sh\nsleep 20\n"


class Bench:
    """Jobs of one test on alpha, and what is done to them on the way."""

    def __init__(self, slurm: Client, conf: Path) -> None:
        self.slurm, self.env = slurm, {"SLURM_CONF": str(conf)}
        self.fabric = discover.query_fabric(slurm)
        self.made: list[str] = []
        self.drained: list[str] = []
        self.said: list[str] = []

    def submit(self, *args: str) -> str:
        """A short job of 2 nodes, told to wait for its choice."""
        words = [
            "--account=lab",
            "--output=/dev/null",
            "--time=2",
            "--nodes=2",
            "--exclusive",
            *loop.DELAYED_START_ARGS,
            *args,
        ]
        self.made.append(self.slurm.submit(SCRIPT, args=words).job_id)
        return self.made[-1]

    def get(self, job_id: str, *then: Callable[[], object], **wish: Any) -> Acquired:
        """Acquire nodes; after choice i, but before the job may start, `then[i]` happens."""
        steps = iter(then)

        def say(text: str) -> None:
            self.said.append(text)
            if " choice " in text:
                next(steps, lambda: None)()

        return loop.run_acquire_loop(self.slurm, job_id, self.fabric, AcquireOptions(**{"timeout_s": 60, **wish}), say)

    def scontrol(self, *words: str) -> None:
        done = subprocesses.run(["scontrol", *words], timeout_s=20, env=self.env)
        assert done.code == 0, done.stderr

    def release(self) -> None:
        """Take the user's hold from the first job."""
        self.scontrol("release", self.made[0])

    def job(self) -> SlurmJob:
        return self.slurm.job(self.made[0])[0]

    def chosen(self) -> list[str]:
        """The nodes of the last choice."""
        return hostlist.expand(self.said[-1].partition(" is ")[2].rpartition(", ")[0])

    def drain(self, node: str) -> None:
        self.drained.append(node)
        self.scontrol("update", f"nodename={node}", "state=drain", "reason=test_acquire")

    def take(self, node: str) -> None:
        """Another job takes a node, and has it when this returns."""
        job = self.submit("--nodes=1", f"--nodelist={node}", "--begin=now")
        until = time.monotonic() + 20
        while self.slurm.state_of([job])[job] == "PENDING" and time.monotonic() < until:
            time.sleep(0.1)

    def leaf(self, nodes: list[str]) -> set[str]:
        return node_filter.nodes_of_leaves(nodes, self.fabric)


@pytest.fixture
def bench(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Alpha, with whatever the test made of it undone in the end; it is asked twice a second, however long it takes."""
    monkeypatch.setattr(loop, "_MAX_POLL_S", 0.5)
    created = Bench(client(load_site("alpha")), clusters / "alpha" / "slurm.conf")
    yield created
    if created.made:
        created.slurm.cancel(created.made)
    for node in created.drained:
        created.scontrol("update", f"nodename={node}", "state=resume")
