from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.checkpoint.store import lookup, owner
from pitools.checkpoint.store.listing import list_checkpoints
from tests.checkpoint.conftest import FINGERPRINT, RUN, Save, build, contents, protected

Pit = Callable[..., subprocess.CompletedProcess[str]]


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def run(folder: Path, save: Save) -> Path:
    """A run's folder with three checkpoints, one of them damaged, and what a killed save left."""
    owner.claim_folder(folder, RUN, FINGERPRINT)
    (folder.parent / "plan.json").write_text("{}")
    for step in (10, 20, 30):
        save(step)
    path = folder / "step_30" / "payload" / "d" / "0a"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 8]) + content[1:])
    build(folder, 40, contents(40), token="killed")
    return folder.parent


def test_list(pit: Pit, run: Path) -> None:
    """A run is given by its folder, its checkpoints' folder, or its id; the states are told from each other."""
    output = records(pit("checkpoint", "list", str(run)))
    assert [(line["step"], line["state"], line["resumable"]) for line in output] == [
        (30, "complete", True),
        (20, "complete", False),
        (10, "complete", False),
        (None, "unfinished", False),
    ]
    assert records(pit("checkpoint", "list", str(run / "checkpoints"))) == output
    table = pit("checkpoint", "list", str(run), "--format", "table").stdout.splitlines()
    assert table[0].split()[:3] == ["STEP", "STATE", "FORMAT"]
    assert table[1].split()[:2] == ["30", "complete"]


def test_no_older_checkpoint_is_resumable_below_a_foreign_one(run: Path, save: Save) -> None:
    """A restore refuses the newest, of another run, and continues from none below it."""
    save(50, run="another-run")
    listed = [(line.step, line.state, line.resumable) for line in list_checkpoints(run / "checkpoints")]
    assert listed[:2] == [(50, "foreign", False), (30, "complete", False)]


def test_check_and_quarantine(pit: Pit, run: Path) -> None:
    """A flipped bit is a finding and exit 1; with --quarantine it is moved aside, and the next check is content."""
    done = pit("checkpoint", "check", str(run))
    assert done.returncode == 1
    finding, summary = records(done)
    assert (finding["checkpoint"], finding["path"], finding["problem"]) == ("step_30", "payload/d/0a", "digest")
    assert (summary["checkpoints"], summary["findings"], summary["newest_good_step"]) == (3, 1, 20)
    assert pit("checkpoint", "check", str(run / "checkpoints" / "step_20")).returncode == 0
    assert pit("checkpoint", "check", str(run), "--step", "30", "--quarantine").returncode == 1
    assert pit("checkpoint", "check", str(run)).returncode == 0
    output = records(pit("checkpoint", "list", str(run)))
    assert [(line["step"], line["state"]) for line in output] == [
        (20, "complete"),
        (10, "complete"),
        (None, "quarantined"),
        (None, "unfinished"),
    ]
    assert "payload/d/0a: digest" in str(output[2]["reason"])


def test_prune_keeps_the_newest_good(pit: Pit, run: Path) -> None:
    """The newest has a flipped bit: the one before it stays as well. What the killed save left goes."""
    folder = run / "checkpoints"
    planned = pit("checkpoint", "prune", str(run), "--keep-last", "1", "--dry-run")
    assert [(line["step"], line["state"]) for line in records(planned)] == [
        (30, "kept"),
        (20, "kept"),
        (10, "would be removed"),
    ]
    assert lookup.complete_steps(folder) == [30, 20, 10]
    done = pit("checkpoint", "prune", str(run), "--keep-last", "1")
    assert "1 killed save" in done.stderr
    assert lookup.complete_steps(folder) == [30, 20]
    assert not list(folder.glob(".step_*"))


def test_prune_removes_nothing_where_none_is_good(pit: Pit, run: Path) -> None:
    """The newest alone may be the least damaged: nothing goes, and the exit is that of damaged data."""
    for path in (run / "checkpoints").glob("step_*/payload/d/0a"):
        path.write_bytes(bytes(path.stat().st_size))
    done = pit("checkpoint", "prune", str(run), "--keep-last", "1")
    assert done.returncode == 5
    assert lookup.complete_steps(run / "checkpoints") == [30, 20, 10]
    assert list((run / "checkpoints").glob(".step_*"))


def test_prune_keeps_the_damaged_ones_it_finds(pit: Pit, run: Path) -> None:
    """Two newer than the newest good one are damaged: all three stay, each with the reason."""
    path = run / "checkpoints" / "step_20" / "payload" / "d" / "0a"
    path.write_bytes(bytes(path.stat().st_size))
    done = pit("checkpoint", "prune", str(run), "--keep-last", "1")
    assert [(line["step"], line["state"]) for line in records(done)] == [(30, "kept"), (20, "kept"), (10, "kept")]
    assert len({str(line["reason"]) for line in records(done)}) == 2


def test_prune_says_no_where_one_cannot_go(pit: Pit, run: Path) -> None:
    """A script that makes room learns that there is none: exit 1, and the others are gone."""
    with protected(run / "checkpoints" / "step_10"):
        done = pit("checkpoint", "prune", str(run), "--keep-last", "1")
        assert (done.returncode, records(done)[-1]["state"]) == (1, "failed")
    assert pit("checkpoint", "prune", str(run), "--keep-last", "1").returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["list", "home"], "neither a run nor a folder of checkpoints"),
        (["list", "no-such-run"], 'no run "no-such-run"'),
        (["check", "{run}", "--step", "7"], "no checkpoint of step 7"),
        (["check", "{run}/checkpoints/step_10", "--step", "20"], "--step 20"),
        (["prune", "{run}/checkpoints/step_10"], "give the run"),
        (["prune", "{run}", "--keep-last", "0"], "--keep-last"),
    ],
)
def test_what_cannot_be(pit: Pit, run: Path, words: list[str], says: str) -> None:
    """What is no run, and what would remove everything, is refused as the command line that it is."""
    done = pit("checkpoint", *(text.format(run=run) for text in words))
    assert done.returncode == 2
    assert says in done.stderr


def test_login_node_needs_no_framework(run: Path) -> None:
    """Neither JAX, PyTorch, Orbax nor NumPy is imported to find and check what they wrote."""
    code = (
        "import sys; from pathlib import Path; from pitools import cli; "
        "from pitools.checkpoint.store import lookup; "
        "lookup.latest_step(Path(sys.argv[3])); code = cli.run(cli.group, 'pit'); "
        "sys.exit(', '.join({'jax', 'torch', 'orbax', 'numpy', 'zarr'} & sys.modules.keys()) or code)"
    )
    argv = [sys.executable, "-c", code, "checkpoint", "check", str(run)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
