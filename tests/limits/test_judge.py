"""The judgement of limits: pairs of policy and job that a real slurmctld decided, and each rule by itself."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.limits.judge import judge
from pitools.limits.read import enforced_limits
from pitools.limits.records import JobRequest, LimitState, Verdict
from pitools.slurm import parse_accounting, parse_cluster, parse_nodes
from pitools.slurm.parse_assoc_mgr import parse_assoc_mgr
from pitools.slurm.records import Association, LimitUsage, Partition, Qos


class Pair(msgspec.Struct):
    """A job, Slurm's answers about its policy, and what slurmctld did: `may-run`, `pends` or `refused`, and why.

    Written by `perf/tenancy/bench_limits.py --record`. Two schedulers of Slurm may give different reasons in turn.
    """

    slurm: tuple[str, list[str]]
    job: JobRequest
    config: str
    partitions: str
    associations: str
    qos: str
    assoc_mgr: str
    groups: tuple[str, ...] = ()

    def state(self) -> LimitState:
        """The limits that the answers tell."""
        config = parse_cluster.parse_config(self.config)
        return LimitState(
            cluster=config.cluster,
            version=config.version,
            enforced=enforced_limits(config),
            associations=tuple(parse_accounting.parse_associations(self.associations)),
            qos=tuple(parse_accounting.parse_qos(self.qos)),
            partitions=tuple(parse_nodes.parse_partitions(self.partitions)),
            usage=tuple(parse_assoc_mgr(self.assoc_mgr)),
            part_limits=config.values["EnforcePartLimits"].lower(),
            groups=frozenset(self.groups),
        )


def recorded_pairs() -> list[tuple[Pair, LimitState]]:
    with gzip.open(Path(__file__).with_name("recorded_pairs.jsonl.gz")) as lines:
        pairs = [msgspec.json.decode(line, type=Pair) for line in lines]
    return [(pair, pair.state()) for pair in pairs]


PAIRS = recorded_pairs()


def first_reasons(verdict: Verdict) -> set[str]:
    """The first reason, and those of a list of the partition: Slurm gives both in turn."""
    reasons = [binding.reason for binding in verdict.bindings] or [""]
    lists = {reason for reason in reasons if " not permitted " in reason}
    first = [reason for reason in reasons if reason not in lists][:1]
    return {*first, *lists} if not first or not first[0].startswith("Partition") else {*first}


def test_a_real_slurmctld_decided_the_same() -> None:
    """Random policies and jobs on Slurm 22.05: each outcome, and the first limit by the name that Slurm gives it."""
    assert len(PAIRS) > 100
    assert len({(pair.slurm[0], *pair.slurm[1]) for pair, _ in PAIRS}) > 40
    for pair, limits in PAIRS:
        verdict = judge(pair.job, limits)
        assert verdict.effect == pair.slurm[0], (pair.job, verdict.bindings)
        assert not {*pair.slurm[1]}.isdisjoint(first_reasons(verdict)), (pair.job, pair.slurm, verdict.bindings)


ACCOUNT = Association(cluster="x", account="lab", parent="dept")
DEPT = Association(cluster="x", account="dept", parent="root")
ME = Association(cluster="x", account="lab", user="me", qos=("normal", "high"))
NORMAL = Qos(qos="normal")
JOB = JobRequest(
    user="me", account="lab", partition="gpu", qos="normal", nodes=2, cpus=8, gres={"gres/gpu": 4}, time_s=3600
)


def state(*rows: Association, qos: tuple[Qos, ...] = (NORMAL,), **values: Any) -> LimitState:
    partition = Partition(partition="gpu", state="up", **values.pop("partition", {}))
    enforced = ("associations", "limits", "qos", "safe")
    given_rows = rows or (ME, ACCOUNT, DEPT)
    plain = {"cluster": "x", "enforced": enforced, "associations": given_rows, "qos": qos, "partitions": (partition,)}
    return LimitState(**{**plain, **values})


def first(limits: LimitState, **asked: Any) -> tuple[str, str, str]:
    """Effect, level and reason of the first binding."""
    verdict = judge(msgspec.structs.replace(JOB, **asked), limits)
    binding = verdict.bindings[0] if verdict.bindings else None
    return (verdict.effect, binding.level if binding else "", binding.reason if binding else "")


def test_without_limits_a_job_may_run() -> None:
    """And where slurmctld enforces none, none counts."""
    assert first(state()) == ("may-run", "", "")
    full = msgspec.structs.replace(ME, max_jobs=0)
    assert first(state(full, ACCOUNT, DEPT, enforced=("associations",))) == ("may-run", "", "")


@pytest.mark.parametrize(
    ("row", "level", "reason"),
    [
        ({"grp_tres": {"gres/gpu": "3"}}, 'me in account "lab"', "AssocGrpGRES"),
        ({"max_tres": {"cpu": "7"}}, 'me in account "lab"', "AssocMaxCpuPerJobLimit"),
        ({"max_tres_per_node": {"gres/gpu": "1"}}, 'me in account "lab"', "AssocMaxGRESPerNode"),
        ({"max_tres_mins": {"node": "119"}}, 'me in account "lab"', "AssocMaxNodeMinutesPerJob"),
        ({"grp_tres_mins": {"cpu": "479"}}, 'me in account "lab"', "AssocGrpCPUMinutesLimit"),
        ({"grp_tres_run_mins": {"billing": "479"}}, 'me in account "lab"', "AssocGrpBillingRunMinutes"),
        ({"max_wall_s": 3540}, 'me in account "lab"', "AssocMaxWallDurationPerJobLimit"),
        ({"grp_jobs": 0}, 'me in account "lab"', "AssocGrpJobsLimit"),
    ],
)
def test_a_limit_binds_for_ever_where_no_job_uses_it(row: dict[str, Any], level: str, reason: str) -> None:
    """One below what the job asks binds, and what it asks does not; at the submission only if a QOS denies."""
    limits = state(msgspec.structs.replace(ME, **row), ACCOUNT, DEPT)
    assert first(limits) == ("pends", level, reason)
    denies = (msgspec.structs.replace(NORMAL, flags=("DenyOnLimit",)),)
    expected = "pends" if "jobs" in next(iter(row)) else "refused"  # running jobs are not counted at the submission
    assert first(msgspec.structs.replace(limits, qos=denies))[0] == expected
    higher = {
        name: {k: str(int(v) + 1) for k, v in value.items()} if isinstance(value, dict) else value + 60
        for name, value in row.items()
    }
    assert first(state(msgspec.structs.replace(ME, **higher), ACCOUNT, DEPT)) == ("may-run", "", "")


def test_the_qos_replaces_what_associations_limit() -> None:
    """The partition's QOS first, unless the job's goes over it; other resources of the same limit still bind."""
    lab = msgspec.structs.replace(ACCOUNT, grp_tres={"gres/gpu": "1", "cpu": "1"})
    part = Qos(qos="part", grp_tres={"gres/gpu": "100"})
    mine = Qos(qos="normal", grp_tres={"gres/gpu": "2"})
    limits = state(ME, lab, DEPT, qos=(mine, part), partition={"qos": "part"})
    assert first(limits) == ("pends", 'account "lab"', "AssocGrpCpuLimit")
    over = msgspec.structs.replace(mine, flags=("OverPartQOS",))
    assert first(msgspec.structs.replace(limits, qos=(over, part))) == ("pends", 'QOS "normal"', "QOSGrpGRES")


def test_a_parents_group_limit_binds_too() -> None:
    """Of the accounts above, each group limit; a limit per job is the nearest one's, named after who sets it."""
    dept = msgspec.structs.replace(DEPT, grp_tres={"node": "1"}, max_tres={"node": "5", "cpu": "7"})
    lab = msgspec.structs.replace(ACCOUNT, grp_tres={"node": "9"}, max_tres={"node": "9"})
    verdict = judge(JOB, state(ME, lab, dept))
    assert [(binding.level, binding.limit) for binding in verdict.bindings] == [
        ('account "dept"', "GrpTRES=node"),
        ('account "dept"', "MaxTRES=cpu"),
    ]
    printed = msgspec.structs.replace(ME, max_tres={"node": "9", "cpu": "7"})  # sacctmgr repeats them in a user's row
    assert judge(JOB, state(printed, lab, dept)) == verdict


