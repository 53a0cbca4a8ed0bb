"""Which partitions could run a request, and the reason for each that could not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core.timestamps import to_rfc3339
from pitools.launch.request import Request
from pitools.place.estimate.candidates import candidates, never_reasons
from pitools.site.schema import Dialect, Place
from pitools.slurm.records import Association, Qos


def asks(**values: Any) -> Request:
    """A request for two nodes of 8 GPUs."""
    return Request(**{"name": "r", "command": "true", "nodes": 2, "gpus_per_node": 8, "time": "2h", **values})


def mine(**values: Any) -> Association:
    """My association with account lab."""
    return Association(**{"cluster": "x", "account": "lab", "user": "me", "qos": ("normal",), **values})


def test_candidate_that_fits_has_a_plan_and_no_reason(made: Any) -> None:
    """The plan is the one that `pit launch run -` takes, for that partition."""
    (candidate,) = candidates(asks(), made.site(), made.snapshot(), "r.toml", "name = 'r'")
    assert candidate.fits
    assert (
        candidate.pool,
        candidate.units,
        candidate.able_nodes,
        candidate.total_nodes,
        candidate.unhealthy_nodes,
    ) == ("x/gpu", 16, 4, 4, 0)
    assert candidate.plan
    assert (candidate.plan.site, candidate.plan.partition, candidate.plan.nodes, candidate.plan.request_text) == (
        "x",
        "gpu",
        2,
        "name = 'r'",
    )


@pytest.mark.parametrize(
    ("request_", "site", "seen", "reason"),
    [
        ({"nodes": 5}, {}, {}, 'nodes = 5, but partition "gpu" of "x" has 4'),
        ({"nodes": 5}, {"gpu": {"nodes": 0}}, {}, "4 of its 4 nodes"),
        ({"gpus_per_node": 9}, {}, {}, 'gpus_per_node = 9, but partition "gpu" has 8'),
        ({"gpu": "b200"}, {}, {}, 'gpu = "b200", but partition "gpu" has h100'),
        ({"gpu_memory_gib": 141}, {}, {}, "gpu_memory_gib = 141, but a GPU of partition"),
        ({"gpu_memory_gib": 1}, {"gpu": {"gpu_memory_gib": 0}}, {}, "gpu_memory_gib = 1, but a GPU of partition"),
        ({"time": "3h"}, {"gpu": {"max_time": "2:00:00"}}, {}, "over the limit of partition"),
        ({"partition": "nosuch"}, {}, {}, "the site file has no partition"),
        ({"tasks_per_node": 9, "cpus_per_task": 8}, {}, {}, "0 of its 4 nodes"),
        ({"memory": "513G"}, {}, {}, "0 of its 4 nodes"),
        ({"constraint": "nvme&ib"}, {}, {}, "0 of its 4 nodes"),
        ({"constraint": "nvme|ib"}, {}, {}, "0 of its 4 nodes"),
        ({"exclude": "n[1-3]"}, {}, {}, "1 of its 4 nodes"),
        ({"nodelist": "n[4-5]"}, {}, {}, "n5 of the node list"),
        ({"account": "nosuch"}, {"accounts": ("lab",)}, {}, 'no account "nosuch"'),
        ({"tier": "nosuch"}, {"tiers": {"normal": "normal"}}, {}, 'no tier "nosuch"'),
        ({"segment": 2}, {}, {}, "has no --segment"),
        ({"workdir": "/nosuch"}, {}, {}, 'workdir = "/nosuch" is no folder'),
        ({}, {}, {"state": "drain"}, "the partition is drain"),
        ({}, {}, {"max_nodes": 1}, "2 nodes (at most 1 a job)"),
        ({}, {}, {"min_nodes": 3}, "2 nodes (at least 3 a job)"),
        ({}, {}, {"max_time_s": 3600}, "time limit 02:00:00 (at most 01:00:00)"),
        ({"account": "lab"}, {}, {"deny_accounts": ("lab",)}, 'account "lab" may not'),
        ({"account": "lab"}, {}, {"allow_accounts": ("infra",)}, 'account "lab" may not'),
        ({"tier": "high"}, {"tiers": {"normal": "n", "high": "h"}}, {"allow_qos": ("n",)}, 'QOS "h" may not'),
    ],
)
def test_candidate_that_does_not_fit_has_the_reason(
    made: Any, request_: dict[str, Any], site: dict[str, Any], seen: dict[str, Any], reason: str
) -> None:
    """Size, type, memory, time, features, names, accounts and QOS: one sentence that says which."""
    (candidate,) = candidates(asks(**request_), made.site(**site), made.snapshot(partition=seen))
    assert not candidate.fits
    assert any(reason in text for text in candidate.reasons), candidate.reasons


@pytest.mark.parametrize(
    ("request_", "seen", "is_never"),
    [
        ({}, {}, False),
        ({"cpus_per_task": 999}, {}, True),
        ({"memory": "513G"}, {}, True),
        ({"gpus_per_node": 9}, {}, True),
        ({"partition": "nosuch"}, {}, True),
        ({"constraint": "nvme&ib"}, {}, False),
        ({"nodelist": "n[4-5]"}, {}, False),
        ({}, {"state": "drain"}, False),
    ],
)
def test_permanent_reasons(made: Any, request_: dict[str, Any], seen: dict[str, Any], is_never: bool) -> None:
    """The size of nodes and partitions; not their state, nor what somebody may give them. One site that may will do."""
    small = (made.site(), made.snapshot(partition=seen))
    assert bool(never_reasons(asks(**request_), [small])) == is_never
    large = (made.site(name="y"), made.snapshot(nodes=tuple(made.node(f"n{n}", cpus=9999) for n in range(1, 5))))
    if "cpus_per_task" in request_:
        assert never_reasons(asks(**request_), [small, large]) == []


@pytest.mark.parametrize(
    ("rows", "qos", "reason"),
    [
        ([mine(user="you")], [], 'me has no association with account "lab"'),
        ([mine(cluster="y")], [], 'me has no association with account "lab"'),
        ([mine(partition="cpu")], [], 'me has no association with account "lab"'),
        ([mine(qos=("low",))], [], 'QOS "normal" is not allowed for the account (allowed: low)'),
        ([mine(max_tres={"node": "1"})], [], '2 nodes (at most 1 for a job of me in account "lab")'),
        ([mine(grp_tres={"gres/gpu": "8"})], [], "16 GPUs (at most 8 for all of me"),
        ([mine(), mine(user="", grp_tres={"cpu": "1"})], [], '2 CPUs (at most 1 for all of account "lab")'),
        ([mine()], [Qos(qos="normal", max_wall_s=60)], 'time limit 02:00:00 (at most 00:01:00 in QOS "normal")'),
        ([mine(max_tres={"node": "2"}), mine(user="", max_tres={"node": "1"})], [], ""),
        ([mine(), mine(user="", max_tres={"node": "1"})], [], '2 nodes (at most 1 for a job of account "lab")'),
        ([mine(max_tres={"node": "1"})], [Qos(qos="normal", max_tres={"node": "2"})], ""),
        ([mine()], [Qos(qos="normal", max_tres={"gres/gpu": "8"})], '16 GPUs (at most 8 for a job of QOS "normal")'),
        ([mine(grp_tres={"node": "1"})], [Qos(qos="normal", grp_tres={"node": "2"})], ""),
        (
            [mine(), mine(user="", parent="dept"), mine(user="", account="dept", grp_tres={"node": "1"})],
            [],
            '2 nodes (at most 1 for all of account "dept")',
        ),
        (
            [mine(user="", cluster="y", parent="dept"), mine(), mine(user="", account="dept", grp_tres={"node": "1"})],
            [],
            "",
        ),
        ([mine()], [Qos(qos="normal", grp_tres={"gres/gpu": "15"})], '16 GPUs (at most 15 for all of QOS "normal")'),
        ([mine()], [Qos(qos="normal", max_tres_per_user={"node": "0"})], "2 nodes (at most 0 for one user of QOS"),
        ([mine(max_tres={"node": "2"}, grp_tres={"gres/gpu": "16"})], [Qos(qos="normal", max_wall_s=7200)], ""),
    ],
)
def test_accounting_s_limits_count_where_they_are_enforced(
    made: Any, rows: list[Association], qos: list[Qos], reason: str
) -> None:
    """Associations, QOS and TRES limits, each named; on a cluster that enforces none, none counts."""
    site = made.site(tiers={"normal": "normal"})
    standing = made.standing(*rows, qos=tuple(qos))
    run_snapshot = made.snapshot(enforced_limits=("associations", "limits", "qos"), account=standing)
    (candidate,) = candidates(asks(account="lab"), site, run_snapshot)
    assert candidate.fits == (not reason)
    assert any(reason in text for text in candidate.reasons) or not reason, candidate.reasons
    (free,) = candidates(asks(account="lab"), site, made.snapshot(account=standing))
    assert free.fits


def test_request_at_the_limits_fits(made: Any) -> None:
    """As many nodes as a job must have, and no more than it may; as long as it may."""
    run_snapshot = made.snapshot(partition={"min_nodes": 2, "max_nodes": 2, "max_time_s": 7200})
    assert candidates(asks(memory="512G"), made.site(gpu={"max_time": "2:00:00"}), run_snapshot)[0].fits


def test_the_partition_s_qos_goes_first_unless_the_job_s_goes_over_it(made: Any) -> None:
    """Each limit is the first QOS's that has it; QOS that neither names have no say."""
    site = made.site(tiers={"normal": "normal"})
    small, other = Qos(qos="small", max_tres={"node": "1"}, max_wall_s=60), Qos(qos="other", max_tres={"node": "0"})
    normal = Qos(qos="normal", max_tres={"node": "2"}, max_wall_s=7200)
    for flags, reasons in (
        ((), ('time limit 02:00:00 (at most 00:01:00 in QOS "small")', '2 nodes (at most 1 for a job of QOS "small")')),
        (("OverPartQOS",), ()),
    ):
        qos = (other, msgspec.structs.replace(normal, flags=flags), small)
        standing = made.standing(mine(qos=("normal", "small")), qos=qos)
        run_snapshot = made.snapshot(enforced_limits=("limits",), account=standing, partition={"qos": "small"})
        (candidate,) = candidates(asks(account="lab"), site, run_snapshot)
        assert candidate.reasons == reasons


