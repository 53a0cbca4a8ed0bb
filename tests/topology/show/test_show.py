"""The fabric shown as text, records and pictures; and jobs scored on it."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError
from pitools.slurm.records import Node
from pitools.topology.fabric_model import Fabric, Leaf, block_fabric, nodes_of, torus_fabric, tree_fabric
from pitools.topology.ring_cost import min_ring_hops, ring_hops
from pitools.topology.show import draw, occupancy, text
from pitools.topology.show.score import count_leaves_and_pods, score_job

Pit = Callable[..., subprocess.CompletedProcess[str]]

SMALL = tree_fabric(
    [
        Leaf(path=("core", "P1", "core/P1/S1"), nodes=("n1", "n2", "n3")),
        Leaf(path=("core", "P1", "core/P1/S2"), nodes=("n4", "n5")),
        Leaf(path=("core", "P2", "core/P2/S1"), nodes=("n6", "n7")),
    ]
)


@pytest.mark.parametrize(
    ("state", "flags", "drawn"),
    [
        ("idle", (), "idle"),
        ("idle", ("powered_down",), "idle"),
        ("idle", ("drain",), "drained"),
        ("allocated", ("drain",), "drained"),
        ("mixed", ("planned",), "mixed"),
        ("allocated", (), "allocated"),
        ("idle", ("not_responding",), "down"),
        ("down", ("drain",), "down"),
        ("idle", ("maintenance",), "drained"),
        ("somethingnew", (), "drained"),
    ],
)
def test_states_of_nodes(state: str, flags: tuple[str, ...], drawn: str) -> None:
    """Slurm's states and flags come down to the five that one plans with."""
    assert occupancy.state_of(Node(node="n", state=state, flags=flags)) == drawn


def test_the_text_has_a_line_a_leaf() -> None:
    """Pods are headings, a bar has a cell a node, and nodes without a switch stand apart."""
    of = {"n1": "idle", "n2": "allocated", "n3": "down", "n4": "drained", "n5": "mixed", "n6": "idle", "x": "idle"}
    assert list(text.draw_text(SMALL, of, title="here")) == [
        "here  tree: 7 nodes, 3 leaves, 2 pods",
        "█ 1 allocated  ▓ 1 mixed  ░ 3 idle  x 1 drained  ! 1 down  ? 1 unknown",
        "",
        "core: 7 nodes  (1 allocated  1 mixed  2 idle  1 drained  1 down  1 unknown)",
        "  P1: 5 nodes  (1 allocated  1 mixed  1 idle  1 drained  1 down)",
        "    S1             █░!       1 of 3 idle, 1 down",
        "    S2             ▓x        0 of 2 idle, 1 drained",
        "",
        "  P2: 2 nodes  (1 idle  1 unknown)",
        "    S1             ░?        1 of 2 idle, 1 unknown",
        "",
        "not in the topology  ░         1 of 1 idle",
    ]


@example([*occupancy.STATES[:3], *["drained"] * 8], 20)
@given(st.lists(st.sampled_from(occupancy.STATES), min_size=1, max_size=700), st.integers(20, 200))
def test_a_bar_keeps_to_its_width_and_hides_no_state(states: list[str], width: int) -> None:
    """However many nodes a leaf has, its line fits, and a single bad node is seen."""
    fabric = tree_fabric([Leaf(path=("leaf",), nodes=tuple(f"n{i}" for i in range(len(states))))])
    of = {f"n{i}": state for i, state in enumerate(states)}
    line = list(text.draw_text(fabric, of, width=width))[-1]
    bar = line.split("  ")[1]
    assert all(text.MARKS[state] in bar for state in states)
    assert len(bar) <= max(64, len(set(states)))
    if width >= 60:
        assert len(bar) <= max(8, width - 38)


def test_names_from_outside_cannot_steer_the_terminal() -> None:
    """Control characters of a name are spelt out."""
    fabric = tree_fabric([Leaf(path=("a\x1b[2J",), nodes=("n1",))])
    shown = "\n".join(text.draw_text(fabric, {"n2\x07": "idle"}, title="\x1b]0;x\x07"))
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_torus_is_shown_in_planes() -> None:
    """Each line of its last dimension is a row."""
    lines = list(text.draw_text(torus_fabric((2, 2, 3), [f"n{i}" for i in range(12)]), {"n0": "idle"}))
    assert lines[0] == "torus of 2 by 2 by 3: 12 nodes"
    assert "plane 1: 6 nodes  (6 unknown)" in lines
    assert lines[4].split() == ["line", "0,0", "░??", "1", "of", "3", "idle,", "2", "unknown"]


