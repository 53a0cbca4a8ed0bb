"""Tables of hosts, NVLink domains and measured matrices as fabrics."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, ConfigError, DataError, ToolMissing
from pitools.topology import discover
from pitools.topology.fabric_model import Fabric
from pitools.topology.formats import matrix, nvlink, table

Pit = Callable[..., subprocess.CompletedProcess[str]]


def shape(fabric: Fabric) -> dict[tuple[str, ...], tuple[str, ...]]:
    return {leaf.path: leaf.nodes for leaf in fabric.leaves}


def test_any_number_of_levels() -> None:
    """The column of hosts may stand anywhere, cells may be padded, and tabs or semicolons divide as well."""
    assert shape(table.read_table("host,leaf\nn2,a\nn1,a\n", "t")) == {("a",): ("n1", "n2")}
    text = "core;pod;leaf;Node\nc; p1 ;l1;n1\nc;p1;l2;n2\nc;p2;l3;n3\n"
    assert list(shape(table.read_table(text, "t"))) == [("c", "p1", "l1"), ("c", "p1", "l2"), ("c", "p2", "l3")]
    assert shape(table.read_table(text.replace(";", "\t"), "t")) == shape(table.read_table(text, "t"))


def test_levels_from_the_leaf_up_are_turned_over() -> None:
    """Where each leaf names its pod and no pod names its leaf, the columns run upwards."""
    down = table.read_table("host,core,pod,leaf\nn1,c,p1,l1\nn2,c,p1,l2\nn3,c,p2,l3\n", "t")
    up = table.read_table("host,leaf,pod,core\nn1,l1,p1,c\nn2,l2,p1,c\nn3,l3,p2,c\n", "t")
    assert up == down


def test_names_that_repeat_are_joined_with_those_above() -> None:
    """S1 of every pod, and a pod called like a core, become names for one switch only."""
    text = "host,core,pod,leaf\nn1,A,A,S1\nn2,A,B,S1\nn3,C,D,S2\n"
    assert list(shape(table.read_table(text, "t"))) == [
        ("A", "A/A", "A/A/S1"),
        ("A", "A/B", "A/B/S1"),
        ("C", "C/D", "C/D/S2"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1,a\nn2,b\n", "no column of hosts"),
        ("host,leaf\nn1,a,b\n", r"t:2: 3 cells \(expected 2\)"),
        ("host,leaf\nn1,\n", "t:2: "),
        ("host,leaf\nn1,a b\n", "t:2: 'a b' is not a valid name"),
        ("host,leaf\nn1,a\nn1,b\n", 't:3: node "n1" is under "a" and "b"'),
    ],
)
def test_a_table_that_cannot_be(text: str, message: str) -> None:
    """The line is named."""
    with pytest.raises((ConfigError, DataError), match=message):
        table.read_table(text, "t")


UUIDS = ("11111111-aaaa-4aaa-8aaa-aaaaaaaaaaaa", "11111111-bbbb-4bbb-8bbb-bbbbbbbbbbbb")


def domain(node: str, uuid: str = "", clique: int = 0) -> str:
    record = {"schema": "pit.nvlink-domain/1", "node": node, "cluster_uuid": uuid, "clique_id": clique, "gpus": 4}
    return json.dumps(record) + "\n"


def test_nvlink_domains_are_blocks(tmp_path: Path) -> None:
    """A block for each cluster and clique, in the order of their nodes; a node on its own is in none."""
    path = tmp_path / "nvlink.jsonl"
    lines = [domain("n9", UUIDS[0], 2), domain("n1", UUIDS[0], 1), domain("n2", UUIDS[1], 1), domain("n3")]
    path.write_text("".join([*lines, domain("n10", UUIDS[0], 2), domain("n1", UUIDS[0], 1)]))
    fabric = discover.read_fabric(path)
    assert fabric.kind == "block"
    assert [leaf.nodes for leaf in fabric.leaves] == [("n1",), ("n2",), ("n9", "n10")]
    assert fabric.leaves[2].path == ("nvl-11111111.2",)
    assert fabric.leaves[1].path == (f"nvl-{UUIDS[1]}.1",)  # the short name would stand for two
    assert fabric.block_sizes == (1,)
    with pytest.raises(DataError, match="two NVLink domains"):
        nvlink.read_domains(domain("n1", UUIDS[0]) + domain("n1", UUIDS[1]), "x")
    with pytest.raises(ConfigError, match=r"^x:2: "):
        nvlink.read_domains(domain("n1") + '{"node": "n1"', "x")


class FabricInfo(ctypes.Structure):
    """As NVML declares nvmlGpuFabricInfo_v2_t."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    ]


