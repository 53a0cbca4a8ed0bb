"""500 jobs followed from 20 terminals for 10 minutes: what slurmctld and slurmdbd are asked.

perf/run launch_follow [--jobs 500] [--minutes 10] [--quick]        needs root and Debian's Slurm packages

Two clusters of its own, at the same time, with the same jobs: of 20 to 60 s each, 32 at once, so that some end and some
begin all the while. On one, 20 processes look at 25 runs each with `status.Watch`, twice a second, as `pit launch logs
-f` and `--wait` do; on the other, 20 processes look at the same with submitit's jobs at their defaults, as its `wait`
does. Calls are those that `sdiag` and `sacctmgr show stats` count, logging in and out included, less these commands'
own and what jobs and nodes call. The jobs write nothing into the runs' folders, so that all is left to Slurm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO
from pitools.launch import plan as planning
from pitools.launch.monitor import status, wait
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.site.load import load_site
from pitools.site.schema import Site

DEVCLUSTER = REPO / "scripts" / "devcluster"
TERMINALS, NODES = 20, 8
AT_ONCE, MORE_A_MINUTE = 7.0, 1.8  # 25 calls in ten minutes
SITE = """\
name = "x"
[slurm]
conf = "{conf}"
[dialect]
gpus = "none"
[paths]
runs = "{work}/runs"
"""
Looks = Callable[[], dict[str, str]]


class Cluster:
    """One cluster of a bench's own."""

    def __init__(self, name: str, base_port: int) -> None:
        self.root, self.port = Path(f"/var/tmp/pit-dc-follow-{name}"), base_port
        self.conf = self.root / "x" / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}

    def up(self) -> None:
        """Start it."""
        options = ["--root", str(self.root), "--clusters", "x", "--nodes", str(NODES), "--base-port", str(self.port)]
        subprocess.run([DEVCLUSTER, "up", *options], check=True, capture_output=True, start_new_session=True)

    def down(self) -> None:
        """End it."""
        subprocess.run([DEVCLUSTER, "down", "--root", str(self.root)], check=False, capture_output=True)

    def run(self, *argv: str) -> str:
        """What a command prints."""
        return subprocess.run(argv, env=self.env, check=True, capture_output=True, text=True).stdout

    def submit(self, count: int) -> list[str]:
        """So many jobs; their ids."""
        dice = random.Random(7)
        lengths = " ".join(str(dice.randint(20, 60)) for _ in range(count))
        script = f'for s in {lengths}; do sbatch --parsable -t5 -o /dev/null --wrap "exec sleep $s" || exit; done'
        return self.run("sh", "-c", script).split()

    def calls(self) -> Counter[str]:
        """Questions by message type that both daemons have answered: those of their own daemons are no questions."""
        actual = _counts(self.run("sdiag")) + _counts(self.run("sacctmgr", "show", "stats"))
        requested = re.compile(r"REQUEST_\w*INFO|REQUEST_JOB_STATE|DBD_GET_\w+|DBD_FINI|SLURM_PERSIST_INIT")
        ours = ("REQUEST_STATS_INFO", "DBD_GET_STATS")
        return Counter({kind: n for kind, n in actual.items() if requested.fullmatch(kind) and kind not in ours})


def _counts(text: str) -> Counter[str]:
    section = text.partition("by message type")[2].partition("by user")[0]
    return Counter({kind: int(n) for kind, n in re.findall(r"(\w+)\s+\( *\d+\) count:(\d+)", section)})


def ours(work: Path, _conf: Path, ids: list[str]) -> Looks:
    """Runs looked at with `status.Watch`."""
    os.environ.update(PIT_SITE_PATH=str(work), XDG_CACHE_HOME=str(work / "cache"))
    site = load_site("x")
    watches = {job_id: wait.RunPoller(_run(work, site, job_id), site) for job_id in ids}
    observed = dict.fromkeys(ids, "UNKNOWN")

    def look() -> dict[str, str]:
        for job_id, watch in watches.items():
            if not status.is_final(observed[job_id]):
                state = watch.poll().state
                observed[job_id] = observed[job_id] if state == "UNKNOWN" else state
        time.sleep(0.5)
        return observed

    return look


def _run(work: Path, site: Site, job_id: str) -> Path:
    """A run's folder for a job that somebody else submitted."""
    run_dir = work / "runs" / f"sleep-{job_id}"
    run_dir.mkdir(parents=True)
    plan = planning.make_plan(Request(name="sleep", command="sleep", time="5m", workdir=str(work)), site, "bench")
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
    run_folder.write_record(
        run_dir / "job.json", run_folder.JobRef(job_id=job_id, site="x", submitted="2026-01-01T00:00:00Z")
    )
    return run_dir


