"""What users type: parts of datasets, plain stores, pipes, limits, mistakes, and what each of them is answered."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import zarr
from click.shell_completion import ShellComplete

from pitools.commands.stage import group
from pitools.dataset.ingest.ingest import ingest

Cli = Callable[..., tuple[int, str, str]]
STEPS = 100


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def build(folder: Path, zarr_format: int = 3, *, sharded: bool = False) -> Path:
    """A store of nested groups, 100 steps in 10 episodes of 10."""
    created = zarr.create_group(folder, zarr_format=zarr_format)  # type: ignore[arg-type]
    values = np.random.default_rng(0).integers(0, 255, (STEPS, 64), dtype="uint8")
    more: dict[str, Any] = {"shards": (20, 64)} if sharded else {}
    created.create_array("data/obs/image", data=values, chunks=(10, 64), **more)
    created.create_array("data/action", data=np.ones((STEPS, 2), "float32"), chunks=(10, 2))
    created.create_array("meta/episode_ends", data=np.arange(10, STEPS + 1, 10), chunks=(10,))
    return folder


@pytest.fixture(params=[(2, False), (3, False), (3, True)], ids=["v2", "v3", "sharded"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The store above, of each format."""
    zarr_format, sharded = request.param
    return build(tmp_path / "pick.zarr", zarr_format, sharded=sharded)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of ours: 5 episodes of 300 steps, in several shards."""
    import h5py

    from pitools.dataset.ingest import chunking

    folder = tmp_path_factory.mktemp("cli")
    with h5py.File(folder / "a.hdf5", "w") as file:
        for i in range(5):
            file[f"data/demo_{i}/actions"] = np.full((300, 2), i, np.float32)
            file[f"data/demo_{i}/obs/state"] = np.full((300, 1), i, np.float64)
            file[f"data/demo_{i}/obs/front_image"] = np.full((300, 4, 4, 3), i, np.uint8)
            file[f"data/demo_{i}/obs/wrist_image"] = np.full((300, 4, 4, 3), i, np.uint8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunking, "CHUNK_BYTES", 1024)
        patched.setattr(chunking, "SHARD_BYTES", 4096)
        return Path(ingest([folder / "a.hdf5"], root=folder / "root", name="pick").path)


def arrays_of(path: str) -> set[str]:
    return set(json.loads((Path(path) / "manifest.json").read_text())["arrays"])


# Parts


@pytest.mark.parametrize(
    ("words", "arrays"),
    [
        (["--arrays", "action"], {"action"}),
        (["--arrays", "action, obs/state"], {"action", "obs/state"}),
        (["--arrays", "action", "--arrays", "obs/state"], {"action", "obs/state"}),
        (["--arrays", "/obs/"], {"obs/state", "obs/front_image", "obs/wrist_image"}),
        (["--arrays", "obs/*_image"], {"obs/front_image", "obs/wrist_image"}),
    ],
)
def test_arrays(recording: Path, root: Path, pit_stage: Cli, words: list[str], arrays: set[str]):
    """Names, groups and globs, with or without blanks, in one option or several; episodes' boundaries come along."""
    code, out, err = pit_stage("run", recording, "--to", root, *words)
    assert (code, err) == (0, "")
    assert arrays_of(records(out)[0]["path"]) == arrays | {"episode_offsets", "episode_json"}


def test_the_order_of_names_is_nothing(recording: Path, root: Path, pit_stage: Cli):
    """The same part is the same set, however it was asked for."""
    first = records(pit_stage("run", recording, "--to", root, "--arrays", "obs/state,action")[1])[0]
    again = records(pit_stage("run", recording, "--to", root, "--arrays", "action,obs/state,action")[1])[0]
    assert (again["state"], again["version"]) == ("present", first["version"])


