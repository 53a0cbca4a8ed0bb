"""200 short jobs onto two clusters, one slurmctld killed (-9) and restarted in the middle, ticks killed at random.

perf/run place_live [--jobs 200] [--rounds 3] [--quick]        needs root and Debian's Slurm packages

Starts two clusters of its own, north and south, of 8 nodes each. Ours go through `pit place`: a `watch` that is killed
(-9) every few seconds and started again, as it is where it ends with an error, which is told. The peer's are the same
scripts, given to `sbatch -M north,south` by as many at once as we are, one for each cluster; what sbatch says it did
not take it is given again. Each job takes a whole node for 1 to 3 s, and appends its number when it begins and when it
ends. The ratio is the peer's makespan over ours; that of a peer which lost jobs is of fewer jobs, and the case says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from perf.harness.harness import from_ratios, report
from perf.harness.two_clusters import DOWN_S, NAMES, TwoClusters, act_when
from pitools.launch import plan as planning
from pitools.launch.request import load_request

PIT = str(Path(sys.executable).with_name("pit"))
ROOT = Path("/var/tmp/pit-dc-place-live")
TABLES = """\
[place]
max_queued_jobs = {tickets}
[templates]
train = "short.sbatch.j2"
"""
REQUEST = """\
name = "short-{number:03d}"
command = "the site's template runs it"
cpus_per_task = 4
time = "2m"
partition = "train"
workdir = "{work}/workdir"
[env]
NUMBER = "{number}"
RAN = "{ran}"
LENGTH_S = "{length_s:.2f}"
"""
# The site's own script, for jobs that are neither trained nor staged: what is left is what dispatching costs.
TEMPLATE = """\
#!/bin/bash
{% for flag in directives %}
{{ flag }}
{% endfor %}
{% for name, value in environment %}
export {{ name }}={{ value | q }}
{% endfor %}
echo "B $(date +%s.%N) $NUMBER" >> "$RAN"
sleep "$LENGTH_S"
echo "E $(date +%s.%N) $NUMBER" >> "$RAN"
at={{ run_dir }}/attempts/${SLURM_RESTART_COUNT:-0}
mkdir -p "$at"
printf '{"schema":"pit.attempt-exit/1","job_id":"%s","exit_code":0,"ended":""}' "$SLURM_JOB_ID" > "$at/exit.json"
touch "$at/succeeded"
"""
MOST_CALLS = 5.0  # of slurmctld, those of its own nodes included
AT_ONCE = 2  # submitters: a tick has one for each site, which submits one job after the other
TICKETS = 16  # of jobs of seconds: so many that no node waits for a tick, nor for one that was killed
LONGEST_S = 300.0  # of a round


class Run:
    """One round of one side: its folder, and what became of its jobs. calm: nothing is killed."""

    def __init__(self, work: Path, clusters: TwoClusters, jobs: int, seed: int, *, calm: bool) -> None:
        self.work, self.jobs, self.calm = work, jobs, calm
        self.ran = work / "ran"
        self.dice = random.Random(seed)
        (work / "requests").mkdir(parents=True)
        (work / "sites").mkdir()
        (work / "workdir").mkdir()  # each run has a copy of it: not of the queue and of everybody's requests
        clusters.write_sites(work / "sites", runs=work / "runs", tables=TABLES.format(tickets=TICKETS))
        (work / "sites" / "short.sbatch.j2").write_text(TEMPLATE)
        lengths = random.Random(7)
        self.requests = [work / "requests" / f"{number:03d}.toml" for number in range(jobs)]
        for number, path in enumerate(self.requests):
            length_s = lengths.uniform(1, 3)
            path.write_text(REQUEST.format(number=number, ran=self.ran, length_s=length_s, work=work))

    def lines(self, kind: str) -> list[tuple[float, str]]:
        """When which job began (B) or ended (E)."""
        text = self.ran.read_text() if self.ran.exists() else ""
        return [(float(t), n) for case, t, n in map(str.split, text.splitlines()) if case == kind]

    def result(self, began: float) -> dict[str, float]:
        """How long it took, and what went wrong. A job that a dead controller forgot may begin again, not end again."""
        begin, end = Counter(n for _, n in self.lines("B")), Counter(n for _, n in self.lines("E"))
        last = max((t for t, _ in self.lines("E")), default=began)
        return {
            "makespan_s": round(last - began, 1),
            "lost": self.jobs - len(end),
            "twice": sum(1 for count in end.values() if count > 1),
            "begun_again": sum(1 for count in begin.values() if count > 1),
        }


def ours(run: Run, clusters: TwoClusters) -> dict[str, float]:
    env = {
        **os.environ,
        "PIT_SITE_PATH": str(run.work / "sites"),
        "PIT_QUEUE": str(run.work / "place"),
        "XDG_CACHE_HOME": str(run.work / "cache"),
        "XDG_STATE_HOME": str(run.work / "state"),
    }
    before, began = clusters.requests(), time.time()
    sites = ["--site", "north", "--site", "south"]
    subprocess.run([PIT, "place", "run", *sites, *map(str, run.requests)], env=env, check=True, capture_output=True)
    crash = _crash_in_the_middle(run, clusters)
    kills = errors = 0
    with (run.work / "watch").open("ab") as log:
        while time.time() - began < LONGEST_S:
            watch = subprocess.Popen(
                [PIT, "place", "watch", "--every", "2s", "--until-empty"], env=env, stdout=log, stderr=log
            )
            try:
                if watch.wait(LONGEST_S if run.calm else run.dice.uniform(1, 6)) == 0:
                    break
                errors += 1  # it says why in its log
                time.sleep(1)
            except subprocess.TimeoutExpired:
                watch.kill()
                watch.wait()
                kills += 1
    crash.join()
    calls = clusters.requests() - before
    if errors:
        lines = [line for line in (run.work / "watch").read_text().splitlines() if not line.startswith("{")]
        print(*lines[-20:], sep="\n", file=sys.stderr)
    return run.result(began) | {"kills": kills, "errors": errors, "calls": calls}


def peers(run: Run, clusters: TwoClusters) -> dict[str, float]:
    os.environ["PIT_SITE_PATH"] = str(run.work / "sites")
    from pitools.site.load import load_site

    site = load_site("north")
    scripts = []
    for path in run.requests:
        plan = planning.make_plan(load_request(path), site, str(path))
        stem = run.work / "runs" / path.stem
        (stem / "attempts").mkdir(parents=True)
        scripts.append(stem / "script.sbatch")
        scripts[-1].write_text(planning.render_script(plan, site, run_dir=str(stem), payload="true"))
    before, began = clusters.requests(), time.time()
    crash = _crash_in_the_middle(run, clusters)

    def submit(script: Path) -> int:
        argv, again = ["sbatch", "-M", "north,south", str(script)], 0
        while subprocess.run(argv, env=clusters.env(NAMES[0]), capture_output=True, check=False).returncode:
            again += 1
            time.sleep(1)
        return again

    with ThreadPoolExecutor(AT_ONCE) as pool:
        again = sum(pool.map(submit, scripts))
    crash.join()
    while _left(clusters) and time.time() - began < LONGEST_S:
        time.sleep(1)
    calls = clusters.requests() - before
    return run.result(began) | {"again": again, "calls": calls}


def _left(clusters: TwoClusters) -> bool:
    return any(
        subprocess.run(["squeue", "-h"], env=clusters.env(name), capture_output=True, check=False).stdout
        for name in NAMES
    )


def _crash_in_the_middle(run: Run, clusters: TwoClusters) -> threading.Thread:
    """Kill a controller once a third of the jobs have ended, and start it again a while later."""

    def crash() -> None:
        if not run.calm:
            clusters.kill_controller(NAMES[0])
            time.sleep(DOWN_S)
            clusters.start()

    return act_when(lambda: len(run.lines("E")) >= run.jobs // 3, crash, limit_s=LONGEST_S)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--calm", action="store_true", help="kill nothing")
    parser.add_argument("--base-port", type=int, default=20000)
    parser.add_argument("--keep", action="store_true", help="leave the clusters and the folder")
    args = parser.parse_args()
    jobs, rounds = (40, 1) if args.quick else (args.jobs, args.rounds)
    work = Path(tempfile.mkdtemp(prefix="pit-place-live-"))
    clusters = TwoClusters(ROOT, args.base_port)
    ratios: list[float] = []
    worst = Counter({"lost": 0, "twice": 0, "errors": 0})
    peers_lost = 0
    per_job: list[float] = []
    try:
        for number in range(rounds):
            clusters.fresh()
            own_part = ours(Run(work / f"ours{number}", clusters, jobs, number, calm=args.calm), clusters)
            clusters.fresh()
            theirs = peers(Run(work / f"peer{number}", clusters, jobs, number, calm=args.calm), clusters)
            for name, item in (("ours", own_part), ("peer", theirs)):
                calls = item.pop("calls")
                shown = {
                    **item,
                    "calls_per_job": round(sum(calls.values()) / jobs, 2),
                    "calls": dict(calls.most_common()),
                }
                print(json.dumps({"who": name, "round": number, **shown}), file=sys.stderr, flush=True)
                if name == "ours":
                    per_job.append(sum(calls.values()) / jobs)
            ratios.append(theirs["makespan_s"] / own_part["makespan_s"])
            peers_lost += int(theirs["lost"])
            worst.update({key: int(own_part[key]) for key in ("lost", "twice", "errors")})
        version = clusters.version()
    finally:
        if not args.keep:
            clusters.down()
    if not args.keep:
        shutil.rmtree(work)
    case = from_ratios(
        f"makespan of {jobs} short jobs{', nothing killed' if args.calm else ''}",
        "sbatch -M",
        version,
        ratios,
        target=1.0,
    )
    right = not any(worst.values()) and max(per_job) <= MOST_CALLS
    output = (
        f"{worst['lost']} lost ({peers_lost} of the peer's), {worst['twice']} run twice, {max(per_job):.1f} calls a job"
    )
    case = replace(case, case=f"{case.case}, {output}", ok=case.ok and right)
    return report([case])


if __name__ == "__main__":
    sys.exit(main())
