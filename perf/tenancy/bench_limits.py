"""Random policies and jobs judged by `pitools.limits`, against what a real slurmctld does with the same jobs.

perf/run tenancy_limits [--quick] [--seed N] [--enforce WORDS] [--part-limits ALL] [--record FILE]
                                                                    needs root, eval "$(scripts/devcluster up)"

For each pair: refused by sbatch with which limit, pending with which reason, or started. The ratio is the share of
pairs in which our effect and our first limit are Slurm's. Disagreements go to stderr.
--enforce, --part-limits: AccountingStorageEnforce, "" for none, and EnforcePartLimits. --record: append each pair, with
the answers that it was judged by, as a line of JSON.
"""

from __future__ import annotations

import argparse
import grp
import json
import pwd
import random
import re
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from perf.harness.dev_cluster import alpha
from perf.harness.harness import from_ratios, report
from perf.harness.workspace import workspace
from perf.tenancy.limits_cluster import CLUSTER, LimitsCluster, limits_cluster
from perf.tenancy.limits_data import Job, make_job, make_policy
from pitools.limits.judge import judge
from pitools.limits.read import enforced_limits
from pitools.limits.records import JobRequest, LimitState, Verdict
from pitools.slurm import argv, parse_accounting, parse_cluster, parse_nodes
from pitools.slurm.parse_assoc_mgr import parse_assoc_mgr

TARGET = 0.99
SITE = alpha()
SETTLED_S = 6.0  # several passes of both schedulers
LOOKS = 6
# sbatch's words where it names no limit; squeue's where it adds names.
NOT_PERMITTED = "not permitted to use this partition"
PARTITION_REASONS = ("PartitionDown", "PartitionNodeLimit", "PartitionTimeLimit")
REFUSALS = {
    "Invalid account or account/partition combination specified": "InvalidAccount",
    "Invalid qos specification": "InvalidQOS",
    "Requested time limit is invalid (missing or exceeds some limit)": "PartitionTimeLimit",
    "Node count specification invalid": "PartitionNodeLimit",
    "Required partition not available (inactive or drain)": "Required partition not available",
}


def request_of(job: Job) -> JobRequest:
    """Return the job as limits judge it."""
    return JobRequest(
        user=job.user,
        partition=job.partition,
        account=job.account,
        qos=job.qos,
        nodes=job.nodes,
        cpus=job.nodes * job.tasks_per_node * job.cpus_per_task,
        memory_mib=job.nodes * job.memory_mib,
        gres={"gres/gpu": job.nodes * job.gpus} if job.gpus else {},
        time_s=job.minutes * 60,
        tasks=job.tasks,
        is_exclusive=job.is_exclusive,
    )


def query(cluster: LimitsCluster, jobs: list[Job]) -> dict[str, str]:
    """Return what Slurm answers to the queries of pitools, by name."""
    accounts = sorted({job.account for job in jobs})
    names = [row.qos for row in parse_accounting.parse_qos(cluster.run(*argv.QOS))]
    above = [f"{name[:-1]}{kind}" for name in accounts for kind in "rm"]
    return {
        "config": cluster.run(*argv.CONFIG),
        "partitions": cluster.run(*argv.PARTITIONS),
        "associations": cluster.run(*argv.associations()),
        "qos": cluster.run(*argv.QOS),
        "assoc_mgr": cluster.run(*argv.assoc_mgr(["root", *accounts, *above], names)),
    }


def state_of(answers: dict[str, str], user: str) -> LimitState:
    """Return the limits that these answers tell of a user's jobs."""
    config = parse_cluster.parse_config(answers["config"])
    return LimitState(
        cluster=CLUSTER,
        version=config.version,
        enforced=enforced_limits(config),
        associations=tuple(parse_accounting.parse_associations(answers["associations"])),
        qos=tuple(parse_accounting.parse_qos(answers["qos"])),
        partitions=tuple(parse_nodes.parse_partitions(answers["partitions"])),
        usage=tuple(parse_assoc_mgr(answers["assoc_mgr"])),
        part_limits=config.values.get("EnforcePartLimits", "no").lower(),
        groups=frozenset({grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name}),
    )


def outcome(job_id: str, error: str, looks: list[dict[str, list[tuple[str, str]]]]) -> tuple[str, set[str]]:
    """Return what Slurm did: our word for it, and its reasons: its two schedulers may give different ones in turn."""
    if not job_id:
        first = error.splitlines()[0].removeprefix("sbatch: error: ").removeprefix("Batch job submission failed: ")
        return "refused", {REFUSALS.get(first, first)}
    tasks = [task for queue in looks for task in queue.get(job_id, [])]
    if any(state != "PENDING" for state, _ in tasks):  # the first task of an array: the judgement is of that one
        return "may-run", {""}
    # Where nodes keep it waiting, no limit does.
    reasons = {reason for state, reason in tasks if state == "PENDING"} - {"Resources", "Priority", "None"}
    return (
        ("pends", {re.sub(r" \(.* (?:allows|denies) .*", "", reason) for reason in reasons})
        if reasons
        else ("may-run", {""})
    )


