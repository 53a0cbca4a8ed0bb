"""Descriptions of fabrics that are broken, huge or made to do harm: an error that says where, soon, or the truth."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ConfigError, DataError, PitError, UsageError
from pitools.topology import discover
from pitools.topology.fabric_model import expand_ordered, torus_fabric
from pitools.topology.formats import matrix, nvlink, table
from pitools.topology.rank_order import rank_order
from pitools.topology.ring_cost import min_ring_hops, ring_hops

Pit = Callable[..., subprocess.CompletedProcess[str]]

BOMB = "- &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"- &{after} [{','.join([f'*{name}'] * 9)}]\n" for name, after in zip("abcdefgh", "bcdefghi", strict=True)
)
WIDE = "host," + ",".join(f"level{i}" for i in range(5000)) + "\n" + ("n1" + ",s" * 5000 + "\n") * 100


@pytest.mark.parametrize("folded", ["n[1-1000000000]", "n[1-99999]x[1-99999]", "a,n[1-200000],m[1-200000]"])
def test_a_list_of_more_names_than_there_is_memory(folded: str) -> None:
    """It is counted before it is expanded."""
    began = time.process_time()
    with pytest.raises(UsageError, match="more than 262144 names"):
        expand_ordered(folded)
    assert time.process_time() - began < 0.5
    assert len(expand_ordered("n[1-3,7,0010-0012],r[1-2]n[1-2]")) == 11


@pytest.mark.parametrize(
    ("name", "text", "what", "where"),
    [
        ("t.conf", "# ours\nSwitchName=a Nodes=n[1-1000000000]\n", "262144 names", ":2"),
        ("t.txt", "SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1-1000000000]\n", "262144 names", ""),
        ("t.yaml", BOMB, "more than 1000000 values", ""),
        ("t.yaml", "- topology: t\n  ? [a]\n  : x\n", "a key is not text", ":1"),
        ("t.csv", WIDE, "5000 levels", ""),
        ("t.csv", 'host,leaf\n"n1,a\n' + "n2,b\n" * 40_000, "field limit", ""),
        ("t.csv", 'host,leaf\nn0,a\n"n1\nn2",a\n', "is not a valid name", ":4"),
        ("t.csv", "# by hand\n\nhost,leaf\n\nn1,a b\n", "'a b' is not a valid name", ":5"),
        ("t.csv", "host,leaf\x1b[2J\nn1,\n", r"'leaf\\x1b\[2J' is empty", ":2"),
        ("t.csv", "latency" + "".join(f",n{i}" for i in range(20_000)) + "\n", "matrix of 20000 nodes", ""),
        ("t.jsonl", '{"schema":"pit.nvlink-domain/1","node":"n","cluster_uuid":"a\\nb"}', "is not a valid name", ":1"),
    ],
)
def test_files_that_do_harm(tmp_path: Path, name: str, text: str, what: str, where: str) -> None:
    """Refused in less than seconds, with the line where there is one, and no control character in the words."""
    path = tmp_path / name
    path.write_text(text)
    began = time.process_time()
    with pytest.raises((ConfigError, DataError), match=what) as caught:
        discover.read_fabric(path)
    assert time.process_time() - began < 4
    assert caught.value.where.startswith(f"{path}{where}")
    assert caught.value.message.isprintable()


def test_a_yaml_that_is_deep(tmp_path: Path) -> None:
    """libyaml would end the process: so this is another one."""
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 100_000)
    pit = [str(Path(sys.executable).with_name("pit")), "topology", "show", "--fabric", str(path)]
    done = subprocess.run(pit, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "nested too deep" in done.stderr) == (3, True)


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "/dev/zero", "/"])
def test_what_is_no_file(path: str) -> None:
    """A name that cannot be, a device without an end, a folder: each is an error of ours."""
    with pytest.raises(ConfigError, match=r"cannot be read|larger than 64 MiB"):
        discover.read_fabric(Path(path))


def test_comments_may_be_indented(tmp_path: Path) -> None:
    """The form is told by the first line that says something."""
    (tmp_path / "t.conf").write_text("\n   # ours\nSwitchName=a Nodes=n1\n")
    assert discover.read_fabric(tmp_path / "t.conf").leaves[0].nodes == ("n1",)


@pytest.mark.parametrize("kind", [complex, str, "M8[s]"])
def test_arrays_of_no_numbers(tmp_path: Path, kind: type) -> None:
    """Nothing is measured in them."""
    np.savez(tmp_path / "m.npz", nodes=np.array(["a", "b"]), latency=np.zeros((2, 2), kind))
    with pytest.raises(ConfigError, match="expected real numbers"):
        discover.read_fabric(tmp_path / "m.npz")


def test_an_array_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header promises 80 GB; a packed one is refused before it is unpacked."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000, 100000), }".ljust(117) + b"\n"
    (tmp_path / "latency.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header)
    (tmp_path / "latency.nodes").write_text("a b")
    with pytest.raises(PitError):
        discover.read_fabric(tmp_path / "latency.npy")
    monkeypatch.setattr(matrix, "_MAX_NODES", 100)
    np.savez_compressed(tmp_path / "m.npz", nodes=np.array(["a"]), latency=np.zeros((200, 200)))
    with pytest.raises(ConfigError, match="matrix of 200 nodes"):
        discover.read_fabric(tmp_path / "m.npz")


@pytest.mark.parametrize("unit", [1e-310, 1e-160, 1.0, 1e160, 1e307])
@pytest.mark.parametrize("is_bandwidth", [True, False])
@pytest.mark.filterwarnings("error")
def test_a_matrix_in_any_unit(unit: float, is_bandwidth: bool) -> None:
    """Only what the pairs are to each other matters: no overflow, the same tree. One direction may be missing."""
    near, far = (8.0, 1.0) if is_bandwidth else (1.0, 8.0)
    values = np.full((6, 6), far * unit)
    for position in (0, 3):
        values[position : position + 3, position : position + 3] = near * unit
    values[4, 1] = np.nan
    actual = matrix.from_matrix([f"n{i}" for i in range(6)], values, is_bandwidth)
    assert [leaf.nodes for leaf in actual.leaves] == [("n0", "n1", "n2"), ("n3", "n4", "n5")]


@given(st.lists(st.tuples(*[st.sampled_from(["A", "B", "A/B", "B/A", "/"])] * 3), min_size=1, max_size=8))
def test_names_stay_unique_whatever_they_are(paths: list[tuple[str, ...]]) -> None:
    """A switch's name stands for one switch, also where names hold the mark that joins them."""
    text = "host,a,b,c\n" + "".join(f"n{i},{','.join(path)}\n" for i, path in enumerate(paths))
    leaves = table.read_table(text, "t").leaves
    branches = {leaf.path[: depth + 1] for leaf in leaves for depth in range(3)}
    assert len({branch[-1] for branch in branches}) == len(branches)


