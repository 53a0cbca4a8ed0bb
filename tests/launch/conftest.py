"""Plans of small requests, runs as folders, and a Slurm whose answers a test chooses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pitools.core import timestamps
from pitools.core.subprocesses import Completed
from pitools.launch import plan as planning
from pitools.launch import slurm_cache
from pitools.launch.plan import Plan
from pitools.launch.probes import unreachable_nodes
from pitools.launch.provenance import provenance
from pitools.launch.recovery import apply_decision, requeue_delay, slurm_query
from pitools.launch.request import Request
from pitools.launch.submission import exactly_once, next_job, submissions
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.site import dialect, load
from pitools.site.schema import Site, SitePartition
from pitools.slurm.errors import SlurmReason, SlurmRefused
from pitools.slurm.records import AccountingRow, SlurmJob
from pitools.slurm.states import UNKNOWN
from pitools.slurm.transport import Transport

MakePlan = Callable[..., planning.Plan]


@pytest.fixture
def make_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """A plan of a small request on a site, with its runs in the test's folder unless the site is a cluster."""

    def make(site: str, **asked: Any) -> planning.Plan:
        if site == "local":
            monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
        expected = {"name": "t", "time": "5m", "workdir": str(tmp_path), **asked}
        if "entry" not in expected:
            expected.setdefault("command", "true")
        return planning.make_plan(Request(**expected), load.load_site(site), "test")

    return make


SITE = Site(name="s", partitions={"p": SitePartition(nodes=8)})


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
        self.transport = Transport()

    def ask(self, site: Site, ids: Sequence[str], *, max_age_s: float = 0.0) -> dict[str, str]:
        self.asked += 1
        return {job_id: self.states.get(job_id, UNKNOWN) for job_id in ids}

    def accounting(self, ids: Sequence[str], *, all_starts: bool = True) -> list[AccountingRow]:
        ends = {item: self.ended_at or timestamps.now_rfc3339() for item in self.ended} if all_starts else {}
        reference = self.states | self.ended if all_starts else self.states
        return [
            AccountingRow(job_id=item, raw_id=item, state=reference[item], end=ends.get(item, ""))
            for item in ids
            if item in reference
        ]

    def job(self, job_id: str) -> list[SlurmJob]:
        self.shown.append(job_id)
        reason, restarts = self.waits.get(job_id, ("Priority", 0))
        return [SlurmJob(job_id=job_id, raw_id=job_id, state=self.states[job_id], reason=reason, restarts=restarts)]

    def jobs(self, ids: Sequence[str], *, all_states: bool = False) -> list[SimpleNamespace]:
        now = self.states | self.queue
        return [SimpleNamespace(job_id=item, raw_id=item, state=now[item]) for item in ids if item in now]

    def nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node=f"n{number}", partitions=("q" if number == 8 else "p",)) for number in range(1, 9)]

    def cancel(self, ids: Sequence[str], *, user: str = "") -> None:
        self.cancelled += ids

    def requeue(self, ids: Sequence[str]) -> None:
        self.requeued += ids

    def send(
        self,
        run_dir: Path,
        site: Site,
        *,
        args: Sequence[str] = (),
        job_number: int | None = None,
        retry_for_s: float = 0.0,
    ) -> run_folder.JobRef:
        self.patience.append(retry_for_s)
        if self.refuses:
            raise self.refuses
        if any("99" in argument for argument in args):
            raise SlurmRefused("Invalid node name specified", where="sbatch", reason=SlurmReason.INVALID_NODE_NAME)
        number = submissions.next_job_number(run_dir) if job_number is None else job_number
        if job := submissions.read_job(run_dir, number):
            return job
        self.meanwhile()
        ref = run_folder.JobRef(
            job_id=str(100 + number), site=site.name, submitted=timestamps.now_rfc3339(), job_number=number
        )
        submissions.record_intent(run_dir, number, site, tuple(args))
        run_folder.write_record(submissions.job_dir(run_dir, number) / "job.json", ref)
        run_folder.write_record(run_dir / "job.json", ref)
        self.states.setdefault(ref.job_id, "PENDING")
        self.sent.append(tuple(args))
        return ref


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A Slurm of the test's own in place of the real one; `exactly_once` has its own tests, with a real sbatch."""
    created: Any = Cluster()
    monkeypatch.setattr(slurm_cache, "require_states", created.ask)
    monkeypatch.setattr(slurm_query, "client", lambda site: created)
    monkeypatch.setattr(apply_decision, "client", lambda site: created)
    monkeypatch.setattr(next_job, "client", lambda site: created)
    monkeypatch.setattr(requeue_delay, "client", lambda site: created)
    monkeypatch.setattr(unreachable_nodes, "run_command", lambda *_, **__: Completed((), 0, created.nodes_text, ""))
    monkeypatch.setattr(exactly_once, "submit_once", created.send)
    return created


