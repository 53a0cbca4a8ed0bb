from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from pitools.dataset.ingest.ingest import ingest
from pitools.stage.cache.layout import journal_path, partial_path, staged_path
from pitools.stage.sources.find import load_version
from pitools.stage.verify import FileFinding, check_versions

NAMES = ("n0", "n1", "n2")
SECRET = secrets.token_hex(16)


class Commands:
    """`pit-stage run --fanout` as the nodes of a step run it: one process a node, a root each, all on loopback."""

    def __init__(self, tmp_path: Path, program: list[str]) -> None:
        self.tmp_path, self.program = tmp_path, program
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.said: dict[str, str] = {}

    def root(self, name: str) -> Path:
        return self.tmp_path / "nodes" / name

    def start(self, source: Path, *names: str, group: tuple[str, ...] = NAMES, options: tuple[str, ...] = ()) -> None:
        env = {name: text for name, text in os.environ.items() if not name.startswith(("PIT_", "SLURM_"))}
        env |= {"PIT_JOB_SECRET": SECRET, "PIT_FANOUT_JOB": self.tmp_path.name}
        env["PIT_FANOUT_NODES"] = ",".join(f"{name}=127.0.0.1" for name in group)
        for name in names:
            argv = [*self.program, "run", str(source), "--to", str(self.root(name)), "--fanout", "--format", "jsonl"]
            self.processes[name] = subprocess.Popen(
                [*argv, *options],
                env={**env, "PIT_FANOUT_NODE": name, "SLURMD_NODENAME": name},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def finish(self, *names: str) -> dict[str, dict]:
        """The record of each, once all have ended well; what they said on stderr is kept."""
        actual = {}
        for name in names:
            out, self.said[name] = self.processes[name].communicate(timeout=60)
            assert self.processes[name].returncode == 0, self.said[name]
            actual[name] = json.loads(out)
        return actual

    def run(self, source: Path, *names: str, group: tuple[str, ...] = NAMES) -> dict[str, dict]:
        self.start(source, *names, group=group)
        return self.finish(*names)

    def is_right(self, source: Path, name: str) -> bool:
        dataset = load_version(source)
        place = staged_path(self.root(name), dataset.version)
        return all((place / e.path).read_bytes() == (source / e.path).read_bytes() for e in dataset.manifest.files)

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def commands(tmp_path: Path, program: list[str]) -> Iterator[Commands]:
    created = Commands(tmp_path, program)
    yield created
    created.close()


@pytest.fixture
def files() -> dict[str, bytes]:
    """Small and large ones, an empty one, and enough for three nodes."""
    large = {f"images/c/{number}": os.urandom((1 << 20) + number) for number in range(6)}
    return {**large, **{f"state/c/{number}": os.urandom(20_000) for number in range(9)}, "zarr.json": b"{}", "e": b""}


def test_three_nodes_read_the_source_once(commands: Commands, make_dataset: Callable[..., Path], files):
    """With the real engine: every node has the set, its bytes were read once, and the secret is nowhere."""
    source = make_dataset(files)
    result = commands.run(source, *NAMES)
    total = sum(map(len, files.values()))
    assert sum(record["copied_bytes"] for record in result.values()) == total
    assert all(record["copied_bytes"] + record["peer_bytes"] == total for record in result.values())
    assert all(commands.is_right(source, name) for name in NAMES)
    assert set(commands.said.values()) == {""}
    paths = [path.read_bytes() for path in commands.tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in data for data in [*paths, json.dumps(result).encode()])


def test_several_sources_are_passed_on_one_after_another(commands: Commands, make_dataset: Callable[..., Path], files):
    """As the nodes of a job stage its datasets: each is read once, and all nodes have all."""
    sources = [make_dataset(files, name) for name in ("one", "two")]
    commands.start(sources[0], *NAMES, options=(str(sources[1]),))
    copied = {"one": 0, "two": 0}
    for name in NAMES:
        out, err = commands.processes[name].communicate(timeout=60)
        assert commands.processes[name].returncode == 0, err
        for record in map(json.loads, out.splitlines()):
            copied[record["dataset"]] += record["copied_bytes"]
        assert all(commands.is_right(source, name) for source in sources)
    assert copied == {source.parent.name: load_version(source).manifest.total_bytes for source in sources}


def test_three_nodes_stage_a_part(commands: Commands, tmp_path: Path):
    """Each writes the part's own metadata from its manifest, and opens just the arrays that are there."""
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.ones((9, 2))
        file["data/demo_0/obs/state"] = np.ones((9, 3))
    source = Path(ingest([tmp_path / "a.hdf5"], root=tmp_path / "made", name="x").path)
    commands.start(source, *NAMES, options=("--arrays", "action"))
    for record in commands.finish(*NAMES).values():
        assert not [item for item in check_versions(Path(record["path"]), readers=1) if isinstance(item, FileFinding)]
        consolidated = zarr.open_consolidated(record["path"], mode="r")
        assert set(consolidated.keys()) == {"action", "episode_json", "episode_offsets"}


def test_the_secret_is_in_no_command_line(commands: Commands, make_dataset: Callable[..., Path], files):
    """Neither of the stager nor of its server and workers, and its environment is for its user alone."""
    commands.start(make_dataset(files), "n0", options=("--bwlimit", "8MiB"))
    leader = commands.processes["n0"].pid
    deadline, start_time = time.monotonic() + 20, set()
    while len(start_time) < 3 and time.monotonic() < deadline:  # the stager, its server, a worker
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == leader:
                    start_time.add(folder.name)
                    assert SECRET.encode() not in (folder / "cmdline").read_bytes() + (folder / "comm").read_bytes()
                    assert (folder / "environ").stat().st_mode & 0o077 == 0
        time.sleep(0.01)
    assert len(start_time) >= 3


def test_a_node_alone_is_a_group(commands: Commands, make_dataset: Callable[..., Path], files):
    """It reads all from the source."""
    source = make_dataset(files)
    record = commands.run(source, "n0", group=("n0",))["n0"]
    assert (record["copied_bytes"], record["peer_bytes"]) == (sum(map(len, files.values())), 0)


def test_only_what_a_new_version_changed_travels(commands: Commands, make_dataset: Callable[..., Path], files):
    """Files that are linked from an older version are there for the others, who have no older one, at once."""
    older = make_dataset(files)
    commands.run(older, "n0", group=("n0",))
    changed = {**files, "images/c/0": os.urandom(1 << 20)}
    source = make_dataset(changed)
    result = commands.run(source, *NAMES)
    assert result["n0"]["linked_bytes"] == sum(map(len, files.values())) - len(files["images/c/0"])
    assert result["n0"]["copied_bytes"] + result["n0"]["peer_bytes"] == 1 << 20
    assert all(commands.is_right(source, name) for name in NAMES)
    total = sum(map(len, changed.values()))
    # Its own share is all that the node with the older version saves the source, and it gives that to the others.
    assert sum(record["copied_bytes"] for record in result.values()) < total


def test_what_stands_already_is_given_at_once(commands: Commands, make_dataset: Callable[..., Path], files):
    """Not only when the node that has it is done: what it links is in the others' hands while it still copies."""
    commands.run(make_dataset(files), "n0", group=("n0",))
    source = make_dataset({**files, "images/c/0": os.urandom(1 << 20)})  # the one large file, and of its own share
    commands.start(source, "n0", options=("--bwlimit", "512KiB"))
    commands.start(source, "n1", "n2")
    linked = partial_path(commands.root("n1"), source.name) / "images/c/5"
    deadline = time.monotonic() + 20
    while not linked.exists() or linked.read_bytes() != files["images/c/5"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not staged_path(commands.root("n0"), source.name).exists()
    assert commands.finish(*NAMES)["n1"]["peer_bytes"] > 0


def test_an_interrupted_node_goes_on_where_it_stopped(commands: Commands, make_dataset: Callable[..., Path], files):
    """Killed in the middle: what its journal has is neither read again nor asked of others, and is given to them."""
    source = make_dataset(files)
    commands.start(source, "n0", group=("n0",), options=("--bwlimit", "4MiB", "--readers", "1"))
    journal = journal_path(commands.root("n0"), source.name)
    deadline = time.monotonic() + 20
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    commands.processes["n0"].kill()
    commands.processes["n0"].communicate()
    assert partial_path(commands.root("n0"), source.name).exists()
    result = commands.run(source, *NAMES)
    total = sum(map(len, files.values()))
    assert result["n0"]["resumed_bytes"] > 0
    assert result["n0"]["resumed_bytes"] + result["n0"]["copied_bytes"] + result["n0"]["peer_bytes"] == total
    assert sum(record["copied_bytes"] for record in result.values()) <= total
    assert all(commands.is_right(source, name) for name in NAMES)


def test_a_node_whose_copy_is_damaged_is_named(commands: Commands, make_dataset: Callable[..., Path], files):
    """Its set stands, by names and sizes; what it gives is caught, read from the source, and said in one line."""
    source = make_dataset(files)
    commands.run(source, "n1", group=("n1",))
    for path in staged_path(commands.root("n1"), source.name).glob("images/c/*"):
        data = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    commands.start(source, *NAMES)
    outcome = commands.finish(*NAMES)
    assert outcome["n1"]["state"] == "present"
    for name in ("n0", "n2"):
        assert commands.is_right(source, name)
    lines = [line for name in ("n0", "n2") for line in commands.said[name].splitlines()]
    assert lines
    assert all(line.startswith("pit-stage: note: n1: ") for line in lines)
    assert not any(commands.said[name].count("\n") > 1 for name in ("n0", "n2"))
    assert commands.said["n1"] == ""


def test_a_source_that_is_wrong_is_nobodys_fault(commands: Commands, make_dataset: Callable[..., Path], files):
    """The node that reads it ends with 5 and says so; the others read it themselves, and end as it did."""
    source = make_dataset(files)
    (source / "images/c/3").write_bytes(bytes(len(files["images/c/3"])))
    commands.start(source, *NAMES)
    for name in NAMES:
        out, output = commands.processes[name].communicate(timeout=60)
        assert (commands.processes[name].returncode, out) == (5, "")
        assert "images/c/3" in output
        assert "gave wrong bytes" not in output
        assert not staged_path(commands.root(name), source.name).exists()
