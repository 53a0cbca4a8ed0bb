"""Estimates: when it starts, how long it runs, what is copied, what fails; and the log that they learn from."""

from __future__ import annotations

import math
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core import timestamps
from pitools.core.errors import ClusterError, ConfigError, Unreachable
from pitools.launch import plan as planning
from pitools.launch.plan import StagedDataset
from pitools.launch.request import Request
from pitools.launch.tickets.remote import datasets, submission
from pitools.place.clusters import account_limits, accounting_history, wait_log
from pitools.place.clusters.accounting_history import AccountingHistory, PastWait
from pitools.place.clusters.pools import pool_states
from pitools.place.clusters.snapshot import Snapshot, make_transport
from pitools.place.estimate import data_transfer, estimate, plan, throughput, wait_model
from pitools.place.estimate.candidates import Candidate, candidates
from pitools.place.estimate.data_transfer import DataTransfer
from pitools.place.estimate.plan import PlacementRequest, options_from_snapshots
from pitools.place.estimate.throughput import Throughput
from pitools.site.load import load_site
from pitools.site.schema import Paths, Place
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT
from pitools.slurm.records import Association, Qos
from pitools.slurm.transport import Transport
from pitools.store import manifest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Logs of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def asks(**values: Any) -> Request:
    return Request(**{"name": "r", "command": "true", "nodes": 2, "gpus_per_node": 8, "time": "2h", **values})


def one_of(made: Any, seen: Snapshot | None = None, request: Request | None = None, **site: Any) -> Candidate:
    (candidate,) = candidates(request or asks(), made.site(**site), seen or made.snapshot())
    return candidate


# The start.


def test_without_history_it_is_what_slurm_said(made: Any) -> None:
    """All three quantiles are the estimate."""
    output = estimate.estimate_wait(one_of(made), 5000.0, made.snapshot(), None, None, [])
    assert (output.q10_s, output.q50_s, output.q90_s, output.slurm_s) == (5000, 5000, 5000, 5000)


def test_others_waits_spread_it(made: Any) -> None:
    """Of jobs like it: the band holds what nine of ten of them waited, unless it starts at once."""
    past = AccountingHistory(jobs=tuple(PastWait("gpu", 2, 3600, float(i), 100.0 * i) for i in range(1, 102)))
    output = estimate.estimate_wait(one_of(made), 5000.0, made.snapshot(), None, past, [])
    assert (output.q10_s, output.q50_s, output.q90_s) == (1100, 5000, 9100)
    now = estimate.estimate_wait(one_of(made), 30.0, made.snapshot(), None, past, [])
    assert (now.q10_s, now.q50_s, now.q90_s) == (30, 30, 30)


def test_jobs_of_other_sizes_and_partitions_say_less() -> None:
    """Half to twice the nodes count; of any size where there are few of those; too few say nothing."""
    like = [PastWait("gpu", 4, 0, 0.0, 10.0)] * 10
    large = [PastWait("gpu", 64, 0, 0.0, 1000.0)] * 10
    assert accounting_history.wait_quantiles(AccountingHistory(jobs=(*like, *large)), "gpu", 8) == (10, 10, 10)
    assert accounting_history.wait_quantiles(AccountingHistory(jobs=(*like[:9], *large)), "gpu", 8) == (10, 1000, 1000)
    assert accounting_history.wait_quantiles(AccountingHistory(jobs=(*like, *large)), "cpu", 8) is None
    assert accounting_history.wait_quantiles(AccountingHistory(jobs=tuple(like[:9])), "gpu", 8) is None


