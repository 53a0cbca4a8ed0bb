"""Three tiers on a development cluster, and runs in them: urgent preempts scavengers, and nobody else."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from perf.recover.fault_cluster import PIT, attempts, read_json, read_json_lines
from perf.recover.trial import unix_time
from perf.tenancy import light_loop

LIMIT_S = 240.0
TICK_S = 20.0  # `pit launch tick`, as cron would call it, only more often
TIERS = '[tiers]\nnormal = "normal"\nscavenger = "scavenger"\nurgent = "urgent"\n'
POLICY = """
[tiers.scavenger]
priority = 10
preempt_mode = "requeue"
grace_time = "00:00:20"

[tiers.urgent]
priority = 1000
preempts = ["scavenger"]
"""
REQUEST = """\
name = "{name}"
entry = "{entry}"
framework = "{framework}"
tier = "{tier}"
partition = "{partition}"
nodes = {nodes}
cpus_per_task = 4
time = "10m"
signal = "USR2@60"
workdir = "{workdir}"
{data}
[watch]
min_stall = "15s"
[args]
steps = {steps}
global_batch_size = 16
checkpoint_every = {save_every}
delay_s = {delay_s}
{more}
"""


class SlurmCluster(Protocol):
    """A running cluster: its name, a folder for requests, the folder of runs, and how to run commands there."""

    name: str
    work: Path
    runs: Path

    def run(self, *argv: str, check: bool = True) -> str:
        """Return what a command prints."""

    def pit(self, *words: str) -> list[dict[str, Any]]:
        """Return the records of one of our commands."""


class Tiers:
    """The tiers of POLICY, made by `pit tenancy run`, and undone when the context ends."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> Tiers:
        cluster = self.cluster
        policy = cluster.work / "policy.toml"
        imported = cluster.run(PIT, "tenancy", "import", "--site", cluster.name)
        text = re.sub(r"(?s)(\[teams\.lab\].*?\ntiers = \[.*?)\]", r'\1, "scavenger", "urgent"]', imported, count=1)
        policy.write_text(text + POLICY)
        self._changes = cluster.pit("tenancy", "run", str(policy), "--site", cluster.name)
        time.sleep(1)  # until slurmctld has been told
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.run("scancel", "--me", "--qos=scavenger,urgent", check=False)
        self.cluster.pit("tenancy", "run", "--undo", self._changes[0]["run"], "--site", self.cluster.name)

    def sacctmgr(self, words: str) -> None:
        """Change accounting, and wait until slurmctld has been told."""
        self.cluster.run("sacctmgr", "-i", *words.split())
        time.sleep(1)

    @contextmanager
    def scavengers(self, **settings: str) -> Iterator[None]:
        """Change settings of the QOS `scavenger`, for a while."""
        usual = {"preemptmode": "requeue", "gracetime": "20", "preemptexempttime": "-1"}
        self.sacctmgr("modify qos scavenger set " + " ".join(f"{key}={value}" for key, value in settings.items()))
        try:
            yield
        finally:
            self.sacctmgr("modify qos scavenger set " + " ".join(f"{key}={usual[key]}" for key in settings))


class RunFolder:
    """What the folder of a run says."""

    def __init__(self, cluster: SlurmCluster, run_dir: Path) -> None:
        self.cluster, self.run_dir = cluster, run_dir

    def logs(self) -> list[list[dict[str, Any]]]:
        """Return the steps of rank 0 in each attempt."""
        return [read_json_lines(attempt / "steps" / "0.jsonl") for attempt in attempts(self.run_dir)]

    def steps(self) -> int:
        """Return the number of steps that are logged."""
        return sum(map(len, self.logs()))

    def losses(self) -> dict[int, set[float]]:
        """Return step → every loss that was logged for it: two only where a repeated step had another."""
        found: dict[int, set[float]] = {}
        for line in (line for log in self.logs() for line in log):
            found.setdefault(line["step"], set()).add(line["loss"])
        return found

    def repeated(self) -> int:
        """Return how many steps were made twice."""
        return self.steps() - len(self.losses())

    def causes(self) -> list[str]:
        """Return why each attempt ended."""
        return [str(read_json(attempt / "cause.json").get("kind", "")) for attempt in attempts(self.run_dir)]

    def job_ids(self) -> list[str]:
        """Return the ids of the run's jobs, oldest first."""
        paths = sorted(self.run_dir.glob("jobs/*/job.json"), key=lambda path: int(path.parent.name))
        return [str(read_json(path)["job_id"]) for path in paths]

    def verdict(self) -> str:
        """Return how the run ended; "" until it has."""
        return str(read_json(self.run_dir / "verdict.json").get("kind", ""))

    def cancel(self) -> None:
        """End the run."""
        self.cluster.run(PIT, "launch", "cancel", str(self.run_dir), "--site", self.cluster.name, check=False)


