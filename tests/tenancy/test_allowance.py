"""What a user may run: on states that a real slurmctld had, against the judgement of each job by itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pitools.core.errors import UsageError
from pitools.core.subprocesses import Completed
from pitools.limits import read as limits_read
from pitools.limits.judge import judge
from pitools.limits.records import JobRequest, LimitState
from pitools.limits.shared import usage_of_jobs
from pitools.site.load import load_site
from pitools.slurm.records import Association, LimitUsage, Partition, Qos, SlurmJob
from pitools.tenancy import allowance
from pitools.tenancy import allowance as read
from pitools.tenancy.allowance import Allowance, allowances, usable
from tests.limits.test_judge import Pair, recorded_pairs

STATE = LimitState(
    cluster="c",
    enforced=("associations", "limits", "qos", "safe"),
    associations=(
        Association(cluster="c", account="root"),
        Association(cluster="c", account="vision", parent="root", grp_tres_mins={"gres/gpu": "6000"}),
        Association(cluster="c", account="vision", user="ann", qos=("low", "high")),
        Association(cluster="c", account="vision", user="ann", partition="old", qos=("low",)),
    ),
    qos=(
        Qos(qos="low", max_tres_per_user={"gres/gpu": "16"}, max_tres={"node": "2"}, min_tres={"gres/gpu": "4"}),
        Qos(qos="high", max_tres={"gres/gpu:h100": "12"}, max_wall_s=7200),
    ),
    partitions=(
        Partition(partition="gpu", state="up", nodes=8, cpus=64, tres={"gres/gpu": "64", "gres/gpu:h100": "64"}),
        Partition(partition="old", state="up", nodes=4, cpus=32, allow_accounts=("others",)),
    ),
)
USED = (
    LimitUsage(qos="low", user="ann", jobs=1, tres={"gres/gpu": 10}),
    LimitUsage(account="vision", tres_mins={"gres/gpu": 5000}, tres_run_mins={"gres/gpu": 400}),
)


def rows(user: str = "ann", usage: tuple[LimitUsage, ...] = USED) -> dict[tuple[str, str], Allowance]:
    state = msgspec.structs.replace(STATE, usage=usage)
    return {(row.qos, row.partition): row for row in allowances(user, state, "alpha")}


def test_what_may_run_now_and_ever_what_binds_and_what_is_left() -> None:
    """By QOS and partition: the largest job beside what runs and alone, its time, the limit, the rest of the budget."""
    found = rows()
    assert list(found) == [("low", "gpu"), ("high", "gpu"), ("low", "old")]
    low, high, old = found.values()
    assert (low.effect, low.now, low.ever, low.reason) == ("may-run", 6, 16, "QOSMaxGRESPerUser")
    assert (high.now, high.ever, high.reason, high.max_time_s) == (12, 12, "QOSMaxGRESPerJob", 7200)
    assert low.hours_left == pytest.approx(10)
    assert low.max_time_s == 600 * 60  # one GPU for all that is left of the budget
    assert (old.resource, old.now, old.ever, old.effect) == ("cpu", 0, 0, "pends")
    assert {each.limit: (each.value, each.used, each.left) for each in low.left} == {
        "MaxTRESPU=gres/gpu": (16, 10, 6),
        "GrpTRESMins=gres/gpu": (6000, 5400, 600),
    }
    assert usable(found.values()) == [low, high]


def test_limit_per_node_spreads_a_job_over_more_nodes() -> None:
    """4 of each node's 8 GPUs may be used: 32 on 8 nodes, and no larger job; unless another limit is below."""
    for most, largest, reason in (({}, 32, "QOSMaxGRESPerNode"), ({"node": "3"}, 12, "QOSMaxNodePerJobLimit")):
        qos = Qos(qos="low", max_tres_per_node={"gres/gpu": "4"}, max_tres=most)
        row, *_ = allowances("ann", msgspec.structs.replace(STATE, qos=(qos,)), "alpha")
        assert (row.now, row.ever, row.reason) == (largest, largest, reason)


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        ({"gres/gpu": "4"}, {}, ("may-run", 64, 64, "")),
        ({"gres/gpu": "65"}, {}, ("pends", 0, 0, "QOSMinGRES")),
        ({"gres/gpu": "8"}, {"gres/gpu": "4"}, ("pends", 0, 0, "QOSMinGRES")),
        ({"cpu": "64"}, {}, ("may-run", 64, 64, "")),
        ({"cpu": "65"}, {}, ("pends", 0, 0, "QOSMinCpuNotSatisfied")),
        ({"cpu": "9"}, {"cpu": "8"}, ("pends", 0, 0, "QOSMaxCpuPerJobLimit")),
        ({"node": "4"}, {"gres/gpu": "8"}, ("may-run", 8, 8, "QOSMaxGRESPerJob")),
        ({"node": "4"}, {"cpu": "3"}, ("pends", 0, 0, "QOSMaxCpuPerJobLimit")),
        ({"mem": "1T", "gres/other": "2"}, {}, ("may-run", 64, 64, "")),
    ],
)
def test_minimum_that_no_job_can_reach_leaves_nothing(
    least: dict[str, str], most: dict[str, str], expected: tuple[str, int, int, str]
) -> None:
    """A job may ask for more GPUs, CPUs and nodes, as far as the partition has them and other limits allow it."""
    qos = Qos(qos="low", min_tres=least, max_tres=most)
    row, *_ = allowances("ann", msgspec.structs.replace(STATE, qos=(qos,)), "alpha")
    assert (row.effect, row.now, row.ever, row.reason) == expected


