"""Real faults of a real cluster reach a real Prometheus: each alert fires on its own, and none while all is well."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pitools.monitor.rules.prometheus_api import query

SLOS = """
[[slo]]
name = "waits"
measure = "queue-wait"
within = "10s"
objective = 0.99
min_events = 1

[[slo]]
name = "goodput"
measure = "goodput"
objective = 0.99
min_events = 0

[alerts]
PitSiteUnreachable = {for = "10s"}
PitCollectorFailing = {for = "10s"}
PitExporterStale = {limit = 60, for = "5s"}
PitNodesDrained = {limit = 0.2, for = "5s"}
PitQueueStuck = {limit = 30, for = "5s"}
PitRecoveries = {limit = 0}
"""
TRAIN = """
import os, sys, time
from pathlib import Path
from pitools.run.steps import StepLog
attempt = Path(os.environ["PIT_ATTEMPT_DIR"])
log = StepLog(attempt / "steps", 0)
for step in range(int(sys.argv[1])):
    time.sleep(0.5)
    log.write(step=step, loss=1.0, wall_s=0.5, input_s=0.0, compute_s=0.5, comm_s=0.0, rank_samples=1)
if len(sys.argv) > 2 and attempt.name != "2":  # with progress and another code, so that it is tried again
    Path(os.environ["PIT_RUN_DIR"], "progress").write_text(str(10 + int(attempt.name)))
    sys.exit(3 + int(attempt.name))