@pytest.mark.parametrize(("words", "run"), [(["--steps", "310:320"], (310, 320)), (["--episodes", "1"], (300, 600))])
def test_steps_and_episodes(recording: Path, root: Path, pit_stage: Cli, words: list[str], run: tuple[int, int]):
    """Fewer bytes than the whole, every one of the wanted steps, and the rest refused by the reader."""
    from pitools.dataset.reader import open_dataset

    full = sum(path.stat().st_size for path in recording.rglob("*") if path.is_file())
    code, out, err = pit_stage("run", recording, "--to", root, *words)
    assert (code, err) == (0, "")
    done = records(out)[0]
    assert done["copied_bytes"] == done["bytes"] < full
    part = open_dataset(Path(done["path"]))
    assert set(part.read("action", *run)[:, 0].tolist()) == {1.0}
    with pytest.raises(IndexError, match=f"{run[0]}:{run[1]}"):
        part.read("action", 0, 1)


def test_a_list_tells_parts_apart(recording: Path, root: Path, pit_stage: Cli):
    """Parts of one dataset have one name; the list says what each holds."""
    for words in (("--arrays", "action"), ("--episodes", "0")):
        assert pit_stage("run", recording, "--to", root, *words)[0] == 0
    pit_stage("run", recording, "--to", root)
    parts = {record["part"] for record in records(pit_stage("list", root)[1])}
    assert len(parts) == 3
    assert any(part.startswith("action") and "steps 0:" in part for part in parts)


def test_a_part_that_is_everything_is_said_to_be(recording: Path, root: Path, pit_stage: Cli):
    """Who asked for less and gets the whole version is told."""
    code, out, err = pit_stage("run", recording, "--to", root, "--episodes", "0-4")
    assert (code, records(out)[0]["version"]) == (0, recording.name)
    assert "the whole version" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--arrays", "actoin"], ["no array 'actoin'", 'did you mean "action"?']),
        (["--arrays", "action,obs/stat"], ["no array 'obs/stat'", 'did you mean "obs/state"?']),
        (["--arrays", "*_depth"], ["no array '*_depth'", "known: action"]),
        (["--arrays", " , "], ["action"]),
        (["--steps", "5"], ["'5'", "1000:2000"]),
        (["--steps", "a:b"], ["'a:b'", "1000:2000"]),
        (["--steps", "1000:2000"], ["1000:2000", "1500", "0:1500"]),
        (["--steps", "-2000:"], ["-2000:", "1500"]),
        (["--steps", "20:10"], ["20:10", "10:20"]),
        (["--episodes", "5"], ["5", "0 to 4"]),
        (["--episodes", "3-1"], ["3-1", "1-3"]),
        (["--episodes", "train"], ["'train'", "3,7-9"]),
        (["--episodes", "1", "--steps", "0:10"], ["--steps", "--episodes"]),
    ],
)
def test_parts_that_are_not_there(recording: Path, root: Path, pit_stage: Cli, words: list[str], told: list[str]):
    """Exit 2, which option, what is wrong with it and what there is; `plan` says the same; nothing is made."""
    for command in ("run", "plan"):
        code, out, err = pit_stage(command, recording, "--to", root, *words)
        assert (code, out) == (2, "")
        assert f"where: {words[-2] if words[0] == '--arrays' else '--'}" in err
        assert all(text in err for text in told)
    assert not root.exists()


# Plain stores


def test_a_plain_store(store: Path, root: Path, pit_stage: Cli):
    """Staged whole and readable, with what could not be proven; the second time it is there, and nothing is said."""
    code, out, err = pit_stage("run", store, "--to", root)
    assert code == 0
    first = records(out)[0]
    assert (first["dataset"], first["state"], first["copied_bytes"]) == ("pick", "staged", first["bytes"])
    assert err.count("note:") == err.count("have no checksum") == 1
    staged, source = zarr.open_group(first["path"], mode="r"), zarr.open_group(store, mode="r")
    for name in ("data/obs/image", "data/action"):
        assert np.array_equal(staged[name][:], source[name][:])  # type: ignore[index,arg-type]
    code, out, err = pit_stage("run", store, "--to", root)
    assert (code, err) == (0, "")
    assert (records(out)[0]["state"], records(out)[0]["version"]) == ("present", first["version"])
    assert pit_stage("check", root)[0] == 0