def test_nodes_that_a_torus_does_not_have() -> None:
    """They open the ring, and the bound is one for that ring."""
    fabric = torus_fabric((4, 4), [f"t{i}" for i in range(16)])
    for nodes in (["t0", "t1", "u"], ["t0", "u", "v"], ["u", "v"], ["t0", "t1", "t2", "t3", "u"]):
        ranks = [slot.node for slot in rank_order(nodes, fabric)]
        assert min_ring_hops(nodes, fabric) <= ring_hops(ranks, fabric)
    assert min_ring_hops(["t0", "t1", "u"], fabric) == 1


def test_one_domain_of_many_nodes() -> None:
    """A UUID as NVML prints it is a name, and so is none."""
    uuid = "12345678-1234-1234-1234-123456789abc"
    lines = "\n".join(f'{{"schema":"pit.nvlink-domain/1","node":"n{i}","cluster_uuid":"{uuid}"}}' for i in range(3))
    assert len(nvlink.read_domains(lines + '\n{"schema":"pit.nvlink-domain/1","node":"m"}', "t").leaves) == 1


def test_hostile_words_of_the_order_command(pit: Pit, tmp_path: Path) -> None:
    """Lists with blanks and newlines, records that are none, one of another command, and what contradicts itself."""
    (tmp_path / "wired.toml").write_text('name = "wired"\nscheduler = "none"\n[paths]\nruns = "/tmp"\n')

    def call(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        site = {"PIT_SITE_PATH": str(tmp_path)}
        return pit("topology", "order", *words, "--site", "wired", stdin=stdin, **site)

    assert call("n3\nn1 n2", "-H").stdout == "n1,n2,n3\n"
    assert call("n3\nn1 n2", "--as", "jax").returncode == 0
    assert call("-", "-H", stdin='{"schema":"pit.node-choice/1","nodes":["n2","n1"]}\n').stdout == "n1,n2\n"
    for stdin in ('{"node":5}', '{"nodes":[1]}', '{"nodes":7}', "{" + "[" * 9, '{"a":1}'):
        done = call("-", stdin=stdin)
        assert (done.returncode, "has no node" in done.stderr) == (2, True), stdin
    for words in (["n[1-1000000000]"], ["n1", "-H", "--as", "jax"], ["n\x1b[2J"]):
        done = call(*words)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), words
