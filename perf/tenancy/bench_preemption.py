"""Three tiers live: an urgent run preempts scavengers and nobody else; they save, go on later, and lose nothing.

perf/run tenancy_preemption [--quick] [--case NAME]... [--base-port 29300]     needs root and Slurm

A cluster of its own, six nodes, always full; runs of two nodes of the reference loops (jax, torch), or of a loop
without a framework. Each case is what became of it: the limit over the seconds from an urgent's submission to its first
step, or the share of checks that hold, all of them: who was preempted, by slurmctld's records; the loss of each step,
bit for bit that of an undisturbed run; no step made twice. --quick: without the long suspension.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perf.harness.harness import Case, from_ratios, report
from perf.recover.fault_cluster import PIT, FaultCluster
from perf.tenancy.tiers_cluster import TIERS, RunFolder, TierRun, Tiers, finish, preempted, wait_until, write_request

URGENT_S = 60.0  # from submission to the first step
GRACE_S = 20
STEPS = 60
TIME_SLICE_S = 5
LOOPS = ("jax", "torch")
ALL_LOOPS = tuple((loop, "scavenger", {"loop": loop}) for loop in (*LOOPS, "light"))


ARRAY = """\
import sys, time
from pathlib import Path
import pitools

def square(number, folder):
    with Path(folder, f"{number}.start").open("a") as file:
        file.write("start\\n")
    time.sleep(25)
    return number**2

executor = pitools.Executor(site="tiers")
executor.update_parameters(name="squares", timeout_min=5, slurm_qos="scavenger", cpus_per_task=4)
print([job.result() for job in executor.map_array(square, range(6), 6 * sys.argv[1:])])
"""


class Bench:
    """One cluster with its tiers, and what was measured. references: loop → the losses of an undisturbed run."""

    def __init__(self, cluster: FaultCluster, tiers: Tiers, data: Path, *, quick: bool) -> None:
        self.cluster, self.tiers, self.data, self.quick = cluster, tiers, data, quick
        self.urgent_s: list[float] = []
        self.references: dict[str, dict[int, set[float]]] = {}
        self._earlier: set[str] = set()

    def begin_case(self) -> None:
        """Forget the jobs that were preempted before."""
        self._earlier = preempted(self.cluster)

    def hit(self) -> set[str]:
        """Return the jobs that were preempted in this case."""
        return preempted(self.cluster) - self._earlier

    def start(self, name: str, tier: str, **options: object) -> TierRun:
        """Start a run of STEPS steps."""
        options = {"steps": STEPS, **options}
        return TierRun(self.cluster, name, tier, data=self.data, **options)  # type: ignore[arg-type]

    def fill(self, *runs: tuple[str, str, dict[str, object]]) -> list[TierRun]:
        """Start runs (name, tier, options) and wait until each has made some steps."""
        started = [self.start(name, tier, **options) for name, tier, options in runs]
        wait_until(self.cluster, lambda: all(run.steps() > 2 for run in started), "the first steps")
        return started

    def urgent(self, *names: str, waits: bool = True, **options: object) -> list[TierRun]:
        """Start urgent runs of few steps at once, and wait for the first of each."""
        options = {"steps": 15, "loop": "torch", **options}
        runs = [self.start(name, "urgent", **options) for name in names or ("urgent",)]
        if waits:
            wait_until(self.cluster, lambda: all(run.steps() for run in runs), "the first steps of urgent runs")
        return runs

    def check_urgent(self, *runs: TierRun) -> dict[str, bool]:
        """Record the times to the first steps."""
        times = [run.first_step_s() for run in runs]
        self.urgent_s += times
        return {f"first step of an urgent run within {URGENT_S:g} s": max(times) < URGENT_S}

    def check_runs(self, runs: list[TierRun], loops: list[str], *, times: int | None = None) -> dict[str, bool]:
        """Check that runs finished with the losses of the references. times: preemptions that each had, if told."""
        found = {}
        for run, loop in zip(runs, loops, strict=True):
            name = run.run_dir.name
            found |= {
                f"{name} succeeded: {run.verdict()} {run.causes()}": run.verdict() == "succeeded",
                f"{name} has the losses of an undisturbed run": run.losses() == self.references[loop],
                f"{name} made no step twice: {run.repeated()}": run.repeated() == 0,
            }
            if times is not None:
                count = run.causes().count("preempted")
                found[f"{name} was preempted {times} times: {count}"] = count == times
        return found


def references(bench: Bench) -> None:
    """Make the undisturbed runs, of one loop after the other on an idle cluster."""
    for loop in (*LOOPS, "light"):
        run = bench.start(f"reference-{loop}", "normal", loop=loop, delay_s=0.0)
        finish([run])
        if run.verdict() != "succeeded" or len(run.losses()) != STEPS:
            raise SystemExit(f"{run.run_dir}: the undisturbed run did not finish: {run.causes()}")
        bench.references[loop] = run.losses()


def requeue(bench: Bench) -> dict[str, bool]:
    """A jax and a torch scavenger, and a normal run; the urgent run needs both scavengers' nodes."""
    runs = bench.fill(
        ("jax", "scavenger", {"loop": "jax"}),
        ("torch", "scavenger", {"loop": "torch"}),
        ("normal", "normal", {"loop": "torch"}),
    )
    hit = {run.job_ids()[0] for run in runs[:2]}
    (urgent,) = bench.urgent(nodes=4)
    finish([*runs, urgent])
    return {
        "the scavengers were preempted, and nobody else": bench.hit() == hit,
        **bench.check_urgent(urgent),
        **bench.check_runs(runs[:2], ["jax", "torch"], times=1),
        **bench.check_runs(runs[2:], ["torch"], times=0),
    }


