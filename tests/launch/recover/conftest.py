"""Runs as folders, on a Slurm that says what a test has it say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pitools.core import clock
from pitools.core.proc import Completed
from pitools.launch import jobs, once, polling
from pitools.launch.attempt import silent
from pitools.launch.plan import Plan
from pitools.launch.recover import asking, putback, settling
from pitools.launch.request import Request
from pitools.run import folder
from pitools.run.attempt import Start
from pitools.site import dialect
from pitools.site.model import Partition, Site
from pitools.slurm.reach import Reach
from pitools.slurm.records import Accounting, Job
from pitools.slurm.refusals import SlurmReason, SlurmRefused
from pitools.slurm.states import UNKNOWN

SITE = Site(name="s", partitions={"p": Partition(nodes=8)})


class Cluster:
    """What Slurm knows. states: job id → word; queue: slurmctld's own, where it knows better than who asked before.

    sent: the flags of every job that was submitted since; patience: with what. meanwhile: happens while one is. waits:
    why a job does that, and how often it was put back; ended: how it had ended before, at `ended_at` ("": now); shown:
    who was asked for. nodes_text: of `scontrol`.
    """

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.queue: dict[str, str] = {}
        self.meanwhile: Callable[[], object] = lambda: None
        self.sent: list[tuple[str, ...]] = []
        self.cancelled: list[str] = []
        self.requeued: list[str] = []
        self.asked = 0
        self.refuses: Exception | None = None
        self.ended: dict[str, str] = {}
        self.waits: dict[str, tuple[str, int]] = {}
        self.ended_at = ""
        self.shown: list[str] = []
        self.patience: list[float] = []
        self.nodes_text = ""
        self.reach = Reach()

    def ask(self, site: Site, ids: Sequence[str], *, max_age_s: float = 0.0) -> dict[str, str]:
        self.asked += 1
        return {job_id: self.states.get(job_id, UNKNOWN) for job_id in ids}

    def accounting(self, ids: Sequence[str], *, attempts: bool = True) -> list[Accounting]:
        ends = {one: self.ended_at or clock.now() for one in self.ended} if attempts else {}
        known = self.states | self.ended if attempts else self.states
        return [
            Accounting(job_id=one, raw_id=one, state=known[one], end=ends.get(one, "")) for one in ids if one in known
        ]

    def job(self, job_id: str) -> list[Job]:
        self.shown.append(job_id)
        reason, restarts = self.waits.get(job_id, ("Priority", 0))
        return [Job(job_id=job_id, raw_id=job_id, state=self.states[job_id], reason=reason, restarts=restarts)]

    def jobs(self, ids: Sequence[str], *, all_states: bool = False) -> list[SimpleNamespace]:
        now = self.states | self.queue
        return [SimpleNamespace(state=now[one]) for one in ids if one in now]

    def nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node=f"n{number}") for number in range(1, 9)]

    def cancel(self, ids: Sequence[str], *, user: str = "") -> None:
        self.cancelled += ids

    def requeue(self, ids: Sequence[str]) -> None:
        self.requeued += ids

    def send(
        self, run_dir: Path, site: Site, *, args: Sequence[str] = (), number: int | None = None, patience_s: float = 0.0
    ) -> folder.JobRef:
        self.patience.append(patience_s)
        if self.refuses:
            raise self.refuses
        if any("99" in word for word in args):
            raise SlurmRefused("Invalid node name specified", where="sbatch", reason=SlurmReason.INVALID_NODE_NAME)
        number = jobs.due(run_dir) if number is None else number
        if found := jobs.known(run_dir, number):
            return found
        self.meanwhile()
        ref = folder.JobRef(job_id=str(100 + number), site=site.name, submitted=clock.now(), number=number)
        jobs.intend(run_dir, number, site, tuple(args))
        folder.write(jobs.at(run_dir, number) / "job.json", ref)
        folder.write(run_dir / "job.json", ref)
        self.states.setdefault(ref.job_id, "PENDING")
        self.sent.append(tuple(args))
        return ref


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A Slurm of the test's own in place of the real one; `once` has its own tests, with a real sbatch."""
    made: Any = Cluster()
    monkeypatch.setattr(polling, "ask", made.ask)
    monkeypatch.setattr(asking, "client", lambda site: made)
    monkeypatch.setattr(settling, "client", lambda site: made)
    monkeypatch.setattr(putback, "client", lambda site: made)
    monkeypatch.setattr(silent, "call", lambda *_, **__: Completed((), 0, made.nodes_text, ""))
    monkeypatch.setattr(once, "send", made.send)
    return made


class Runs:
    """A folder of runs."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        self.root, self.cluster = root, cluster

    def make(self, name: str = "t-1", *, nodes: int = 2, **asked: Any) -> Path:
        """A run whose first job is queued."""
        run_dir = self.root / name
        (run_dir / "attempts").mkdir(parents=True)
        request = Request(name="t", command="true", nodes=nodes, **asked)
        job = dialect.Job(name="t", nodes=nodes, partition="p")
        plan = Plan(name="t", site="s", request=request, job=job, data=(), runs=str(self.root), nvme="", python="p")
        (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
        (run_dir / "script.sbatch").write_text("#!/bin/sh\n")
        folder.note(run_dir, "created", site="s")
        self.cluster.send(run_dir, SITE)
        self.cluster.sent.clear()
        self.cluster.patience.clear()
        return run_dir

    def attempt(self, run_dir: Path, *, error: str = "", code: int | None = None, progress: int = 0) -> Path:
        """One more attempt of the newest job, with the log that a rank leaves behind that fails so."""
        made = run_dir / "attempts" / str(len(folder.attempts(run_dir)))
        (made / "logs").mkdir(parents=True)
        ref = folder.read(run_dir / "job.json", folder.JobRef)
        assert ref is not None
        start = Start(
            attempt=made.name, job=ref.number, job_id=ref.job_id, cluster="", restart=0, node_list="n[1-2]", nodes=2,
            started=clock.now(), progress=progress,
        )  # fmt: skip
        folder.write(made / "start.json", start)
        if error:
            trace = f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n{error}\n'
            (made / "logs" / "0.out").write_text(trace)
            (made / "first_failure").write_text("1 0 n1")
        if code is not None:
            folder.write(made / "exit.json", folder.Attempt(job_id=ref.job_id, exit_code=code, ended=clock.now()))
        return made


@pytest.fixture
def runs(tmp_path: Path, cluster: Cluster) -> Runs:
    """The test's own folder of runs."""
    return Runs(tmp_path / "runs", cluster)
