from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pitools.dataset.ingest import ingest


def records(done) -> list[dict]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ingest_twice_list_show(pit, robomimic, tmp_path) -> None:
    """One record an ingest, new only once; `list` finds the version and `show` its arrays."""
    source = str(robomimic(3, 4))
    (first,) = records(pit("dataset", "ingest", source, "--to", "root", "--name", "x"))
    done = pit("dataset", "ingest", source, "--to", "root", "--name", "x")
    (again,) = records(done)
    assert (first["schema"], first["new"], again["new"]) == ("pit.dataset/1", True, False)
    assert f"x: nothing to do, these recordings are already there as {first['version']}" in done.stderr
    (listed,) = records(pit("dataset", "list", "root"))
    assert listed == again
    shown = {line["array"]: line for line in records(pit("dataset", "show", first["path"]))}
    assert shown["obs/eye_image"]["shape"] == [7, 8, 8, 3]
    assert shown["episode_offsets"]["shape"] == [3]
    assert sum(line["bytes"] for line in shown.values()) < first["bytes"]


def test_exit_codes(pit, robomimic, tmp_path) -> None:
    """Bad data is 5 and a bad name is 2, each with where and what next, and no half record on stdout."""
    (tmp_path / "bad.hdf5").write_text("no")
    bad = pit("dataset", "ingest", "bad.hdf5", "--to", "root", "--name", "x")
    assert (bad.returncode, bad.stdout) == (5, "")
    assert "where: bad.hdf5" in bad.stderr
    assert "next:" in bad.stderr
    name = pit("dataset", "ingest", str(robomimic(3)), "--to", "root", "--name", "../x")
    assert (name.returncode, name.stdout) == (2, "")
    assert pit("dataset", "ingest", "absent.hdf5", "--to", "root", "--name", "x").returncode == 2
    assert not (tmp_path / "root").exists()


def test_list_names_the_damaged_last(pit, robomimic, tmp_path) -> None:
    """One damaged manifest does not hide the other versions, and is the exit code."""
    damaged, _ = (ingest([robomimic(3)], root=tmp_path / "root", name=name) for name in ("a", "b"))
    (Path(damaged.path) / "manifest.json").write_text("{")
    done = pit("dataset", "list", "root")
    assert done.returncode == 5
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["b"]


def test_help_is_light(repo) -> None:
    """`pit dataset --help` imports no heavy library."""
    code = (
        "import sys; from pitools.cli import group; group.main(['dataset', 'ingest', '--help'], standalone_mode=False);"
        "print(sorted({'numpy', 'zarr', 'h5py', 'PIL', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_readme_recipes(repo, tmp_path) -> None:
    """The README's three recipes run as they are written, one after the other."""
    text = (repo / "pitools/dataset/README.md").read_text()
    recipes = re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in recipes] == ["sh", "python", "sh"]
    (tmp_path / "scripts").symlink_to(repo / "scripts")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    for kind, recipe in recipes:
        argv = ["bash", "-euo", "pipefail", "-c", recipe] if kind == "sh" else [sys.executable, "-c", recipe]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len(text.splitlines()) <= 80


@pytest.fixture
def make(repo, tmp_path):
    """Runs the example in the test's folder."""

    def run(*words: str):
        argv = [sys.executable, str(repo / "scripts/examples/make_recording.py"), *words]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_example_recording(make, pit, oracle, tmp_path) -> None:
    """The simulated arm's recording is the same for the same seed, has moving frames and bounded actions, and can be
    ingested as it is."""
    import numpy as np

    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert make(f"{name}.hdf5", "--episodes", "5", "--steps", "50", "--seed", seed).returncode == 0
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()
    assert (tmp_path / "a.hdf5").read_bytes() != (tmp_path / "c.hdf5").read_bytes()
    arrays = oracle([tmp_path / "a.hdf5"])
    assert {name: value.shape[1:] for name, value in arrays.items()} == {
        "action": (7,), "reward": (), "done": (), "obs/agentview_image": (64, 64, 3), "obs/robot0_proprio": (7,),
        "episode_offsets": (),
    }  # fmt: skip
    assert np.abs(arrays["action"]).max() <= 1
    assert (arrays["action"].std(axis=0) > 0.02).all()
    assert (np.diff(arrays["obs/agentview_image"].astype(int), axis=0) != 0).any(axis=(1, 2, 3)).all()
    # The expert succeeds: by the end of most episodes the tip is at the disc with the gripper closed.
    assert arrays["reward"].reshape(5, 50)[:, -1].mean() >= 0.6
    (version,) = records(pit("dataset", "ingest", "a.hdf5", "--to", "root", "--name", "reach"))
    assert (version["episodes"], version["steps"]) == (5, 250)


def test_example_leaves_nothing_when_it_fails(make, tmp_path) -> None:
    """An output that cannot be written is named, and no part of it stays."""
    done = make("no/such/folder.hdf5", "--episodes", "1", "--steps", "2")
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
    assert list(tmp_path.iterdir()) == []
