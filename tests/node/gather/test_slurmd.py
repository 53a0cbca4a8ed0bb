"""Slurm's own view of a node: which slurmd is this node's, and what a controller says, or does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, Unreachable
from pitools.node.gather import slurmd
from pitools.node.gather.read import Query
from pitools.node.types import Row
from pitools.slurm.client import Client, Transport
from pitools.slurm.parse_cluster import parse_ping
from pitools.slurm.records import Node
from tests.node.gather.conftest import Check, Write


class FakeClient(Client):
    """A client whose answers are given; an exception is raised."""

    def __init__(self, answers: list[bool] | Exception, nodes: list[Node] | Exception) -> None:
        self.answers, self.found = answers, nodes

    def controllers(self) -> list[bool]:
        """Return, or raise, what was given."""
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    def nodes(self, names: str = "") -> list[Node]:
        """Return, or raise, what was given."""
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def read(proc: Path, client: Client | None = None, node: str = "n03") -> Row:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pitools.slurm.client.Client", lambda _: client or FakeClient([], []))
        (row,) = slurmd.read_slurm(Query(root=proc.parent, node=node))
    return row


def process(pid: str, name: str, state: str, command: str, uids: str = "0 0") -> dict[str, str | bytes]:
    """Return the files of a process. uids: real and effective."""
    return {
        f"{pid}/stat": f"{pid} ({name}) {state} 1 1 1",
        f"{pid}/status": f"Name:\t{name}\nUid:\t{uids} 0 0\n",
        f"{pid}/cmdline": command.encode(),
    }


@pytest.fixture
def daemons(tmp_path: Path, write_tree: Write) -> Path:
    """A /proc with the slurmds of n01 and n02, a dead one of n03, a slurmstepd, and a name that tries to be slurmd."""
    processes = {
        "11": ("slurmd", "S", "slurmd\0-D\0-N\0n01\0-f\0/etc/slurm.conf"),
        "12": ("slurmd", "S", "/usr/sbin/slurmd\0-Nn02"),
        "13": ("slurmd", "Z", ""),
        "14": ("slurmstepd", "S", "slurmstepd: [7.0]"),
        "15": ("x) S 1 (slurmd", "S", "x"),
    }
    for pid, (name, state, text) in processes.items():
        write_tree(tmp_path / "proc", process(pid, name, state, f"{text}\0"))
    return write_tree(tmp_path / "proc", {"meminfo": ""})


def test_the_slurmd_of_this_node_is_found(daemons: Path, write_tree: Write) -> None:
    """One that was started as another node is not it, nor one that ends just now; one without a name is."""
    write_tree(daemons, process("8", "slurmd", "S", ""))
    assert [slurmd.find_slurmd(daemons, node) for node in ("n01", "n02", "n03", "")] == [11, 12, None, 11]
    write_tree(daemons, process("9", "slurmd", "S", "slurmd\0-D\0"))
    assert slurmd.find_slurmd(daemons, "n03") == 9


def test_a_program_of_a_user_is_no_slurmd(daemons: Path, write_tree: Write) -> None:
    """By its name and a lower number it would hide the real one, or a dead one; nor does a set-uid program count."""
    for pid, uids in (("10234", "4242 4242"), ("10235", "4242 0")):
        write_tree(daemons, process(pid, "slurmd", "S", "slurmd\0-N\0n03\0", uids))
    assert slurmd.find_slurmd(daemons, "n03") is None
    write_tree(daemons, process("9", "slurmd", "S", "slurmd\0-N\0n03\0"))
    assert slurmd.find_slurmd(daemons, "n03") == 9


def test_no_program_that_proc_names_is_run(daemons: Path, tmp_path: Path) -> None:
    """A process's program is its user's."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    program.chmod(0o755)
    for pid in ("11", "12"):
        (daemons / pid / "exe").symlink_to(program)
        (daemons / pid / "root").symlink_to(tmp_path)
    assert read(daemons, node="n01") == {"is_node": True, "slurmd_is_running": True}
    assert not (tmp_path / "was-run").exists()


def test_what_a_controller_says(daemons: Path, last_rows: Check) -> None:
    """Controllers that answer, and the node's state; what it does not say is unknown, and never an error."""
    node = Node(node="n03", state="idle", flags=("drain", "not_responding"), reason="gpu")
    row = read(daemons, FakeClient([True, False], [node]))
    last_rows("slurm", [row])
    assert (row["controllers"], row["controllers_up"]) == (2, 1)
    assert (row["node_state"], row["node_flags"], row["node_reason"]) == ("idle", "drain,not_responding", "gpu")
    assert "node_state" not in read(daemons, FakeClient([False, False], [node]))
    for found in (ClusterError("invalid node name"), []):
        assert read(daemons, FakeClient([True], found)).keys() == row.keys() - {
            "node_state",
            "node_flags",
            "node_reason",
        }
    assert "controllers" not in read(daemons, FakeClient(Unreachable("no answer"), [node]))


def test_the_configuration_is_that_of_the_running_slurmd(
    tmp_path: Path, write_tree: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its option -f, unless SLURM_CONF names one; without any the controllers are unknown, not down."""
    for name in ("own.conf", "other.conf"):
        (tmp_path / name).touch()
    write_tree(tmp_path / "proc", process("11", "slurmd", "S", f"slurmd\0-N\0n01\0-f\0{tmp_path}/own.conf\0"))
    write_tree(tmp_path / "proc", process("12", "slurmd", "S", "slurmd\0-N\0n02\0"))
    script = '#!/bin/sh\n[ "$1 $SLURM_CONF" = "ping $EXPECTED" ] && echo "Slurmctld(primary) at c1 is UP"'
    (write_tree(tmp_path, {"bin/scontrol": script}) / "bin/scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def controllers_up(node: str, conf: str) -> object:
        monkeypatch.setenv("EXPECTED", f"{tmp_path}/{conf}")
        (row,) = slurmd.read_slurm(Query(root=tmp_path, node=node))
        return row.get("controllers_up")

    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert (controllers_up("n01", "own.conf"), controllers_up("n02", "own.conf")) == (1, None)
    monkeypatch.setenv("SLURM_CONF", f"{tmp_path}/other.conf")
    assert (controllers_up("n01", "other.conf"), controllers_up("n02", "other.conf")) == (1, 1)


def test_the_answer_of_scontrol_ping() -> None:
    """A line for each controller."""
    text = "Slurmctld(primary) at UP-1 is DOWN\nSlurmctld(backup) at c2 is UP\nnonsense is UP\n"
    assert parse_ping(text) == [False, True]


@pytest.mark.slurm
def test_a_node_of_the_real_slurm(clusters: Path) -> None:
    """Its slurmd runs, its controller answers and knows it; of a node that is not there only that is known."""
    alpha = Client(Transport(env={"SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}))
    row = read(Path("/proc"), alpha, node="alpha03")
    assert row["slurmd_is_running"]
    assert (row["controllers"], row["controllers_up"]) == (1, 1)
    assert row["node_state"]
    assert read(Path("/proc"), alpha, node="nosuch") == {
        "is_node": False, "slurmd_is_running": False, "controllers": 1, "controllers_up": 1,
    }  # fmt: skip
