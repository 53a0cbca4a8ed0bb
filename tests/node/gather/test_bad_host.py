"""The collectors together on this machine, with faults that are real: a full disk, a hung mount, stuck processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pitools.core.record import decode_json
from pitools.node.gather.collectors import COLLECTORS
from pitools.node.tables import TABLES
from pitools.node.types import NodeFacts, Row

TABLES_READ = ("mounts", "files", "processes", "system")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad_host")


@pytest.fixture(scope="module")
def facts(folder: Path) -> NodeFacts:
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("only root can mount, where /dev/fuse is")
    unshare = ["unshare", "--mount", "--propagation", "private"]
    argv = [*unshare, sys.executable, str(Path(__file__).with_name("bad_host.py")), str(folder), *TABLES_READ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return decode_json(done.stdout, NodeFacts)


def row_of(facts: NodeFacts, table: str, subject: object) -> Row:
    assert facts.tables[table].unknown == ""
    return next(row for row in facts.tables[table].rows if row[TABLES[table].subject] == subject)


def test_a_full_disk_is_seen(facts: NodeFacts, folder: Path) -> None:
    """A tmpfs that a file fills has no space, and no file can be written in it."""
    mount = row_of(facts, "mounts", str(folder / "full"))
    assert mount | {"type": "tmpfs", "responds": True, "size_bytes": 65536, "free_bytes": 0, "used_share": 1.0} == mount
    file = row_of(facts, "files", str(folder / "full"))
    assert (file["is_mount_point"], file["is_writable"], file["responds"]) == (True, False, True)


def test_a_hung_mount_hides_nothing_else(facts: NodeFacts, folder: Path) -> None:
    """A FUSE mount that answers nothing does not respond, nor a file in it; all other mounts and files are read."""
    mount = row_of(facts, "mounts", str(folder / "hung"))
    assert (mount["type"], mount["device"], mount["responds"], "size_bytes" in mount) == (
        *("fuse", "nas:/data", False),
        False,
    )
    assert row_of(facts, "files", str(folder / "hung/data"))["responds"] is False
    assert row_of(facts, "files", str(folder / "none")) == {
        "path": str(folder / "none"),
        "exists": False,
        "responds": True,
    }
    others = [row for row in facts.tables["mounts"].rows if row["target"] != str(folder / "hung")]
    assert all(row["responds"] is not False for row in others)
    assert row_of(facts, "mounts", "/proc")["responds"] is True


def test_stuck_processes_are_seen(facts: NodeFacts) -> None:
    """A process that waits for the mount and cannot be killed is blocked; a zombie is in state Z."""
    zombie, blocked = (row_of(facts, "processes", int(pid)) for pid in facts.node.split("-"))
    assert (blocked["state"], blocked["is_blocked"]) == ("D", True)
    assert (zombie["state"], zombie["is_blocked"], zombie["user"], zombie["command"]) == (
        "Z",
        False,
        "root",
        "[python]",
    )
    assert [row["is_blocked"] for row in facts.tables["processes"].rows if row["state"] != "D"].count(True) == 0


def test_only_the_tables_that_are_named_are_read(facts: NodeFacts) -> None:
    """read_facts reads the tables that checks need; each collector fills another known table."""
    assert set(facts.tables) == set(TABLES_READ)
    names = [collector.table for collector in COLLECTORS]
    assert len(set(names)) == len(names)
    assert set(names) <= set(TABLES)


def test_reading_the_shipped_tables_loads_no_large_library() -> None:
    """psutil and OpenSSL (hashlib, hmac) take 10 ms of a check each, and nothing of theirs is needed."""
    code = (
        "import sys; from pitools.commands import node_check; from pitools.node.check import this_node; "
        "from pitools.slurm.client import Client; from pitools.node.gather import collectors; "
        "print(*{'psutil', '_hashlib', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