"""
# Panels of what this cluster has not: GPUs, prices, jobs of several nodes, jobs that wait, drained nodes.
WITHOUT_DATA = {
    "GPUs",
    "GPUs asked for",
    "GPUs without a step for 10 min",
    "Drained GPUs",
    "Cost in an hour",
    "Leaf switches over the fewest",
    "Oldest pending job",
    "Pending jobs",
}
MINUTES = 60  # of health
pytestmark = pytest.mark.slow


class Fleet:
    """A cluster with its runs, an exporter and a Prometheus. Commands end within a minute."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.conf = root / "gamma" / "slurm.conf"
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PIT_", "SLURM_"))}
        self.env |= {"SLURM_CONF": str(self.conf), "PIT_SITE_PATH": str(root / "sites")}
        self.env["XDG_STATE_HOME"] = str(folder / "state")  # an exporter's state is of its site's name
        self.url = ""
        self.processes: list[subprocess.Popen[bytes]] = []

    def call(self, *argv: object, codes: tuple[int, ...] = (0,)) -> str:
        words = [str(word) for word in argv]
        words = [sys.executable, "-m", "pitools", *words[1:]] if words[0] == "pit" else words
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode in codes, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self, *argv: object) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            words = [str(word) for word in argv]
            process = subprocess.Popen(words, cwd=self.folder, env=self.env, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def launch(self, name: str, *words: str) -> str:
        (self.folder / "train.py").write_text(TRAIN)
        (self.folder / f"{name}.toml").write_text(
            f'name = "{name}"\ncommand = "{sys.executable} train.py {" ".join(words)}"\nsnapshot = false\ntime = "9m"\n'
            "[retry]\nprogram = 3\n"
        )
        return str(json.loads(self.call("pit", "launch", "run", f"{name}.toml", "--site", "gamma"))["run_id"])

    def monitor(self, start_prometheus: Callable[..., str], *slos: str) -> subprocess.Popen[bytes]:
        """Start a Prometheus with the rules of a file, or the shipped ones, and an exporter, which is returned."""
        rules = self.call("pit", "monitor", "rules", *slos)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        words = ["monitor", "export", "--site", "gamma", "--listen", address, "--every", "5s"]
        exporter = self.start(sys.executable, "-m", "pitools", *words)
        self.url = start_prometheus({}, rules=rules, scrape=address)
        return exporter

    def watch(self, duration_s: int) -> Counter[str]:
        """For how many seconds an alert was `firing NAME` or `pending NAME`, looked at each second."""
        seen = Counter[str]()
        for _ in range(duration_s):
            time.sleep(1)
            seen.update(f"{state} {name}" for state in ("firing", "pending") for name in self.alerts(state))
        return seen

    def alerts(self, state: str = "firing") -> dict[str, dict[str, str]]:
        """The annotations of alerts, by name, and of SLOs by theirs."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=10) as answer:
            rows = json.load(answer)["data"]["alerts"]
        return {
            row["labels"].get("slo", row["labels"]["alertname"]): row["annotations"]
            for row in rows
            if row["state"] == state
        }

    def wait_for(self, name: str, *, until: bool = True, timeout_s: float = 150) -> None:
        end = time.monotonic() + timeout_s
        while (name in (firing := self.alerts())) != until:
            assert time.monotonic() < end, (name, sorted(firing), (self.folder / "log").read_text()[-2000:])
            time.sleep(0.5)


@pytest.fixture
def fleet(slurm_installed: None, repo: Path, tmp_path: Path) -> Iterator[Fleet]:
    """A cluster of four nodes, up."""
    devcluster = str(repo / "scripts" / "devcluster")
    with tempfile.TemporaryDirectory(prefix="dcr", dir="/var/tmp") as root:
        with Path(root).with_name("dcr.lock").open("w") as lock:  # two that start at once would see the same ones free
            fcntl.flock(lock, fcntl.LOCK_EX)
            for ports in range(29000, 31000, 400):  # above those of other tests' clusters
                argv = [devcluster, "up", "--root", root, "--clusters", "gamma", "--nodes", "4"]
                argv += ["--base-port", str(ports)]
                done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
                if "--base-port" not in done.stderr:  # they are free
                    break
                subprocess.run([devcluster, "down", "--root", root], capture_output=True, timeout=150, check=True)
        fleet = Fleet(Path(root), tmp_path)
        try:
            assert done.returncode == 0, done.stderr
            yield fleet
        finally:
            for process in reversed(fleet.processes):
                process.terminate()
                process.wait()
            subprocess.run([devcluster, "down", "--root", root], capture_output=True, timeout=150, check=True)


@pytest.fixture
def boards(repo: Path) -> ModuleType:
    """tests/monitor/rules/test_dashboards.py, for its queries."""
    spec = importlib.util.spec_from_file_location("boards", Path(__file__).with_name("test_dashboards.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(60 * MINUTES + 900)
def test_a_healthy_hour_is_silent(fleet: Fleet, start_prometheus: Callable[..., str]) -> None:
    """The shipped rules, while small jobs and runs begin and end: none fires, and at the end none is pending."""
    fleet.launch("first", "200")  # a site whose folder of runs is missing is not well
    fleet.monitor(start_prometheus)
    seen = Counter[str]()
    for turn in range(6 * MINUTES):
        if turn % 30 == 15:
            fleet.launch(f"run{turn}", "200")
        fleet.call("sbatch", "-A", "lab", "-o", "/dev/null", "--wrap", f"sleep {turn % 12}")
        seen += fleet.watch(10)
    print("seconds that an alert was seen:", dict(seen))
    assert not [name for name in seen if name.startswith("firing")], seen
    assert not fleet.alerts("pending"), seen
    with urllib.request.urlopen(f"{fleet.url}/api/v1/rules", timeout=10) as answer:
        rules = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    (jobs,) = query(fleet.url, "sum(pit_queue_wait_seconds_count)")
    (ended,) = query(fleet.url, 'sum(pit_runs_ended_total{cause="succeeded"}) or vector(0)')
    assert (jobs.value >= 5 * MINUTES, ended.value >= MINUTES / 5 - 2) == (True, True), (jobs, ended)


@pytest.mark.timeout(1500)
def test_each_alert_fires_on_its_fault(
    fleet: Fleet, start_prometheus: Callable[..., str], boards: ModuleType, tmp_path: Path
) -> None:
    """Drained nodes, a dead slurmctld, a stuck queue, a run that fails twice and a dead exporter; a minute without.

    Some seven minutes, because the exporter looks at the runs each five.
    """
    (tmp_path / "slos.toml").write_text(SLOS)
    fleet.launch("well", "900")
    exporter = fleet.monitor(start_prometheus, "slos.toml")
    assert not [name for name in fleet.watch(60) if name.startswith("firing")]
    fleet.call("pit", "monitor", "check", "slos.toml", "--prometheus", fleet.url)

    fleet.call("scontrol", "update", "nodename=gamma04", "state=drain", "reason=test")
    fleet.wait_for("PitNodesDrained")
    fleet.call("scontrol", "update", "nodename=gamma04", "state=resume")
    fleet.wait_for("PitNodesDrained", until=False)

    os.kill(int((fleet.root / "gamma" / "slurmctld.pid").read_text()), signal.SIGKILL)
    fleet.wait_for("PitSiteUnreachable")
    assert set(fleet.alerts()) == {"PitSiteUnreachable"}  # no tickets of its collectors
    fleet.start("slurmctld", "-D", "-f", fleet.conf)
    fleet.wait_for("PitSiteUnreachable", until=False)

    fleet.call("scontrol", "update", "nodename=gamma[01-04]", "state=drain", "reason=test")
    for _ in range(3):
        fleet.call("sbatch", "-A", "lab", "-o", "/dev/null", "--wrap", "true")
    fleet.wait_for("PitQueueStuck")
    fleet.call("scontrol", "update", "nodename=gamma[01-04]", "state=resume")
    fleet.wait_for("PitQueueStuck", until=False)
    fleet.wait_for("waits")

    fleet.launch("failing", "10", "twice")
    fleet.wait_for("PitRecoveries", timeout_s=400)
    fleet.wait_for("goodput")
    rows = [
        json.loads(line)
        for line in fleet.call(
            "pit", "monitor", "check", "slos.toml", "--prometheus", fleet.url, codes=(1,)
        ).splitlines()
    ]
    assert {row["slo"] for row in rows if row["burning"]} >= {"goodput"}
    empty = {title for _, title in boards.empty_queries(fleet.url)}
    assert empty <= WITHOUT_DATA

    exporter.terminate()
    fleet.wait_for("PitExporterStale")
    for name, texts in fleet.alerts().items():
        assert "gamma" in texts["summary"], name
        assert texts["runbook"].startswith("pit "), name
        assert "<error" not in "".join(texts.values()), name