def test_without_an_account_only_slurm_knows_whose_limits_count(made: Any) -> None:
    """The limits of accounts that it may not come under are no reason; to have no account at all is one."""
    rows = (mine(max_tres={"node": "1"}), mine(account="infra"), mine(user="", max_tres={"node": "0"}))
    run_snapshot = made.snapshot(enforced_limits=("associations", "limits"), account=made.standing(*rows))
    assert candidates(asks(), made.site(), run_snapshot)[0].fits
    run_snapshot = made.snapshot(enforced_limits=("associations",), account=made.standing(mine(user="you")))
    assert candidates(asks(), made.site(), run_snapshot)[0].reasons == ("me has no association with any account",)


@pytest.mark.parametrize(
    ("partition", "version", "fits"),
    [
        ({"allow_accounts": ("dept",)}, (22, 5, 8), False),
        ({"allow_accounts": ("dept",)}, (24, 5, 0), True),
        ({"allow_accounts": ("other",)}, (25, 5, 0), False),
        ({"deny_accounts": ("dept",)}, (22, 5, 8), True),
        ({"deny_accounts": ("dept",)}, (25, 5, 0), False),
        ({"allow_accounts": ("lab",), "deny_accounts": ("lab",)}, (22, 5, 8), True),
        ({"allow_groups": ("physics", "chem")}, (22, 5, 8), True),
        ({"allow_groups": ("physics",)}, (22, 5, 8), False),
    ],
)
def test_whom_a_partition_lets_in(made: Any, partition: dict[str, Any], version: tuple[int, ...], fits: bool) -> None:
    """Later Slurms take an account for all below it; who is allowed is not looked up among the denied; groups."""
    rows = (mine(), mine(user="", parent="dept"), mine(user="", account="dept", parent="root"))
    standing = made.standing(*rows, groups=frozenset({"chem"}))
    run_snapshot = made.snapshot(partition=partition, version=version, account=standing)
    assert candidates(asks(account="lab"), made.site(), run_snapshot)[0].fits == fits


