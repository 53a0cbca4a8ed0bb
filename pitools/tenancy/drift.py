"""What makes a policy untrue at a site: what differs from it, and what keeps its limits from having an effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pitools.core.record import Record
from pitools.limits.read import enforced_limits
from pitools.slurm.fields import comma_list, parse_tres
from pitools.slurm.parse_transactions import Transaction
from pitools.slurm.records import Config, Partition
from pitools.tenancy.apply import differences
from pitools.tenancy.changed_by import AccountingChanges
from pitools.tenancy.changes import effective_tiers
from pitools.tenancy.cluster_state import ClusterState, Values
from pitools.tenancy.columns import COLUMNS
from pitools.tenancy.policy import table_name
from pitools.tenancy.words import difference_text, name_of, partition_gaps

Remarks = Iterator[tuple[str, str, str]]  # object, message, hint

_RUN = "pit tenancy plan"
CONF = "slurm.conf: "
_BYPASS = ("OverPartQOS", "PartitionMaxNodes", "PartitionMinNodes", "PartitionTimeLimit")


class Finding(Record, frozen=True, kw_only=True, tag="pit.tenancy-finding/1"):
    """What makes a policy untrue at a site.

    kind: drift, an object that differs; ineffective, a setting of Slurm or a right that keeps the policy from having an
    effect; note, what the policy's reader should know, which is no fault. message: of a drift policy → site. changes:
    who made it differ, newest first; () if accounting does not tell.
    """

    site: str
    kind: Literal["drift", "ineffective", "note"]
    object: str
    message: str
    hint: str = ""
    changes: tuple[Transaction, ...] = ()


def find_drift(now: ClusterState, then: ClusterState, made_by: AccountingChanges, site: str) -> Iterator[Finding]:
    """Yield what a site has that the policy does not ask for, and what it lacks."""
    for change in differences(then, now):
        if change.after is None:
            message = "missing"
        elif change.before is None:
            values = difference_text(change.key[0], None, change.after)
            message = "not in the policy" + (f": {values}" if values else "")
        else:
            message = difference_text(change.key[0], change.before, change.after)
        changes = made_by.of(change)
        who = f"{changes[0].actor} at {changes[0].at}" if changes else "accounting does not tell who"
        if changes and change.key[0] == "tier" and change.after is None:
            who = f"perhaps removed by {who}: accounting does not tell which tier was"
        name = name_of(change.key)
        yield Finding(site=site, kind="drift", object=name, message=f"{message} ({who})", hint=_RUN, changes=changes)


def find_ineffective(config: Config, then: ClusterState) -> Remarks:
    """Yield the settings of slurm.conf that keep what a policy uses from having an effect."""
    enforced, used = set(enforced_limits(config)), _used(then)
    needs = {
        "associations": ("members", "everybody may submit, in any team or none"),
        "limits": ("limits", "no limit is enforced"),
        "qos": ("tiers", "everybody may use every tier"),
        "safe": ("budgets", "jobs start that will exceed their team's budget"),
    }
    everything = f"{CONF}AccountingStorageEnforce={','.join(needs)}"
    for word, (what, message) in needs.items():
        if what in used and word not in enforced:
            yield "AccountingStorageEnforce", f'lacks "{word}": {message}', everything
    tracked = [name for name in comma_list(config.values.get("AccountingStorageTRES", "")) if "/" in name]
    lacking = {name.partition(":")[0] for name in used if "/" in name} - {name.partition(":")[0] for name in tracked}
    for name in sorted(lacking):
        hint = f"{CONF}AccountingStorageTRES={','.join((*tracked, *sorted(lacking)))}"
        yield "AccountingStorageTRES", f"lacks {name}: nothing counts against its limits", hint
    yield from _priority(config, used)


def _used(then: ClusterState) -> set[str]:
    """Return what of a policy needs Slurm's help: members, limits, tiers, …; and the resources that limits name."""
    used = {"members"} if any(key[0] == "member" for key in then.objects) else set()
    for (kind, *_), values in then.objects.items():
        for column in COLUMNS[kind]:
            text = values.get(column.option, "")
            if not text:
                continue
            if column.option.startswith(("Grp", "Max", "Min")):
                used |= {"limits", *(parse_tres(text) if column.kind == "tres" else ())}
            named = {"GrpTRESMins": "budgets", "QOS": "tiers", "Fairshare": "shares"}
            used.add("priorities" if (kind, column.option) == ("tier", "Priority") else named.get(column.option, ""))
    return used