def test_use_of_others_holds_a_job_until_they_end() -> None:
    """Running jobs count at each level by its own counts; nodes that jobs share count once."""
    lab = msgspec.structs.replace(ACCOUNT, grp_tres={"gres/gpu": "8"})
    used = LimitUsage(account="lab", jobs=2, submitted=2, tres={"gres/gpu": 5, "node": 2})
    assert first(state(ME, lab, DEPT, usage=(used,))) == ("pends", 'account "lab"', "AssocGrpGRES")
    assert first(state(ME, lab, DEPT, usage=(used,)), gres={}) == ("may-run", "", "")
    few = state(
        ME,
        msgspec.structs.replace(ACCOUNT, grp_tres={"node": "2"}),
        DEPT,
        usage=(used,),
        partition={"nodes": 4, "cpus": 256, "tres": {"gres/gpu": "32"}},
    )
    assert first(few)[0] == "may-run"
    assert "if these have room" in judge(JOB, few).not_judged[-1]
    assert first(few, is_exclusive=True)[0] == "pends"
    assert first(few, gres={"gres/gpu": 14})[0] == "pends"  # 11 are left on the two nodes, 7 for each of ours
    high = Qos(qos="normal", max_jobs_per_user=2, max_submit_per_account=3)
    mine = LimitUsage(qos="normal", user="me", jobs=2, submitted=2)
    accounts = LimitUsage(qos="normal", account="lab", submitted=2)
    assert first(state(qos=(high,), usage=(mine, accounts))) == ("pends", 'QOS "normal"', "QOSMaxJobsPerUserLimit")
    assert first(state(qos=(high,), usage=(mine, accounts)), tasks=2)[2] == "MaxSubmitJobsPerAccount"
    row = msgspec.structs.replace(ME, max_jobs=0, max_submit=0)  # these do not count beside those of the QOS
    loose = Qos(qos="normal", max_jobs_per_account=9, max_submit_per_user=9)
    assert first(state(row, ACCOUNT, qos=(loose,))) == ("may-run", "", "")
    assert first(state(row, ACCOUNT)) == ("refused", 'me in account "lab"', "AssocMaxSubmitJobLimit")


