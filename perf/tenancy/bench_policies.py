"""Random policies, made real by `pitools.tenancy` in a real slurmdbd, and read back.

perf/run tenancy_policies [--quick] [--seed N]     needs root, eval "$(scripts/devcluster up --clusters alpha)"

From each policy to the next by the calls of `run`. Then the ratio is the share of policies for which a check finds
nothing, of which an import asks for no change, and (of every tenth) after whose undo sacctmgr prints what it did
before. Then a run of more than 40 changes is ended at each call (--quick: at every 15th), before or after it in turn:
of how many did the next run finish? The cluster keeps the last policy. Two hours: a call of sacctmgr takes 0.4 s on one
machine, but 0.01 s, and all some 15 minutes, where the loopback address acknowledges at once (see .ci/run).
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from perf.harness.dev_cluster import alpha
from perf.harness.harness import from_ratios, report
from pitools.core.errors import PitError
from pitools.tenancy.apply import differences, journal_path
from pitools.tenancy.changes import order_changes
from pitools.tenancy.cluster_state import ClusterState, Key, Values
from pitools.tenancy.desired import desired_state, policy_tables
from pitools.tenancy.policy import policy_of
from pitools.tenancy.policy_text import policy_text
from pitools.tenancy.read import SiteAccounting, read_site
from pitools.tenancy.site_plan import run_changes
from pitools.tenancy.undo import undone_state
from tests.tenancy.states import large_change, states

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


def make(accounting: SiteAccounting, then: ClusterState, undoes: str = "") -> str:
    """Make the accounting a state as `pit tenancy run` does, and return the run's ID, "" if there was nothing to do."""
    run = secrets.token_hex(4)
    return run if list(run_changes(accounting, then, run, undoes)) else ""


def with_root(state: ClusterState) -> ClusterState:
    """Return a state with what no run may take away, the root user of the root account, and tiers of devcluster."""
    tiers: dict[Key, Values] = {("tier", name): {} for name in ("low", "high")}
    root: dict[Key, Values] = {
        ("member", "root", "root", ""): {},
        ("user", "root"): {"DefaultAccount": "root", "AdminLevel": "Administrator"},
    }
    extra: dict[Key, Values] = {("tier", f"extra{i}"): {"Priority": "7"} for i in range(len(state.objects) % 3)}
    return ClusterState(cluster="alpha", objects={**tiers, **state.objects, **extra, **root})


def try_policy(then: ClusterState, *, is_undone: bool) -> dict[str, bool]:
    """Make the accounting a state, and return which promises hold."""
    now = read_site(SITE)
    before = shown() if is_undone else []
    run = make(now, then)
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
        make(after, undone_state(after.state, journal_path(), run, SITE.name), run)
        promises["undo: as before"] = shown() == before
    return promises


class KilledError(Exception):
    """A run ends here."""


class EndingClient:
    """The client of a run that ends at its call n: before it if n is even, after it if n is odd."""

    def __init__(self, client: Any, n: int) -> None:
        self.client, self.transport, self.n, self.made = client, client.transport, n, 0

    def run_once(self, *args: Any) -> Any:
        """Make a call, unless the run ends."""
        if (self.made, self.n % 2) == (self.n, 0):
            raise KilledError
        done = self.client.run_once(*args)
        self.made += 1
        if (self.made, self.n % 2) == (self.n + 1, 1):
            raise KilledError
        return done


def try_kill(now: ClusterState, then: ClusterState, n: int) -> bool:
    """End a run from one state to the other at its call n, and return whether the next leads to the other."""
    make(read_site(SITE), now)
    accounting = read_site(SITE)
    ending: Any = EndingClient(accounting.client, n)
    try:
        make(msgspec.structs.replace(accounting, client=ending), then)
    except KilledError:
        make(read_site(SITE), then)
        return read_site(SITE).state.objects == then.objects
    return False  # it was not ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 policies")
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    held: dict[str, list[float]] = defaultdict(list)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder  # of the journal

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
                promises = try_policy(then, is_undone=number % UNDO_EVERY == 9)
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
            held[f"a run of {calls} changes, ended at a call: finished by the next"].append(
                float(try_kill(now, then, n))
            )
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