def _priority(config: Config, used: set[str]) -> Remarks:
    if used & {"shares", "priorities"} and config.values.get("PriorityType") != "priority/multifactor":
        message = f"{config.values.get('PriorityType')}: shares and priorities of tiers have no effect"
        yield "PriorityType", message, f"{CONF}PriorityType=priority/multifactor"
        return
    for what, key in (("shares", "PriorityWeightFairShare"), ("priorities", "PriorityWeightQOS")):
        if what in used and config.values.get(key) == "0":
            yield key, f"0: {what} {'of tiers ' if what == 'priorities' else ''}have no effect", f"{CONF}{key}=10000"


def find_bypasses(now: ClusterState, then: ClusterState, named: set[str], partitions: Sequence[Partition]) -> Remarks:
    """Yield QOS outside the policy that set its limits aside. named: the tiers of the policy."""
    usable = {name: key[2] for key in then.objects if key[0] == "member" for name in effective_tiers(then, key)}
    for name, user in sorted(usable.items()):
        flags = [flag for flag in comma_list(now.objects.get(("tier", name), {}).get("Flags", "")) if flag in _BYPASS]
        if name not in named and flags:
            message = f"not in the policy, sets limits of partitions aside ({','.join(flags)}), and {user} may use it"
            yield f"tier {name}", message, f"name it in the policy, or leave it out of the tiers of {user}"
    for partition in partitions:
        first = now.objects.get(("tier", partition.qos), {})
        for name in sorted(named):
            own = now.objects.get(("tier", name), {})
            both = _limits(first) & _limits(own)
            if partition.qos not in named and both and "OverPartQOS" not in comma_list(own.get("Flags", "")):
                message = f"its QOS {partition.qos} replaces {', '.join(sorted(both))} of tier {name}"
                yield f"partition {partition.partition}", message, f"flags OverPartQOS of tier {name}, or no such limit"


def _limits(values: Values) -> set[str]:
    """Return the limits of a QOS, each resource for itself: Slurm replaces them one by one."""
    limits: set[str] = set()
    for option, text in values.items():
        if option.startswith(("Grp", "Max", "Min")):
            limits |= {f"{option}={name}" for name in parse_tres(text)} or {option}
    return limits


def find_administrators(levels: dict[str, str], named: set[str]) -> Remarks:
    """Yield users who may change accounting and are not administrators of the policy. levels: user → AdminLevel."""
    for user, level in sorted(levels.items()):
        if user not in {*named, "root"} and level not in ("", "None"):
            hint = f'[users.{user}] admin = "{level}", or: sacctmgr modify user {user} set adminlevel=None'
            yield f"user {user}", f"{level}: may change accounting and every limit, and is not in the policy", hint


def find_notes(config: Config, then: ClusterState) -> Remarks:
    """Yield what a reader of the policy should know of a site."""
    half_life, reset = (config.values.get(f"Priority{name}", "") for name in ("DecayHalfLife", "UsageResetPeriod"))
    if "budgets" in _used(then) and half_life not in ("", "00:00:00", "0"):
        message = f"{half_life}: what is used of a budget halves in this time, so that budgets have no period"
        yield "PriorityDecayHalfLife", message, f"{CONF}PriorityDecayHalfLife=0 and PriorityUsageResetPeriod=MONTHLY"
    elif "budgets" in _used(then) and reset == "NONE":
        message = "NONE: a budget is for ever, and has no period"
        yield "PriorityUsageResetPeriod", message, f"{CONF}PriorityUsageResetPeriod=MONTHLY"
    if plugins := config.values.get("JobSubmitPlugins"):
        yield "JobSubmitPlugins", f"{plugins}: may change what a job asks for, unseen here", ""
    for key, message in partition_gaps(then):
        yield name_of(key), message, f"name them in [{table_name(key)}], too"
