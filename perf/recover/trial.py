"""One run under faults: started, aimed at by its steps, hit, waited for, and measured."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from perf.recover.fault_cluster import PIT, FaultCluster, attempts, read_json, read_json_lines

TICK_S = 20.0  # cron's, only more often
POLL_S = 0.1
REQUEST = """\
name = "{name}"
entry = "slow_loop:{loop}"
framework = "{loop}"
nodes = {nodes}
time = "{time}"
signal = "USR2@{notice_s}"
workdir = "{code}"
[data]
demo = "{data}"
[watch]
hang_factor = 10.0
min_stall = "15s"
first_step = "3m"
[args]
{args}
"""


class InjectedFault(NamedTuple):
    """A fault that was done: when (Unix time), and to which attempt."""

    t: float
    attempt: str


class Shape(NamedTuple):
    """What every run of a campaign is: its steps, how often it saves, seconds a step, its nodes."""

    steps: int = 40
    save_every: int = 5
    delay_s: float = 0.15
    nodes: int = 2


class Trial:
    """A run of one of the loops. args: more of `slow_loop`'s; time, notice_s: its limit, and the warning before."""

    def __init__(
        self,
        cluster: FaultCluster,
        name: str,
        loop: str,
        data: Path,
        shape: Shape,
        dice: random.Random,
        *,
        args: dict[str, Any] | None = None,
        time: str = "10m",
        notice_s: int = 60,
    ) -> None:
        self.cluster, self.loop, self.shape, self.dice, self.name = cluster, loop, shape, dice, f"{name}-{loop}"
        self.hits: list[InjectedFault] = []
        self.run_dir = Path()
        self._later: list[threading.Thread] = []
        self._ticked = 0.0
        self._tick: subprocess.Popen[bytes] | None = None
        self._before = set(cluster.runs.glob(f"{self.name}-*"))
        arguments = {
            "steps": shape.steps,
            "global_batch_size": 16,
            "checkpoint_every": shape.save_every,
            "delay_s": shape.delay_s,
            **(args or {}),
        }
        self.request = cluster.work / f"{self.name}.toml"
        output = {"name": self.name, "loop": loop, "nodes": shape.nodes, "time": time, "notice_s": notice_s}
        text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
        self.request.write_text(REQUEST.format(**output, code=cluster.work / "code", data=data, args=text))
        self.login = self._submit()

    def _submit(self) -> subprocess.Popen[bytes]:
        argv = [PIT, "launch", "run", str(self.request), "--site", self.cluster.name, "--wait", "--format", "jsonl"]
        return self.cluster.start(*argv, log=self.cluster.work / f"{self.name}.out")

    def has_started(self) -> bool:
        """Whether the run's folder is there."""
        new = [path for path in self.cluster.runs.glob(f"{self.name}-*") if path not in self._before]
        self.run_dir = max(new, key=lambda path: path.name, default=Path())
        return bool(new) and (self.run_dir / "plan.json").exists()

    def attempt(self) -> Path:
        """The newest attempt."""
        created = attempts(self.run_dir) if self.has_started() else []
        return created[-1] if created else self.run_dir / "attempts" / "none"

    def step(self) -> int:
        """The last step that rank 0 of the newest attempt wrote down; -1 for none."""
        done = read_json_lines(self.attempt() / "steps" / "0.jsonl")
        return int(done[-1]["step"]) if done else -1

    def verdict(self) -> dict[str, Any]:
        """How the run ended; {} until it has."""
        return read_json(self.run_dir / "verdict.json") if self.has_started() else {}

    def wait_until(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Wait, with cron's tick meanwhile; whether it came before the run's end, and in time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if ready():
                return True
            if self.verdict():
                return False
            self.tick()
            time.sleep(POLL_S)
        return False

    def tick(self) -> None:
        """`pit launch tick`, as cron calls it: every TICK_S, whatever became of the last."""
        if time.monotonic() - self._ticked > TICK_S and (self._tick is None or self._tick.poll() is not None):
            self._ticked = time.monotonic()
            argv = [PIT, "launch", "tick", "--site", self.cluster.name]
            self._tick = self.cluster.start(*argv, log=self.cluster.work / "tick.out")

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Do something after a while; the trial does not end before."""
        thread = threading.Timer(seconds, act)
        thread.start()
        self._later.append(thread)

    def record_fault(self) -> None:
        """Write down that a fault happens now."""
        self.hits.append(InjectedFault(time.time(), self.attempt().name))

    def rank_pid(self, rank: int) -> int:
        """The process of a rank of the newest attempt, if it is still one of this run's. Raises ProcessLookupError."""
        pid = int(read_json(self.attempt() / "ranks" / f"{rank}.json").get("pid", 0))
        try:
            if pid and str(self.run_dir).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        except OSError:
            pass
        raise ProcessLookupError(rank)

    def nodes(self) -> list[str]:
        """Nodes of the newest attempt, by rank."""
        ranks = (read_json(self.attempt() / "ranks" / f"{rank}.json") for rank in range(self.shape.nodes))
        return [str(rank["node"]) for rank in ranks if rank]

    def end(self, limit_s: float) -> None:
        """Wait for the verdict; whatever is left of the run then is cancelled."""
        self.wait_until(lambda: bool(self.verdict()), limit_s)
        for thread in self._later:
            thread.join()
        if self.has_started() and not self.verdict():
            self.cluster.run(PIT, "launch", "cancel", str(self.run_dir), "--site", self.cluster.name, check=False)
        self.cluster.run("scancel", "--me", check=False)
        for process in (self.login, self._tick):
            if process:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()

    # What became of it.

    def loss(self) -> float | None:
        """Of the last step; None where that was not made."""
        last = [
            json_line
            for path in attempts(self.run_dir)
            for json_line in read_json_lines(path / "steps" / "0.jsonl")
            if json_line["step"] == self.shape.steps - 1
        ]
        return last[-1]["loss"] if last else None

    def cause(self, attempt: str) -> dict[str, Any]:
        """Why an attempt ended, as it was judged; of a job that never began one, why that did."""
        record = read_json(self.run_dir / "attempts" / attempt / "cause.json")
        return record or read_json(self.run_dir / "jobs" / "0" / "cause.json")

    def recovery_of(self, hit: InjectedFault) -> tuple[float | None, int | None]:
        """(seconds from a fault to the next new step, steps that were made twice); None where there was no next."""
        faulted = read_json_lines(self.run_dir / "attempts" / hit.attempt / "steps" / "0.jsonl")
        for path in attempts(self.run_dir):
            if int(path.name) > int(hit.attempt) and (done := read_json_lines(path / "steps" / "0.jsonl")):
                reached = int(faulted[-1]["step"]) + 1 if faulted else 0
                return unix_time(done[0]["t"]) - hit.t, max(0, reached - int(done[0]["step"]))
        went_on = [unix_time(item["t"]) for item in faulted if unix_time(item["t"]) > hit.t]
        return (went_on[0] - hit.t, 0) if went_on else (None, None)

    def ended(self, attempt: Path) -> float:
        """When an attempt ended: its last word, or its last step."""
        exit_ = read_json(attempt / "exit.json")
        done = read_json_lines(attempt / "steps" / "0.jsonl")
        return unix_time(exit_["ended"]) if exit_ else unix_time(done[-1]["t"]) if done else time.time()


def unix_time(text: str) -> float:
    """A moment as Unix time."""
    return datetime.fromisoformat(text).timestamp()


def reset_cluster(cluster: FaultCluster) -> None:
    """Bring the cluster back to where a trial begins: all daemons up, all nodes idle, nothing excluded.

    And with calls left for asking Slurm: nobody else begins a run a minute.
    """
    cluster.up()
    shutil.rmtree(cluster.work / "cache" / "pitools" / "slurm-cache", ignore_errors=True)
    for path in cluster.runs.glob(".exclusions.*.jsonl"):
        path.unlink()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        parts = cluster.run("sinfo", "-h", "-N", "-p", "train", "-o", "%N %T", check=False).split("\n")
        states = dict(line.split() for line in parts if line)
        if len(states) == len(cluster.nodes) and set(states.values()) == {"idle"}:
            return
        for node, state in states.items():
            if state.startswith(("down", "drain")):
                cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        time.sleep(1)
    raise SystemExit(f"the nodes do not come back: {states}")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal, to whoever is left."""
    os.kill(pid, number)
