"""Two Slurm clusters of a benchmark's own, north and south: start them, break them, count requests to slurmctld."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from perf.harness.workspace import REPO

NAMES = ("north", "south")
NODES = 8  # of each cluster
DOWN_S = 5.0  # between a controller's death and its restart
SITE = """\
name = "{name}"
accounts = ["lab"]
[slurm]
conf = "{root}/{name}/slurm.conf"
{more}[dialect]
gpus = "none"
[defaults]
partition = "train"
account = "lab"
[paths]
runs = "{runs}"
[partitions.train]
nodes = {nodes}
"""


class TwoClusters:
    """The clusters of one `scripts/devcluster`, below `root`. Requests are counted also over a controller's death."""

    def __init__(self, root: Path, base_port: int) -> None:
        self.root = root
        self._devcluster = str(REPO / "scripts/devcluster")
        options = ["--clusters", ",".join(NAMES), "--nodes", str(NODES), "--base-port", str(base_port)]
        self._up = [self._devcluster, "up", "--root", str(root), *options]
        self._before_death: Counter[str] = Counter()

    def fresh(self) -> None:
        """Start them with an empty state: a controller's death leaves nodes drained and jobs forgotten."""
        self.down()
        self._before_death.clear()
        self.start()

    def start(self) -> None:
        """Start what does not run."""
        subprocess.run(self._up, check=True, capture_output=True, start_new_session=True)

    def down(self) -> None:
        """End them."""
        subprocess.run([self._devcluster, "down", "--root", str(self.root)], check=True, capture_output=True)

    def env(self, name: str) -> dict[str, str]:
        """Return the environment of Slurm's commands to one of them."""
        return {**os.environ, "SLURM_CONF": str(self.root / name / "slurm.conf")}

    def output(self, name: str, *argv: str) -> str:
        """Return what a command of Slurm prints about one of them."""
        return subprocess.run(argv, env=self.env(name), capture_output=True, text=True, check=True).stdout

    def version(self) -> str:
        """Return Slurm's version."""
        return self.output(NAMES[0], "sbatch", "-V").split()[-1]

    def requests(self) -> Counter[str]:
        """Return the requests to both controllers by type, since `fresh`."""
        return sum((self._requests_of(name) for name in NAMES), self._before_death)

    def _requests_of(self, name: str) -> Counter[str]:
        section = self.output(name, "sdiag").partition("by message type")[2].partition("by user")[0]
        counter = Counter({kind: int(n) for kind, n in re.findall(r"(\w+)\s+\( *\d+\) count:(\d+)", section)})
        del counter["REQUEST_STATS_INFO"]  # sdiag's own
        return counter

    def kill_controller(self, name: str) -> None:
        """Kill (-9) a slurmctld; `start` starts it again."""
        self._before_death += self._requests_of(name)
        os.kill(int((self.root / name / "slurmctld.pid").read_text()), signal.SIGKILL)

    def write_sites(self, folder: Path, *, runs: Path, with_cluster_name: bool = False, tables: str = "") -> None:
        """Write both site files into a folder. with_cluster_name: set `slurm.cluster`. tables: TOML added to each."""
        for name in NAMES:
            more = f'cluster = "{name}"\n' if with_cluster_name else ""
            site = SITE.format(name=name, root=self.root, more=more, runs=runs, nodes=NODES)
            (folder / f"{name}.toml").write_text(site + tables)


def act_when(is_due: Callable[[], bool], act: Callable[[], None], *, limit_s: float) -> threading.Thread:
    """Call `act` in a thread as soon as `is_due`, at the latest after `limit_s`; return the thread."""

    def wait() -> None:
        began = time.time()
        while not is_due() and time.time() - began < limit_s:
            time.sleep(0.2)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