def fake_nvml(gpus: list[tuple[bytes, int, int]]) -> SimpleNamespace:
    """A pynvml whose GPUs answer (cluster UUID, clique, state); None is an old driver."""

    class NVMLError(Exception):
        pass

    class NotSupported(NVMLError):
        pass

    def info(handle: int, pointer: Any) -> None:
        answer = pointer._obj
        uuid, answer.cliqueId, answer.state = gpus[handle]
        if answer.state == 99:
            raise NotSupported("Not Supported")
        answer.clusterUuid[:] = list(uuid)

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NotSupported,
        NVMLError_FunctionNotFound=NotSupported,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetGpuFabricInfoV=info,
        c_nvmlGpuFabricInfoV_t=FabricInfo,
    )


@pytest.mark.parametrize(
    ("gpus", "uuid", "count"),
    [
        ([(b"\x11" * 16, 7, 3)] * 4, "11111111-1111-1111-1111-111111111111", 4),
        ([(b"\0" * 16, 0, 0)] * 8, "", 0),  # an HGX board: its fabric ends in the node
        ([(b"\x11" * 16, 7, 2)] * 4, "", 0),  # the fabric manager is not through
        ([(b"\0" * 16, 0, 99)] * 2, "", 0),  # a GPU or driver that knows no fabrics
    ],
)
def test_nvml_tells_this_nodes_domain(
    gpus: list[tuple[bytes, int, int]], uuid: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nvmlDeviceGetGpuFabricInfoV answers on each kind of machine, by its documentation."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(gpus))
    monkeypatch.setenv("SLURMD_NODENAME", "nvl-3")
    actual = nvlink.local_domain()
    assert (actual.node, actual.cluster_uuid, actual.gpus) == ("nvl-3", uuid, count)
    assert actual.clique_id == (7 if uuid else 0)


def test_gpus_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node cannot be in two domains."""
    gpus = [(b"\x11" * 16, 1, 3), (b"\x22" * 16, 1, 3)]
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(gpus))
    with pytest.raises(ClusterError, match="several NVLink domains"):
        nvlink.local_domain()


def test_without_nvml_it_says_what_to_install(pit: Pit, monkeypatch: pytest.MonkeyPatch) -> None:
    """No package, or no driver: exit 4 with a hint."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(ToolMissing) as error:
        nvlink.local_domain()
    assert "pitools-hpc[gpu]" in error.value.hint
    assert pit("topology", "show", "--nvlink-here").returncode == 4


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 6), min_size=2, max_size=4), min_size=2, max_size=4),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_a_measured_matrix_finds_the_switches(fanout: list[list[int]], is_bandwidth: bool, seed: int) -> None:
    """Under 8 % of noise and scrambled names, the clusters are the leaves and pods that were there."""
    noise = np.random.default_rng(seed)
    homes = [(pod, leaf) for pod, leaves in enumerate(fanout) for leaf, size in enumerate(leaves) for _ in range(size)]
    names = random.Random(seed).sample([f"h{i}" for i in range(1000)], len(homes))
    level = np.array([[0 if a == b else 1 if a[0] == b[0] else 2 for b in homes] for a in homes])
    latency = np.array([2.0, 4.0, 9.0])[level] * noise.uniform(0.96, 1.04, level.shape)
    fabric = matrix.from_matrix(names, 1 / latency if is_bandwidth else latency, is_bandwidth)
    truth = {frozenset(name for name, home in zip(names, homes, strict=True) if home == item) for item in set(homes)}
    assert {frozenset(leaf.nodes) for leaf in fabric.leaves} == truth
    pods = {leaf.path[:2] for leaf in fabric.leaves}
    assert len(pods) == len(fanout)
    assert {len(leaf.path) for leaf in fabric.leaves} == {3}
    # Half of 4 - 2 above a leaf is 1; half of 9 - 4 above a pod is 2.5 of that.
    assert all(abs(fabric.lengths[pod] - 2.5) < 0.3 for _, pod in pods)
    assert not any(leaf.path[-1] in fabric.lengths for leaf in fabric.leaves)


