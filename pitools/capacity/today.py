"""The pools of today, and the tiers of their QOS, as sites have them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pitools.core import hostlist
from pitools.core.errors import ConfigError
from pitools.place.simulate.model import Scenario
from pitools.place.simulate.scenario import scenario_of_sites
from pitools.site.connect import client
from pitools.site.load import load_site
from pitools.slurm.fields import none_to_empty
from pitools.slurm.records import Config, Partition, Qos


def today_of_sites(names: Sequence[str]) -> Scenario:
    """Return the partitions of these sites as pools, with the tiers of their QOS, and which preempt which.

    Raises ConfigError for a site whose file has no number of nodes, or whose partitions share a part of their nodes,
    Unreachable for one that does not answer, ClusterError for one that answers with an error.
    """
    scenario, qos = scenario_of_sites(names), list[Qos]()
    for name in dict.fromkeys(names):
        site = client(load_site(name))
        scenario, config = without_shared_nodes(scenario, name, site.partitions()), site.config()
        if not config.values.get("AccountingStorageType", "").endswith("none"):
            qos += [_as_applied(each, config) for each in site.qos()]
    return with_tiers(scenario, qos)


def without_shared_nodes(scenario: Scenario, site: str, partitions: Sequence[Partition]) -> Scenario:
    """Return a scenario without the pools of a site's partitions whose nodes are all in larger ones.

    Raises ConfigError for partitions that share only a part of their nodes.
    """
    nodes = {f"{site}/{each.partition}": set(hostlist.expand(none_to_empty(each.node_list))) for each in partitions}
    counted, kept = set[str](), set[str]()
    for pool in sorted(nodes, key=lambda pool: -len(nodes[pool])):
        if any(pool == each.pool for each in scenario.pools) and not (nodes[pool] and nodes[pool] <= counted):
            if counted & nodes[pool]:
                problem, hint = f"{pool} shares some nodes with others", "give the pools as a --scenario file"
                raise ConfigError(f"{problem} (expected all or none)", where=f"site {site}", hint=hint)
            counted |= nodes[pool]
            kept.add(pool)
    pools = tuple(each for each in scenario.pools if each.pool in kept or each.pool not in nodes)
    return msgspec.structs.replace(scenario, pools=pools)


def _as_applied(qos: Qos, config: Config) -> Qos:
    """Return a QOS without what this cluster's slurmctld ignores."""
    has_priority = config.values.get("PriorityWeightQOS", "0") != "0"
    can_preempt = config.values.get("PreemptType") == "preempt/qos"
    return msgspec.structs.replace(
        qos, priority=qos.priority if has_priority else 0, preempt=qos.preempt if can_preempt else ()
    )


def with_tiers(scenario: Scenario, qos: Sequence[Qos]) -> Scenario:
    """Return a scenario with the QOS ranked by priority from 0; a QOS ranks above each one that it preempts.

    Of a QOS that several sites have the highest priority counts. Raises ConfigError for QOS that preempt each other.
    """
    preempts: dict[str, set[str]] = {}
    keys: dict[str, tuple[int, int]] = {}  # priority, and steps above it
    for each in qos:
        keys[each.qos] = max(keys.get(each.qos, (0, 0)), (each.priority, 0))
        preempts.setdefault(each.qos, set()).update(set(each.preempt))
    for _ in range(len(keys) + 1):
        below = {name: [keys[other] for other in preempts[name] if other in keys] for name in keys}
        raised = {name: max([key, *((top, steps + 1) for top, steps in below[name])]) for name, key in keys.items()}
        if raised == keys:
            order = sorted(set(keys.values()))
            preempting = {name: frozenset(others & keys.keys()) for name, others in preempts.items() if others}
            tiers = {name: order.index(key) for name, key in keys.items()}
            return msgspec.structs.replace(scenario, tiers=tiers, preempts=preempting)
        keys = raised
    raise ConfigError("QOS that preempt each other", where=scenario.name, hint="sacctmgr show qos format=Name,Preempt")