def early(bench: Bench) -> dict[str, bool]:
    """Scavengers that are preempted while their ranks start: they have saved nothing, and begin anew later."""
    runs = [bench.start(loop, "scavenger", loop=loop) for loop in LOOPS]
    other = bench.start("normal", "normal")
    wait_until(bench.cluster, lambda: all(list(run.run_dir.glob("attempts/0/ranks/*.json")) for run in runs), "ranks")
    (urgent,) = bench.urgent(nodes=4, loop="light")
    finish([*runs, other, urgent])
    return {**bench.check_urgent(urgent), **bench.check_runs(runs, list(LOOPS), times=1)}


def same_job(bench: Bench) -> dict[str, bool]:
    """The same with chain = "requeue": Slurm's own requeue, of the same job."""
    site = bench.cluster.work / "sites" / f"{bench.cluster.name}.toml"
    text = site.read_text()
    site.write_text(text.replace("[recovery]\n", '[recovery]\nchain = "requeue"\n'))
    try:
        runs = bench.fill(*ALL_LOOPS)
        (urgent,) = bench.urgent(nodes=4)
        finish([*runs, urgent])
    finally:
        site.write_text(text)
    counts = [run.causes().count("preempted") for run in runs]
    return {
        f"two of three scavengers were preempted: {counts}": sorted(counts) == [0, 1, 1],
        f"each in one job: {[run.job_ids() for run in runs]}": all(len(run.job_ids()) == 1 for run in runs),
        **bench.check_urgent(urgent),
        **bench.check_runs(runs, [*LOOPS, "light"]),
    }


def fewest(bench: Bench) -> dict[str, bool]:
    """Three scavengers, two urgent runs at once, one of which could be served by any: as many as needed are hit."""
    runs = bench.fill(*((f"scavenger{i}", "scavenger", {}) for i in range(3)))
    urgents = bench.urgent("urgent0", loop="light")
    first = bench.hit()
    finish([*runs, *urgents])
    again = bench.fill(*((f"scavenger{i}", "scavenger", {}) for i in range(3)))
    urgents += bench.urgent("urgent1", "urgent2", loop="light")
    finish([*again, *urgents])
    counts = [run.causes().count("preempted") for run in again]
    return {
        f"one scavenger for one urgent run: {first}": len(first) == 1,
        f"two for two at once: {counts}": sorted(counts) == [0, 1, 1],
        **bench.check_urgent(*urgents),
        **bench.check_runs(runs + again, ["light"] * 6),
    }


def too_big(bench: Bench) -> dict[str, bool]:
    """An urgent run that needs a normal run's nodes as well waits, and nobody is preempted for it."""
    runs = bench.fill(
        ("scavenger0", "scavenger", {}),
        ("scavenger1", "scavenger", {}),
        ("normal", "normal", {}),
    )
    (urgent,) = bench.urgent(nodes=6, loop="light", waits=False)
    time.sleep(15)  # many rounds of both schedulers
    hit = bench.hit()  # before the normal run ends, after which it fits
    finish([*runs, urgent])
    return {
        "nobody was preempted": not hit,
        "the urgent run waited": urgent.first_step_s() > 15,
        **bench.check_runs(runs, ["light"] * 3, times=0),
    }