class TierRun(RunFolder):
    """A run that was submitted now. It takes the options of `write_request`."""

    def __init__(self, cluster: SlurmCluster, name: str, tier: str, **options: Any) -> None:
        request = write_request(cluster, name, tier, **options)
        self.submitted = time.time()
        (record,) = cluster.pit("launch", "run", str(request), "--site", cluster.name)
        super().__init__(cluster, Path(record["run_dir"]))

    def first_step_s(self) -> float:
        """Return the seconds from the submission to the end of the first step."""
        return unix_time(next(log for log in self.logs() if log)[0]["t"]) - self.submitted


def write_request(
    cluster: SlurmCluster,
    name: str,
    tier: str,
    *,
    loop: str = "light",
    nodes: int = 2,
    steps: int = 60,
    save_every: int = 20,
    delay_s: float = 1.0,
    partition: str = "train",
    data: Path | None = None,
    hold_at: int | None = None,
) -> Path:
    """Write the request of a loop: jax or torch of `perf.recover.slow_loop`, on the dataset `data`, or light.

    delay_s, and of light hold_at: see there.
    """
    workdir = cluster.work / "code"
    workdir.mkdir(exist_ok=True)
    shutil.copy(light_loop.__file__, workdir)
    request = cluster.work / f"{name}.toml"
    text = REQUEST.format(
        name=name,
        entry="light_loop:light" if loop == "light" else f"slow_loop:{loop}",
        framework="none" if loop == "light" else loop,
        tier=tier,
        partition=partition,
        nodes=nodes,
        workdir=workdir,
        data=f'[data]\ndemo = "{data}"' if data and loop != "light" else "",
        steps=steps,
        save_every=save_every,
        delay_s=delay_s,
        more="" if hold_at is None else f"hold_at = {hold_at}",
    )
    request.write_text(text)
    return request


def wait_until(cluster: SlurmCluster, ready: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait, with cron's tick meanwhile. Raises SystemExit with the queue after the time-out."""
    deadline, tick_at = time.monotonic() + limit_s, time.monotonic() + TICK_S
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {limit_s:g} s\n{cluster.run('squeue', '-o', '%i %j %q %T %r %N')}")
        if time.monotonic() > tick_at:
            tick_at = time.monotonic() + TICK_S
            cluster.pit("launch", "tick", "--site", cluster.name)
        time.sleep(0.2)


def finish(runs: Sequence[TierRun], what: str = "the end of all runs") -> None:
    """Let all runs make their steps without a delay, and wait until they have ended."""
    for run in runs:
        (run.run_dir / "go").touch()
    wait_until(runs[0].cluster, lambda: all(run.verdict() for run in runs), what)


def preempted(cluster: SlurmCluster) -> set[str]:
    """Return the jobs that slurmctld has preempted: those too that then ended by themselves, or were suspended."""
    records = (
        dict(re.findall(r"(\w+)=(\S*)", line)) for line in cluster.run("scontrol", "-o", "show", "job").splitlines()
    )
    marks = ("PreemptTime", "SuspendTime")
    return {record["JobId"] for record in records if any(record.get(mark, "None") != "None" for mark in marks)}
