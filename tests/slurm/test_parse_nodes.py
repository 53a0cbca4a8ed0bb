"""Nodes and partitions from recorded answers, and from what later versions and hostile hands may print."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ClusterError
from pitools.slurm import parse_nodes
from pitools.slurm.records import Node, Partition, Reservation

Recorded = Callable[[str], str]
LINE = (
    "NodeName=n1 CPUAlloc=0 CPUTot=4 ActiveFeatures=(null) Gres=gpu:h100:8 NodeAddr=10.0.0.1 NodeHostName=n1"
    " OS=Linux 6.1 #1 SMP  RealMemory=1000 FreeMem=N/A State=IDLE+DRAIN Weight=3 Partitions=a,b"
)


def test_recorded_nodes(recorded: Recorded) -> None:
    """All 12 nodes of each version, the drained one exactly."""
    nodes = {node.node: node for node in parse_nodes.parse_nodes(recorded("nodes_o.txt"))}
    assert list(nodes) == ["a01", "a02", "a03", "a04", "h01", "h02", "h03", "h04", "h05", "h06", "h07", "h08"]
    assert nodes["h08"] == Node(
        node="h08",
        state="idle",
        flags=("drain",),
        partitions=("train", "all"),
        gres="gpu:h100:8",
        gpu_type="h100",
        gpus=8,
        gpus_allocated=0,
        cpus=16,
        memory_mib=20000,
        features=("h100", "ib", "nvme"),
        reason="NHC: gpu 3 ecc",
        address="127.0.0.1",
    )
    assert (nodes["h01"].state, nodes["h01"].gpus_allocated) == ("allocated", 8)
    assert (nodes["a02"].state, nodes["a02"].gpu_type, nodes["a02"].gpus_allocated) == ("mixed", "a100", 2)


def test_recorded_partitions(recorded: Recorded) -> None:
    """The three partitions of each version, `dev` exactly."""
    train, dev, full = parse_nodes.parse_partitions(recorded("partitions_o.txt"))
    assert train.is_default
    assert not full.is_default
    assert dev == Partition(
        partition="dev",
        state="up",
        node_list="a[01-04]",
        nodes=4,
        cpus=32,
        max_time_s=14400,
        over_subscribe="NO",
        tres={
            "cpu": "32",
            "mem": "40000M",
            "node": "4",
            "billing": "32",
            "gres/gpu": "16",
            "gres/gpu:a100": "16",
        },
    )
    assert full.node_list == "a[01-04],h[01-08]"


def test_allowed_accounts_of_a_partition(recorded: Recorded) -> None:
    """ALL means no restriction, names are kept."""
    text = recorded("partitions_o.txt").replace("AllowAccounts=ALL", "AllowAccounts=lab,infra DenyQos=low", 1)
    first = parse_nodes.parse_partitions(text)[0]
    assert (first.allow_accounts, first.allow_qos, first.deny_qos) == (("lab", "infra"), (), ("low",))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (" Reason=x=1 State=UP Weight=9 [al@2026-11-21T01:59:42] Comment=Gres=gpu:9", "x=1 State=UP Weight=9"),
        (" Reason=[y] x [root@2026-11-21T01:59:42] Comment=Reason=no", "[y] x"),
        (" Reason=one [bob@2026-11-21T01:59:42]\n        State=ALLOCATED", "one\nState=ALLOCATED"),
        (" Comment=c State=DOWN Reason=r [a@2026-11-21T01:59:42] Extra=e", "r"),
        (" Reason=old form without a name", "old form without a name"),
        (" Extra=only Gres=gpu:1", ""),
        ("", ""),
    ],
)
def test_what_people_write_stays_text(said: str, reason: str) -> None:
    """A reason or comment that looks like Slurm's keys changes nothing but itself."""
    (node,) = parse_nodes.parse_nodes(LINE + said + "\n")
    assert node.reason == reason
    assert (node.state, node.flags, node.gpus, node.address) == ("idle", ("drain",), 8, "10.0.0.1")
    assert node.partitions == ("a", "b")
    assert node.gpus_allocated is None


@given(st.text(st.characters(exclude_characters="\n[]@\r"), min_size=1).map(str.strip).filter(bool))
def test_any_reason_comes_back(reason: str) -> None:
    """Any one-line reason comes through scontrol's form unchanged."""
    (node,) = parse_nodes.parse_nodes(f"{LINE} Reason={reason} [root@2026-11-21T01:59:42]\n")
    assert node.reason == reason
    assert node.node == "n1"