def test_a_job_without_an_account_is_bound_by_its_qos() -> None:
    """Whose association counts is unknown then; names are Slurm's in any case."""
    full = Qos(qos="normal", grp_jobs=1, max_jobs_per_account=0)
    limits = state(msgspec.structs.replace(ME, max_jobs=0), qos=(full,), usage=(LimitUsage(qos="normal", jobs=1),))
    assert first(limits, account="") == ("pends", 'QOS "normal"', "QOSGrpJobsLimit")
    assert first(limits, account="Lab", qos="NORMAL") == ("pends", 'QOS "normal"', "QOSGrpJobsLimit")


def test_minutes_used_and_promised_count() -> None:
    """With `safe`, a job starts only if its minutes are left; without, until all are used up."""
    lab = msgspec.structs.replace(ACCOUNT, grp_tres_mins={"gres/gpu": "1000"}, grp_wall_s=6000)
    used = LimitUsage(account="lab", tres_mins={"gres/gpu": 500}, tres_run_mins={"gres/gpu": 300}, wall_s=1200)
    assert first(state(ME, lab, DEPT, usage=(used,)))[2] == "AssocGrpGRESMinutes"
    assert first(state(ME, lab, DEPT, usage=(used,), enforced=("limits",)))[0] == "may-run"
    spent = msgspec.structs.replace(used, tres_mins={"gres/gpu": 1000}, wall_s=6000)
    assert first(state(ME, lab, DEPT, usage=(spent,), enforced=("limits",)))[2] == "AssocGrpWallLimit"
    assert first(state(ME, lab, DEPT, usage=(spent,)), time_s=6060)[2] == "AssocGrpWallLimit"