def test_what_is_left_below_a_minimum_is_nothing_now() -> None:
    """6 of a user's 16 GPUs, where a job needs 8; and all, where a partition asks for 4 nodes and 2 may be used."""
    low = msgspec.structs.replace(STATE.qos[0], min_tres={"gres/gpu": "8"}, max_tres={})
    row, *_ = allowances("ann", msgspec.structs.replace(STATE, qos=(low,), usage=USED), "alpha")
    assert (row.effect, row.now, row.ever, row.reason) == ("pends", 0, 16, "QOSMinGRES")
    low = msgspec.structs.replace(low, min_tres={"gres/gpu": "17"})
    full = LimitUsage(qos="low", user="ann", jobs=1, tres={"gres/gpu": 16})
    row, *_ = allowances("ann", msgspec.structs.replace(STATE, qos=(low,), usage=(full,)), "alpha")
    assert (row.now, row.ever, row.reason) == (0, 0, "QOSMinGRES")  # why no job may ever run, not now
    wide = msgspec.structs.replace(STATE.partitions[0], min_nodes=4)
    row, *_ = allowances("ann", msgspec.structs.replace(STATE, partitions=(wide,)), "alpha")
    assert (row.now, row.ever, row.reason) == (0, 0, "QOSMaxNodePerJobLimit")


def test_a_partition_that_is_down_allows_something_later() -> None:
    """Nothing runs there now, and the same as before ever."""
    down = tuple(msgspec.structs.replace(row, state="down") for row in STATE.partitions)
    low, *_ = allowances("ann", msgspec.structs.replace(STATE, partitions=down, usage=USED), "alpha")
    assert (low.now, low.ever, low.effect, low.reason) == (0, 16, "pends", "PartitionDown")


def test_jobs_of_the_queue_count_where_slurmctld_hides_its_own_counts() -> None:
    """A running job of the user takes its GPUs off what is left."""
    job = SlurmJob(job_id="1", raw_id="1", state="RUNNING", user="ann", account="vision", qos="low", partition="gpu")
    job = msgspec.structs.replace(job, nodes=2, gres="gpu:4")
    usage = tuple(usage_of_jobs(allowance.choices("ann", STATE), STATE, [job]))
    assert rows(usage=usage)["low", "gpu"].now == 8


def test_a_user_without_an_account_may_run_nothing() -> None:
    """Unless Slurm requires no association: then in each partition, with the default account and QOS."""
    assert rows("bob") == {}
    days = msgspec.structs.replace(STATE.partitions[0], max_time_s=200 * 86400)
    state = msgspec.structs.replace(STATE, enforced=(), partitions=(days, STATE.partitions[1]))
    assert [(row.qos, row.partition, row.now, row.max_time_s) for row in allowances("bob", state, "alpha")] == [
        ("", "gpu", 64, 200 * 86400),
        ("", "old", 32, None),
    ]


@pytest.mark.parametrize("number", range(4))
def test_one_more_than_the_largest_job_is_bound(number: int) -> None:
    """On recorded states, with slurmctld's counts: the largest job is judged free, a larger one as the row says."""
    checked = 0
    for pair, state in recorded_pairs()[number::16]:
        for row in allowances(pair.job.user, state, "alpha"):
            _check(row, pair, state)
            checked += 1
    assert checked > 20


