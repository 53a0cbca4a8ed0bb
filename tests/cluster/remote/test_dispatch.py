"""One queue over a near cluster and a far one: real Slurms, a real sshd, and a connection that is cut on the way."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pitools.launch.request import Request
from pitools.place import types
from pitools.place.dispatch import planner, store, tick
from pitools.place.dispatch.tick import Dispatcher
from pitools.site.schema import Site
from pitools.slurm.client import Client, Transport

pytestmark = pytest.mark.slurm

NEAR, FAR = "beta/train", "far/train"
# Jobs of this name wait in the near queue for as long as anybody cares.
SBATCH = (
    '#!/bin/sh\nfor last; do :; done\ngrep -q -- moved- "$last" && set -- --begin=now+1hour "$@"\nexec {real} "$@"\n'
)
WANTED = {"near": (NEAR,), "far": (FAR,), "moved": (NEAR, FAR)}


def decide(
    now_s: float, jobs: Sequence[types.PendingJob], pools: Mapping[str, types.PoolState], held: Sequence[types.Ticket]
) -> list[types.Submit | types.Withdraw]:
    """Each job where its name says; `moved` goes to the near queue, and from there to the far one."""
    actual: list[types.Submit | types.Withdraw] = []
    for job in jobs:
        expected = WANTED[job.job_id.partition("-")[0]]
        own_part = [ticket.pool for ticket in held if ticket.job_id == job.job_id]
        # Where a ticket was just taken back there is no option for a while.
        left = [pool for pool in expected if pool in pools and pool in {option.pool for option in job.options}]
        if not own_part:
            actual += [types.Submit(job_id=job.job_id, pool=pool) for pool in left[:1]]
        elif own_part[0] != expected[-1]:
            actual.append(types.Withdraw(job_id=job.job_id, pool=own_part[0]))
    return actual


@pytest.fixture
def world(
    site: Site, far_side: Any, clusters: Path, dev_sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A machine with beta's Slurm, and ssh to the far side; returns the queue."""
    sites, bin_folder, state = tmp_path / "sites", tmp_path / "bin", tmp_path / "state"
    for folder in (sites, bin_folder, state):
        folder.mkdir(mode=0o700)
    path = os.environ["PATH"] + ":" + os.defpath
    real = next(f"{item}/sbatch" for item in path.split(":") if Path(item, "sbatch").exists())
    (bin_folder / "sbatch").write_text(SBATCH.format(real=real))
    (bin_folder / "sbatch").chmod(0o755)
    text = (dev_sites / "alpha.toml").read_text().replace('name = "alpha"', 'name = "far"')
    head, _, rest = text.partition("[paths]\n")
    keys = "".join(f'{key} = "{getattr(site.paths, key)}"\n' for key in ("runs", "data", "nvme", "python"))
    reach = '[connection]\nkind = "ssh"\nhost = "far"\ntimeout_s = 20\n'
    (sites / "far.toml").write_text(f"{head}[paths]\n{keys}{reach}{rest[rest.index('[partitions') :]}")
    (sites / "beta.toml").write_text(f'[paths]\nruns = "{tmp_path}/runs"\n')
    monkeypatch.setenv("PATH", f"{bin_folder}:{far_side.near}:{path}")
    monkeypatch.setenv("PIT_SITE_PATH", str(sites))
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(state))
    monkeypatch.setattr(planner, "LEAD_S", 0.0)
    monkeypatch.setattr(tick, "MAX_AGE_S", 1.0)
    yield store.queue_dir()
    beta = Client(Transport(env={"SLURM_CONF": str(clusters / "beta" / "slurm.conf")}))
    if left := [job.raw_id for job in beta.jobs() if str(tmp_path) in job.work_dir or job.name.startswith("moved-")]:
        beta.cancel(left)


