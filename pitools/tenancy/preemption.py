"""What keeps the preemption of a policy's tiers from working at a site, and their victims from saving."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pitools.core import hostlist, units
from pitools.slurm.fields import comma_list
from pitools.slurm.records import Config, Partition
from pitools.tenancy.cluster_state import ClusterState, Values
from pitools.tenancy.drift import CONF, Remarks


class _Victim(NamedTuple):
    """A tier that others preempt. by: these. modes: how, in lower case, by the cluster's PreemptMode if not its own."""

    name: str
    values: Values
    by: dict[str, Values]
    modes: set[str]


def find_faults(config: Config, then: ClusterState, partitions: Sequence[Partition]) -> Remarks:
    """Yield what makes preemption ineffective."""
    victims = list(_victims(config, then))
    if victims and config.values.get("PreemptType") != "preempt/qos":
        kind = config.values.get("PreemptType")
        yield "PreemptType", f"{kind}: no tier preempts another", f"{CONF}PreemptType=preempt/qos"
        return
    for each in victims:
        tier = f"tier {each.name}"
        if not each.modes - {"off", "gang"}:
            yield tier, "PreemptMode OFF: its jobs are never preempted", 'preempt_mode = "requeue"'
        elif "suspend" in each.modes:
            yield from _suspension(each, config, partitions)
        if "requeue" in each.modes and config.values.get("JobRequeue") == "0":
            message = "JobRequeue 0: its preempted jobs are cancelled, unless sbatch said --requeue"
            yield tier, message, f"{CONF}JobRequeue=1"
        own = int(each.values.get("Priority", "0"))
        for name, values in each.by.items():
            if (priority := int(values.get("Priority", "0"))) <= own:
                message = f"priority {priority} is not above {own}, that of {each.name}, which it preempts"
                yield f"tier {name}", message, f"priority = {own + 1}"


def find_notes(config: Config, then: ClusterState, grace_s: float) -> Remarks:
    """Yield what a reader of the policy should know of its preemption. grace_s: what a run needs to save."""
    victims = list(_victims(config, then))
    for each in victims:
        grace = units.parse_duration(each.values.get("GraceTime", "0"))
        if "suspend" in each.modes:
            message = "suspended jobs keep their memory and GPUs: preemption frees CPUs alone"
            yield f"tier {each.name}", message, 'preempt_mode = "requeue"'
        elif grace < grace_s:
            hint = f'grace_time = "{units.to_slurm_time(math.ceil(grace_s))}"'
            message = f"grace_time {grace} s: the site's [recovery] gives a run {grace_s:g} s to save"
            yield f"tier {each.name}", message, hint
    for name, values in {name: values for each in victims for name, values in each.by.items()}.items():
        if not any(option.startswith(("Grp", "Max")) for option in values):
            yield f"tier {name}", "preempts others without a limit of its own", "max_tres_per_user of the tier"


def _victims(config: Config, then: ClusterState) -> Iterator[_Victim]:
    tiers = {key[1]: values for key, values in sorted(then.objects.items()) if key[0] == "tier"}
    for name in sorted({name for values in tiers.values() for name in comma_list(values.get("Preempt", ""))}):
        own = tiers.get(name, {})
        by = {above: values for above, values in tiers.items() if name in comma_list(values.get("Preempt", ""))}
        mode = own.get("PreemptMode", "cluster").lower()
        modes = comma_list(config.values.get("PreemptMode", "").lower()) if mode == "cluster" else (mode,)
        yield _Victim(name, own, by, {*modes})


def _suspension(victim: _Victim, config: Config, partitions: Sequence[Partition]) -> Remarks:
    """Yield why jobs of a tier are not suspended, or not for as long as those that preempt them run."""
    mode = config.values.get("PreemptMode", "")
    if not {"suspend", "gang"} <= {*comma_list(mode.lower())}:
        message = f"its jobs are not suspended: the cluster's PreemptMode is {mode}"
        yield f"tier {victim.name}", message, f"{CONF}PreemptMode=SUSPEND,GANG"
    own = [row for row in partitions if _admits(row, victim.name)]
    for row in own:
        if row.over_subscribe != "FORCE:1":
            message = f"OverSubscribe={row.over_subscribe or 'NO'}: no job of tier {victim.name} is suspended"
            yield f"partition {row.partition}", message, f"{CONF}OverSubscribe=FORCE:1"
    for name in victim.by:
        above = [row for row in partitions if _admits(row, name)]
        equal = {a.partition for a in above for b in own if a.priority_tier <= b.priority_tier and _share_nodes(a, b)}
        if equal:
            names = ", ".join(sorted(equal))
            message = f"in partition {names} it takes turns with {victim.name}, every SchedulerTimeSlice"
            hint = f"{CONF}a partition of the same nodes with a higher PriorityTier, for {name} alone (AllowQos)"
            yield f"tier {name}", message, hint


def _admits(partition: Partition, tier: str) -> bool:
    return tier in partition.allow_qos if partition.allow_qos else tier not in partition.deny_qos


def _share_nodes(a: Partition, b: Partition) -> bool:
    return a.partition == b.partition or bool({*hostlist.expand(a.node_list)} & {*hostlist.expand(b.node_list)})
