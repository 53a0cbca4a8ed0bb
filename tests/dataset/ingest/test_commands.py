from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from pitools.core.errors import UsageError
from pitools.dataset.ingest.ingest import ingest


def records(done) -> list[dict]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ingest_twice_list_show(pit, robomimic, tmp_path) -> None:
    """One record an ingest, new only once; `list` finds the version and `show` its arrays."""
    source = str(robomimic(3, 4))
    (first,) = records(pit("dataset", "ingest", source, "--to", "root", "--name", "x"))
    (again,) = records(pit("dataset", "ingest", source, "--to", "root", "--name", "x"))
    assert (first["schema"], first["new"], again["new"]) == ("pit.dataset-version/1", True, False)
    assert (again["version"], again["path"]) == (first["version"], first["path"])
    (listed,) = records(pit("dataset", "list", "root"))
    assert (again | {"schema": "pit.dataset-listing/1"}).items() <= listed.items()
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


def test_refused_and_report(pit, robomimic, tmp_path) -> None:
    """Refused episodes are named one a line and the exit is 5; with --skip-rejected the rest is ingested."""
    path = robomimic(5, 6, 7)
    with h5py.File(path, "r+") as file:
        for number in (0, 2):
            del file[f"data/demo_{number}/rewards"]
            file[f"data/demo_{number}/rewards"] = np.zeros(3)
    words = ("dataset", "ingest", str(path), "--to", "root", "--name", "x", "--report", "report.jsonl")
    done = pit(*words)
    assert (done.returncode, done.stdout) == (5, "")
    assert len([line for line in done.stderr.splitlines() if line.startswith("pit: refused: ")]) == 2
    assert "--skip-rejected" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [(line["schema"], line["accepted"]) for line in lines] == [
        ("pit.dataset-scanned-episode/1", True),
        ("pit.dataset-scanned-episode/1", False),
        ("pit.dataset-scanned-episode/1", False),
    ]
    (version,) = records(pit(*words, "--skip-rejected"))
    assert version["episodes"] == 1


def test_append(pit, robomimic, tmp_path) -> None:
    """--append takes a version as people name it, and goes on with its codec."""
    records(pit("dataset", "ingest", str(robomimic(3, 4)), "--to", "root", "--name", "x", "--codec", "raw"))
    more = str(robomimic(5, name="more.hdf5", seed=1))
    (version,) = records(pit("dataset", "ingest", more, "--to", "root", "--name", "x", "--append", "root/x"))
    assert (version["episodes"], version["steps"]) == (3, 12)
    done = pit("dataset", "ingest", more, "--to", "root", "--name", "x", "--append", "root/x")
    assert done.returncode == 2
    assert "more.hdf5" in done.stderr


def test_array_here(pit, robomimic, tmp_path) -> None:
    """On a site without Slurm the array's tasks run here; the version is the one that a plain ingest makes."""
    path = str(robomimic(40, 50))
    words = ("dataset", "ingest", path, "--name", "x")
    (plain,) = records(pit(*words, "--to", "plain"))
    (spread,) = records(
        pit(*words, "--to", "spread", "--array-jobs", "3", "--site", "local", PIT_RUNS=str(tmp_path / "runs"))
    )
    assert spread["version"] == plain["version"]
    assert Path(spread["path"]).is_absolute()  # for a task may begin in another folder
    assert [path.name for path in (tmp_path / "spread").iterdir()] == ["x"]
    refused = pit(*words, "--to", "plain", "--array-jobs", "2")
    assert refused.returncode == 2
    assert "--site NAME" in refused.stderr


def test_array_tells_what_a_task_met(pit, robomimic, tmp_path) -> None:
    """What a task finds wrong with a recording ends the command as it would without an array."""
    path = robomimic(2, 20)
    with h5py.File(path, "r+") as file:
        del file["data/demo_1/obs/eye_image"]
        frames = np.zeros((20, 8, 8, 3), np.uint8)
        dataset = file["data/demo_1/obs"].create_dataset("eye_image", data=frames, compression="gzip")
        where = dataset.id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[where : where + 8] = b"\xff" * 8
    path.write_bytes(data)
    words = ("dataset", "ingest", str(path), "--to", "root", "--name", "x", "--array-jobs", "2", "--site", "local")
    done = pit(*words, PIT_RUNS=str(tmp_path / "runs"))
    assert (done.returncode, done.stdout) == (5, "")
    assert str(path) in done.stderr
    assert not (tmp_path / "root").exists()