def _check(row: Allowance, pair: Pair, state: LimitState) -> None:
    (partition,) = (each for each in state.partitions if each.partition == row.partition)
    names = [name for name in partition.tres if name.startswith("gres/gpu")]
    per_node = (int(partition.tres.get("gres/gpu", 0)) or partition.cpus) // partition.nodes

    def reasons(amount: int, nodes: int, cpus: int, time_s: int = 60) -> list[str]:
        job = JobRequest(
            user=row.user, account=row.account, qos=row.qos, partition=row.partition, time_s=time_s, nodes=nodes
        )
        gres, cpus = (dict.fromkeys(names, amount), cpus) if names else ({}, amount)
        return [each.reason for each in judge(msgspec.structs.replace(job, gres=gres, cpus=cpus), state).bindings]

    def shapes(amount: int) -> list[list[str]]:
        """What binds the job on each number of nodes, with as few CPUs as some QOS allows, and on its fullest node."""
        numbers = range(-(-amount // per_node), partition.nodes + 1)
        of_node = {n: [reason for reason in reasons(-(-amount // n), 1, 1) if "PerNode" in reason] for n in numbers}
        least = {1, *(int(qos.min_tres.get("cpu", "1")) for qos in state.qos)}
        return [reasons(amount, n, max(n, cpus)) + of_node[n] for n in numbers for cpus in least]

    if row.now:
        assert [] in shapes(row.now)
    if row.binding:
        assert row.reason in [first for first, *_ in shapes(row.now + 1)]  # none is free
    if row.now and row.max_time_s is not None:
        for time_s in (row.max_time_s, row.max_time_s + 60):
            of_one = [reason for reason in reasons(1, 1, 1, time_s) if "Min" not in reason.replace("Minutes", "")]
            assert (of_one == []) == (time_s == row.max_time_s)
    same = (pair.job.account, pair.job.qos, pair.job.partition) == (row.account, row.qos, row.partition)
    if same and pair.slurm[0] == "may-run" and row.resource == "gpu":  # the real slurmctld let this job run
        assert row.now >= pair.job.gres.get("gres/gpu", 0)


def test_reading_asks_for_the_accounts_of_the_user_alone(dev_sites: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for the counts, of the user's accounts and those above; the queue's jobs where it is refused."""
    asked: list[list[str]] = []

    def queries(transport: object, commands: Sequence[Sequence[str]]) -> list[Completed]:
        asked.extend(list(command) for command in commands)
        refused = "slurm_load_assoc_mgr_info error: Access/permission denied"
        return [Completed(tuple(c), int("assoc_mgr" in c), "", refused) for c in commands]

    elsewhere = (Association(cluster="d", account="vision", parent="lab"), Association(cluster="d", account="lab"))
    state = msgspec.structs.replace(STATE, private=("jobs", "usage"), associations=(*STATE.associations, *elsewhere))
    monkeypatch.setattr(limits_read, "run_queries", queries)
    monkeypatch.setattr(read, "read_limits", lambda request, *_, **__: (request, state))
    found = read.read_allowances(load_site("alpha"), "ann")
    assert "accounts=vision,root" in asked[0]
    assert found[0].now == 16
    assert any("hidden" in text for text in found[0].not_judged)
    with pytest.raises(UsageError):
        read.read_allowances(load_site("alpha"), "bob")


def test_several_budgets_and_a_limit_that_is_over() -> None:
    """The tightest of the resource counts; where a limit is over nothing is left; other clusters have own accounts."""
    root, *others = STATE.associations
    root = msgspec.structs.replace(root, grp_tres_mins={"gres/gpu": "600", "cpu": "60"})
    far = Association(cluster="d", account="far", user="ann")
    over = LimitUsage(qos="low", user="ann", jobs=1, tres={"gres/gpu": 20})
    state = msgspec.structs.replace(STATE, associations=(root, *others, far), usage=(over,))
    low, *more = allowances("ann", state, "alpha")
    assert {row.account for row in more} == {"vision"}
    assert (low.now, low.hours_left, low.max_time_s) == (0, 10.0, 3600)
    assert [each.left for each in low.left if each.limit == "MaxTRESPU=gres/gpu"] == [0]
    assert low in usable([low])