def exempt(bench: Bench) -> dict[str, bool]:
    """PreemptExemptTime: a scavenger is left alone for its first 30 s."""
    with bench.tiers.scavengers(preemptexempttime="00:00:30"):
        began = time.time()
        runs = bench.fill(*((f"scavenger{i}", "scavenger", {"delay_s": 2.0}) for i in range(3)))
        (urgent,) = bench.urgent(loop="light")
        waited_s = time.time() - began
        for run in runs:
            run.cancel()
        finish([*runs, urgent])
    return {
        f"the urgent run started after the exempt time: {waited_s:.0f} s": waited_s > 30,
        "one scavenger was preempted": [run.causes().count("preempted") for run in runs].count(1) == 1,
        **bench.check_urgent(urgent),
    }


def cancel(bench: Bench) -> dict[str, bool]:
    """PreemptMode=CANCEL, without a grace time: Slurm puts nothing back, and the runs go on all the same."""
    with bench.tiers.scavengers(preemptmode="cancel", gracetime="0"):
        runs = bench.fill(*((loop, "scavenger", {"loop": loop}) for loop in LOOPS))
        other = bench.start("normal", "normal")
        (urgent,) = bench.urgent(nodes=4)
        finish([*runs, other, urgent])
    return {
        **bench.check_urgent(urgent),
        **bench.check_runs(runs, list(LOOPS), times=1),
        **bench.check_runs([other], ["light"], times=0),
    }


def array(bench: Bench) -> dict[str, bool]:
    """An array of callables without a grace time: the tasks that are preempted start again, and each has its result."""
    folder = bench.cluster.work / "array"
    folder.mkdir()
    (folder / "squares.py").write_text(ARRAY)
    with bench.tiers.scavengers(gracetime="0"):
        process = bench.cluster.start(sys.executable, str(folder / "squares.py"), str(folder), log=folder / "log")
        wait_until(bench.cluster, lambda: len(list(folder.glob("*.start"))) == 6, "the array")
        (urgent,) = bench.urgent(nodes=2, loop="light")
        finish([urgent])
        wait_until(bench.cluster, lambda: process.poll() is not None, "the array's end")
    log = (folder / "log").read_text()
    starts = [path.read_text().count("start") for path in folder.glob("*.start")]
    return {
        f"two tasks of six started again: {starts}": sorted(starts) == [1] * 4 + [2] * 2,
        f"each has its result: {log[-1000:]}": log.endswith("[0, 1, 4, 9, 16, 25]\n"),
        **bench.check_urgent(urgent),
    }