@pytest.mark.parametrize(
    ("partition", "values", "outcome"),
    [
        ({"max_nodes": 1}, {}, ("pends", 'partition "gpu"', "PartitionNodeLimit")),
        ({"max_nodes": 1}, {"part_limits": "all"}, ("refused", 'partition "gpu"', "PartitionNodeLimit")),
        ({"allow_accounts": ("x",)}, {"part_limits": "all"}, ("refused", 'partition "gpu"', "InvalidAccount")),
        ({"max_time_s": 60}, {}, ("pends", 'partition "gpu"', "PartitionTimeLimit")),
        ({"min_nodes": 3}, {}, ("pends", 'partition "gpu"', "PartitionNodeLimit")),
        ({"allow_qos": ("high",)}, {}, ("pends", 'partition "gpu"', "Job's QOS not permitted to use this partition")),
        ({"allow_accounts": ("dept",)}, {"version": (24, 5)}, ("may-run", "", "")),
    ],
)
def test_partitions(partition: dict[str, Any], values: dict[str, Any], outcome: tuple[str, str, str]) -> None:
    """Sizes and access; EnforcePartLimits lets sbatch refuse; a QOS may go over the sizes."""
    assert first(state(partition=partition, **values)) == outcome
    free = Qos(qos="normal", flags=("PartitionMaxNodes", "PartitionMinNodes", "PartitionTimeLimit"))
    if "allow_qos" not in partition and outcome[2] != "InvalidAccount":
        assert first(state(partition=partition, qos=(free,), **values))[0] == "may-run"


def test_a_closed_partition_and_no_association_are_refused() -> None:
    """Before any limit; the default QOS is the association's, or the only one."""
    closed = state(partitions=(Partition(partition="gpu", state="drain"),))
    assert first(closed) == ("refused", 'partition "gpu"', "Required partition not available")
    assert first(state(), user="you")[2] == "InvalidAccount"
    assert first(state(), qos="low")[2] == "InvalidQOS"
    own = msgspec.structs.replace(ME, default_qos="high")
    high = Qos(qos="high", max_tres={"node": "1"})
    assert first(state(own, ACCOUNT, qos=(NORMAL, high)), qos="")[1] == 'QOS "high"'


def test_billing_is_weighed() -> None:
    """TRESBillingWeights of the partition, memory by the unit of its weight."""
    lab = msgspec.structs.replace(ACCOUNT, grp_tres={"billing": "107"})
    weights = {"billing_weights": {"CPU": "1.0", "Mem": "0.25G", "GRES/gpu": "24"}}
    verdict = judge(msgspec.structs.replace(JOB, memory_mib=16384), state(ME, lab, DEPT, partition=weights))
    assert [(binding.limit, binding.asked) for binding in verdict.bindings] == [("GrpTRES=billing", 108)]
    dearest = state(ME, lab, DEPT, partition=weights, priority_flags=("max_tres",))
    assert first(dearest, memory_mib=16384)[0] == "may-run"  # 96 for the GPUs
    (binding,) = judge(msgspec.structs.replace(JOB, memory_mib=1 << 20), dearest).bindings
    assert binding.asked == 256  # for the memory alone