def test_a_part_of_a_plain_store(store: Path, root: Path, pit_stage: Cli):
    """Arrays and episodes of a store that has a `meta/episode_ends`; asked again in other words it is there."""
    code, out, _ = pit_stage("run", store, "--to", root, "--arrays", "data/obs,data/action", "--episodes", "4-5")
    part = records(out)[0]
    assert (code, part["state"]) == (0, "staged")
    staged, source = zarr.open_group(part["path"], mode="r"), zarr.open_group(store, mode="r")
    image: Any = staged["data/obs/image"]
    assert np.array_equal(image[40:60], source["data/obs/image"][40:60])  # type: ignore[index,arg-type]
    assert len(list(Path(part["path"]).glob("data/action/**/[0-9]*"))) < 20
    again = pit_stage("run", store, "--to", root, "--arrays", "data/action,data/obs/", "--episodes", "4-5")
    assert records(again[1])[0]["state"] == "present"


def test_verify_replaces_a_damaged_copy_of_a_plain_store(store: Path, root: Path, pit_stage: Cli):
    """A flipped bit that only content shows: `--verify` finds it, the good copy takes its place and is said to."""
    path = Path(records(pit_stage("run", store, "--to", root)[1])[0]["path"])
    chunk = next(file for file in path.glob("data/action/**/*") if file.name[0].isdigit() and file.is_file())
    chunk.chmod(0o600)
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    assert pit_stage("check", root)[0] == 1
    assert records(pit_stage("run", store, "--to", root)[1])[0]["state"] == "present"
    code, out, _ = pit_stage("run", store, "--to", root, "--verify")
    assert (code, records(out)[0]["state"]) == (0, "repaired")
    assert pit_stage("check", root)[0] == 0
    chunk.unlink()
    plan = records(pit_stage("plan", store, "--to", root)[1])[0]
    assert (plan["state"], plan["path"]) == ("damaged", str(path))
    assert records(pit_stage("run", store, "--to", root)[1])[0]["state"] == "repaired"
    assert records(pit_stage("plan", store, "--to", root)[1])[0]["state"] == "present"


@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_check_repairs_a_plain_store_whose_manifest_is_damaged(store: Path, root: Path, pit_stage: Cli, damage: str):
    """As `run` does; where the source was written since, nothing says any more what the set was, and that is told."""
    assert pit_stage("run", store, "--to", root)[0] == 0
    (final,) = (root / "objects").iterdir()
    file = final / "manifest.json"
    data = file.read_bytes()

    def check() -> tuple[int, list[str]]:
        file.unlink()
        if damage != "gone":
            file.write_bytes(b"{" if damage == "cut" else data.replace(b'"steps"', b'"steps" '))
        code, out, _ = pit_stage("check", root, "--repair")
        actual = [json.loads(line) for line in out.splitlines()]
        return code, [record["state"] for record in actual if record["schema"] == "pit.stage-repair/1"]

    assert check() == (0, ["repaired"])
    assert file.read_bytes() == data
    assert pit_stage("check", root)[0] == 0
    os.utime(next(path for path in store.rglob("*") if path.is_file()), (1, 1))
    assert check() == (1, ["failed"])


def test_a_plain_store_that_is_used_again_is_used_now(store: Path, root: Path, pit_stage: Cli):
    """A set that `run` found in place is not the next to be evicted."""
    version = records(pit_stage("run", store, "--to", root)[1])[0]["version"]
    os.utime(root / ".leases" / version, (0, 0))
    start_time = time.time()
    assert records(pit_stage("run", store, "--to", root)[1])[0]["state"] == "present"
    assert (root / ".leases" / version).stat().st_mtime > start_time - 1


