"""Preemption that a policy asks for and a site does not give, or gives too fast."""

from __future__ import annotations

import pytest

from pitools.slurm.records import Partition
from pitools.tenancy import preemption
from pitools.tenancy.cluster_state import Key, Values
from tests.tenancy.test_drift import config, state

POLICY: dict[Key, Values] = {
    ("tier", "urgent"): {"Priority": "9", "Preempt": "low", "MaxTRESPU": "gres/gpu=4"},
    ("tier", "low"): {"Priority": "8", "GraceTime": "00:00:30"},
}
SUSPEND = {"low": {"PreemptMode": "suspend"}}
GANG = {"PreemptMode": "GANG,SUSPEND"}
BOTH = Partition(partition="gpu", state="up", node_list="n[1-4]")
FORCED = Partition(partition="gpu", state="up", node_list="n[1-4]", over_subscribe="FORCE:1", deny_qos=("urgent",))
ABOVE = Partition(partition="now", state="up", node_list="n[3-9]", allow_qos=("urgent",), priority_tier=2)
EQUAL = Partition(partition="now", state="up", node_list="n[3-9]", allow_qos=("urgent",))
ELSEWHERE = Partition(partition="now", state="up", node_list="n[5-9]", allow_qos=("urgent",))


def policy(changes: dict[str, Values]) -> dict[Key, Values]:
    return {key: {**values, **changes.get(key[1], {})} for key, values in POLICY.items()}


@pytest.mark.parametrize(
    ("settings", "tiers", "partitions", "found"),
    [
        ({}, {}, [BOTH], []),
        ({"PreemptType": "preempt/none"}, {}, [BOTH], ["PreemptType"]),
        ({"PreemptMode": "OFF"}, {}, [BOTH], ["tier low"]),
        ({"PreemptMode": "OFF"}, {"low": {"PreemptMode": "cancel"}}, [BOTH], []),
        ({"JobRequeue": "0"}, {}, [BOTH], ["tier low"]),
        ({}, {"low": {"Priority": "9"}}, [BOTH], ["tier urgent"]),
        ({}, {"urgent": {"Priority": ""}}, [BOTH], ["tier urgent"]),
        (GANG, SUSPEND, [FORCED, ABOVE], []),
        (GANG, {}, [FORCED, ABOVE], []),  # by the cluster's mode
        ({}, SUSPEND, [FORCED, ABOVE], ["tier low"]),
        ({"PreemptMode": "SUSPEND"}, SUSPEND, [FORCED, ABOVE], ["tier low"]),
        (GANG, SUSPEND, [BOTH], ["partition gpu", "tier urgent"]),
        (GANG, SUSPEND, [FORCED, EQUAL], ["tier urgent"]),
        (GANG, SUSPEND, [FORCED, ELSEWHERE], []),
    ],
)
def test_what_preemption_lacks(
    settings: dict[str, str], tiers: dict[str, Values], partitions: list[Partition], found: list[str]
) -> None:
    """Each setting alone: of the cluster, of the victim, of the tier that preempts, and of their partitions."""
    faults = preemption.find_faults(config(**settings), state(_set(policy(tiers))), partitions)
    assert [name for name, _, _ in faults] == found


def _set(objects: dict[Key, Values]) -> dict[Key, Values]:
    return {key: {option: text for option, text in values.items() if text} for key, values in objects.items()}


@pytest.mark.parametrize(
    ("tiers", "noted"),
    [
        ({}, []),
        ({"low": {"GraceTime": "00:00:29"}}, ["tier low"]),
        ({"low": {"GraceTime": ""}}, ["tier low"]),
        ({**SUSPEND, "urgent": {"MaxTRESPU": ""}}, ["tier low", "tier urgent"]),
    ],
)
def test_notes(tiers: dict[str, Values], noted: list[str]) -> None:
    """What suspension does not free, too little time to save, and a tier that may preempt without end."""
    notes = [name for name, _, _ in preemption.find_notes(config(), state(_set(policy(tiers))), 30.0)]
    assert notes == noted
