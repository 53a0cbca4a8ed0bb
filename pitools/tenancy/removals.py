"""Keep for now what a state would remove and unfinished jobs use, or other clusters of the database.

slurmdbd refuses to remove an association of unfinished jobs, and so a run would end in the middle. It removes a tier,
or takes one from an association, whose jobs then never start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.tenancy.changes import ObjectChange, effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Key, needs
from pitools.tenancy.read import SiteAccounting
from pitools.tenancy.refusals import default_tier
from pitools.tenancy.words import name_of

_JOBS = ["squeue", "-h", "-a", "-o", "%a|%u|%q|%A"]
_NAMED = 5  # jobs in a sentence


class Kept(NamedTuple):
    """A state with what it cannot remove yet. for_jobs, for_clusters: what stays, as sentences.

    postponed: of members who stay anyway, what they have for now, and what is wanted.
    """

    state: ClusterState
    for_jobs: list[str]
    for_clusters: list[str]
    postponed: list[ObjectChange]


def read_unfinished_jobs(accounting: SiteAccounting, then: ClusterState) -> dict[Key, list[str]]:
    """Return the unfinished jobs of each member, for all partitions, tier, and ("used", team, user, tier).

    Empty if the state removes no member, no tier, and no tier of a member. Jobs on other clusters that do not answer
    are left out. Raises ClusterError, Unreachable.
    """
    now = accounting.state
    removed = {key[0] for key in now.objects.keys() - then.objects.keys()}
    others = [*now.others] if "tier" in removed else []
    commands = [[*_JOBS, "--local"], *([*_JOBS, "-M", cluster] for cluster in others)]
    members = (key for key in now.objects if key[0] == "member")
    if not removed & {"tier", "member"} and all(effective_tiers(now, k) <= effective_tiers(then, k) for k in members):
        return {}
    answers = run_queries(accounting.client.transport, commands)
    stdout_or_raise(accounting.client.transport, answers[0])
    jobs: dict[Key, list[str]] = {}
    for i, answer in enumerate(answers):
        for line in [line for line in answer.stdout.splitlines() if line.count("|") == 3]:
            team, user, tier, number = line.split("|")
            jobs.setdefault(("tier", tier), []).append(f"{number} of cluster {others[i - 1]}" if i else number)
            if i == 0:  # of the site's own cluster
                jobs.setdefault(("member", team, user), []).append(number)
                jobs.setdefault(("used", team, user, tier), []).append(number)
    return jobs


def keep_used(now: ClusterState, then: ClusterState, jobs: Mapping[Key, Sequence[str]]) -> Kept:
    """Return a state with what it removes of members and tiers that are in use. jobs: `read_unfinished_jobs`."""
    objects = dict(then.objects)
    for_jobs, for_clusters = [], []
    kept, postponed = list[Key](), list[ObjectChange]()

    def keep(key: Key) -> None:
        if key in objects or key not in now.objects:
            return
        objects[key] = dict(now.objects[key])
        kept.append(key)
        if key[0] == "member" and (user := ("user", key[2])) not in then.objects:  # who goes keeps no rights
            is_default = now.objects[user].get("DefaultAccount") == key[1]
            objects[user] = {"DefaultAccount": key[1]} if is_default or user not in objects else objects[user]
        for needed in needs(key, objects[key]):
            keep(needed)

    for key in sorted(now.objects.keys() - then.objects.keys()):
        users = [cluster for cluster, used in sorted(now.others.items()) if key in used and key[0] == "tier"]
        if numbers := jobs.get(key[:3]):
            for_jobs.append(f"{name_of(key)} {_stays(numbers)}")
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
    for key in sorted(key for key in objects if key[0] == "member"):
        tiers = effective_tiers(state, key)
        of_jobs = {tier: jobs.get(("used", *key[1:3], tier)) for tier in sorted(effective_tiers(now, key) - tiers)}
        if used := {tier: f"{name_of(key)} {_stays(numbers)}" for tier, numbers in of_jobs.items() if numbers}:
            own = {"QOS": ",".join(sorted(tiers.union(used)))}
            postponed.append(ObjectChange(key=key, before={**objects[key], **own}, after=objects[key]))
            objects[key] = {**objects[key], **own}
            for_jobs += (f"tier {tier} of {text}" for tier, text in used.items())
    return Kept(state, for_jobs, for_clusters, postponed)


def _stays(numbers: Sequence[str]) -> str:
    text = ", ".join(list(dict.fromkeys(numbers))[:_NAMED])
    return f"stays for now: unfinished jobs {text}" + (", ..." if len({*numbers}) > _NAMED else "")