def test_what_was_learnt_goes_before(made: Any) -> None:
    """Where jobs of this pool waited a tenth of what was foretold, so will this one; other pools teach nothing."""
    run_snapshot = made.snapshot(jobs=(made.job("1", state="PENDING", nodes=2, reason="Priority"),))
    (pool,) = pool_states(run_snapshot, (), made.site())
    features = wait_model.log_features(pool, 16, 7200)
    assert features == {"units": 16.0, "limit_s": 7200.0, "queued_ahead": 0.5}
    noted: list[wait_log.WaitLine] = []
    for number in range(40):
        for where, factor in (("x/gpu", 0.1), ("x/cpu", 0.9)):
            job, t_s = f"{where}{number}", 1e5 * number
            noted.append(wait_log.WaitPredicted(t_s=t_s, ticket=job, pool=where, estimate_s=5000.0, features=features))
            noted.append(wait_log.WaitEnded(t_s=t_s + 5000.0 * factor, ticket=job, pool=where, started=True))
    output = estimate.estimate_wait(one_of(made), 5000.0, run_snapshot, pool, None, noted)
    assert output.q50_s == pytest.approx(500, rel=0.05)
    assert output.basis.endswith("calibrated")
    past = AccountingHistory(jobs=(PastWait("gpu", 4, 0, 0.0, 5000.0),) * 10)
    both = estimate.estimate_wait(one_of(made), 5000.0, run_snapshot, pool, past, noted)
    assert (output.q10_s, both.q50_s) == (both.q10_s, pytest.approx(math.sqrt(560 * 5060) - 60, rel=0.05))
    assert estimate.estimate_wait(one_of(made), 30.0, run_snapshot, pool, past, noted).q50_s < 30
    assert estimate.estimate_wait(one_of(made), 5000.0, run_snapshot, pool, None, noted[1::2][:4]).q50_s == 5000


def test_a_database_that_does_not_answer_is_asked_for_less(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 days, then 7, 3, 1 and 1: not the same question again; the next after an answer is for 14 days."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.folder / "cache"))
    monkeypatch.setattr(accounting_history, "_RETRY_FAILED_S", -1.0)
    requested: list[str] = []

    def batch(_: object, commands: list[list[str]]) -> None:
        requested.extend(text for text in commands[0] if text.startswith("--starttime"))
        raise Unreachable("no answer within 5 s")

    monkeypatch.setattr(accounting_history, "run_queries", batch)
    for _ in range(5):
        with pytest.raises(Unreachable):
            accounting_history.read_history(made.site(), 10)
    assert requested == [f"--starttime=now-{days}days" for days in (14, 7, 3, 1, 1)]


@pytest.mark.parametrize(("from_h", "starts_h"), [(1.0, 5.0), (0.0, 5.0), (3.0, 0.05)])
def test_no_start_lies_in_a_reservation(made: Any, from_h: float, starts_h: float) -> None:
    """Waits that were short make no start from which a job of two hours would reach into a maintenance window."""
    start_time, now_s = made.snapshot(), time.time()
    (pool,) = pool_states(start_time, (), made.site())
    pool = msgspec.structs.replace(pool, maintenance_windows=[(now_s + from_h * 3600, now_s + 5 * 3600)])
    features = wait_model.log_features(pool, 16, 7200)
    raw_s = 5 * 3600.0  # Slurm knows of the window, and what it foretold was mostly far too late
    noted: list[wait_log.WaitLine] = []
    for number in range(40):
        job, t_s = str(number), 1e5 * number
        noted.append(wait_log.WaitPredicted(t_s=t_s, ticket=job, pool="x/gpu", estimate_s=raw_s, features=features))
        noted.append(wait_log.WaitEnded(t_s=t_s + raw_s / 100, ticket=job, pool="x/gpu", started=True))
    output = estimate.estimate_wait(one_of(made), raw_s, start_time, pool, None, noted)
    for start_s in (output.q10_s, output.q50_s, output.q90_s):
        assert start_s == pytest.approx(starts_h * 3600, abs=60)
    # What others waited there makes no such start either.
    past = AccountingHistory(jobs=(PastWait("gpu", 4, 0, 0.0, 180.0),) * 10)
    output = estimate.estimate_wait(one_of(made), raw_s, start_time, pool, past, [])
    assert output.q10_s == pytest.approx(starts_h * 3600, abs=60)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Unix time, which stands still."""
    now_s = float(int(time.time()))
    monkeypatch.setattr(time, "time", lambda: now_s)
    return now_s


def test_a_full_account_waits_for_its_own_jobs(made: Any, now_s: float) -> None:
    """GrpTRES, of which --test-only knows nothing: the start is when enough of the account's jobs have ended."""
    end = timestamps.to_rfc3339(datetime.fromtimestamp(now_s + 3600, UTC))
    rows = [
        Association(cluster="x", account="lab", user="me"),
        Association(cluster="x", account="lab", grp_tres={"gres/gpu": "24", "node": "9"}),
    ]
    jobs = (made.job("1", node_list="n1", end=end), made.job("2", node_list="n2"), made.job("3", account="infra"))
    run_snapshot = made.snapshot(enforced_limits=("limits",), account=made.standing(*rows), jobs=jobs)
    output = estimate.estimate_wait(one_of(made, run_snapshot, asks(account="lab")), 0.0, run_snapshot, None, None, [])
    assert output.q50_s == 3600
    assert "a limit of the account" in output.basis
    assert (
        estimate.estimate_wait(
            one_of(made, run_snapshot, asks(account="lab", nodes=1)), 0.0, run_snapshot, None, None, []
        ).q50_s
        == 0
    )


def test_a_full_qos_waits_for_whoever_is_in_it(made: Any, now_s: float) -> None:
    """Everybody's jobs for what all of it may have, mine for what one user may; of accounts, those below count."""
    ends = [timestamps.to_rfc3339(datetime.fromtimestamp(now_s + s, UTC)) for s in (1800, 3600, 7200)]
    jobs = tuple(
        made.job(str(i), user=user, account=account, qos=qos, end=end)
        for i, (user, account, qos, end) in enumerate(
            [("you", "lab", "normal", ends[0]), ("me", "child", "normal", ends[1]), ("me", "infra", "low", ends[2])]
        )
    )
    site = made.site(tiers={"normal": "normal"})

    def wait_s(*rows: Association, **qos: Any) -> float:
        association = Association(cluster="x", account="lab", user="me")
        standing = made.standing(association, *rows, qos=(Qos(qos="normal", **qos),))
        run_snapshot = made.snapshot(enforced_limits=("limits",), account=standing, jobs=jobs)
        (candidate,) = candidates(asks(account="lab"), site, run_snapshot)
        return estimate.estimate_wait(candidate, 0.0, run_snapshot, None, None, []).q50_s

    assert wait_s() == 0
    assert wait_s(grp_tres={"gres/gpu": "24"}) == 1800
    assert wait_s(max_tres_per_user={"gres/gpu": "16"}) == 3600
    assert wait_s(max_tres_per_user={"gres/gpu": "24"}) == 0
    lab = Association(cluster="x", account="lab", grp_tres={"node": "2"})
    child = Association(cluster="x", account="child", parent="lab")
    assert wait_s(lab) == 1800
    assert wait_s(lab, child) == 3600
    assert wait_s(lab, child, grp_tres={"node": "9"}) == 0  # a QOS says it first


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A program of Slurm's that says what the test wants."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("in_s", "skew_s", "expected"), [(600, 0.0, 600), (600, 400.0, 200), (600, 900.0, 0), (-9, 0.0, 0)]
)
def test_a_start_is_on_our_clock(
    made: Any, home: Path, monkeypatch: pytest.MonkeyPatch, now_s: float, in_s: float, skew_s: float, expected: float
) -> None:
    """Slurm says it on the cluster's clock, which may be ahead of ours; what was due by now is due now."""
    position = datetime.fromtimestamp(now_s + in_s, UTC)
    output = (
        f"sbatch: Job 7 to start at {position:%Y-%m-%dT%H:%M:%S} using 2 processors on nodes n[1-2] in partition gpu"
    )
    put_on_path(home, monkeypatch, "sbatch", f"echo '{output}' >&2")
    start = estimate.query_start(one_of(made), made.snapshot(skew_s=skew_s), 10)
    assert start == expected