def test_near_and_far_and_a_cut(world: Path, alpha: Client, far_side: Any, tmp_path: Path) -> None:
    """Every job runs once, on the side where it could; over one connection, and one more after the cut."""
    work = tmp_path / "work"
    work.mkdir()
    command = 'echo "$SLURM_CLUSTER_NAME" >> "$PIT_RUN_DIR/proof"; sleep 1'
    requests = [
        Request(name=name, command=command, time="2m", workdir=str(work))
        for name in ("near", "far", "far", "moved", "moved")
    ]
    jobs = store.enqueue(world, [store.make_request(request, ("beta", "far"), user="ada") for request in requests])
    ticker = Dispatcher(world, decide)
    before, cuts = far_side.logins(), 0
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and not all(store.find_job(world, job.job_id).is_over for job in jobs):
        ticked = ticker.tick()
        assert ticked
        if not cuts and any(row.pool == FAR and row.state == "running" for row in ticked.jobs):
            assert far_side.logins() - before == 1
            cuts = far_side.cut()
            assert cuts == 1
        time.sleep(0.2)
    actual = [store.find_job(world, job.job_id) for job in jobs]
    assert [job.state for job in actual] == ["done"] * len(jobs), [job.tickets for job in actual]
    assert far_side.logins() - before == 2
    proofs = [
        path
        for runs in (tmp_path / "runs", far_side.root / "runs" / far_side.user)
        for job in jobs
        for path in runs.glob(f"{job.job_id}.*/proof")
    ]
    ran = Counter((path.parent.name.partition(".")[0], *path.read_text().split()) for path in proofs)
    sides = {"near": "beta", "far": "alpha", "moved": "alpha"}
    assert ran == Counter((job.job_id, sides[job.job_id.partition("-")[0]]) for job in jobs)
    # What the far runs had to say lies in the queue's own folder.
    logs = [list((store.queue_dir() / "done" / job.job_id).glob("run/attempts/*/exit.json")) for job in jobs]
    assert [len(request) for request in logs] == [0, 1, 1, 1, 1]


STOPPING = """\
done=$(cat "$PIT_CHECKPOINT_DIR/steps" 2>/dev/null || echo 0)
echo "$SLURM_CLUSTER_NAME $(cat here) $done" >> "$PIT_CHECKPOINT_DIR/proof"
echo $((done + 5)) > "$PIT_CHECKPOINT_DIR/steps"; cp "$PIT_CHECKPOINT_DIR/steps" "$PIT_RUN_DIR/progress"
[ "$done" -ge 15 ] || exit 95
"""


def test_a_stopped_job_goes_on_across_sites(world: Path, far_side: Any, tmp_path: Path) -> None:
    """Its checkpoints and its code come here from the far side, go there, and back; what was fetched is removed."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "here").write_text("first\n")
    request = Request(name="stopping", command=STOPPING, time="2m", workdir=str(work))
    (queued,) = store.enqueue(world, [store.make_request(request, ("beta", "far"), user="ada")])
    route = [FAR, FAR, NEAR, FAR]

    def along(
        _now_s: float, jobs: Sequence[types.PendingJob], _pools: object, held: Sequence[types.Ticket]
    ) -> list[types.Submit | types.Withdraw]:
        pools = {option.pool for job in jobs for option in job.options}
        taken = len(store.find_job(world, queued.job_id).tickets)
        return [
            types.Submit(job_id=job.job_id, pool=route[taken]) for job in jobs if not held and route[taken] in pools
        ]

    ticker = Dispatcher(world, along)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not store.find_job(world, queued.job_id).is_over:
        assert ticker.tick()
        if store.find_job(world, queued.job_id).tickets:
            (work / "here").write_text("changed since\n")
        time.sleep(0.2)
    job = store.find_job(world, queued.job_id)
    assert (job.state, [ticket.state for ticket in job.tickets]) == ("done", ["stopped"] * 3 + ["over"]), job.tickets
    last = far_side.root / "runs" / far_side.user / f"{job.job_id}.4"
    assert (last / "checkpoints" / "proof").read_text().splitlines() == [
        "alpha first 0",
        "alpha first 5",
        "beta first 10",
        "alpha first 15",
    ]
    assert [path.name for path in job.path.glob("run*")] == ["run"]
