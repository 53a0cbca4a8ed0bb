"""Random policies, made real by `pitools.tenancy` in a real slurmdbd, and read back.

perf/run tenancy_policies [--quick] [--seed N]     needs root, eval "$(scripts/devcluster up --clusters alpha)"

From each policy to the next by the calls of `run`. Then the ratio is the share of policies for which a check finds
nothing, of which an import asks for no change, and (of every tenth) after whose undo sacctmgr prints what it did
before. Then a run of more than 40 changes is ended at each call (--quick: at every 15th), before or after it in turn:
of how many did the next run finish? The cluster keeps the last policy. Two hours: a call of sacctmgr takes 0.4 s on one
machine, but 0.01 s, and all some 15 minutes, where the loopback address acknowledges at once (see .ci/run).

slurmdbd 22.05 puts a QOS 0 into a list of preempted QOS that was emptied, and calls each chain through that list a loop
until it starts anew: then the bench starts it anew, as the error tells its user, runs the policy again, and counts it
as one that needed this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from perf.harness.dev_cluster import alpha
from perf.harness.harness import from_ratios, report
from pitools.core.errors import ClusterError, PitError
from pitools.tenancy.apply import Call, apply_changes, differences
from pitools.tenancy.changes import order_changes
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.policy import policy_of
from pitools.tenancy.policy_text import policy_text
from pitools.tenancy.read import SiteAccounting, read_again, read_site
from pitools.tenancy.undo import undone_state
from tests.tenancy.states import TIERS, large_change, states

SITE = alpha()
UNDO_EVERY = 10
EMPTY = ClusterState(cluster="alpha", objects={})


def shown() -> list[str]:
    """Return the lines that sacctmgr prints of everything, in no order: a QOS made again has a new place."""
    env = {"SLURM_CONF": SITE.slurm.conf, "PATH": "/usr/bin:/bin"}
    lines = []
    for what in (["qos"], ["account", "withassoc", "withcoord"], ["user", "withassoc", "withcoord"], ["assoc"]):
        argv = ["sacctmgr", "-P", "show", *what]
        lines += subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(lines)


def call(accounting: SiteAccounting, argv: Sequence[str]) -> None:
    """Run a call of sacctmgr. Raises PitError with the call."""
    try:
        accounting.client.run_once(argv, "")
    except PitError as error:
        raise ClusterError(str(error), where=shlex.join(argv)) from error


def make(accounting: SiteAccounting, then: ClusterState, journal: Path, run_call: Call | None = None) -> str:
    """Make the accounting a state by the calls of `run`, and return the run's ID."""
    calls, again = run_call or partial(call, accounting), partial(read_again, accounting)
    of_run = {"run": secrets.token_hex(4), "site": "alpha", "user": "root"}
    return of_run["run"] if list(apply_changes(accounting.state, then, calls, again, journal, **of_run)) else ""


def restart_slurmdbd() -> None:
    """End slurmdbd and start it again, as a process of devcluster; devcluster itself would make its own tiers again."""
    record = Path(SITE.slurm.conf).parent.parent / "processes" / "slurmdbd.json"
    identity = json.loads(record.read_text())
    proc = Path("/proc", str(identity["pid"]))
    argv = proc.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
    env = dict(line.split("=", 1) for line in proc.joinpath("environ").read_text().split("\0") if line)
    os.kill(identity["pid"], signal.SIGTERM)
    while proc.exists():
        with contextlib.suppress(ChildProcessError):  # one that was started here
            os.waitpid(identity["pid"], os.WNOHANG)
        time.sleep(0.1)
    log = subprocess.DEVNULL
    started = subprocess.Popen(argv, env=env, stdin=log, stdout=log, stderr=log, start_new_session=True)
    ticks = int(Path("/proc", str(started.pid), "stat").read_text().rpartition(")")[2].split()[19])
    record.write_text(json.dumps({**identity, "pid": started.pid, "start": ticks}))
    for _ in range(100):
        if not subprocess.run(
            ["sacctmgr", "-n", "show", "cluster"],
            env={"SLURM_CONF": SITE.slurm.conf, "PATH": "/usr/bin:/bin"},
            capture_output=True,
        ).returncode:
            return
        time.sleep(0.3)
    raise ClusterError("slurmdbd: does not answer after its start", where=str(record))


