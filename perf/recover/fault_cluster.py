"""A cluster of a bench's own, whose daemons and ranks can be killed, with a site, a tiny dataset and a run to watch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perf.harness.workspace import REPO
from perf.recover import slow_loop

PIT = str(Path(sys.executable).with_name("pit"))
# An interpreter that a node may have broken: see `bad_node`.
PYTHON = """\
#!/bin/sh
if [ -n "$SLURM_PROCID" ] && [ "${{SLURM_STEP_ID:-4294967291}}" -lt 4294967000 ] &&
  [ "$SLURMD_NODENAME" = "$(cat {bad} 2> /dev/null)" ]; then
  echo "{python}: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file:" \\
    "Input/output error" >&2
  exit 127
fi
exec {python} "$@"
"""
SITE = """\
name = "{name}"
accounts = ["lab"]
[slurm]
conf = "{conf}"
cluster = "{name}"
[dialect]
gpus = "none"
[defaults]
partition = "train"
account = "lab"
[tiers]
normal = "normal"
[paths]
runs = "{work}/runs"
nvme = "{work}/nvme/{{node}}"
python = "{work}/python"
[recovery]
exclude_share = 0.5
[partitions.train]
nodes = {nodes}
"""


class FaultCluster:
    """One devcluster, and a folder of work beside it, both of its name. A context: at its end nothing is left."""

    def __init__(
        self, *, name: str = "faults", nodes: int = 4, base_port: int = 29000, requeue_delay_s: int = 10
    ) -> None:
        self.name, self.root, self.work = name, Path(f"/var/tmp/pit-dc-{name}"), Path(f"/var/tmp/pit-{name}-work")
        self.nodes = [f"{name}{i:02d}" for i in range(1, nodes + 1)]
        self.conf, self.runs = self.root / name / "slurm.conf", self.work / "runs"
        options = [
            "--root",
            str(self.root),
            "--clusters",
            name,
            "--nodes",
            str(nodes),
            "--base-port",
            str(base_port),
            "--requeue-delay",
            str(requeue_delay_s),
        ]
        self._up = [str(REPO / "scripts/devcluster"), "up", *options]
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "PIT_"))},
            "SLURM_CONF": str(self.conf),
            "PIT_SITE_PATH": str(self.work / "sites"),
            "XDG_CACHE_HOME": str(self.work / "cache"),
            "XDG_STATE_HOME": str(self.work / "state"),
            "HOME": str(self.work),
            "OMP_NUM_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
        }

    def __enter__(self) -> FaultCluster:
        # Whoever ends this process lets it clean up; two of them would take each other's cluster down.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self._alone = Path(f"/var/tmp/pit-{self.name}.lock").open("w")
        try:
            fcntl.flock(self._alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("another campaign is at work")
        self.down()
        for part in ("sites", "runs", "code", "cache", "state", "nvme"):
            (self.work / part).mkdir(parents=True)
        self.up()
        python = self.work / "python"
        python.write_text(PYTHON.format(python=sys.executable, bad=self.work / "bad-node"))
        python.chmod(0o755)
        output = {"name": self.name, "conf": self.conf, "work": self.work, "nodes": len(self.nodes)}
        (self.work / "sites" / f"{self.name}.toml").write_text(SITE.format(**output))
        shutil.copy(slow_loop.__file__, self.work / "code")
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        self._alone.close()

    def up(self) -> None:
        """Start what does not run."""
        subprocess.run(self._up, check=True, capture_output=True, start_new_session=True)

    def down(self) -> None:
        """End all of it, mounts and cgroups too. Safe to repeat."""
        if self.conf.exists():
            self.run("scancel", "--me", check=False)
        subprocess.run([self._up[0], "down", "--root", str(self.root)], check=False, capture_output=True)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if mount.startswith(f"{self.work}/")]):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        slow_loop.remove_cgroups()
        shutil.rmtree(self.work, ignore_errors=True)

    def run(self, *argv: str, check: bool = True, timeout_s: float = 120) -> str:
        """What a command prints."""
        done = subprocess.run(argv, env=self.env, check=False, capture_output=True, text=True, timeout=timeout_s)
        if check and done.returncode:
            raise SystemExit(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def pit(self, *words: str, **options: Any) -> list[dict[str, Any]]:
        """The records of one of our commands."""
        return [json.loads(line) for line in self.run(PIT, *words, **options).splitlines()]

    def start(self, *argv: str, log: Path) -> subprocess.Popen[bytes]:
        """A command in the background."""
        with log.open("ab") as out:
            return subprocess.Popen(argv, env=self.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def dataset(self) -> Path:
        """A dataset of a few short episodes; its version's folder."""
        recording = self.work / "tiny.hdf5"
        make = [sys.executable, str(REPO / "scripts/examples/make_recording.py"), str(recording)]
        self.run(*make, "--episodes", "8", "--steps", "30", "--size", "32")
        result = self.pit("dataset", "ingest", str(recording), "--to", str(self.work / "datasets"), "--name", "tiny")[
            -1
        ]
        return self.work / "datasets" / result["name"] / result["version"]

    def kill_daemon(self, name: str) -> None:
        """kill -9 of `slurmd-<node>` or `<cluster>-slurmctld`."""
        pid = json.loads((self.root / "processes" / f"{name}.json").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)

    def kill_steps(self, node: str) -> None:
        """kill -9 of every process that jobs have on a node, and of the slurmstepds above them."""
        for _ in range(3):
            for pid in processes_of_node(self.conf, node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    @contextlib.contextmanager
    def read_only_runs(self) -> Iterator[None]:
        """The folder of runs read-only for whoever opens a file there, as a server that fails over has it."""
        folder = self.work / "read-only"
        folder.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", str(self.runs), str(folder)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
            subprocess.run(["mount", "--bind", str(folder), str(self.runs)], check=True)
            try:
                yield
            finally:
                subprocess.run(["umount", "-l", str(self.runs)], check=True)
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)

    @contextlib.contextmanager
    def full_nvme(self, node: str) -> Iterator[None]:
        """A node's own disk too small for the dataset."""
        position = self.work / "nvme" / node
        position.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(position)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(position)], check=True)

    @contextlib.contextmanager
    def bad_node(self, node: str) -> Iterator[None]:
        """A node on which no step starts."""
        path = self.work / "bad-node"
        path.write_text(node)
        try:
            yield
        finally:
            path.unlink()


def processes_of_node(conf: Path, node: str) -> list[int]:
    """Processes of jobs on a node of this cluster, and the slurmstepds that started them."""
    marks = (f"SLURM_CONF={conf}".encode(), f"SLURMD_NODENAME={node}".encode())
    actual: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if set(marks) <= set((entry / "environ").read_bytes().split(b"\0")):
                actual.add(int(entry.name))
                above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"slurmstepd" in (Path("/proc") / str(above) / "cmdline").read_bytes():
                    actual.add(above)
    return sorted(actual - {os.getpid()})


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a growing file of JSON."""
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    return []


def read_json(path: Path) -> dict[str, Any]:
    """A file of JSON; {} where there is none."""
    with contextlib.suppress(OSError):
        record: dict[str, Any] = json.loads(path.read_bytes())
        return record
    return {}


def attempts(run_dir: Path) -> list[Path]:
    """A run's attempts, oldest first."""
    return sorted((p for p in (run_dir / "attempts").glob("*") if p.name.isdigit()), key=lambda path: int(path.name))