@given(
    st.dictionaries(st.sampled_from(["CPU", "Mem", "GRES/gpu:h100", "License/x"]), st.text("019.-eKPnainf"), min_size=1)
)
def test_no_weight_is_too_odd(weights: dict[str, str]) -> None:
    """What slurm.conf may hold for a weight, and more: a verdict, which says so where it does not know the billing."""
    lab = msgspec.structs.replace(ACCOUNT, grp_tres={"billing": "0"})
    verdict = judge(JOB, state(ME, lab, DEPT, partition={"billing_weights": weights}))
    if "GrpTRES=billing" not in str(verdict.not_judged):
        assert all(float(text.rstrip("KP")) >= 0 for text in weights.values())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"nodes": 4, "cpus": 4}, ""),
        ({"nodes": 5, "cpus": 5}, "AssocGrpNodeLimit"),
        ({"cpus": 2}, "AssocMaxCpuPerNode"),
    ],
)
def test_the_factor_of_a_qos_multiplies_what_associations_limit(asked: dict[str, Any], reason: str) -> None:
    """Of GrpTRES and MaxTRES alone; 2 nodes by 2.25 are 4 whole ones."""
    row = msgspec.structs.replace(ME, grp_tres={"node": "2"}, max_tres_per_node={"cpu": "1"})
    factor = (Qos(qos="normal", limit_factor=2.25),)
    assert first(state(row, ACCOUNT, DEPT, qos=factor), **{"nodes": 1, **asked})[2] == reason


def test_minutes_by_the_usage_factor_count_where_it_is_safe() -> None:
    """Only with UsageFactorSafe: a job of 240 minutes of a GPU counts half."""
    lab = msgspec.structs.replace(ACCOUNT, grp_tres_mins={"gres/gpu": "200"})
    half = Qos(qos="normal", usage_factor=0.5)
    assert first(state(ME, lab, DEPT, qos=(half,)))[2] == "AssocGrpGRESMinutes"
    safe = msgspec.structs.replace(half, flags=("UsageFactorSafe",))
    assert first(state(ME, lab, DEPT, qos=(safe,)))[0] == "may-run"
    double = (msgspec.structs.replace(safe, usage_factor=2.0),)
    wall = msgspec.structs.replace(ACCOUNT, grp_wall_s=6000)
    assert first(state(ME, wall, DEPT, qos=double))[2] == "AssocGrpWallLimit"
    assert first(state(msgspec.structs.replace(ME, max_wall_s=6000), ACCOUNT, DEPT, qos=double))[0] == "may-run"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"partition": {"restrictions": {"RootOnly": "YES"}}}, "Access/permission denied"),
        ({"partition": {"restrictions": {"ReqResv": "YES"}}}, "Access/permission denied"),
        ({"qos": (Qos(qos="normal", flags=("RequiresReservation",)),)}, "InvalidQOS"),
        (
            {"partition": {"allow_groups": ("staff",)}, "groups": frozenset({"me"})},
            "User's group not permitted to use this partition",
        ),
    ],
)
def test_who_may_not_enter_is_refused(values: dict[str, Any], reason: str) -> None:
    """Whatever EnforcePartLimits says; a reservation, root and a group of the list open what asks for them."""
    assert first(state(**values))[::2] == ("refused", reason)
    rows = (msgspec.structs.replace(ME, user="root"), ACCOUNT, DEPT)
    opened = state(*rows, **{**values, "groups": frozenset({"staff"})})
    assert first(opened, user="root", in_reservation=True)[0] == "may-run"


ROOT = Association(cluster="x", account="root")


