"""Which nodes fit a waiting job, and what Slurm is told of a choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pitools.core import hostlist
from pitools.core.errors import ClusterError, UsageError
from pitools.site.load import load_site
from pitools.slurm import argv, parse_cluster, parse_jobs
from pitools.slurm.records import Block, Node, SlurmJob
from pitools.topology.acquire import node_filter, submission
from pitools.topology.acquire.options import AcquireOptions, require_choosable
from pitools.topology.choose import select_nodes
from pitools.topology.fabric_model import Fabric, Leaf, Torus, from_blocks


def node(name: str, **known: Any) -> Node:
    return Node(**{"node": name, "state": "idle", "partitions": ("p",), **known})


def waiting(**asked: Any) -> SlurmJob:
    return SlurmJob(**{"job_id": "7", "raw_id": "7", "state": "PENDING", "partition": "p", "nodes": 2, **asked})


TREE = Fabric(
    leaves=(
        Leaf(path=("s", "a"), nodes=("n1", "n3", "n5")),
        Leaf(path=("s", "b"), nodes=("n2", "n4", "n6")),
        Leaf(path=("s", "c"), nodes=("n7", "n8")),
    )
)
NODES = [node(f"n{number}") for number in range(1, 9)]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"partition": "q"}, "n2"),
        ({"partition": "p,q"}, "n1 n2 n3 n4"),
        ({"features": "ib&h100"}, "n1"),
        ({"features": "ib|h100"}, "n1 n3"),
        ({"features": "[ib*2&h100*2]"}, "n1 n3 n4"),
        ({"gres": "gpu:4"}, "n3 n4"),
        ({"gres": "gpu:a100:4"}, "n4"),
        ({"excluded_nodes": "n[1,3]"}, "n4"),
    ],
)
def test_what_fits(asked: dict[str, Any], names: str) -> None:
    """Partitions, features, GPUs by number and type, and the job's own excluded nodes."""
    nodes = [
        node("n1", features=("ib", "h100")),
        node("n2", partitions=("q",)),
        node("n3", features=("ib",), gpus=8, gpu_type="h100"),
        node("n4", gpus=4, gpu_type="a100"),
    ]
    assert " ".join(fitting_node.node for fitting_node in node_filter.fitting_nodes(nodes, waiting(**asked))) == names


def test_what_is_free() -> None:
    """Idle and nobody else's; nodes planned for another job only where there are not enough others."""
    nodes = [
        node("n1"),
        node("n2", flags=("drain",)),
        node("n3", flags=("planned",)),
        node("n4", state="mixed"),
        node("n5", flags=("not_responding",)),
        node("n6", flags=("reserved",)),
        node("n7", flags=("completing",)),
        node("n8", state="down"),
        node("n9", flags=("powered_down",)),
        node("n10", flags=("blocked",)),
    ]
    assert node_filter.free_nodes(nodes, 2) == ["n1", "n9"]
    assert node_filter.free_nodes(nodes, 3) == ["n1", "n3", "n9"]


def test_what_slurm_is_told_of_a_tree() -> None:
    """All leaves but the chosen are excluded, and what the job excludes itself; or just the nodes; or both reserved."""
    job = waiting(excluded_nodes="n8,x1")
    choice = select_nodes(TREE, [n.node for n in node_filter.fitting_nodes(NODES, job)], 2)
    assert choice.leaves == 1
    by = {way: node_filter.constrain(choice, TREE, NODES, job, way) for way in ("exclude", "nodelist", "reservation")}
    leaf = {"n1", "n3", "n5"} if "n1" in choice.nodes or "n3" in choice.nodes else {"n2", "n4", "n6"}
    assert by["exclude"].allowed == leaf
    assert set(hostlist.expand(by["exclude"].exclude)) == {n.node for n in NODES} - leaf | {"x1"}
    assert (by["nodelist"].allowed, by["nodelist"].exclude) == (frozenset(choice.nodes), "n8,x1")
    assert hostlist.expand(by["nodelist"].nodelist) == sorted(choice.nodes)
    assert (by["reservation"].exclude, by["reservation"].reserved_nodes) == (
        by["exclude"].exclude,
        hostlist.fold(choice.nodes),
    )