def ticket(bench: Bench) -> dict[str, bool]:
    """A scavenger of the queue of `pit place`: it goes on from its checkpoints in another ticket."""
    cluster = bench.cluster
    runs = bench.fill(*((f"other{i}", "normal", {}) for i in range(2)))
    cluster.env |= {"PIT_QUEUE": str(cluster.work / "queue"), "PIT_SITES": cluster.name}
    request = write_request(cluster, "ticket", "scavenger", loop="torch", data=bench.data, steps=STEPS, delay_s=0.5)
    (row,) = cluster.pit("place", "run", str(request))
    parts = [RunFolder(cluster, cluster.runs / f"{row['job_id']}.{number}") for number in (1, 2)]

    def tick(ready: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: ready() or (bool(cluster.run(PIT, "place", "tick", check=False)) and False)

    wait_until(cluster, tick(lambda: parts[0].steps() > 2), "the ticket's first steps")
    (urgent,) = bench.urgent(nodes=2)
    wait_until(cluster, tick(lambda: parts[1].causes() == ["succeeded"]), "the second ticket")
    finish([*runs, urgent])
    losses = {**parts[0].losses(), **parts[1].losses()}
    return {
        f"preempted, then finished: {[part.causes() for part in parts]}": parts[0].causes() == ["preempted"]
        and parts[1].causes() == ["succeeded"],
        "the losses of an undisturbed run": losses == bench.references["torch"],
        "no step made twice": not parts[0].losses().keys() & parts[1].losses().keys(),
        **bench.check_urgent(urgent),
    }


@contextmanager
def suspending(cluster: FaultCluster) -> Iterator[None]:
    """PreemptMode=SUSPEND,GANG for a while, with urgent runs in a partition of their own."""
    usual = cluster.conf.read_text()
    text = usual.replace("PreemptMode=REQUEUE", f"PreemptMode=SUSPEND,GANG\nSchedulerTimeSlice={TIME_SLICE_S}")
    text = re.sub(r"(PartitionName=\w+ Nodes=ALL)", r"\1 OverSubscribe=FORCE:1", text)
    cluster.conf.write_text(text)
    cluster.run("scontrol", "reconfigure")
    cluster.run("scontrol", "update", "partition=dev", "PriorityTier=10")
    try:
        yield
    finally:
        cluster.conf.write_text(usual)
        cluster.run("scontrol", "reconfigure")


def suspend(bench: Bench) -> dict[str, bool]:
    """Scavengers are suspended: they go on by themselves, and none of our watches calls them dead."""
    seconds = 20 if bench.quick else 150
    with suspending(bench.cluster), bench.tiers.scavengers(preemptmode="suspend"):
        runs = bench.fill(*ALL_LOOPS)
        (urgent,) = bench.urgent(nodes=6, loop="light", partition="dev", steps=seconds)
        shown: list[str] = []
        while not urgent.verdict():
            time.sleep(10)
            shown.append(bench.cluster.pit("launch", "show", str(runs[0].run_dir))[0]["state"])
        finish([*runs, urgent])
    return {
        f"shown as suspended: {shown}": bench.quick or "SUSPENDED" in shown,
        f"each went on in its first attempt: {[run.causes() for run in runs]}": all(
            run.causes() == ["succeeded"] for run in runs
        ),
        **bench.check_urgent(urgent),
        **bench.check_runs(runs, [*LOOPS, "light"], times=0),
    }


CASES: dict[str, Callable[[Bench], dict[str, bool]]] = {
    "requeue": requeue,
    "early": early,
    "same-job": same_job,
    "fewest": fewest,
    "too-big": too_big,
    "exempt": exempt,
    "cancel": cancel,
    "array": array,
    "ticket": ticket,
    "suspend": suspend,
}


def run_cases(bench: Bench, names: list[str]) -> list[Case]:
    """Return a case for each, and one for the urgent runs' time to their first step."""
    references(bench)
    version = bench.cluster.run("sinfo", "-V").split()[-1]
    created = []
    for name in names:
        bench.begin_case()
        try:
            checks = CASES[name](bench)
        except SystemExit as error:
            if not isinstance(error.code, str):  # a signal
                raise
            checks = {error.code: False}
            bench.cluster.run("scancel", "--me", check=False)
        for check in (check for check, holds in checks.items() if not holds):
            print(f"{name}: not so: {check}", file=sys.stderr, flush=True)
        share = sum(checks.values()) / len(checks)
        times_s = [round(seconds, 1) for seconds in bench.urgent_s]
        print(f"{name}: {share:.0%} of {len(checks)} checks; urgent: {times_s} s", file=sys.stderr, flush=True)
        about = (CASES[name].__doc__ or "").split(":")[0].rstrip(".")
        created.append(from_ratios(f"{name}: {about}: {len(checks)} checks", "slurmctld", version, [share], target=1))
    if times := bench.urgent_s:
        label = (
            f"first step of {len(times)} urgent runs: after {statistics.median(times):.1f} s, at most {max(times):.1f}"
        )
        created.append(from_ratios(label, "60 s", "", [URGENT_S / value for value in times], target=1))
    return created


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", action="append", default=[], dest="cases", choices=list(CASES))
    parser.add_argument("--base-port", type=int, default=29300)
    args = parser.parse_args()
    with FaultCluster(name="tiers", nodes=6, base_port=args.base_port) as cluster:
        site = cluster.work / "sites" / "tiers.toml"
        text = re.sub(r"\[tiers\]\n(\w+ = .*\n)+", TIERS, site.read_text())
        site.write_text(f"{text}[partitions.dev]\nnodes = 6\n")
        with Tiers(cluster) as tiers:
            return report(
                run_cases(Bench(cluster, tiers, cluster.dataset(), quick=args.quick), args.cases or list(CASES))
            )


if __name__ == "__main__":
    sys.exit(main())
