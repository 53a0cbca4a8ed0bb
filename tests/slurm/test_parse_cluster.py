"""Configuration, version, topology, estimates and job ids from recorded answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError
from pitools.slurm import parse_cluster
from pitools.slurm.records import Block, StartEstimate, Submitted, Switch

Recorded = Callable[[str], str]


def test_recorded_config(recorded: Recorded, version: str) -> None:
    """Every setting of each version, with the version as numbers."""
    config = parse_cluster.parse_config(recorded("config.txt"))
    assert config.cluster == "gamma"
    assert config.version[:2] == tuple(int(part) for part in version.split("."))
    assert len(config.values) == recorded("config.txt").count(" = ")
    assert config.values["PreemptType"] == "preempt/qos"
    assert config.values["KillWait"] == "30 sec"
    assert config.values["SlurmctldHost[0]"].startswith("vm")
    assert config.values["InteractiveStepOptions"] == "--interactive --preserve-env --pty $SHELL"
    assert config.values["TopologyParam"] == ""
    assert config.values["PriorityFlags"] == ""


def test_config_of_a_further_section_and_of_garbage() -> None:
    """Settings of Slurm's further sections are read too; an answer without the version is refused."""
    text = "ClusterName = c\nSLURM_VERSION = 26.05.1\n\nCgroup Support Configuration:\nAllowedRAMSpace = 100.0%\n"
    config = parse_cluster.parse_config(text)
    assert (config.version, config.values["AllowedRAMSpace"]) == ((26, 5, 1), "100.0%")
    with pytest.raises(ClusterError, match="SLURM_VERSION"):
        parse_cluster.parse_config("ClusterName = c\n")


def test_recorded_versions(recorded: Recorded, version: str) -> None:
    """What -V prints, whoever packaged it."""
    assert parse_cluster.parse_version(recorded("version.txt"))[:2] == tuple(int(part) for part in version.split("."))
    with pytest.raises(ClusterError, match="no version"):
        parse_cluster.parse_version("command not found")


def test_recorded_tree(recorded: Recorded) -> None:
    """The switches of each version, leaves first."""
    topology = parse_cluster.parse_topology(recorded("topology.txt"))
    assert topology == [
        Switch(switch="leaf1", level=0, node_list="h[01-04]"),
        Switch(switch="leaf2", level=0, node_list="h[05-08]"),
        Switch(switch="leaf3", level=0, node_list="a[01-04]"),
        Switch(switch="spine1", level=1, node_list="h[01-08]", switches="leaf[1-2]"),
        Switch(switch="core", level=2, node_list="a[01-04],h[01-08]", switches="spine1,leaf3"),
    ]


def test_recorded_branch(recorded: Recorded, version: str) -> None:
    """The switches above one node, which 25.05 no longer tells."""
    topology = parse_cluster.parse_topology(recorded("topology_node.txt"))
    assert len(topology) == (0 if version == "25.05" else 3)


def test_recorded_blocks(repo: Path) -> None:
    """Base blocks, and the one that is made of two."""
    text = (repo / "tests/replay/slurm-25.05-block/topology.txt").read_text()
    assert parse_cluster.parse_topology(text) == [
        Block(block="b1", index=0, node_list="h[01-04]", size=4),
        Block(block="b2", index=1, node_list="h[05-08]", size=4),
        Block(block="b3", index=2, node_list="a[01-04]", size=4),
        Block(block="b[1-2]", index=3, node_list="h[01-08]", size=8, is_aggregated=True),
    ]


def test_topologies_of_later_plugins(recorded: Recorded) -> None:
    """Unknown lines pass among known ones; nothing but unknown lines is an error."""
    text = recorded("topology.txt")
    assert len(parse_cluster.parse_topology(text + "RingName=r1 Nodes=x[1-4]\n")) == 5
    assert parse_cluster.parse_topology("") == []
    with pytest.raises(ClusterError, match="neither switches nor blocks"):
        parse_cluster.parse_topology("RingName=r1 Nodes=x[1-4]\n")
    with pytest.raises(ClusterError, match="Level"):
        parse_cluster.parse_topology("SwitchName=s1 Nodes=x[1-4]\n")


def test_recorded_estimates(recorded: Recorded) -> None:
    """When each version would start a job, with and without 25.05's stray word."""
    now = parse_cluster.parse_estimate(recorded("test_only_now.txt.err"), UTC)
    later = parse_cluster.parse_estimate(recorded("test_only_later.txt.err"), UTC)
    assert (now.cpus, now.node_list, now.partition) == (1, "h05", "train")
    assert (later.cpus, later.node_list) == (64, "h[01-04]")
    assert later.start > now.start > "2026-11-23T17:2"


def test_estimates_with_blocks_clusters_and_victims(repo: Path) -> None:
    """A segment, a named cluster, and the jobs that would be preempted."""
    text = (repo / "tests/replay/slurm-25.05-block/test_only_segment.txt.err").read_text()
    assert parse_cluster.parse_estimate(text, UTC).node_list == "h[05-08]"
    output = (
        "sbatch: Job 4 to start at 2026-11-21T02:24:42 on cluster alpha using 16 processors on nodes beta[01-04]"
        " in partition train\nsbatch:   Preempts: 3,7\n"
    )
    assert parse_cluster.parse_estimate(output, UTC) == StartEstimate(
        start="2026-11-21T02:24:42.000Z",
        cpus=16,
        node_list="beta[01-04]",
        partition="train",
        cluster="alpha",
    )


def test_what_is_no_estimate(recorded: Recorded) -> None:
    """A refusal is no estimate."""
    with pytest.raises(ClusterError, match="no start"):
        parse_cluster.parse_estimate(recorded("test_only_never.txt.err"))


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("16\n", Submitted(job_id="16")),
        ("16;beta\n", Submitted(job_id="16", cluster="beta")),
        ("welcome to this site\n16\n", Submitted(job_id="16")),
    ],
)
def test_job_ids(text: str, job: Submitted) -> None:
    """The id, with a cluster or under a site's greeting."""
    assert parse_cluster.parse_submitted(text) == job


@pytest.mark.parametrize("text", ["", "Submitted batch job\n", "16\n17\n"])
def test_what_is_no_job_id(text: str) -> None:
    """No id, or two, is an error."""
    with pytest.raises(ClusterError, match=r"jobs \(expected 1\)"):
        parse_cluster.parse_submitted(text)
