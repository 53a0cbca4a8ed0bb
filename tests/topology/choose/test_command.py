"""`pit topology choose`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import DataError
from pitools.topology.choose.node_costs import read_costs

Pit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Two pods of two leaves of four nodes."""
    path = tmp_path / "topology.conf"
    path.write_text(
        "SwitchName=a1 Nodes=n[01-04]\nSwitchName=a2 Nodes=n[05-08]\nSwitchName=b1 Nodes=n[09-12]\n"
        "SwitchName=b2 Nodes=n[13-16]\nSwitchName=a Switches=a[1-2]\nSwitchName=b Switches=b[1-2]\n"
        "SwitchName=core Switches=a,b\n"
    )
    return path


def test_says_what_it_costs_and_what_the_next_would(pit: Pit, conf: Path) -> None:
    """One record: the nodes in rank order, the cost, and that of the best other choice."""
    done = pit(
        "topology",
        "choose",
        "--nodes",
        "5",
        "--spares",
        "1",
        "--fabric",
        str(conf),
        "--from-nodes",
        "n[01-04],n[06-07],n[09-11],n[13-15]",
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["nodes"] == ["n01", "n02", "n03", "n04", "n06"]
    assert record["spares"] == ["n07"]
    assert (record["cost"], record["runner_up_cost"], record["per_leaf"]) == (102.0, 102.0, {"a1": 4, "a2": 2})
    assert (record["free"], record["ring_hops"], record["node_list"]) == (12, 4, "n[01-04,06]")


def test_lists_for_sbatch(pit: Pit, conf: Path) -> None:
    """-H is the nodes; --as-exclude is all nodes but those of the chosen leaves, free or not."""
    ask = ["topology", "choose", "--nodes", "2", "--fabric", str(conf), "--from-nodes", "n[09-10],n14,n01"]
    assert pit(*ask, "-H").stdout == "n[09-10]\n"
    assert pit(*ask, "--format", "hosts").stdout == "n[09-10]\n"
    assert pit(*ask, "--as-exclude").stdout == "n[01-08,13-16]\n"


def test_costs_come_by_file_or_with_the_nodes(pit: Pit, conf: Path, tmp_path: Path) -> None:
    """A node that costs less is taken; lines of stdin may be records, such as those of other commands."""
    costs = tmp_path / "costs"
    costs.write_text("n[01-04] 2.5  # flaky switch\nn09 1\n")
    ask = ["topology", "choose", "--nodes", "3", "--fabric", str(conf), "--from-nodes", "-", "-H"]
    stdin = '{"schema":"pit.node/1","node":"n05","cost":9}\nn[01-04] n[06,08]\nn[09-12]'
    assert pit(*ask, stdin=stdin).stdout == "n[01-03]\n"
    assert pit(*ask, "--costs", str(costs), stdin=stdin).stdout == "n[10-12]\n"


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["--nodes", "9"], 4, "9 nodes requested, 8 free"),
        (["--nodes", "6", "--segment", "4"], 2, "6 nodes are not a multiple of the segment 4"),
        (["--nodes", "2", "--objective", "best"], 2, "'best' is not one of"),
    ],
)
def test_what_cannot_be_is_refused(pit: Pit, conf: Path, words: list[str], code: int, what: str) -> None:
    """More than is free is the cluster's refusal; a wrong question is usage."""
    done = pit("topology", "choose", *words, "--fabric", str(conf), "--from-nodes", "n[01-08]")
    assert (done.returncode, done.stdout) == (code, "")
    assert what in done.stderr


@pytest.mark.parametrize(
    ("words", "what"), [([], "--from-nodes LIST, or --site"), (["--from-nodes", ""], "where: --from-nodes")]
)
def test_nodes_that_nobody_names_are_asked_for(pit: Pit, conf: Path, words: list[str], what: str) -> None:
    """Neither a file alone nor an empty variable stands for the free nodes of a Slurm."""
    done = pit("topology", "choose", "--nodes", "2", "--fabric", str(conf), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert what in done.stderr


@pytest.mark.parametrize("line", ["n[01-", '{"node": 3}', "n01;n02 4", "@group 1"])
def test_a_cost_that_cannot_be_read_is_named(line: str) -> None:
    """The error has the file and the line."""
    with pytest.raises(DataError) as caught:
        read_costs(f"n01 3\n\n{line}\n", "costs.txt")
    assert caught.value.where == "costs.txt:3"


def test_costs_add_up() -> None:
    """What several lines say of a node is added; a line without a cost says 0."""
    assert read_costs("n[1-2] 1.5\nn2\t2\nn3 n4\n# nothing\n", "f") == {"n1": 1.5, "n2": 3.5, "n3": 0.0, "n4": 0.0}


@pytest.mark.slurm
def test_free_nodes_of_a_live_site(clusters: Path, pit: Pit) -> None:
    """Without a list, what is idle now is chosen from; a partition that is not there is named."""
    done = pit("topology", "choose", "--nodes", "1", "--site", "alpha")
    assert done.returncode in (0, 4), done.stderr  # others may use them all
    if done.returncode == 0:
        assert json.loads(done.stdout)["nodes"][0].startswith("alpha")
    done = pit("topology", "choose", "--nodes", "1", "--site", "alpha", "--partition", "trein")
    assert (done.returncode, 'did you mean "train"?' in done.stderr) == (2, True)