class Runs:
    """A folder of runs."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        self.root, self.cluster = root, cluster

    def make(self, name: str = "t-1", *, nodes: int = 2, **asked: Any) -> Path:
        """A run whose first job is queued."""
        run_dir = self.root / name
        (run_dir / "attempts").mkdir(parents=True)
        request = Request(name="t", command="true", nodes=nodes, **asked)
        job = dialect.JobSpec(name="t", nodes=nodes, partition="p")
        plan = Plan(name="t", site="s", request=request, job=job, data=(), runs_dir=str(self.root), nvme="", python="p")
        (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
        (run_dir / "script.sbatch").write_text("#!/bin/sh\n")
        run_folder.append_event(run_dir, "created", site="s")
        self.cluster.send(run_dir, SITE)
        self.cluster.sent.clear()
        self.cluster.patience.clear()
        return run_dir

    def attempt(self, run_dir: Path, *, error: str = "", code: int | None = None, progress: int = 0) -> Path:
        """One more attempt of the newest job, with the log that a rank leaves behind that fails so."""
        created = run_dir / "attempts" / str(len(run_folder.attempt_dirs(run_dir)))
        (created / "logs").mkdir(parents=True)
        ref = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
        assert ref is not None
        start = AttemptStart(
            attempt=created.name,
            job_number=ref.job_number,
            job_id=ref.job_id,
            cluster="",
            restart_count=0,
            node_list="n[1-2]",
            nodes=2,
            started=timestamps.now_rfc3339(),
            saved_steps=progress,
        )
        run_folder.write_record(created / "start.json", start)
        if error:
            trace = f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n{error}\n'
            (created / "logs" / "0.out").write_text(trace)
            (created / "first_failure").write_text("1 0 n1")
        if code is not None:
            run_folder.write_record(
                created / "exit.json",
                run_folder.AttemptExit(job_id=ref.job_id, exit_code=code, ended=timestamps.now_rfc3339()),
            )
        return created


@pytest.fixture
def runs(tmp_path: Path, cluster: Cluster) -> Runs:
    """The test's own folder of runs."""
    return Runs(tmp_path / "runs", cluster)


Git = Callable[..., str]
MakeRun = Callable[..., Path]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a module that tells where it is."""
    root = tmp_path / "work"
    root.mkdir()
    (root / "loop.py").write_text("def main(**args):\n    print('from', __file__)\n")
    (root / "settings.toml").write_text("rate = 1\n")
    return root


@pytest.fixture
def git(work: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """git in the workdir, which becomes a repository with one commit."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(work.parent))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def run(*words: str, at: Path = work) -> str:
        name = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
        done = subprocess.run(["git", *name, *words], cwd=at, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    run("init", "-q", "-b", "main")
    run("add", "-A")
    run("commit", "-q", "-m", "first")
    return run


@pytest.fixture
def make_run(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Makes the folder of a run of the workdir, as submission does; `site` and keys of the request may be given."""
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))

    def make(name: str = "r-1", *, site: str = "local", **asked: Any) -> Path:
        expected = {"name": "t", "time": "5m", "workdir": str(work), **asked}
        if "entry" not in expected:
            expected.setdefault("command", "true")
        position = load.load_site(site)
        plan = planning.make_plan(msgspec.convert(expected, Request), position, "test")
        run_dir = tmp_path / "runs" / name
        building = run_dir.with_name(f".{name}")
        building.mkdir(parents=True)
        plan = provenance.capture(plan, position, building, run_dir)
        (building / "plan.json").write_bytes(msgspec.json.encode(plan))
        (building / "attempts").mkdir()
        return building.rename(run_dir)

    return make