def test_what_comes_back_by_itself_serves(made: Any) -> None:
    """Maintenance ends and clouds wake their nodes: Slurm says when; a node that is down stays so."""
    flags = [("maintenance",), ("powering_down", "cloud"), ("powered_down",), ("maintenance", "drain")]
    nodes = tuple(made.node(f"n{i}", flags=some) for i, some in enumerate(flags))
    (candidate,) = candidates(asks(), made.site(), made.snapshot(nodes=nodes))
    assert (candidate.fits, candidate.able_nodes, candidate.unhealthy_nodes) == (True, 3, 1)


def test_units_are_those_of_the_pool(made: Any) -> None:
    """GPUs, all of a node's where it is had alone or Slurm counts none, one where it asks for none; else nodes."""
    few = asks(gpus_per_node=2)
    run_snapshot = made.snapshot()

    def units(request: Request, seen: Any = run_snapshot, **site: Any) -> int:
        return candidates(request, made.site(**site), seen)[0].units

    assert units(few) == 4
    assert units(few, dialect=Dialect(exclusive=True)) == 16
    assert units(few, dialect=Dialect(gpus="none")) == 16
    assert units(few, made.snapshot(partition={"over_subscribe": "EXCLUSIVE"})) == 16
    assert units(asks(gpus_per_node=0)) == 2
    assert units(asks(gpus_per_node=0), gpu={"gpus_per_node": 0}, dialect=Dialect(exclusive=True)) == 16
    bare = tuple(made.node(f"n{i}", gres="", gpus=0, gpu_type="") for i in range(1, 5))
    assert units(asks(gpus_per_node=0), made.snapshot(nodes=bare), gpu={"gpus_per_node": 0}) == 2