@pytest.mark.slurm
def test_array_on_slurm(pit, robomimic, clusters) -> None:
    """As an array of a real Slurm, two tasks make the version that one process makes."""
    root = clusters / "runs" / f"ingest-{os.getpid()}"
    root.parent.mkdir(exist_ok=True)
    source = shutil.copyfile(robomimic(40, 50), clusters / "runs" / f"ingest-{os.getpid()}.hdf5")
    try:
        words = ("dataset", "ingest", str(source), "--name", "x", "--workers", "1")
        (plain,) = records(pit(*words, "--to", str(root / "plain")))
        array = ("--to", str(root / "spread"), "--array-jobs", "2", "--site", "alpha")
        (spread,) = records(pit(*words, *array, PIT_RUNS=str(root / "runs")))
        assert (spread["version"], spread["new"]) == (plain["version"], True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        source.unlink()


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
    """The README's recipes run as they are written, one after the other, and it is short."""
    text = (repo / "pitools/dataset/README.md").read_text()
    recipes = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert len(recipes) == text.count("```") / 2 == 3
    (tmp_path / "scripts").symlink_to(repo / "scripts")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(repo)}
    for recipe in recipes:
        argv = ["bash", "-euo", "pipefail", "-c", recipe]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "episode3.png").stat().st_size > 10_000
    versions = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("datasets/*/*/manifest.json")}
    assert sorted(reference["episodes"] for reference in versions.values()) == [20, 20, 40]
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
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert make(f"{name}.hdf5", "--episodes", "5", "--steps", "50", "--seed", seed).returncode == 0
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()
    assert (tmp_path / "a.hdf5").read_bytes() != (tmp_path / "c.hdf5").read_bytes()
    arrays = oracle([tmp_path / "a.hdf5"])
    assert {name: value.shape[1:] for name, value in arrays.items()} == {
        "action": (7,),
        "reward": (),
        "done": (),
        "obs/agentview_image": (64, 64, 3),
        "obs/robot0_proprio": (7,),
        "episode_offsets": (),
    }
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


@pytest.mark.parametrize(
    "words",
    [
        ["ingest", "reach.hdf5", "--to", "s3://lab/datasets", "--name", "x"],
        ["ingest", "reach.hdf5", "--to", "gs://lab", "--name", "x"],
        ["ingest", "s3://lab/reach.hdf5", "--to", "root", "--name", "x"],
        ["ingest", "reach.hdf5", "--to", "root", "--name", "x", "--report", "s3://lab/report"],
        ["list", "s3://lab/datasets"],
        ["show", "s3://lab/datasets/x"],
        ["gc", "s3://lab/datasets"],
        ["tag", "s3://lab/datasets/x", "good", "1f3a9c"],
    ],
    ids=" ".join,
)
def test_no_url_for_a_folder(pit, robomimic, tmp_path, below, words) -> None:
    """A URL where a folder is meant is a usage error of every command, and makes no folder of its name."""
    robomimic(3)
    before = below(tmp_path)
    done = pit("dataset", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert below(tmp_path) == before


@pytest.mark.parametrize("root", ["s3://lab/datasets", "file:///tmp/x"])
def test_no_url_for_a_root(robomimic, tmp_path, below, monkeypatch, root) -> None:
    """From Python a URL is refused too, though a Path has lost one of its slashes."""
    monkeypatch.chdir(tmp_path)
    source = robomimic(3)
    before = below(tmp_path)
    with pytest.raises(UsageError):
        ingest([source], root=Path(root), name="x")
    assert below(tmp_path) == before


@pytest.mark.parametrize("package", ["h5py", "crc32c", "numcodecs", "PIL"])
def test_missing_package(robomimic, tmp_path, package) -> None:
    """Where a package of an extra is not installed, the command that installs it is named, and nothing is written."""
    code = f"import sys; sys.modules[{package!r}] = None\nfrom pitools import cli; sys.exit(cli.run(cli.group, 'pit'))"
    words = ["dataset", "ingest", str(robomimic(3)), "--to", "root", "--name", "x"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "pip install 'pitools-hpc[data]'" in done.stderr) == (4, True), done.stderr
    assert not (tmp_path / "root").exists()


def test_root_is_a_root(pit, robomimic, publish, tmp_path) -> None:
    """A version is no root, and an append goes beside its parent; nothing is written otherwise."""
    source = str(robomimic(3))
    (version,) = records(pit("dataset", "ingest", source, "--to", "root", "--name", "x"))
    more = str(robomimic(4, name="more.hdf5", seed=1))
    for words in (["--to", version["path"]], ["--to", "root/x"], ["--to", "other", "--append", "root/x"]):
        assert pit("dataset", "ingest", more, "--name", "x", *words).returncode == 2
    assert not (tmp_path / "other").exists()
    assert pit("dataset", "check", "root/x").returncode == 0