@pytest.mark.parametrize(
    "fabric",
    [
        SMALL,
        Fabric(kind="flat"),
        block_fabric([Leaf(path=(f"b{i}",), nodes=tuple(f"n{i}-{j}" for j in range(18))) for i in range(4)], (18, 36)),
        torus_fabric((2, 3, 4), [f"n{i}" for i in range(24)]),
        torus_fabric((5,), [f"n{i}" for i in range(5)]),
        tree_fabric([Leaf(path=("core", "deep", "s"), nodes=("n1",)), Leaf(path=("core", "t"), nodes=("n2",))]),
        tree_fabric([Leaf(path=(f"r{i}", f"r{i}s"), nodes=tuple(f"n{i}-{j}" for j in range(40))) for i in range(9)]),
        tree_fabric([Leaf(path=("$x^2$ 叶",), nodes=("n1",))]),
    ],
    ids=["tree", "flat", "blocks", "torus", "ring", "uneven", "forest", "odd names"],
)
def test_every_kind_is_drawn(fabric: Fabric, tmp_path: Path) -> None:
    """SVG and PNG of each kind of fabric, the same file for the same fabric."""
    of = {node: random.Random(node).choice(occupancy.STATES[:5]) for node in [*nodes_of(fabric), "stray"]}
    draw.draw_fabric(fabric, of, tmp_path / "a.svg", title="some $site$")
    draw.draw_fabric(fabric, of, tmp_path / "b.svg", title="some $site$")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_the_picture_has_a_cell_for_every_node(tmp_path: Path) -> None:
    """Colours are those of the nodes' states, as often as there are such nodes."""
    of = {"n1": "idle", "n2": "allocated", "n3": "down", "n4": "drained", "n5": "idle", "n6": "idle"}
    draw.draw_fabric(SMALL, of, tmp_path / "a.png")
    draw.draw_fabric(SMALL, of, tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "a.svg").read_text()
    paths = [line for line in drawn.splitlines() if "stroke: #ffffff" in line]
    assert sum(draw.COLOURS["idle"] in line for line in paths) == 3
    assert sum(draw.COLOURS["down"] in line for line in paths) == 1


FANOUTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)


def forest(fanout: list[list[int]]) -> Fabric:
    """Pods of leaves of so many nodes; the last pod hangs on a root of its own."""
    names = iter(random.Random(7).sample([f"n{i}" for i in range(99)], 99))
    leaves = []
    for pod, sizes in enumerate(fanout):
        root = "core" if pod + 1 < len(fanout) else "other"
        for leaf, size in enumerate(sizes):
            held = tuple(itertools.islice(names, size))
            leaves.append(Leaf(path=(root, f"p{pod}", f"p{pod}s{leaf}"), nodes=held))
    return tree_fabric(leaves)


@given(FANOUTS, st.data())
def test_fewest_crossings_are_the_minimum_of_all_orders(fanout: list[list[int]], data: st.DataObject) -> None:
    """Of up to six nodes, no order has fewer crossings than `fewest` says, and depth first has just as many."""
    fabric = forest(fanout)
    chosen = data.draw(st.lists(st.sampled_from(nodes_of(fabric)), min_size=1, max_size=6, unique=True))
    counts = {ring_hops(order, fabric) for order in itertools.permutations(chosen)}
    first = [node for node in nodes_of(fabric) if node in chosen]
    assert min(counts) == min_ring_hops(chosen, fabric) == ring_hops(first, fabric)


def test_crossings_of_blocks_and_of_a_torus() -> None:
    """The links of an aggregate count too; on a torus it is the hops, over the edge where that is shorter."""
    blocks = block_fabric([Leaf(path=(f"b{i}",), nodes=(f"n{2 * i}", f"n{2 * i + 1}")) for i in range(4)], (2, 4))
    assert ring_hops(["n0", "n1"], blocks) == 0
    assert ring_hops(["n0", "n2"], blocks) == 4  # out of one block and into the other, and back
    assert ring_hops(["n0", "n4"], blocks) == 8  # and through the two aggregates
    torus = torus_fabric((1, 5), [f"n{i}" for i in range(5)])
    assert ring_hops(["n0", "n4"], torus) == 2
    assert ring_hops([f"n{i}" for i in range(5)], torus) == min_ring_hops(nodes_of(torus), torus) == 5
    assert ring_hops([], SMALL) == ring_hops(["n1"], SMALL) == 0


def test_a_score_tells_placement_from_order() -> None:
    """Four nodes on three leaves where two would do, in an order that crosses more than these need."""
    score = score_job(["n1", "n6", "n2", "n4"], SMALL, job_id="7")
    assert (score.leaves, score.pods, score.best_leaves, score.best_pods) == (3, 2, 2, 1)
    assert score.ring_hops == 12
    assert score.reordered_ring_hops == min_ring_hops(["n1", "n2", "n4", "n6"], SMALL) == 10
    assert score.min_ring_hops == 4
    assert score.locality == round(4 / 12, 4)
    full = score_job(["n1", "n2", "n3"], SMALL)
    assert (full.ring_hops, full.locality, full.leaves) == (0, 1.0, 1)