def try_until_loaded(then: ClusterState, journal: Path, *, is_undone: bool) -> dict[str, bool]:
    """Do as `try_policy`, once more with a new slurmdbd where the old one sees a loop that is none."""
    without = "no new slurmdbd needed"
    try:
        return {without: True, **try_policy(then, journal, is_undone=is_undone)}
    except PitError as error:
        if "Preemption loop" not in str(error):
            raise
    restart_slurmdbd()
    return {without: False, **try_policy(then, journal, is_undone=False)}


def with_root(state: ClusterState) -> ClusterState:
    """Return a state with what no run may take away: the root user of the root account, an administrator.

    Tiers that preempt stay, others come and go: slurmdbd 22.05 remembers those that an emptied list had, and refuses
    to let the tier be preempted once they are removed.
    """
    tiers: dict[Key, Values] = {("tier", name): {} for name in ("low", "high", *TIERS)}  # those of devcluster, too
    root: dict[Key, Values] = {
        ("member", "root", "root", ""): {},
        ("user", "root"): {"DefaultAccount": "root", "AdminLevel": "Administrator"},
    }
    extra: dict[Key, Values] = {("tier", f"extra{i}"): {"Priority": "7"} for i in range(len(state.objects) % 3)}
    return ClusterState(cluster="alpha", objects={**tiers, **state.objects, **extra, **root})


def try_policy(then: ClusterState, journal: Path, *, is_undone: bool) -> dict[str, bool]:
    """Make the accounting a state, and return which promises hold."""
    now = read_site(SITE)
    before = shown() if is_undone else []
    run = make(now, then, journal)
    after = read_site(SITE)
    text = policy_text(policy_tables(after.state))
    asked = desired_state(policy_of(tomllib.loads(text), "", "policy"), EMPTY)
    for change in differences(after.state, then):
        print(change.key, change.before, "expected", change.after, file=sys.stderr)
    promises = {
        "plan, run, check: clean": after.state.objects == then.objects,
        "import: no change": asked.objects == after.state.objects,
    }
    if is_undone and run:
        make(after, undone_state(after.state, journal, run, "alpha"), journal)
        promises["undo: as before"] = shown() == before
    return promises


class KilledError(Exception):
    """A run ends here."""


def try_kill(now: ClusterState, then: ClusterState, n: int, journal: Path) -> bool:
    """End a run from one state to the other at its call n, and return whether the next leads to the other."""
    make(read_site(SITE), now, journal)
    accounting, made = read_site(SITE), 0

    def run_call(argv: Sequence[str]) -> None:
        nonlocal made
        if (made, n % 2) == (n, 0):
            raise KilledError
        call(accounting, argv)
        made += 1
        if (made, n % 2) == (n + 1, 1):
            raise KilledError

    try:
        make(accounting, then, journal, run_call)
    except KilledError:
        make(read_site(SITE), then, journal)
        return read_site(SITE).state.objects == then.objects
    return False  # it was not ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 policies")
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    held: dict[str, list[float]] = defaultdict(list)

    with tempfile.TemporaryDirectory() as folder:

        @seed(args.seed)
        @settings(
            max_examples=20 if args.quick else 500,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(states())
        def each(state: ClusterState) -> None:
            number = len(held["plan, run, check: clean"])
            then = with_root(state)
            try:
                promises = try_until_loaded(then, Path(folder, "journal.jsonl"), is_undone=number % UNDO_EVERY == 9)
            except PitError as error:
                promises = {"plan, run, check: clean": False}
                print(f"policy {number}: {error}", file=sys.stderr, flush=True)
            for promise, is_held in promises.items():
                held[promise].append(float(is_held))
                if not is_held:
                    print(f"policy {number}: not held: {promise}", file=sys.stderr, flush=True)
            if number % 20 == 19:
                print({promise: f"{sum(n):g} of {len(n)}" for promise, n in held.items()}, file=sys.stderr, flush=True)

        each()
        now, then = map(with_root, large_change())
        calls = len(order_changes(now, then))
        for n in range(0, calls, 15 if args.quick else 1):
            is_finished = try_kill(now, then, n, Path(folder, "journal.jsonl"))
            held[f"a run of {calls} changes, ended at a call: finished by the next"].append(float(is_finished))
    version = subprocess.run(
        ["sinfo", "-V"],
        env={"SLURM_CONF": SITE.slurm.conf, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[-1]
    return report(
        [
            from_ratios(
                f"{promise} ({len(shares)} times)", "slurmdbd", version, [sum(shares) / len(shares)], target=1.0
            )
            for promise, shares in held.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
