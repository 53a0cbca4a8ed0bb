"""Ranks over nodes in order, and the forms in which others read them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import UsageError
from pitools.site import load, template
from pitools.site.dialect import JobSpec
from pitools.slurm.records import Switch
from pitools.topology import rank_layout
from pitools.topology.fabric_model import Fabric, from_switches
from pitools.topology.rank_order import NodeSlot, rank_order

Pit = Callable[..., subprocess.CompletedProcess[str]]


def leaves(*sizes: int) -> Fabric:
    """Leaves of so many nodes, dealt out in turn: names do not follow them."""
    held: list[list[str]] = [[] for _ in sizes]
    number = 0
    while any(len(mine) < size for mine, size in zip(held, sizes, strict=True)):
        for mine, size in zip(held, sizes, strict=True):
            if len(mine) < size:
                mine.append(f"n{number:02d}")
                number += 1
    return from_switches(
        [Switch(switch=f"leaf{i}", level=0, node_list=",".join(mine)) for i, mine in enumerate(held)]
        + [Switch(switch="spine", level=1, node_list="", switches=",".join(f"leaf{i}" for i in range(len(sizes))))]
    )


def slots_of(fabric: Fabric, group: int = 1) -> list[NodeSlot]:
    return rank_order([node for leaf in fabric.leaves for node in leaf.nodes], fabric, group)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]), st.data())
def test_every_rank_has_one_place(sizes: list[int], gpus: int, data: st.DataObject) -> None:
    """Ranks fill the axes; a tensor group is one node's, and a data ring goes round the nodes in their order."""
    slots = slots_of(leaves(*sizes))
    tensor = data.draw(st.sampled_from([t for t in (1, 2, 4, 8) if gpus % t == 0]))
    world = len(slots) * gpus
    pipeline = data.draw(st.sampled_from([p for p in range(1, world + 1) if world % (p * tensor) == 0]))
    seats = rank_layout.place_ranks(slots, gpus, tensor, pipeline)
    places = [(seat.data, seat.pipeline, seat.tensor) for seat in seats]
    shape = rank_layout.jax_mesh(seats, [slot.node for slot in slots]).shape
    assert places == [(d, p, t) for d in range(shape[0]) for p in range(shape[1]) for t in range(shape[2])]
    assert [(seat.rank, seat.node, seat.local_rank) for seat in seats] == [
        (rank, slots[rank // gpus].node, rank % gpus) for rank in range(world)
    ]
    for d, p in {(seat.data, seat.pipeline) for seat in seats}:
        assert len({seat.node for seat in seats if (seat.data, seat.pipeline) == (d, p)}) == 1
    ring = [seat.node for seat in seats if seat.pipeline == 0 and seat.tensor == 0]
    assert ring == sorted(ring, key=[slot.node for slot in slots].index)


def test_pipelines_stay_below_a_leaf() -> None:
    """Replicas of two nodes on leaves of 4, 3 and 2: only the one that must goes over two leaves."""
    slots = slots_of(leaves(4, 3, 3), rank_layout.nodes_per_replica(8, 4, 4))
    seats = rank_layout.place_ranks(slots, 8, tensor=4, pipeline=4)
    spread = [len({s.leaf for s in seats if s.data == d}) for d in range(5)]
    assert sorted(spread) == [1, 1, 1, 1, 2]


def test_axes_that_do_not_fit_are_refused() -> None:
    """A tensor group that is no part of a node, too few GPUs for a replica, and a group over two leaves."""
    slots = slots_of(leaves(3, 3))
    for tensor, pipeline, case in [
        (3, 1, "do not fit nodes of 8"),
        (8, 4, "6 nodes of 8 GPUs .* 8 x 4"),
        (16, 1, "spans several leaves"),
    ]:
        with pytest.raises(UsageError, match=case) as caught:
            rank_layout.place_ranks(slots, 8, tensor, pipeline)
        assert caught.value.hint
    full = rank_layout.place_ranks(slots_of(leaves(2, 2)), 8, 16)  # an NVLink domain of two nodes is one tensor group
    assert [{s.leaf for s in full if s.data == d} for d in (0, 1)] == [{"leaf0"}, {"leaf1"}]


def test_host_file_and_rank_file() -> None:
    """A line a task; cores of a node dealt out to its ranks."""
    slots = slots_of(leaves(1, 1))
    assert rank_layout.format_hostfile(slots, 2) == "n00\nn00\nn01\nn01\n"
    assert rank_layout.format_rankfile(slots, 2, cpus=4).splitlines() == [
        "rank 0=n00 slot=0-3",
        "rank 1=n00 slot=4-7",
        "rank 2=n01 slot=0-3",
        "rank 3=n01 slot=4-7",
    ]
    assert rank_layout.format_rankfile(slots, 1).splitlines() == ["rank 0=n00 slot=0", "rank 1=n01 slot=0"]
    assert rank_layout.format_torchrun([], 8) == ""


TOPOLOGY = "SwitchName=a Nodes=n1,n4\nSwitchName=b Nodes=n2,n3\nSwitchName=s Switches=a,b\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A site of four nodes under two leaves, described by a file."""
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    (tmp_path / "wired.toml").write_text(
        f'name = "wired"\nscheduler = "none"\n[paths]\nruns = "/tmp"\n[topology]\nfile = "{tmp_path}/topology.conf"\n'
    )
    return str(tmp_path)


def test_a_job_orders_its_ranks_by_its_site_s_file(
    pit: Pit, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in the job's script reads the site's fabric, and Slurm's on nodes that lack the site's file."""
    monkeypatch.setenv("PIT_SITE_PATH", site)
    wired = load.load_site("wired")
    script = template.render_template(wired, "train", JobSpec(name="j", nodes=4), payload="true")
    (line,) = [line for line in script.splitlines() if "topology order" in line]
    words = shlex.split(line.partition("-m pitools ")[2].partition(" >")[0])
    assert pit(*words, stdin="n[1-4]\n", PIT_SITE_PATH=site).stdout.split() == ["n1", "n4", "n2", "n3"]
    for path in (tmp_path / "topology.conf", tmp_path / "wired.toml"):
        path.unlink()
        done = pit(*words, stdin="n[1-4]\n", PIT_SITE_PATH=site, SLURM_CONF=str(tmp_path / "missing"))
        assert (done.returncode, done.stdout.split()) == (0, ["n1", "n2", "n3", "n4"])
        assert len(done.stderr.splitlines()) == 2  # the site's fabric, then Slurm's


def test_a_line_for_each_torchrun(pit: Pit, site: str) -> None:
    """Node i of the order has node rank i, whatever it is called; the rest of the flags is the same on all."""
    done = pit("topology", "order", "n[1-4]", "--site", "wired", "--as", "torchrun", "--gpus", "2", PIT_SITE_PATH=site)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [words[0] for words in lines] == ["n1", "n4", "n2", "n3"], done.stderr
    assert [words[1:4] for words in lines] == [
        [f"--node-rank={rank}", "--nnodes=4", "--nproc-per-node=2"] for rank in range(4)
    ]


SAY = 'import os; print(os.environ["NODE"], os.environ["RANK"], os.environ["WORLD_SIZE"])'


@pytest.mark.slow
@pytest.mark.slurm
def test_torchrun_on_loopback(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """Two torchruns with the flags of their nodes meet at the master, and number their ranks by the order."""
    done = pit("topology", "order", "alpha[02-03]", "--site", "alpha", "--as", "torchrun")
    (tmp_path / "say.py").write_text(SAY)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    started = []
    for line in reversed(done.stdout.splitlines()):
        node, *flags = line.split()
        argv = [*torchrun, *flags, "--master-port=29417", str(tmp_path / "say.py")]
        env = {**os.environ, "NODE": node, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    output = sorted(process.communicate(timeout=60)[0].strip() for process in started)
    assert output == ["alpha02 1 2", "alpha03 0 2"]


MESH = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh
said = json.load(sys.stdin)
mesh = Mesh(np.array(jax.devices())[said["devices"]].reshape(said["shape"]), said["axes"])
print(json.dumps([dict(mesh.shape), [[int(d.id) for d in row.flat] for row in mesh.devices]]))
"""


def test_jax_builds_its_mesh(pit: Pit, site: str) -> None:
    """Four processes that srun numbered by name, two devices each: a real Mesh has the leaves' devices side by side."""
    words = ["topology", "order", "n[1-4]", "--site", "wired", "--as", "jax", "--gpus", "2", "--tensor", "2"]
    stdout = pit(*words, "--pipeline", "2", PIT_SITE_PATH=site).stdout
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, "-c", MESH]
    done = subprocess.run(argv, input=stdout, env=env, text=True, capture_output=True, check=True, timeout=60)
    shape, devices = json.loads(done.stdout)
    assert shape == {"data": 2, "pipeline": 2, "tensor": 2}
    assert devices == [[0, 1, 6, 7], [2, 3, 4, 5]]  # n1 and n4, then n2 and n3


def test_forms_of_the_command(pit: Pit, site: str) -> None:
    """`-H` keeps the order, a hostfile has a line a rank, ranks are records, and what does not fit exits 2."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return pit("topology", "order", "n[1-4]", "--site", "wired", *words, PIT_SITE_PATH=site)

    assert call("-H").stdout == "n1,n4,n2,n3\n"
    assert call("--as", "hostfile", "--gpus", "2").stdout == "n1\nn1\nn4\nn4\nn2\nn2\nn3\nn3\n"
    first = json.loads(call("--as", "ranks", "--gpus", "4", "--tensor", "4").stdout.splitlines()[1])
    assert first["schema"] == "pit.rank-placement/1"
    assert (first["node"], first["local_rank"], first["tensor"], first["data"]) == ("n1", 1, 1, 0)
    assert call("-H", "--as", "ranks").returncode == 2
    strange = pit("topology", "order", "x1,n2", "--site", "wired", "-H", PIT_SITE_PATH=site)
    assert (strange.stdout, "1 of 2 nodes are not in the topology" in strange.stderr) == ("n2,x1\n", True)
    refused = call("--as", "jax", "--gpus", "4", "--tensor", "3")
    assert refused.returncode == 2
    assert "do not fit" in refused.stderr