def test_what_slurm_is_told_of_a_torus() -> None:
    """A torus has no leaves: everything but the box is excluded."""
    torus = Fabric(kind="torus", torus=Torus(dims=(2, 4), nodes=tuple(f"n{number}" for number in range(1, 9))))
    choice = select_nodes(torus, [n.node for n in NODES], 4)
    assert node_filter.constrain(choice, torus, NODES, waiting(nodes=4), "exclude").allowed == frozenset(choice.nodes)


def test_block_topology_of_a_recorded_slurm(repo: Path) -> None:
    """25.05's blocks: a job of one block excludes the other blocks; a list of nodes is refused beforehand."""
    text = (repo / "tests" / "replay" / "slurm-25.05-block" / "topology.txt").read_text()
    fabric = from_blocks([part for part in parse_cluster.parse_topology(text) if isinstance(part, Block)])
    nodes = [node(name) for name in [*hostlist.expand("h[01-08]"), *hostlist.expand("a[01-04]")]]
    free = [n.node for n in nodes if n.node not in ("h02", "a03")]
    choice = select_nodes(fabric, free, 4, segment=4)
    limits = node_filter.constrain(choice, fabric, nodes, waiting(nodes=4), "exclude")
    assert limits.allowed == frozenset(hostlist.expand("h[05-08]"))
    assert argv.update_job("7", exclude=limits.exclude, start_now=True) == [
        "scontrol",
        "update",
        "jobid=7",
        "excnodelist=a[01-04],h[01-04]",
        "starttime=now",
    ]
    require_choosable(fabric, AcquireOptions())
    with pytest.raises(ClusterError, match="--by nodelist") as caught:
        require_choosable(fabric, AcquireOptions(by="nodelist"))
    assert caught.value.hint == "use --by exclude"


def test_a_flat_fabric_is_no_choice() -> None:
    """Where nothing is known of the wiring, it says so rather than choosing."""
    with pytest.raises(ClusterError, match="flat"):
        require_choosable(Fabric(kind="flat"), AcquireOptions())


def test_requests_that_change_a_job() -> None:
    """An empty value clears, None leaves alone, and nothing but host lists and names gets onto the command line."""
    assert argv.update_job("7", exclude="", nodelist="n[1-2]", reservation="") == [
        "scontrol",
        "update",
        "jobid=7",
        "excnodelist=",
        "reqnodelist=n[1-2]",
        "reservationname=",
    ]
    for bad in ({"exclude": "n1 priority=0"}, {"nodelist": "--all"}, {"reservation": "a,b"}):
        with pytest.raises(UsageError):
            argv.update_job("7", **bad)
    with pytest.raises(ClusterError, match="longer than a command line"):
        argv.update_job("7", exclude=",".join(f"n{number}x" for number in range(20000)))
    words = argv.create_reservation("pit-7-ab", "n[1-2]", "ann", 7)
    assert words[3:] == [
        "reservationname=pit-7-ab",
        "starttime=now",
        "duration=7",
        "nodes=n[1-2]",
        "users=ann",
        "flags=FLEX,NO_HOLD_JOBS_AFTER,PURGE_COMP=00:01:00",
    ]
    with pytest.raises(UsageError):
        argv.delete_reservation("x flags=MAINT")