def test_an_array_that_lost_its_metadata_is_said(tmp_path: Path, root: Path, pit_stage: Cli):
    """Its chunks are files of no array: they are copied, and whoever stages them hears of it."""
    store = build(tmp_path / "pick.zarr")
    (store / "data/action/zarr.json").unlink()
    code, _, err = pit_stage("run", store, "--to", root)
    assert code == 0
    assert "10 files are in no array's folder" in err
    assert "data/action/c/0/0" in err


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (lambda store: os.truncate(store / "data/obs/image/c/0/0", 3), "data/obs/image/c/0/0"),
        (lambda store: (store / "data/action/zarr.json").write_text("{"), "data/action/zarr.json"),
        (lambda store: (store / "link").symlink_to("/etc/passwd"), "link"),
    ],
)
def test_a_store_that_cannot_be_staged(
    tmp_path: Path, root: Path, pit_stage: Cli, plant: Callable[[Path], object], told: str
):
    """Exit 5, the file by its whole path, and nothing at the root that could be taken for a set."""
    store = build(tmp_path / "pick.zarr", sharded=True)
    plant(store)
    code, out, err = pit_stage("run", store, "--to", root)
    assert (code, out) == (5, "")
    assert f"where: {store}/{told}" in err
    assert not root.exists() or not list((root / "objects").iterdir())


def test_a_store_of_one_array(tmp_path: Path, root: Path, pit_stage: Cli):
    """It has no names to choose from, and the error says so."""
    zarr.create_array(tmp_path / "x.zarr", data=np.ones((40, 2)), chunks=(10, 2))
    code, _, err = pit_stage("run", tmp_path / "x.zarr", "--to", root, "--arrays", "x")
    assert code == 2
    assert ("'x'" in err, "--arrays" in err) == (True, True)
    code, out, _ = pit_stage("run", tmp_path / "x.zarr", "--to", root, "--steps", "10:20")
    assert (code, records(out)[0]["files"]) == (0, 2)
    assert "steps" in pit_stage("run", tmp_path / "x.zarr", "--to", root, "--episodes", "1")[2]


# Places


