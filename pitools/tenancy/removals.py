"""Keep for now what a state would remove and unfinished jobs use, or other clusters of the database.

slurmdbd refuses to remove an association of unfinished jobs, and so a run would end in the middle. It removes a tier,
whose jobs then never start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.tenancy.changes import effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Key, needs
from pitools.tenancy.read import SiteAccounting
from pitools.tenancy.refusals import default_tier
from pitools.tenancy.words import name_of

_JOBS = ["squeue", "-h", "-a", "-o", "%a|%u|%q|%A"]
_NAMED = 5  # jobs in a sentence


class Kept(NamedTuple):
    """A state with what it cannot remove yet. for_jobs, for_clusters: what stays, as sentences."""

    state: ClusterState
    for_jobs: list[str]
    for_clusters: list[str]


def read_unfinished_jobs(accounting: SiteAccounting, then: ClusterState) -> dict[Key, list[str]]:
    """Return the unfinished jobs of each member, for all partitions, and tier, if the state removes any.

    Jobs on other clusters that do not answer are left out. Raises ClusterError, Unreachable.
    """
    removed = {key[0] for key in accounting.state.objects.keys() - then.objects.keys()}
    others = accounting.state.others if "tier" in removed else ()
    commands = [[*_JOBS, "--local"], *([*_JOBS, "-M", cluster] for cluster in others)]
    if not removed & {"tier", "member"}:
        return {}
    answers = run_queries(accounting.client.transport, commands)
    stdout_or_raise(accounting.client.transport, answers[0])
    jobs: dict[Key, list[str]] = {}
    for i, answer in enumerate(answers):
        for line in [line for line in answer.stdout.splitlines() if line.count("|") == 3]:
            team, user, tier, number = line.split("|")
            jobs.setdefault(("tier", tier), []).append(number)
            if i == 0:  # of the site's own cluster
                jobs.setdefault(("member", team, user), []).append(number)
    return jobs


def keep_used(now: ClusterState, then: ClusterState, jobs: Mapping[Key, Sequence[str]]) -> Kept:
    """Return a state with what it removes of members and tiers that are in use. jobs: `read_unfinished_jobs`."""
    objects = dict(then.objects)
    for_jobs, for_clusters = [], []
    kept: list[Key] = []

    def keep(key: Key) -> None:
        if key in objects or key not in now.objects:
            return
        objects[key] = dict(now.objects[key])
        kept.append(key)
        if key[0] == "member":  # a user who goes keeps no rights
            objects.setdefault(("user", key[2]), {"DefaultAccount": key[1]})
        for needed in needs(key, objects[key]):
            keep(needed)

    for key in sorted(now.objects.keys() - then.objects.keys()):
        users = [cluster for cluster, used in sorted(now.others.items()) if key in used and key[0] == "tier"]
        numbers = list(dict.fromkeys(jobs.get(key[:3], ())))
        if numbers:
            text = ", ".join(numbers[:_NAMED]) + (", ..." if len(numbers) > _NAMED else "")
            for_jobs.append(f"{name_of(key)} stays for now: unfinished jobs {text}")
        elif users:
            for_clusters.append(f"{name_of(key)} stays: in use on {', '.join(users)}")
        if numbers or users:
            keep(key)
    state = msgspec.structs.replace(then, objects=objects)
    for key in sorted(kept, reverse=True):  # teams before members
        default = default_tier(state, key) if key[0] in ("team", "member") else ""
        if default and default not in effective_tiers(state, key):  # the team's tiers changed
            for option in ("QOS", "DefaultQOS"):
                objects[key].pop(option, None)
    return Kept(state, for_jobs, for_clusters)
