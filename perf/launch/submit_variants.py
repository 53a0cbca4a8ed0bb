"""One submission through a faulty proxy, as we make it and as most people write it, and the jobs that came of many."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from perf.harness.dev_cluster import alpha
from perf.launch.slurm_proxy import SlurmProxy
from pitools.launch.submission import exactly_once, grant, submissions
from pitools.site.schema import Site
from pitools.slurm.client import Client, Transport
from pitools.slurm.states import is_final

REAL = Path(alpha().slurm.conf)
PORT = int(next(line for line in REAL.read_text().splitlines() if line.startswith("SlurmctldPort=")).split("=")[1])
SLURM = Client(Transport(env={"SLURM_CONF": str(REAL)}, timeout_s=60))
AT_ONCE = 8
TIMEOUT_S = 2  # MessageTimeout of the clients: after it sbatch gives up
FLAGS = ("--account=lab", "--time=2", "--output=/dev/null", "--mem=1")
# The job's own commands are to ask the real controller, not the proxy.
SCRIPT = '#!/bin/bash\nexport SLURM_CONF={conf}\n{leave}echo "$SLURM_JOB_ID" >> {folder}/ran\n'
_SEND = """\
import sys, msgspec, pathlib
from pitools.launch.submission import exactly_once
from pitools.site.schema import Site
site = msgspec.json.decode(pathlib.Path(sys.argv[2]).read_bytes(), type=Site)
print("go", flush=True)
exactly_once.submit_once(pathlib.Path(sys.argv[1]), site, args=sys.argv[3:], job_number=0)
"""
# What is found in scripts and in other launchers: again, when sbatch did not say an id.
_LOOP = 'for i in 1 2 3 4 5 6 7 8; do id=$(sbatch --parsable "$@" 2>/dev/null) && echo "$id" && break; sleep 1; done'


def make(folder: Path) -> Path:
    """A run's folder, whose job leaves word of itself and may run once."""
    folder.mkdir(parents=True)
    text = grant.add_grant_check("#!/bin/bash\n", str(submissions.job_dir(folder, 0))).removeprefix("#!/bin/bash\n")
    (folder / "script.sbatch").write_text(SCRIPT.format(conf=REAL, leave=text, folder=folder))
    return folder


def site(conf: Path) -> Site:
    """The cluster alpha, reached by this slurm.conf."""
    reference = alpha()
    return msgspec.structs.replace(
        reference,
        slurm=msgspec.structs.replace(reference.slurm, conf=str(conf)),
        connection=msgspec.structs.replace(reference.connection, timeout_s=10.0),
    )


def ours(folder: Path, conf: Path) -> str:
    """Submit by `once.send`; the job's id."""
    return exactly_once.submit_once(make(folder), site(conf), args=FLAGS, job_number=0).job_id


def killed(folder: Path, conf: Path, after_s: float) -> str:
    """The same by a process that is killed on the way, and then again; the job's id."""
    make(folder)
    (folder / "site.json").write_bytes(msgspec.json.encode(site(conf)))
    argv = [sys.executable, "-c", _SEND, str(folder), str(folder / "site.json"), *FLAGS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as sender:
        assert sender.stdout
        assert sender.stdout.readline()
        time.sleep(after_s)
        sender.send_signal(signal.SIGKILL)
    return exactly_once.submit_once(folder, site(conf), args=FLAGS, job_number=0).job_id


def peers(folder: Path, conf: Path) -> str:
    """Submit as most scripts do; the last id that sbatch said."""
    folder.mkdir(parents=True)
    (folder / "script.sbatch").write_text(SCRIPT.format(conf=REAL, leave="", folder=folder))
    argv = ["bash", "-c", _LOOP, "bash", *FLAGS, f"--job-name={folder.name}", str(folder / "script.sbatch")]
    env = {**os.environ, "SLURM_CONF": str(conf)}
    return subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def submit_many(
    root: Path,
    count: int,
    submit: Callable[[Path, Path], str],
    fault: Callable[[int], str],
    *,
    deaths: Sequence[int] = (),
    at_once: int = AT_ONCE,
) -> tuple[dict[str, str], SlurmProxy]:
    """Submit `count` jobs through a proxy, several at a time; the id that each was told, and the proxy, closed.

    deaths: which of them are killed on the way once.
    """
    root.mkdir(parents=True)
    dice = random.Random(7)
    with SlurmProxy(PORT, fault) as proxy:
        conf = proxy.conf(REAL, root / "slurm.conf", MessageTimeout=TIMEOUT_S)

        def one(number: int) -> tuple[str, str]:
            folder = root / f"{root.parent.name}-{root.name}-{number}"
            if number in deaths:
                return folder.name, killed(folder, conf, dice.uniform(0, 1.5))
            return folder.name, submit(folder, conf)

        with ThreadPoolExecutor(at_once) as pool:
            reported = dict(pool.map(one, range(count)))
        time.sleep(proxy.late_s + 1)  # what was held back has arrived
    return reported, proxy


def jobs_of(names: Sequence[str], *, timeout_s: float = 300.0) -> dict[str, list[str]]:
    """The ids of all jobs of each name, from squeue and sacct, once all of them have ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        reference = [job for job in SLURM.jobs(user=SLURM.user(), all_states=True) if job.name in names]
        if all(is_final(job.state) for job in reference) or time.monotonic() > deadline:
            break
        time.sleep(1)
    actual: dict[str, set[str]] = {name: set() for name in names}
    for job in reference:
        actual[job.name].add(job.raw_id)
    result = subprocess.run(
        ["sacct", "-X", "-n", "-P", "-S", "now-1hours", "-o", "jobidraw,jobname%200"],
        text=True,
        check=True,
        env={**os.environ, "SLURM_CONF": str(REAL)},
        capture_output=True,
    ).stdout
    for line in result.splitlines():
        job_id, name = line.split("|")
        if name in actual:
            actual[name].add(job_id)
    return {name: sorted(ids, key=int) for name, ids in actual.items()}


def count_outcomes(root: Path, told: dict[str, str]) -> Counter[str]:
    """How many submissions became one job that ran once and is known (`right`), and what became of the others."""
    count: Counter[str] = Counter()
    for name, ids in jobs_of(list(told)).items():
        ran = root / name / "ran"
        times = len(ran.read_text().splitlines()) if ran.exists() else 0
        count["jobs"] += len(ids)
        count["lost"] += not ids
        count["double"] += len(ids) > 1
        count["ran twice"] += times > 1
        count["unknown"] += bool(ids) and told[name] not in ids
        count["right"] += len(ids) == times == 1 and told[name] == ids[0]
    return count


def remove_leftovers(root: Path) -> None:
    """Remove what the submissions left."""
    shutil.rmtree(root, ignore_errors=True)