@settings(max_examples=30, deadline=None)
@given(FANOUTS, st.data())
def test_the_best_is_the_best_of_all_choices(fanout: list[list[int]], data: st.DataObject) -> None:
    """No k nodes of a small forest have fewer leaves, pods or crossings than a score says; and some have as few."""
    fabric = forest(fanout)
    k = data.draw(st.integers(1, min(4, len(nodes_of(fabric)))))
    every = list(itertools.islice(itertools.combinations(nodes_of(fabric), k), 600))
    score = score_job(every[data.draw(st.integers(0, len(every) - 1))], fabric)
    if len(every) < 600:
        assert score.best_leaves == min(count_leaves_and_pods(some, fabric)[0] for some in every)
        assert score.best_pods == min(count_leaves_and_pods(some, fabric)[1] for some in every)
        assert score.min_ring_hops == min(min_ring_hops(some, fabric) for some in every)
    assert score.min_ring_hops <= score.reordered_ring_hops <= score.ring_hops


def test_nodes_that_the_fabric_does_not_know_are_counted_apart() -> None:
    """They are in no leaf; and a flat fabric is not scored."""
    score = score_job(["n1", "x", "n2"], SMALL)
    assert (score.nodes, score.unknown_nodes, score.leaves) == (3, 1, 1)
    assert count_leaves_and_pods(["x"], SMALL) == (0, 0)
    with pytest.raises(ClusterError, match="flat"):
        score_job(["n1"], Fabric(kind="flat"))


CSV = "host,pod,leaf\nn1,p1,a\nn2,p1,b\nn3,p2,c\nn4,p2,c\n"


def test_show_in_a_pipe_and_as_slurms_files(pit: Pit, tmp_path: Path) -> None:
    """A record a leaf; and what `--as` prints is the same fabric again."""
    (tmp_path / "hosts.csv").write_text(CSV)
    done = pit("topology", "show", "--fabric", "hosts.csv")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["schema"], r["path"], r["nodes"], r["unknown"]) for r in records][2] == (
        "pit.leaf-state/1",
        ["p2", "c"],
        ["n3", "n4"],
        2,
    )
    for form, name in (("conf", "topology.conf"), ("yaml", "topology.yaml")):
        written = pit("topology", "show", "--fabric", "hosts.csv", "--as", form)
        (tmp_path / name).write_text(written.stdout)
        assert pit("topology", "show", "--fabric", name).stdout == done.stdout
    assert "p2: 2 nodes" in pit("topology", "show", "--fabric", "hosts.csv", "--format", "table").stdout
    assert pit("topology", "show", "--fabric", "hosts.csv", "--format", "hosts").stdout == "n[1-4]\n"
    assert pit("topology", "show", "--fabric", "hosts.csv", "--png", "x.jpg").returncode == 2
    assert pit("topology", "show", "--fabric", "none.csv").returncode == 3


def test_score_of_lists_and_records(pit: Pit, tmp_path: Path) -> None:
    """Orders come as lists or as records with nodes, one a line."""
    (tmp_path / "hosts.csv").write_text(CSV)
    lines = 'n1,n3,n2\n{"schema":"pit.node-choice/1","nodes":["n3","n4"]}\n'
    done = pit("topology", "score", "--fabric", "hosts.csv", "--nodes", "-", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert (first["leaves"], first["pods"], first["ring_hops"]) == (3, 2, 10)
    assert (first["best_leaves"], first["min_ring_hops"]) == (2, 8)  # over two roots that nothing connects
    assert (second["leaves"], second["locality"]) == (1, 1.0)
    assert pit("topology", "score", "--fabric", "hosts.csv", "7").returncode == 2


@pytest.mark.slurm
def test_show_and_score_a_live_cluster(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """Every node of the site is in one leaf; a picture is drawn; a job that is not there is told."""
    done = pit("topology", "show", "--site", "alpha")
    assert done.returncode == 0, done.stderr
    leaves = [json.loads(line) for line in done.stdout.splitlines()]
    assert [leaf["path"] for leaf in leaves] == [["spine", "leaf1"], ["spine", "leaf2"]]
    assert all(sum(leaf[state] for state in occupancy.STATES) == 4 and not leaf["unknown"] for leaf in leaves)
    drawn = pit("topology", "show", "--site", "alpha", "--png", "alpha.png", "--svg", "alpha.svg")
    assert (drawn.returncode, drawn.stdout) == (0, "")
    assert (tmp_path / "alpha.png").stat().st_size > 10_000
    result = pit("topology", "score", "--site", "alpha", "999999")
    assert result.returncode == 4
    assert "999999 not found" in result.stderr


@pytest.mark.slurm
def test_score_a_running_job(clusters: Path, pit: Pit) -> None:
    """A job on two nodes of two leaves could have had one."""
    env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
    batch = ["sbatch", "--parsable", "-w", "alpha01,alpha02", "-N2", "-t1", "-o", "/dev/null", "--wrap", "sleep 30"]
    stdout = subprocess.run(batch, env=env, capture_output=True, text=True, check=True).stdout
    job_id = stdout.strip().split(";")[0]
    try:
        for _ in range(40):
            done = pit("topology", "score", job_id, "--site", "alpha")
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert (record["job_id"], record["leaves"], record["best_leaves"]) == (job_id, 2, 1)
        assert (record["ring_hops"], record["min_ring_hops"], record["locality"]) == (4, 0, 0.0)
    finally:
        subprocess.run(["scancel", job_id], env=env, check=False)