def test_a_root_inside_the_source_is_refused(small: Path, tmp_path: Path, pit_stage: Cli, monkeypatch):
    """It would put files into the data, also through a link; nothing has been put there."""
    store = build(tmp_path / "pick.zarr")
    before = sorted(store.rglob("*"))
    (tmp_path / "link").symlink_to(store)
    for source, root in ((store, store), (store, store / "a/b"), (store, tmp_path / "link/x"), (small, small / "x")):
        for words in (["run"], ["run", "--dry-run"], ["plan"]):
            code, out, err = pit_stage(*words, source, "--to", root)
            assert (code, out) == (2, "")
            assert (str(root) in err, "where: --to" in err) == (True, True)
    assert sorted(store.rglob("*")) == before
    # A staged set may well be a source of its own root: a part of it, say.
    path = records(pit_stage("run", store, "--to", tmp_path / "pit")[1])[0]["path"]
    assert pit_stage("run", path, "--to", tmp_path / "pit", "--steps", "0:10")[0] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "SMALL", "--to", ""], ["an empty path", "where: --to", "variable"]),
        (["run", "SMALL", "--to", "/"], ["/ cannot be a staging folder", "where: --to"]),
        (["run", "SMALL", "--to", "/tmp/.."], ["/ cannot be a staging folder"]),
        (["plan", "SMALL", "--to", ""], ["an empty path"]),
        (["evict", "x", "--to", "/"], ["/ cannot be a staging folder"]),
        (["list", ""], ["an empty path", "where: ROOT"]),
        (["run", "", "--to", "ROOT"], ["an empty path", "where: SOURCE"]),
        (["run", "SMALL", "--to", "ROOT", "--receipt", ""], ["an empty path", "where: --receipt"]),
        (["run", "SMALL", "--to", "ROOT", "--receipt", "-"], ["- is not a path", "stdout"]),
        (["run", "SMALL", "--to", "ROOT", "--receipt", "SMALL"], ["is a folder", "stage.jsonl"]),
        (["run", "SMALL", "ROOT"], ["staging folder", "--to ROOT"]),
        (["run", "SMALL", "--to", "ROOT", "--quota", "20M"], ['"20M" is not a size', "where: --quota", "200GiB"]),
        (["run", "SMALL", "--to", "ROOT", "--bwlimit", "1MiB/s"], ["where: --bwlimit"]),
        (["run", "SMALL", "--to", "ROOT", "--timeout", "soon"], ["where: --timeout", "90s"]),
        (["plan", "-", "--to", "ROOT"], ["only source", "pit-stage run -"]),
        (["run", "SMALL", "--to", "ROOT", "--array", "x"], ["--arrays"]),
        (["run", "SMALL", "--to", "ROOT", "--fanout"], ["--fanout"]),
    ],
)
def test_mistakes(small: Path, root: Path, pit_stage: Cli, monkeypatch, words: list[str], told: list[str]):
    """Exit 2 before anything is done, and what was wrong, where, and what to write instead."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    position = {"SMALL": str(small), "ROOT": str(root)}
    code, out, err = pit_stage(*(position.get(word, word) for word in words))
    assert (code, out) == (2, "")
    assert all(text.replace("ROOT", str(root) if "--to" in text else "ROOT") in err for text in told)
    assert not root.exists()


def test_a_bad_variable_is_named(small: Path, root: Path, pit_stage: Cli, monkeypatch):
    """A limit from the environment is not said to come from the command line; an empty one is none."""
    monkeypatch.setenv("PIT_STAGE_QUOTA", "much")
    code, _, err = pit_stage("run", small, "--to", root)
    assert (code, "where: PIT_STAGE_QUOTA" in err) == (2, True)
    monkeypatch.setenv("PIT_STAGE_QUOTA", "")
    assert pit_stage("run", small, "--to", root)[0] == 0


# Plans


def test_a_dry_run_is_a_plan_and_changes_nothing(small: Path, root: Path, pit_stage: Cli):
    """The same records as `plan`, no folder, and the second time what stands."""
    code, out, _ = pit_stage("run", small, "--to", root, "--dry-run")
    assert (code, root.exists()) == (0, False)
    [plan] = records(out)
    assert (plan["schema"], plan["state"], plan["copy_bytes"]) == ("pit.stage-plan/1", "absent", plan["bytes"])
    pit_stage("run", small, "--to", root)
    [plan] = records(pit_stage("run", small, "--to", root, "--dry-run")[1])
    assert (plan["state"], plan["copy_bytes"], plan["evict_bytes"]) == ("present", 0, 0)


def test_a_plan_keeps_to_the_limits(make_dataset, root: Path, pit_stage: Cli, monkeypatch):
    """It says what `run` with the same limits does: no room; room when an old set goes; and then that one goes."""
    old, new = (make_dataset({"a": os.urandom(4 << 20)}, name) for name in ("old", "new"))
    assert pit_stage("run", old, "--to", root)[0] == 0
    limits = ["--quota", "13MiB"]
    code, out, _ = pit_stage("plan", new, "--to", root, *limits)
    assert (code, records(out)[0]["fits"]) == (1, False)  # it was used a moment ago
    assert pit_stage("run", new, "--to", root, *limits)[0] == 75
    os.utime(root / ".leases" / old.name, (0, 0))
    code, out, _ = pit_stage("plan", new, "--to", root, *limits)
    assert (code, records(out)[0]["fits"]) == (0, True)
    assert records(out)[0]["evict_bytes"] >= 4 << 20
    assert (root / "objects" / old.name).is_dir()
    monkeypatch.setattr(sys, "stdin", io.StringIO(out))
    assert pit_stage("run", "-", *limits)[0] == 0
    assert not (root / "objects" / old.name).exists()
    assert pit_stage("plan", old, "--to", root, "--min-free", "4000TiB")[0] == 1
    assert records(pit_stage("plan", old, "--to", root)[1])[0]["evict_bytes"] == 0


@pytest.mark.parametrize("kind", ["dataset", "store"])
def test_a_plan_of_a_part_through_a_pipe(recording: Path, tmp_path: Path, program: list[str], kind: str):
    """`plan … | run -` as the shell does it, and the part is the one that was planned."""
    source = recording if kind == "dataset" else build(tmp_path / "pick.zarr")
    words = ["--arrays", "*action", "--episodes", "1-2", "--to", str(tmp_path / "pit")]
    plan = subprocess.run([*program, "plan", source, *words], capture_output=True, text=True, check=True)
    done = subprocess.run([*program, "run", "-"], input=plan.stdout, capture_output=True, text=True, check=True)
    [planned], [staged] = records(plan.stdout), records(done.stdout)
    assert (planned["arrays"], planned["episodes"]) == (["*action"], "1-2")
    assert (staged["state"], staged["bytes"]) == ("staged", planned["bytes"])
    result = subprocess.run([*program, "run", "-"], input=plan.stdout, capture_output=True, text=True, check=True)
    assert records(result.stdout)[0]["state"] == "present"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["no plan", "pipefail"]),
        ("DATASET  VERSION\n", ["not a plan", "stdin, line 1", "--format jsonl"]),
        ('{"schema":"pit.stage-run/1"}\n', ["not a plan", "pit.stage-run/1"]),
        ("\udcff\n", ["not a plan"]),
    ],
)
def test_a_pipe_without_plans(pit_stage: Cli, monkeypatch, text: str, told: list[str]):
    """Exit 2 also where nothing came: a `plan` that failed must not look like data that is staged."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, out, err = pit_stage("run", "-")
    assert (code, out) == (2, "")
    assert all(part in err for part in told)