def test_one_slow_node_has_a_leaf_of_its_own() -> None:
    """A node with a bad cable is far from all, whatever was declared."""
    latency = np.full((6, 6), 2.0)
    latency[5, :] = latency[:, 5] = 20.0
    fabric = matrix.from_matrix([f"n{i}" for i in range(6)], latency, False)
    assert shape(fabric) == {("m", "m1"): ("n0", "n1", "n2", "n3", "n4"), ("m", "m2"): ("n5",)}
    assert shape(matrix.from_matrix(["a", "b", "c"], np.ones((3, 3)), False)) == {("m",): ("a", "b", "c")}
    assert shape(matrix.from_matrix(["a"], np.zeros((1, 1)), False)) == {("m",): ("a",)}


def test_without_scipy_no_matrix_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which extra has it."""
    monkeypatch.setitem(sys.modules, "scipy.cluster.hierarchy", None)
    with pytest.raises(ToolMissing) as caught:
        matrix.from_matrix(["a", "b"], np.ones((2, 2)), False)
    assert "pitools-hpc[data]" in caught.value.hint


def test_matrices_in_files(tmp_path: Path) -> None:
    """CSV, .npz and .npy say the same; what was not measured is named."""
    names, latency = ["n1", "n2", "n3", "n4"], np.array([[0, 1, 5, 5], [1, 0, 5, 5], [5, 5, 0, 1], [5, 5, 1, 0.0]])
    csv = tmp_path / "pairs.csv"
    rows = [",".join([name, *map(str, row)]) for name, row in zip(names, latency, strict=True)]
    csv.write_text("\n".join([",".join(["latency_us", *names]), *rows]) + "\n")
    np.savez(tmp_path / "pairs.npz", nodes=np.array(names), latency=latency)
    np.save(tmp_path / "latency.npy", latency)
    (tmp_path / "latency.nodes").write_text("\n".join(names))
    actual = [discover.read_fabric(tmp_path / name) for name in ("pairs.csv", "pairs.npz", "latency.npy")]
    assert actual[0] == actual[1] == actual[2]
    assert shape(actual[0]) == {("m", "m1"): ("n1", "n2"), ("m", "m2"): ("n3", "n4")}
    half = csv.read_text().replace("n2,1.0", "n2,")
    csv.write_text(half)
    assert discover.read_fabric(csv) == actual[0]  # one direction is enough
    csv.write_text(half.replace("n1,0.0,1.0", "n1,0.0,"))
    with pytest.raises(DataError, match='no positive number between "n1" and "n2"'):
        discover.read_fabric(csv)
    csv.write_text("bandwidth,n1,n2\nn1,0,1\nn3,1,0\n")
    with pytest.raises(ConfigError, match=r"pairs.csv:3: the matrix is not square"):
        discover.read_fabric(csv)


def test_arrays_that_are_none(tmp_path: Path) -> None:
    """Pickles are not opened, and a file that is no array is an error of ours."""
    np.save(tmp_path / "latency.npy", np.array([{"a": 1}], dtype=object))
    (tmp_path / "latency.nodes").write_text("n1")
    with pytest.raises(ConfigError, match=r"latency.npy: not an array"):
        discover.read_fabric(tmp_path / "latency.npy")
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(ConfigError):
        discover.read_fabric(tmp_path / "x.npz")