def test_gpus_in_use_come_from_the_detailed_answer() -> None:
    """GresUsed of `-d` tells the GPUs in use where the TRES do not."""
    (node,) = parse_nodes.parse_nodes(LINE + " GresUsed=gpu:h100:3(IDX:0-2)\n")
    assert node.gpus_allocated == 3


def test_later_versions_may_add(recorded: Recorded) -> None:
    """Keys, flags and states that a later version adds change nothing else."""
    nodes = parse_nodes.parse_nodes(recorded("nodes_o.txt"))
    text = recorded("nodes_o.txt").replace(" CPUTot=", " NewKey=some words here Topology=x:y CPUTot=")
    text = text.replace(" State=IDLE+DRAIN", " State=IDLE+DRAIN+QUARANTINE")
    after = parse_nodes.parse_nodes(text)
    assert after[:-1] == nodes[:-1]
    assert after[-1].flags == ("drain", "quarantine")


@pytest.mark.parametrize(
    "text",
    [
        "Segmentation fault\n",
        LINE,
        LINE.replace(" State=IDLE+DRAIN", "") + "\n",
        LINE.replace("CPUTot=4", "CPUTot=four") + "\n",
        LINE.replace("RealMemory=1000", "RealMemory=lots") + "\n",
    ],
    ids=["garbage", "cut", "no state", "no number", "no memory"],
)
def test_bad_answers_are_refused(text: str) -> None:
    """Garbage, half an answer and missing keys are errors that show the line."""
    with pytest.raises(ClusterError, match="cannot parse") as caught:
        parse_nodes.parse_nodes(text)
    assert caught.value.where.startswith("line: ")


def test_a_partition_without_a_needed_key_is_refused(recorded: Recorded) -> None:
    """A partition that lacks its nodes is an error that names the key."""
    with pytest.raises(ClusterError, match="'Nodes'"):
        parse_nodes.parse_partitions(recorded("partitions_o.txt").replace(" Nodes=", " Knots="))


@pytest.mark.parametrize("text", ["", "No nodes in the system\n"])
def test_no_nodes(text: str) -> None:
    """An empty cluster has no nodes."""
    assert parse_nodes.parse_nodes(text) == []


KEPT = (
    "ReservationName=m1 StartTime=2026-11-22T16:13:13 EndTime=2026-11-22T17:13:13 Duration=01:00:00 Nodes=n[01-03]"
    " NodeCnt=3 CoreCnt=12 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=12"
    " Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a"
    " MaxStartDelay=(null)\n"
    "ReservationName=lic StartTime=2026-11-22T17:13:13 EndTime=2026-11-22T17:43:13 Duration=00:30:00 Nodes=(null)"
    " NodeCnt=0 CoreCnt=0 Features=(null) PartitionName=(null) Flags=ANY_NODES TRES=(null) Users=(null)"
    " Groups=(null) Accounts=lab,infra Licenses=x:1 State=ACTIVE BurstBuffer=(null) MaxStartDelay=(null)"
    " Comment=Users=nobody\n"
)


def test_reservations() -> None:
    """As scontrol prints them, one with nodes and one of licenses; none at all is a sentence."""
    assert parse_nodes.parse_reservations(KEPT, UTC) == [
        Reservation(
            reservation="m1",
            start="2026-11-22T16:13:13.000Z",
            end="2026-11-22T17:13:13.000Z",
            state="inactive",
            node_list="n[01-03]",
            cpus=12,
            flags=("maint", "ignore_jobs", "spec_nodes"),
            users=("root",),
        ),
        Reservation(
            reservation="lic",
            start="2026-11-22T17:13:13.000Z",
            end="2026-11-22T17:43:13.000Z",
            state="active",
            flags=("any_nodes",),
            accounts=("lab", "infra"),
        ),
    ]
    assert parse_nodes.parse_reservations("No reservations in the system\n") == []


@pytest.mark.parametrize("text", [KEPT[:-1], KEPT.replace(" Flags=MAINT", " Flogs=MAINT"), "Reservation m1\n"])
def test_half_a_reservation_is_refused(text: str) -> None:
    """Cut short, without a key, or something else."""
    with pytest.raises(ClusterError, match="scontrol show reservation"):
        parse_nodes.parse_reservations(text)