def test_nodes_that_are_down_do_not_serve(made: Any) -> None:
    """With too few healthy nodes it does not fit, and the reason says what the others are."""
    nodes = (made.node("n1"), made.node("n2", flags=("drain",)), made.node("n3", state="down"), made.node("n4", gpus=7))
    (candidate,) = candidates(asks(), made.site(), made.snapshot(nodes=nodes))
    assert (candidate.able_nodes, candidate.total_nodes, candidate.unhealthy_nodes) == (1, 4, 2)
    assert candidate.reasons == ("1 of 3 nodes can run the job, the others are down, drain",)
    (small,) = candidates(asks(nodes=1), made.site(), made.snapshot(nodes=nodes))
    assert small.fits


def test_a_quota_counts_what_was_used(made: Any) -> None:
    """The request may use up what is left of the GPU hours, not more; unknown use is no free use."""
    site = made.site(place=Place(max_gpu_hours=100))
    for used, fits in ((68.0, True), (68.5, False)):
        (candidate,) = candidates(asks(), site, made.snapshot(account=made.standing(used_gpu_hours=used)))
        assert candidate.fits == fits
    assert candidate.reasons == ("quota: 68 of 100 GPU hours used in 30 days, this job may need 32",)
    (unknown,) = candidates(asks(), site, made.snapshot())
    assert "100 GPU hours: usage unknown" in unknown.reasons[0]


def test_a_quota_counts_our_other_jobs(made: Any) -> None:
    """What our pending and running jobs may still use is not given twice; others' jobs do not count."""
    end = to_rfc3339(datetime.now(UTC) + timedelta(hours=1))
    ours = (
        made.job("5", user="me", state="PENDING", nodes=2, time_limit_s=4 * 3600),
        made.job("6", user="me", end=end),
        made.job("7", end=end, time_limit_s=86400),
    )
    for quota, fits in ((32 + 64 + 8, True), (32 + 64 + 7, False)):
        site, account = made.site(place=Place(max_gpu_hours=quota)), made.standing()
        (candidate,) = candidates(asks(), site, made.snapshot(account=account, jobs=ours))
        assert candidate.fits == fits


def test_a_quota_counts_no_gpus_of_jobs_without(made: Any) -> None:
    """Where Slurm reports GPUs of any job, ours without GPUs uses none of the quota."""
    cpu_job = made.job("5", user="me", state="PENDING", nodes=2, time_limit_s=4 * 3600, gres="")
    site, account = made.site(place=Place(max_gpu_hours=32)), made.standing()
    for others, fits in (((), False), ((made.job("6"),), True)):
        (candidate,) = candidates(asks(), site, made.snapshot(account=account, jobs=(cpu_job, *others)))
        assert candidate.fits == fits


def test_slow_nodes_are_given_more_time(made: Any) -> None:
    """A request's time is for speed 1: at half the speed the limit doubles, and must fit the partition."""
    (slow,) = candidates(asks(), made.site(gpu={"speed": 0.5}), made.snapshot())
    assert slow.plan
    assert slow.plan.job.time_s == 4 * 3600
    (fast,) = candidates(asks(), made.site(gpu={"speed": 2.0}), made.snapshot())
    assert fast.plan
    assert fast.plan.job.time_s == 2 * 3600
    (over,) = candidates(asks(), made.site(gpu={"speed": 0.5, "max_time": "3:00:00"}), made.snapshot())
    assert not over.fits


def test_gpus_that_slurm_does_not_count(made: Any) -> None:
    """Where GPUs are no resource of Slurm's, the site file says how many a node has."""
    nodes = tuple(made.node(f"n{i}", gres="", gpus=0, gpu_type="") for i in range(1, 5))
    site = made.site(dialect=Dialect(gpus="none"))
    assert candidates(asks(), site, made.snapshot(nodes=nodes))[0].fits
    assert not candidates(asks(), made.site(), made.snapshot(nodes=nodes))[0].fits


def test_data_that_is_nowhere(made: Any, tmp_path: Path) -> None:
    """A dataset that cannot be found is a reason against every partition, with its path."""
    site = made.site(paths=made.site().paths.__class__(nvme="/nvme"))
    (candidate,) = candidates(asks(data={"demo": str(tmp_path / "gone")}), site, made.snapshot())
    assert candidate.plan is None
    assert str(tmp_path / "gone") in candidate.reasons[-1]