def test_waits_of_others_are_read_from_their_eligible_time(
    made: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was held or dependent did not wait till then; early starts waited none; who never started is left out."""
    rows = [
        "1|gpu|2|60|2026-01-01T00:00:00|2026-01-01T01:00:00|2026-01-01T01:10:00|NODE_FAIL|43200",
        "1|gpu|2|60|2026-01-01T00:00:00|2026-01-02T00:00:00|2026-01-02T00:00:05|COMPLETED|86400",
        "2|gpu|2|UNLIMITED|2026-01-01T00:00:00|Unknown|2026-01-01T00:00:30|RUNNING|86400",
        "3|cpu|1|60|2026-01-01T00:00:00|2026-01-01T00:00:02|2026-01-01T00:00:01|CANCELLED by 7|86400",
        "4|gpu|1|60|2026-01-01T00:00:00|2026-01-01T00:00:00|Unknown|PENDING|0",
        "5|gpu|9|60|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T10:00:00|CANCELLED by 7|0",
    ]
    (home / "rows").write_text("\n".join(rows) + "\n")
    takes = 'for word; do case "$word" in --delimiter=*) sep="${word#*=}" ;; esac; done'
    put_on_path(home, monkeypatch, "sacct", f'{takes}; sed "s/|/$sep/g" {home}/rows')
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    assert accounting_history.peek_history(made.site()) is None
    history = accounting_history.read_history(made.site(), 10)
    assert [(wait.nodes, wait.limit_s, wait.wait_s) for wait in history.jobs] == [
        (2, 0, 30),
        (1, 3600, 0),
        (2, 3600, 600),
        (2, 3600, 5),
    ]
    assert history.failures_by_partition == {"gpu": (5.0, 1), "cpu": (1.0, 0)}
    assert accounting_history.peek_history(made.site()) == history


# The run.


def test_a_run_takes_its_limit_by_speed(made: Any) -> None:
    """Nobody measured it: what was asked for, divided by the speed of the partition."""
    for by, expected in ((2.0, 3600.0), (0.5, 4 * 3600.0)):
        one = one_of(made, gpu={"speed": by})
        assert estimate.estimate_runs(asks(), [one], {})["x/gpu"].run_s == expected


def test_what_was_measured_goes_before_what_was_declared(made: Any) -> None:
    """Samples to do ÷ samples a second and node; a rate alone scales the limit among the partitions."""
    fast, slow = one_of(made, name="f", gpu={"throughput": {"r": 300.0}}), one_of(made, name="s")
    rates = {"s/gpu": Throughput(samples_per_node_s=100.0, samples=720_000.0)}
    works = estimate.estimate_runs(asks(), [fast, slow], rates)
    assert (works["f/gpu"].run_s, works["s/gpu"].run_s) == (1200, 3600)
    works = estimate.estimate_runs(asks(), [fast, slow], {"s/gpu": Throughput(samples_per_node_s=100.0)})
    assert works["s/gpu"].run_s / works["f/gpu"].run_s == pytest.approx(3)
    assert throughput.relative_speeds(
        {"a": Throughput(samples_per_node_s=300.0), "b": Throughput(samples_per_node_s=100.0)},
        {"a": 1.0, "b": 1.0, "c": 1.0},
    ) == {
        "a": 3.0,
        "b": 1.0,
        "c": 1.0,
    }


def test_failures_and_money(made: Any) -> None:
    """Each failure costs half a checkpoint interval and a requeue; who saves only at the end loses all."""
    place, gpu = Place(failures_per_node_day=0.6), {"price_per_node_hour": 30.0}
    one = one_of(made, place=place, gpu=gpu)
    work = estimate.estimate_runs(asks(), [one], {})["x/gpu"]
    failures = 0.6 * 2 * 2 / 24
    assert work.p_fail == pytest.approx(1 - math.exp(-failures))
    assert work.loss_s == pytest.approx(failures * (900 + 120))
    assert work.cost == pytest.approx(30 * 2 * (2 + work.loss_s / 3600))
    args = {"entry": "a:b", "command": ""}
    late = estimate.estimate_runs(asks(args={"checkpoint_every": 0}, **args), [one], {})["x/gpu"]
    assert late.loss_s == pytest.approx(failures * (3600 + 120))
    often = estimate.estimate_runs(
        asks(args={"checkpoint_every": 10}, **args), [one], {"x/gpu": Throughput(samples_per_node_s=1, step_s=2.0)}
    )["x/gpu"]
    assert often.loss_s == pytest.approx(failures * (10 + 120))


def test_nodes_that_failed_before_will_again(made: Any) -> None:
    """What accounting saw counts against what the site file says, by the node-days behind it; others' sites do not."""
    one = one_of(made, place=Place(failures_per_node_day=0.01))
    saw = {
        days: AccountingHistory(jobs=(), failures_by_partition={"gpu": (days, round(days / 10)), "cpu": (1e6, 0)})
        for days in (0.0, 100.0, 1e6)
    }
    rates = [accounting_history.node_failure_rate(saw[days], "gpu", 0.01) for days in (0.0, 100.0, 1e6)]
    assert rates == pytest.approx([0.01, 0.055, 0.1], rel=1e-3)
    assert (
        accounting_history.node_failure_rate(saw[100.0], "new", 0.02)
        == accounting_history.node_failure_rate(None, "gpu", 0.02)
        == 0.02
    )
    for days, per_day in zip(saw, rates, strict=True):
        for site, expected in (("x", per_day), ("y", 0.01)):
            work = estimate.estimate_runs(asks(), [one], {}, {site: saw[days]})["x/gpu"]
            assert work.p_fail == pytest.approx(1 - math.exp(-expected * 2 * 2 / 24))


def test_copying_costs_only_what_outlasts_the_wait(made: Any) -> None:
    """Both go on at once."""
    work = estimate.RunEstimate(run_s=100, loss_s=5, p_fail=0, cost=0, basis="")
    for wait_s, copy_s, end_s in ((50.0, 20.0, 155), (20.0, 50.0, 155)):
        start = estimate.WaitEstimate(q10_s=0, q50_s=wait_s, q90_s=99, slurm_s=0, basis="")
        assert (
            estimate.CandidateEstimate(wait=start, run=work, transfer=DataTransfer(bytes=1, wall_s=copy_s)).end_s
            == end_s
        )


def test_options_are_one_for_the_same_nodes(made: Any) -> None:
    """What a dispatcher chooses from: the fit ones, two names for the same nodes counting once."""
    run_snapshot = made.snapshot()
    twin = msgspec.structs.replace(run_snapshot.partitions[0], partition="twin")
    run_snapshot = msgspec.structs.replace(run_snapshot, partitions=(*run_snapshot.partitions, twin))
    site = made.site()
    site = msgspec.structs.replace(site, partitions={"gpu": site.partitions["gpu"], "twin": site.partitions["gpu"]})
    candidate = candidates(asks(), site, run_snapshot)
    assert [item.fits for item in candidate] == [True, True]
    works = estimate.estimate_runs(asks(), candidate, {})
    (option,) = estimate.placement_options(candidate, works, {"x/gpu": DataTransfer(bytes=9, wall_s=3.0)})
    assert (option.pool, option.units, option.run_s, option.limit_s, option.copy_s) == ("x/gpu", 16, 7200, 7200, 3)
    assert estimate.placement_options(candidates(asks(nodes=5), site, run_snapshot), {}, {}) == ()


def test_offers_leave_out_whoever_cannot_say_what_is_there(made: Any) -> None:
    """Only what fits, at sites that answer; a site on this machine's storage is not even asked."""
    placement_request = PlacementRequest(request=asks())
    observed, small = made.snapshot(), made.snapshot(nodes=(made.node("n1"),))
    sites = [
        (made.site(name="a"), observed),
        (made.site(name="b"), small),
        (made.site(name="c", gpu={"speed": 2.0}), observed),
    ]
    actual = options_from_snapshots(placement_request, sites, timeout_s=5).options
    assert [(item.pool, item.run_s, item.units) for item in actual] == [("a/gpu", 7200, 16), ("c/gpu", 3600, 16)]


@pytest.mark.parametrize(("gpus", "hours"), [("gres/gpu=", 4 * 2 + 10 * 3), ("gres/none=", 16 * (2 + 1 + 3))])
def test_gpu_hours_are_those_of_the_last_month(
    made: Any, home: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, hours: float
) -> None:
    """GPUs x hours of our jobs, from a month ago on; whole nodes where Slurm does not count GPUs; accounts, and us."""

    def row(job: str, started_ago_h: float, ran_h: float, tracked: str) -> str:
        start = f"{datetime.now(UTC) - timedelta(hours=started_ago_h):%Y-%m-%dT%H:%M:%S}"
        reference = {
            "JobID": job,
            "JobIDRaw": job,
            "State": "COMPLETED",
            "ExitCode": "0:0",
            "Start": start,
            "NNodes": "2",
            "ElapsedRaw": str(round(ran_h * 3600)),
            "Partition": "gpu",
            "AllocTRES": tracked,
        }
        return "|".join(reference.get(name, "") for name in ACCOUNTING_FORMAT)

    month_h = 30 * 24.0
    rows = [
        "|".join(ACCOUNTING_FORMAT),
        row("1", 10, 2, f"cpu=8,{gpus}4"),
        row("2", 10, 1, "cpu=8"),
        row("3", month_h + 5, 8, f"{gpus}10"),
        row("4", month_h + 5, 4, f"{gpus}10"),
    ]
    (home / "rows").write_text("\n".join(rows) + "\n")
    takes = 'for word; do case "$word" in --delimiter=*) sep="${word#*=}" ;; esac; done'
    put_on_path(home, monkeypatch, "sacct", f'{takes}; sed "s/|/$sep/g" {home}/rows')
    put_on_path(home, monkeypatch, "id", "echo ada")  # a container may have no name for us
    ours = "".join(f"x|lab|{user}||normal|normal|||||\n" for user in ("", "$(id -un)", "somebody"))
    put_on_path(home, monkeypatch, "sacctmgr", f'case "$*" in *assoc*) printf "{ours}" ;; esac')
    actual = account_limits.query_account_limits(made.site(), make_transport(made.site(), 10))
    assert actual.used_gpu_hours == pytest.approx(hours, abs=0.1)
    assert [row.user for row in actual.associations] == ["", actual.user]
    assert actual.groups


def test_a_run_that_outlasts_its_limit_does_not_fit(made: Any) -> None:
    """As it ran before, it would be ended before its end; the reason says both."""
    one = one_of(made)
    work = estimate.RunEstimate(run_s=7200.0, loss_s=0, p_fail=0, cost=0, basis="")
    assert plan.reject_if_too_long(one, {"x/gpu": work}).fits
    over = plan.reject_if_too_long(one, {"x/gpu": msgspec.structs.replace(work, run_s=9000.0)})
    assert over.reasons == ("expected run time 2h30m by earlier runs (time limit 2h00m)",)


def test_bandwidth_is_what_the_last_transfers_had(made: Any) -> None:
    """All together, else what the site file says."""
    assert data_transfer.assumed_transfer_rate(made.site(place=Place(bandwidth="10MiB"))) == 10 << 20
    wait_log.record_transfer("x", 100 << 20, 1.0)
    wait_log.record_transfer("x", 100 << 20, 3.0)
    assert data_transfer.assumed_transfer_rate(made.site()) == 50 << 20


# Data, and the start, asked of a far side.


@pytest.fixture
def versions(tmp_path: Path) -> list[StagedDataset]:
    """Three datasets here; below paths.data of the site one is whole, one torn and one missing."""
    data = []
    for number, name in enumerate(("demo", "torn", "none"), start=1):
        text = manifest.encode_manifest(manifest.Manifest(name=name, episodes=0, steps=0, arrays={}, files=()))
        version = manifest.version_of(text)
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(text)
        target = tmp_path / "far" / name / version
        if name != "none":
            target.mkdir(parents=True)
            (target / "manifest.json").write_bytes(text if name == "demo" else text[:-1])
        data.append(
            StagedDataset(name=f"d{number}", source=str(tmp_path / name), version=version, bytes=number * 100 << 20)
        )
    return data


@pytest.mark.slurm
def test_data_is_where_its_manifest_says(
    far: Any, tmp_path: Path, versions: list[StagedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call; a version is there when its manifest's digest is its name, at its path here or below paths.data. A
    submission copies what the estimate counts, and reads the rest where it is.
    """
    site = load_site(far.site("a", "true"))
    site = msgspec.structs.replace(site, paths=Paths(runs="/runs", python="/python", data=str(tmp_path / "far")))
    here = versions[2].source
    run_command = datasets.run_command

    def without_ours(transport: Transport, argv: list[str], **options: Any) -> object:
        """The far side has one of the folders here."""
        folders = options.pop("stdin").splitlines()
        seen = ["/nothing" if Path(one).parent == tmp_path and one != here else one for one in folders]
        return run_command(transport, argv, stdin="".join(f"{one}\n" for one in seen), **options)

    monkeypatch.setattr(datasets, "run_command", without_ours)
    snapshot = Snapshot(
        site="a", seen_s=0, skew_s=0, cluster="alpha", enforced_limits=(), partitions=(), nodes=(), jobs=()
    )
    assert data_transfer.missing_data(versions, site, snapshot, 10) == DataTransfer(bytes=200 << 20, wall_s=2.0)
    assert far.called() == ["true"]
    request = Request(name="r", command="true", time="1m", partition="train", workdir=str(tmp_path))
    planned = msgspec.structs.replace(planning.make_plan(request, site, "test"), data=tuple(versions))
    assert [staged.name for staged in datasets.missing_datasets(planned, site)] == ["d2"]
    there = submission.plan_with_remote_paths(planned, site, "/runs/r", datasets.find_datasets(site, versions))
    assert [staged.source for staged in there.data] == [
        str(tmp_path / "far" / "demo" / versions[0].version),
        str(tmp_path / "far" / "torn" / versions[1].version),
        here,
    ]
    assert data_transfer.missing_data(versions, load_site("alpha"), snapshot, 10) == DataTransfer()
    with pytest.raises(ClusterError):
        data_transfer.missing_data(versions, load_site(far.site("g", "garbage")), snapshot, 10)
    # Without a folder for copies, what would be refused at the submission does not fit.
    bare = msgspec.structs.replace(site, paths=Paths())
    assert data_transfer.missing_data(versions[2:], bare, snapshot, 10) == DataTransfer()
    with pytest.raises(ConfigError):
        data_transfer.missing_data(versions, bare, snapshot, 10)