def peers(work: Path, conf: Path, ids: list[str]) -> Looks:
    """submitit's jobs, looked at as `Job.wait` does."""
    from submitit.slurm.slurm import SlurmJob

    os.environ["SLURM_CONF"] = str(conf)
    jobs: dict[str, Any] = {job_id: SlurmJob(folder=work, job_id=job_id) for job_id in ids}
    done: set[str] = set()

    def look() -> dict[str, str]:
        done.update(job_id for job_id, job in jobs.items() if job_id not in done and job.done())
        time.sleep(1)
        return {job_id: "COMPLETED" if job_id in done else "UNKNOWN" for job_id in jobs}

    return look


def terminal(
    kind: Callable[[Path, Path, list[str]], Looks], work: Path, conf: Path, ids: list[str], until: float, told: Any
) -> None:
    """Look at these jobs until a moment; says when each was first seen to have ended, or what went wrong."""
    end: dict[str, float] = {}
    try:
        look = kind(work, conf, ids)
        while time.time() < until:
            for job_id, state in look().items():
                if status.is_final(state):
                    end.setdefault(job_id, time.time())
    except BaseException as error:
        told.put(f"{type(error).__name__}: {error}")
        raise
    told.put(end)


def late_s(cluster: Cluster, seen: dict[str, float]) -> list[float]:
    """How long after its end each job was seen to have ended. Raises where one was that had not."""
    text = cluster.run("sacct", "-X", "-n", "-P", "-S", "now-1days", "-o", "JobIDRaw,State,End")
    ends = {job_id: (state, end) for job_id, state, end in (line.split("|") for line in text.splitlines())}
    wrong = [job_id for job_id in seen if ends[job_id][0] != "COMPLETED"]
    if wrong:
        raise SystemExit(f"seen to have ended, and had not: {wrong}")
    return [t - time.mktime(time.strptime(ends[job_id][1], "%Y-%m-%dT%H:%M:%S")) for job_id, t in seen.items()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--base-port", type=int, default=25000)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    jobs, minutes = (100, 1.0) if args.quick else (args.jobs, args.minutes)
    work = Path(tempfile.mkdtemp(prefix="pit-follow-"))
    sides = {"ours": ours, "peer": peers}
    clusters = {name: Cluster(name, args.base_port + 1000 * i) for i, name in enumerate(sides)}
    calls: dict[str, Counter[str]] = {}
    late: dict[str, list[float]] = {}
    fork = multiprocessing.get_context("fork")
    started: list[Any] = []
    try:
        for cluster in clusters.values():
            cluster.up()
        ids = {name: cluster.submit(jobs) for name, cluster in clusters.items()}
        before = {name: cluster.calls() for name, cluster in clusters.items()}
        until, start_time = time.time() + 60 * minutes, {name: fork.Queue() for name in sides}
        for name, kind in sides.items():
            (work / name).mkdir()
            (work / name / "x.toml").write_text(SITE.format(conf=clusters[name].conf, work=work / name))
            for i in range(TERMINALS):
                of = (kind, work / name, clusters[name].conf, ids[name][i::TERMINALS], until, start_time[name])
                started.append(fork.Process(target=terminal, args=of, daemon=True))
                started[-1].start()
        for name, cluster in clusters.items():
            observed: dict[str, float] = {}
            for _ in range(TERMINALS):
                output = start_time[name].get(timeout=60 * minutes + 120)
                if isinstance(output, str):
                    sys.exit(output)
                observed |= output
            late[name] = late_s(cluster, observed) or [float("nan")]
        for name, cluster in clusters.items():
            calls[name] = cluster.calls() - before[name]
            # Of the two looks at the statistics, the first is counted in its own answer; sacct was asked once more.
            calls[name] -= Counter({"SLURM_PERSIST_INIT": 2, "DBD_FINI": 3, "DBD_GET_JOBS_COND": 1})
            kinds = {kind: n for kind, n in calls[name].items() if n}
            print(f"{name}: {kinds}, seen late by {statistics.median(late[name]):.0f} s", file=sys.stderr, flush=True)
    finally:
        for process in started:
            process.kill()
            process.join()
        for cluster in clusters.values():
            cluster.down()
        shutil.rmtree(work)
    total = {name: max(1, sum(count.values())) for name, count in calls.items()}
    most = AT_ONCE + MORE_A_MINUTE * minutes
    case = f"{jobs} jobs, {TERMINALS} terminals, {minutes:g} min"
    told_of = {name: f"{total[name]} calls, an end seen {statistics.median(late[name]):.0f} s late" for name in sides}
    cases: list[Case] = [
        from_ratios(
            f"{case}: {told_of['ours']}; ratio {most:g} calls ÷ ours", "limit", "", [most / total["ours"]], target=1
        ),
        from_ratios(
            f"{case}: peer {told_of['peer']}; ratio its calls ÷ ours",
            "submitit",
            version("submitit"),
            [total["peer"] / total["ours"]],
            target=1,
        ),
    ]
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