@pytest.mark.parametrize(
    ("values", "asked", "words"),
    [
        ({}, {}, []),
        ({}, {"partition": "hidden"}, ['partition "hidden"']),
        ({"submit_plugins": "lua"}, {}, ["JobSubmitPlugins=lua"]),
        ({"partition": {"restrictions": {"MaxMemPerNode": "100"}}}, {}, ["MaxMemPerNode=100 of partition"]),
        ({"partition": {"allow_groups": ("staff",)}}, {}, ["AllowGroups of partition"]),
        ({"qos": (Qos(qos="normal", flags=("Relative",)),)}, {}, ['Relative of QOS "normal"']),
        ({"qos": (Qos(qos="normal", max_tres={"mem": "1G"}),)}, {}, ["MaxTRES=mem of QOS"]),
        ({"qos": (Qos(qos="normal", grp_tres={"license/x": "1"}),)}, {}, ["GrpTRES=license/x of QOS"]),
        ({"qos": (Qos(qos="normal", max_tres={"gres/gpu:h100": "1"}),)}, {}, ["MaxTRES=gres/gpu:h100 of QOS"]),
        ({}, {"account": ""}, ["limits of associations"]),
        ({"associations": (ME, ACCOUNT)}, {}, ['limits of accounts above "lab"']),
        ({"qos": ()}, {}, ['limits of the QOS "normal"']),
        ({"qos": (Qos(qos="normal", max_tres_run_mins_per_user={"cpu": "1"}),)}, {}, []),  # 22.05 ignores it
        (
            {"qos": (Qos(qos="normal", max_tres_run_mins_per_user={"cpu": "1"}),), "version": (24, 5, 1)},
            {},
            ["MaxTRESRunMinsPU of QOS"],
        ),
        ({"enforced": (), "associations": (), "qos": ()}, {}, []),
    ],
)
def test_what_is_not_judged_is_said(values: dict[str, Any], asked: dict[str, Any], words: list[str]) -> None:
    """The job may run as far as is known; what is not known is in the verdict."""
    limits = state(*(ME, ACCOUNT, DEPT, ROOT), **{"version": (22, 5, 8), **values})
    verdict = judge(msgspec.structs.replace(JOB, **asked), limits)
    assert verdict.effect == "may-run"
    assert [text[: len(word)] for text, word in zip(verdict.not_judged, words, strict=True)] == words


def test_use_that_is_hidden_is_not_judged() -> None:
    """Of minutes, where squeue's jobs are counted; of all, where these are hidden too. What binds still does."""
    lab = msgspec.structs.replace(ACCOUNT, grp_tres_mins={"gres/gpu": "1000"}, grp_jobs=3)
    rows = (ME, lab, DEPT, ROOT)
    use = LimitUsage(account="lab", hidden="amounts")
    verdict = judge(JOB, state(*rows, usage=(use,)))
    assert [text.split("=")[0] for text in verdict.not_judged] == ["GrpTRESMins"]
    verdict = judge(JOB, state(*rows, usage=(msgspec.structs.replace(use, hidden="jobs"),)))
    assert [text.split("=")[0][:7] for text in verdict.not_judged] == ["GrpTRES", "GrpJobs"]
    full = state(*rows, usage=(msgspec.structs.replace(use, jobs=3),))
    assert first(full) == ("pends", 'account "lab"', "AssocGrpJobsLimit")


RANK = {"may-run": 0, "pends": 1, "refused": 2}


@settings(max_examples=150)
@given(st.sampled_from(PAIRS), st.integers(1, 3), st.integers(1, 8), st.integers(10, 600), st.integers(0, 4))
def test_who_asks_less_is_not_bound_more(
    recorded: tuple[Pair, LimitState], nodes: int, cpus: int, minutes: int, gpus: int
) -> None:
    """Where no minimum binds, a job that is smaller in everything is not held or refused where the larger was not."""
    most = {"nodes": nodes, "cpus": cpus * nodes, "time_s": minutes * 60, "gres": {"gres/gpu": gpus * nodes}}
    pair, limits = recorded
    large = msgspec.structs.replace(pair.job, **most, memory_mib=1000)
    least = {"nodes": 1, "cpus": cpus, "time_s": 600, "gres": {"gres/gpu": gpus}}
    small = judge(msgspec.structs.replace(pair.job, **least, memory_mib=1000), limits)
    if not any("Min" in binding.limit and "Mins" not in binding.limit for binding in small.bindings):
        assert RANK[small.effect] <= RANK[judge(large, limits).effect]