def test_what_a_job_asked_for_is_read(repo: Path) -> None:
    """Features, host lists, reservation and segment of `scontrol show job`, "" and 0 where there are none."""
    text = (repo / "tests" / "replay" / "slurm-22.05" / "job_pending_o.txt").read_text()
    (job,) = parse_jobs.parse_scontrol_jobs(text)
    assert (job.features, job.required_nodes, job.excluded_nodes, job.reservation, job.segment) == ("", "", "", "", 0)
    changed = text.replace("ExcNodeList=(null)", "ExcNodeList=n[1-2]").replace("ReqNodeList=(null)", "ReqNodeList=n4")
    changed = changed.replace("Features=(null)", "Features=ib&h100 SegmentSize=4 Reservation=x")
    (job,) = parse_jobs.parse_scontrol_jobs(changed)
    requested = (job.features, job.required_nodes, job.excluded_nodes, job.reservation, job.segment)
    assert requested == ("ib&h100", "n4", "n[1-2]", "x", 4)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--begin=now+1hour", "begin"),
        ("-b now", "begin"),
        ("--array=0-3", "array"),
        ("-a 1", "array"),
        ("-w n1", "nodelist"),
        ("--nodel=n1", "nodelist"),
        ("--reservation=x", "reservation"),
        ("-F hosts", "nodefile"),
        ("-M beta", "clusters"),
        ("--cluster=a,b", "clusters"),
        ("--wait", "wait"),
        ("-W", "wait"),
        ("-J x -HW", "wait"),
        ("hetjob", "hetjob"),
        ("packjob", "hetjob"),
    ],
)
def test_scripts_that_settle_it_themselves(line: str, option: str) -> None:
    """A script that says when or where it runs is refused before it is submitted."""
    with pytest.raises(UsageError, match=option) as caught:
        submission.sbatch_arguments(load_site("alpha"), f"#!/bin/sh\n#SBATCH {line}\nsleep 1\n", name="x.sh")
    assert caught.value.hint


def test_options_of_a_script() -> None:
    """The site's defaults where the script says nothing, its file's name, and the number of nodes."""
    args = submission.sbatch_arguments(
        load_site("alpha"), "#!/bin/sh\n#SBATCH -p dev\n", name="/x/train.sh", nodes=4, segment=2
    )
    assert {"--account=lab", "--job-name=train.sh", "--nodes=4"} < set(args)
    assert not any(argument.startswith(("--partition", "--segment")) for argument in args)
    assert submission.sbatch_arguments(
        load_site("alpha"), "#!/bin/sh\n#SBATCH --wait-all-nodes=1\necho #SBATCH -W\n", name="x"
    )


def test_variables_of_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count for more than the script and the site, as with sbatch, though Slurm's commands run without them."""
    monkeypatch.setenv("SBATCH_ACCOUNT", "infra")
    monkeypatch.setenv("SBATCH_EXCLUSIVE", "")
    monkeypatch.setenv("SBATCH_CONSTRAINT", "eth")
    monkeypatch.setenv("SBATCH_MEM_BIND_LIST", "0x1")  # as Slurm sets it in a job
    args = submission.sbatch_arguments(load_site("alpha"), "#!/bin/sh\n#SBATCH -A lab\n", name="x.sh")
    assert "--account=infra" in args
    assert {"--exclusive", "--constraint=eth"} < set(args)
    assert not any("mem-bind" in argument for argument in args)
    assert "--account=lab" not in args
    monkeypatch.setenv("SBATCH_RESERVATION", "ours")
    with pytest.raises(UsageError):
        submission.sbatch_arguments(load_site("alpha"), "#!/bin/sh\n", name="x.sh")


def test_partitions_are_not_mixed() -> None:
    """Of a job for either of two, the nodes of one are left, and those of both are excluded beyond them."""
    nodes = [node(f"n{number}", partitions=("p",) if number < 5 else ("q",)) for number in range(1, 9)]
    job = waiting(partition="p,q")
    choice = select_nodes(TREE, ["n1", "n3"], 2)
    limits = node_filter.constrain(choice, TREE, nodes, job, "exclude", "p")
    assert limits.allowed == {"n1", "n3"}
    assert hostlist.expand(limits.exclude) == ["n2", "n4", "n5", "n6", "n7", "n8"]
