"""Sites and snapshots of the test's own, and far sides of every kind behind an `ssh` that is a script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.place.clusters.account_limits import AccountLimits
from pitools.place.clusters.snapshot import Snapshot
from pitools.site.schema import Site
from pitools.site.schema import SitePartition as Said
from pitools.slurm.records import Association, Node, Partition, SlurmJob

# What stands at the end of the command line is what the far side's shell would run. The host says how it answers.
SSH = """\
#!/bin/sh
[ "$1" = -G ] && exit 1
for last; do host=$word; word=$last; done
echo "$host" >> {calls}
case "$host" in
  true*) exec sh -c "$last" ;;
  dark) exec sleep 600 ;;
  closed) echo 'ssh: connect to host closed port 22: Connection refused' >&2; exit 255 ;;
  garbage) head -c 5000 /dev/urandom; exit 0 ;;
  nothing) exit 0 ;;
  half) sh -c "$last" > {folder}/out.$$ 2> {folder}/err.$$
        head -c $(( $(wc -c < {folder}/out.$$) / 2 )) {folder}/out.$$; cat {folder}/err.$$ >&2 ;;
  lines) sh -c "$last" | sed '/^NodeName=[a-z]*0[5-8] /d' ;;
  twice) sh -c "$last" | sed '/^NodeName=/p' ;;
  billion) sh -c "$last" | sed 's/ Nodes=alpha[^ ]*/ Nodes=alpha[0-9999999999]/' ;;
  ahead) sh -c "$last" | sed "2s/.*/$(( $(date +%s) + 3600 ))/" ;;
  noclock) sh -c "$last" | sed '2s/.*/soon/' ;;
  drip) yes | while read -r y; do printf '\036'; sleep 0.05; done ;;
  slow) case "$last" in *sbatch*) exec sleep 600 ;; esac; exec sh -c "$last" ;;
  wrong) exec sh -c "$(printf %s "$last" | sed s,/alpha/slurm.conf,/beta/slurm.conf,g)" ;;
  liar) sh -c "$last" 2> {folder}/err.$$; rc=$?
        sed 's/on nodes [^ ]*/on nodes evil[1-9]/' {folder}/err.$$ >&2; exit $rc ;;
  late) sh -c "$last" 2> {folder}/err.$$; rc=$?
        sed 's/to start at [^ ]*/to start at 2099-01-01T00:00:00/' {folder}/err.$$ >&2; exit $rc ;;
esac
"""

NODES = 4


def node(name: str, **values: Any) -> Node:
    """An idle node of 8 GPUs in partition `gpu`."""
    plain = {
        "state": "idle",
        "partitions": ("gpu",),
        "gres": "gpu:h100:8",
        "gpu_type": "h100",
        "gpus": 8,
        "gpus_allocated": 0,
        "cpus": 64,
        "memory_mib": 512 * 1024,
    }
    return Node(node=name, **{**plain, **values})


def job(job_id: str, **values: Any) -> SlurmJob:
    """Somebody's running job on one whole node of partition `gpu`."""
    plain = {
        "raw_id": job_id.split("_")[0],
        "state": "RUNNING",
        "user": "them",
        "account": "lab",
        "partition": "gpu",
        "nodes": 1,
        "gres": "gpu:8",
        "name": f"their-{job_id}",
    }
    return SlurmJob(job_id=job_id, **{**plain, **values})


@pytest.fixture
def made(tmp_path: Path) -> type[Made]:
    """What makes sites and snapshots."""
    Made.folder = tmp_path
    return Made


class Made:
    """Makes records that go together: a site `x` with partition `gpu` on nodes n1 to n4."""

    folder = Path()
    node, job = staticmethod(node), staticmethod(job)

    @classmethod
    def site(cls, **values: Any) -> Site:
        """A site; `gpu`: keys of its partition."""
        output = {"nodes": NODES, "gpu": "h100", "gpus_per_node": 8, "gpu_memory_gib": 80, **values.pop("gpu", {})}
        plain = {"name": "x", "partitions": {"gpu": Said(**output)}}
        return Site(**{**plain, **values})

    @classmethod
    def snapshot(cls, **values: Any) -> Snapshot:
        """An idle site, seen now. `partition`: fields of it."""
        nodes = values.pop("nodes", tuple(node(f"n{number}") for number in range(1, NODES + 1)))
        named = ",".join(item.node for item in nodes)
        fields = {"state": "up", "node_list": named, "nodes": len(nodes), **values.pop("partition", {})}
        plain = {
            "site": "x",
            "seen_s": time.time(),
            "skew_s": 0.0,
            "cluster": "x",
            "enforced_limits": (),
            "nodes": nodes,
            "jobs": (),
            "partitions": (Partition(partition="gpu", **fields),),
        }
        return Snapshot(**{**plain, **values})

    @classmethod
    def standing(cls, *rows: Association, **values: Any) -> AccountLimits:
        """Ours at the site."""
        plain = {
            "user": "me",
            "associations": rows or (Association(cluster="x", account="lab", user="me"),),
            "qos": (),
            "used_gpu_hours": 0.0,
        }
        return AccountLimits(**{**plain, **values})


class Far:
    """Sites behind the scripted ssh, all of them alpha, and a `pit` that knows them."""

    def __init__(self, folder: Path, clusters: Path, dev_sites: Path) -> None:
        self.folder, self.clusters, self.calls = folder, clusters, folder / "calls"
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PIT_", "SLURM_", "XDG_"))}
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(SSH.format(folder=folder, calls=self.calls))
        ssh.chmod(0o755)
        self.env |= {"HOME": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "200"}
        self.env["PIT_RUNS"] = str(folder / "runs")
        self.sites = folder / ".config" / "pitools" / "sites"
        shutil.copytree(dev_sites, self.sites)

    def site(self, name: str, host: str, more: str = "") -> str:
        """A site file: alpha, reached through this host."""
        text = (self.sites / "alpha.toml").read_text()
        text = text.replace('name = "alpha"', f'name = "{name}"')
        (self.sites / f"{name}.toml").write_text(f'{text}\n[connection]\nkind = "ssh"\nhost = "{host}"\n{more}')
        return name

    def without_accounting(self) -> None:
        """Let the clusters have no slurmdbd: to ask a real one takes a second, and says nothing of most things."""
        for name in ("sacctmgr", "sacct"):
            path = self.folder / "bin" / name
            path.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
            path.chmod(0o755)

    def pit(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a command of ours, which may not wait for a far side that is silent to its end."""
        command = [str(Path(sys.executable).parent / "pit"), *words]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )

    def called(self) -> list[str]:
        """The host of every call since the last time."""
        try:
            return self.calls.read_text().split()
        finally:
            self.calls.unlink(missing_ok=True)


@pytest.fixture
def far(clusters: Path, dev_sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """Sites behind an ssh that answers as its host's name says; this process uses it too."""
    created = Far(tmp_path, clusters, dev_sites)
    for name in ("HOME", "PATH"):
        monkeypatch.setenv(name, created.env[name])
    for name in [name for name in os.environ if name.startswith(("XDG_", "SLURM_", "PIT_"))]:
        monkeypatch.delenv(name)
    yield created
    shutil.rmtree(tmp_path, ignore_errors=True)