# While it runs


def test_bwlimit(make_dataset, root: Path, pit_stage: Cli):
    """Bytes are read no faster than was said."""
    folder = make_dataset({str(i): os.urandom(1 << 20) for i in range(6)})
    code, out, _ = pit_stage("run", folder, "--to", root, "--bwlimit", "8MiB")
    assert code == 0
    assert records(out)[0]["wall_s"] > 0.3


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_is_stopped_and_goes_on(
    tmp_path: Path, root: Path, program: list[str], pit_stage: Cli, number: signal.Signals, code: int
):
    """Ctrl-C and scancel: the code of the signal, one line that nothing is lost, and the next run reads the rest."""
    store = tmp_path / "pick.zarr"
    values = np.random.default_rng(0).integers(0, 255, (8, 1 << 20), dtype="uint8")
    zarr.create_array(store, data=values, chunks=(1, 1 << 20), compressors=None)
    words = ["run", str(store), "--to", str(root)]
    slow = [*program, *words, "--bwlimit", "4MiB", "--readers", "1"]
    process = subprocess.Popen(slow, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 20
    while time.monotonic() < until and len(list(root.glob(".tmp/*.partial/c/*/0"))) < 4:  # three are done
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "the same command resumes" in err
    [done] = records(pit_stage(*words)[1])
    assert done["state"] == "staged"
    assert done["resumed_bytes"] > 0
    assert done["copied_bytes"] + done["resumed_bytes"] == done["bytes"]


@pytest.mark.parametrize(
    "words", [("check", "s3://lab/x"), ("list", "s3://lab/x"), ("run", "/data", "--to", "gs://b/x")]
)
def test_a_url_where_a_path_is_wanted(words: tuple[str, ...], pit_stage: Cli):
    """It is not taken for a folder called `s3:`."""
    code, out, err = pit_stage(*words)
    assert (code, out) == (2, "")
    assert "path of this machine" in err


# The shell


def test_completion():
    """Commands and options by name; paths are left to the shell, which knows the files."""
    shell = ShellComplete(group, {}, "pit-stage", "_PIT_STAGE_COMPLETE")

    def offered(*words: str) -> list[tuple[str, str]]:
        return [(item.value, item.type) for item in shell.get_completions(list(words[:-1]), words[-1])]

    assert ("plan", "plain") in offered("pl")
    assert ("--arrays", "plain") in offered("run", "--ar")
    for words in (("run", "/da"), ("run", "x", "--to", "/nv"), ("list", "/nv"), ("plan", "/da")):
        assert offered(*words) == [(words[-1], "dir")]
    assert offered("run", "x", "--receipt", "r") == [("r", "file")]


@pytest.mark.parametrize("command", sorted(group.commands))
def test_help(command: str, pit_stage: Cli):
    """Every command has help on stdout, and none of its options is without a word."""
    code, out, err = pit_stage(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: pit-stage {command}")
    options = [param for param in group.commands[command].params if isinstance(param, click.Option)]
    assert all(option.help for option in options)