def first_reasons(verdict: Verdict) -> tuple[str, ...]:
    """Return the reasons that Slurm may give first.

    For a job that a list of the partition leaves out, one scheduler gives that, the other the next limit; or, where
    what is tested before the nodes binds too, one gives the former, the other the latter.
    """
    reasons = [binding.reason for binding in verdict.bindings] or [""]
    lists = [reason for reason in reasons if NOT_PERMITTED in reason]
    first = [reason for reason in reasons if reason not in lists][:1]
    return (*first, *lists) if not first or first[0] not in PARTITION_REASONS else (first[0],)


def run(cluster: LimitsCluster, seed: int, rounds: int, record: Path | None) -> dict[str, list[float]]:
    """Return outcome → 1 for each pair in which we agree, 0 for each other."""
    rng = random.Random(seed)
    policies = [make_policy(rng, f"lim{i:02d}", name, CLUSTER) for i, name in enumerate(cluster.partitions)]
    cluster.apply(policies)
    fillers = [make_job(rng, p, is_filler=True) for p in policies for _ in range(rng.choice((2, 4, 6, 8)))]
    agreed: dict[str, list[float]] = defaultdict(list)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cluster.submit, fillers))
        time.sleep(70)  # slurmctld adds up the use of minutes every minute
        for _ in range(rounds):
            jobs = [make_job(rng, policy) for policy in policies]
            answers = query(cluster, jobs)
            submitted = list(pool.map(cluster.submit, jobs))
            time.sleep(SETTLED_S)
            looks = [cluster.outcomes()]
            for _ in range(LOOKS - 1):
                time.sleep(0.7)
                looks.append(cluster.outcomes())
            for job, (job_id, error) in zip(jobs, submitted, strict=True):
                effect, reasons = outcome(job_id, error, looks)
                verdict = judge(request_of(job), state_of(answers, job.user))
                ours = first_reasons(verdict)
                is_same = verdict.effect == effect and not reasons.isdisjoint(ours)
                agreed[effect].append(float(is_same))
                if not is_same:
                    print(f"Slurm: {effect} {reasons}, ours: {ours}, {job}, {verdict.bindings}", file=sys.stderr)
                if record:
                    keep(record, job, (effect, sorted(reasons)), answers)
    return agreed


def keep(record: Path, job: Job, slurm: tuple[str, list[str]], answers: dict[str, str]) -> None:
    """Append a pair, with those lines of the answers that name its policy or the root account."""
    name = job.account[:-1]
    of_policy = re.compile(
        rf"{name}|^{CLUSTER}[|]root[|]|PartitionName={job.partition} |QOS=normal|^normal|Account=root UserName= "
    )
    lines = {
        key: "".join(line for line in text.splitlines(keepends=True) if of_policy.search(line))
        for key, text in answers.items()
        if key in ("partitions", "associations", "qos")
    }
    head, *blocks = re.split(r"^(?=ClusterName=|QOS=)", answers["assoc_mgr"], flags=re.MULTILINE)
    kept = "".join(block for block in blocks if of_policy.search(block.splitlines()[0]))
    config = "".join(
        line
        for line in answers["config"].splitlines(keepends=True)
        if re.match("ClusterName|SLURM_VERSION|AccountingStorageEnforce|EnforcePartLimits", line)
    )
    pair = {
        "job": msgspec.to_builtins(request_of(job)),
        "groups": sorted(state_of(answers, job.user).groups),
        "slurm": slurm,
        "config": config,
        **lines,
        "assoc_mgr": head + kept,
    }
    with record.open("a") as file:
        file.write(json.dumps(pair) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 pairs")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--enforce", default="associations,limits,qos,safe")
    parser.add_argument("--part-limits", default="NO")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    policies, rounds = (5, 6) if args.quick else (25, 12)
    port = re.search(r"AccountingStoragePort=(\d+)", Path(SITE.slurm.conf).read_text())
    assert port
    with (
        workspace(Path("/var/tmp"), needed=100 << 20) as folder,
        limits_cluster(folder, port[1], policies, args.enforce, args.part_limits) as cluster,
    ):
        version = cluster.run("sinfo", "-V").split()[-1]
        agreed = run(cluster, args.seed, rounds, args.record)
    every = [share for shares in agreed.values() for share in shares]
    counts = ", ".join(f"{len(shares)} {name}" for name, shares in sorted(agreed.items()))
    share = sum(every) / len(every)
    return report(
        [from_ratios(f"seed {args.seed}, {len(every)} pairs: {counts}", "slurmctld", version, [share], target=TARGET)]
    )


if __name__ == "__main__":
    sys.exit(main())
