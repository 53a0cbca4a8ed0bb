"""Submissions to `alpha` through a proxy that loses, delays, halves, repeats and refuses what it carries.

perf/run launch_submit_once [--count 200] [--quick]       needs eval "$(scripts/devcluster up)"

Ours is `once.send`, which `pit launch run` calls; a fifth of ours are killed (SIGKILL) at a random moment and sent
again. The peer is `sbatch` in a loop until it says an id, as it stands in most scripts. Both meet the same faults: two
of three submissions meet one, and what is tried again may meet the next. Right is a submission that became one job,
which ran once, and whose id the submitter knows. Calls are counted by the proxy, where nobody else's are among them.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from perf.harness.dev_cluster import alpha
from perf.harness.harness import Case, report
from perf.launch import submit_variants as ways
from perf.launch.slurm_proxy import FAULTS, SUBMIT

ROOT = Path(alpha().paths.runs) / f"bench-submit-{os.getpid()}"


def faults(seed: int) -> Callable[[int], str]:
    """What becomes of the n-th request, the same whoever makes it."""
    names = [name for name in FAULTS if name]
    return lambda number: random.Random(f"{seed} {number}").choice([*names, "", "", ""])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    count = 16 if args.quick else args.count
    version = subprocess.run(
        ["sbatch", "-V"], env={**os.environ, "SLURM_CONF": str(ways.REAL)}, capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    cases, right, calls = [], {}, {}
    for name, submit, deaths in (("ours", ways.ours, range(0, count, 5)), ("loop", ways.peers, ())):
        reported, proxy = ways.submit_many(ROOT / name, count, submit, faults(1), deaths=deaths)
        right[name] = ways.count_outcomes(ROOT / name, reported)
        calls[name] = sum(proxy.calls.values()) / count
        print(
            f"{name}: {dict(right[name])}, requests {proxy.calls[SUBMIT]}, calls {calls[name]:.1f} a submission, "
            f"faults {dict(proxy.struck)}",
            file=sys.stderr,
            flush=True,
        )
    ours, loop = right["ours"], right["loop"]
    ratio = ours["right"] / max(1, loop["right"])
    cases.append(
        Case(
            case=f"{count} submissions, {ours['jobs']} jobs, {ours['right']} right ({calls['ours']:.1f} calls "
            f"to slurmctld each); peer {loop['jobs']} jobs, {loop['right']} right, {loop['double']} double, "
            f"{loop['lost']} lost ({calls['loop']:.1f} calls each)",
            peer="sbatch in a retry loop",
            peer_version=version,
            ratio=round(ratio, 2),
            ratio_min=round(ratio, 2),
            ratio_max=round(ratio, 2),
            n=count,
            target=1.0,
            ok=ours["right"] == ours["jobs"] == count,
        )
    )
    clean = {}
    for name, submit in (("clean", ways.ours), ("plain", ways.peers)):
        reported, proxy = ways.submit_many(ROOT / name, 8, submit, lambda _: "")
        clean[name] = sum(proxy.calls.values()) / 8
        assert ways.count_outcomes(ROOT / name, reported)["right"] == 8, "the cluster itself loses jobs"
    ratio = clean["plain"] / clean["clean"]
    cases.append(
        Case(
            case=f"calls to slurmctld a submission where nothing fails: {clean['clean']:g}, peer {clean['plain']:g}",
            peer="sbatch",
            peer_version=version,
            ratio=ratio,
            ratio_min=ratio,
            ratio_max=ratio,
            n=8,
            target=1.0,
            ok=ratio >= 1.0,
        )
    )
    if all(case.ok for case in cases):
        ways.remove_leftovers(ROOT)
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
