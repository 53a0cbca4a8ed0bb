from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import s3_server
from s3_server import BUCKET, KEY_ID, SECRET, Server

from pitools.dataset.ingest import chunking
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.store import manifest

BOUNDS = [0, 30, 180, 200, 230]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def episodes(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 4 episodes in many small shards, whose copy is at s3://lab/episodes/x/<version>."""
    import h5py

    created = tmp_path_factory.mktemp("episodes")
    with h5py.File(created / "a.hdf5", "w") as file:
        for number, (start, stop) in enumerate(pairwise(BOUNDS)):
            steps = np.arange(start, stop, dtype=np.int64)
            file[f"data/demo_{number}/actions"] = steps[:, None] * [1, 10]
            file[f"data/demo_{number}/obs/state"] = steps[:, None] + [0.5]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunking, "CHUNK_BYTES", 128)
        patched.setattr(chunking, "SHARD_BYTES", 512)
        folder = Path(ingest([created / "a.hdf5"], root=created / "root", name="x").path)
    s3_server.put_tree(server.port, folder, f"episodes/x/{folder.name}")
    return folder


@pytest.fixture
def quiet(pit_stage: Run, root: Path) -> Run:
    """Runs `pit-stage`; no secret is in anything that it says or keeps, and nothing of the library in this process."""

    def run(*argv: object) -> tuple[int, str, str]:
        actual = pit_stage(*argv)
        retained = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file()) if root.exists() else b""
        for secret in (SECRET, KEY_ID, "hunter2"):
            assert secret not in actual[1] + actual[2]
            assert secret.encode() not in retained
        assert "obstore" not in sys.modules
        return actual

    return run


def one(out: str) -> dict:
    """The only record."""
    (line,) = out.splitlines()
    return json.loads(line)


def test_run_stages_a_version(uploaded: Path, root: Path, quiet: Run):
    """Staged, then present; the record names the URL, and what stands passes `check`."""
    url = f"s3://{BUCKET}/data/pick/{uploaded.name}"
    code, out, err = quiet("run", url, "--to", root)
    record = one(out)
    assert (code, err, record["state"], record["source"], record["version"]) == (0, "", "staged", url, uploaded.name)
    assert one(quiet("run", url, "--to", root)[1])["state"] == "present"
    code, out, _ = quiet("check", root)
    assert (code, one(out)["findings"]) == (0, 0)
    assert one(quiet("list", root)[1])["source"] == url


def test_plan_into_run(uploaded: Path, root: Path, quiet: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`plan` asks for the manifest alone, finds the only version below a name, and `run -` does what it said."""
    code, out, _ = quiet("plan", f"s3://{BUCKET}/data/pick", "--to", root)
    plan = one(out)
    assert (code, plan["state"], plan["version"]) == (0, "absent", uploaded.name)
    assert plan["source"] == f"s3://{BUCKET}/data/pick/{uploaded.name}"
    assert not root.exists()
    (tmp_path / "plans").write_text(out)
    with (tmp_path / "plans").open() as plans:
        monkeypatch.setattr(sys, "stdin", plans)
        code, out, _ = quiet("run", "-")
    assert (code, one(out)["copied_bytes"]) == (0, plan["copy_bytes"])
    assert one(quiet("plan", plan["source"], "--to", root)[1])["state"] == "present"


@pytest.mark.parametrize(
    ("choice", "arrays", "steps"),
    [
        (("--arrays", "obs/state"), {"obs/state"}, (0, 230)),
        (("--steps", "100:150"), {"obs/state", "action"}, (100, 150)),
        (("--episodes", "2"), {"obs/state", "action"}, (180, 200)),
    ],
    ids=["arrays", "steps", "episodes"],
)
def test_a_part_of_a_version_is_staged(
    episodes: Path, root: Path, quiet: Run, choice: tuple[str, str], arrays: set[str], steps: tuple[int, int]
):
    """Only the shards that it needs are read, and what was chosen reads as in the whole."""
    url = f"s3://{BUCKET}/episodes/x/{episodes.name}"
    planned = one(quiet("plan", url, "--to", root, *choice)[1])
    code, out, err = quiet("run", url, "--to", root, *choice)
    record = one(out)
    assert (code, err) == (0, "")
    assert record["version"] == planned["version"] != episodes.name
    assert record["copied_bytes"] == planned["copy_bytes"] < manifest.load_manifest(episodes)[0].total_bytes
    assert quiet("check", root)[0] == 0
    part, full = open_dataset(Path(record["path"])), open_dataset(episodes)
    assert set(part.arrays) == arrays
    for name in arrays:
        assert part.read(name, *steps).tolist() == full.read(name, *steps).tolist()


def test_a_store_without_a_manifest_is_staged(episodes: Path, root: Path, quiet: Run, server: Server):
    """A plain Zarr store is listed, staged and judged; one that stands is not read again, one that changed is."""
    files = {path.relative_to(episodes).as_posix(): path for path in episodes.rglob("*") if path.is_file()}
    del files[manifest.MANIFEST_FILE]
    s3_server.put(server.port, {f"bare/x.zarr/{path}": file for path, file in files.items()})
    url = f"s3://{BUCKET}/bare/x.zarr"
    code, out, _ = quiet("run", url, "--to", root)
    first = one(out)
    assert (code, first["state"], first["files"]) == (0, "staged", len(files))
    assert one(quiet("run", url, "--to", root)[1])["state"] == "present"
    assert open_dataset(Path(first["path"])).read("action", 0, 230).tolist()
    s3_server.put(server.port, {"bare/x.zarr/README": b"new"})
    assert one(quiet("run", url, "--to", root)[1])["version"] != first["version"]


def test_a_damaged_copy_is_repaired_from_the_store(uploaded: Path, root: Path, quiet: Run):
    """`check --repair` knows where it came from."""
    path = Path(one(quiet("run", f"s3://{BUCKET}/data/pick/{uploaded.name}", "--to", root)[1])["path"])
    file = path / "images/c/1/0"
    file.chmod(0o644)
    file.write_bytes(os.urandom(file.stat().st_size))
    assert quiet("check", root)[0] == 1
    assert quiet("check", "--repair", root)[0] == 0
    assert quiet("check", root)[0] == 0
    assert file.read_bytes() == (uploaded / "images/c/1/0").read_bytes()


@pytest.mark.parametrize(
    ("url", "change", "code", "word"),
    [
        (f"s3://{BUCKET}/objects", {}, 5, "manifest.json"),
        ("s3://no-such/data", {}, 2, "bucket 'no-such'"),
        (f"s3://id:hunter2@{BUCKET}/data", {}, 2, "where: s3://…"),
        ("https://host/data", {}, 2, "AWS_ENDPOINT_URL"),
        (f"s3://{BUCKET}/data/pick", {"AWS_SECRET_ACCESS_KEY": "hunter2"}, 4, "AWS_ACCESS_KEY_ID"),
        (f"s3://{BUCKET}/data/pick", {"AWS_ACCESS_KEY_ID": "", "AWS_PROFILE": "none"}, 3, "profile 'none'"),
        (f"s3://{BUCKET}/data/pick", {"AWS_ENDPOINT_URL": "http://me:hunter2@x"}, 3, "carries a name, a password"),
        (f"s3://{BUCKET}/data/pick", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, 75, "the connection was refused"),
    ],
    ids=["no dataset", "no bucket", "secret in URL", "https", "wrong keys", "no profile", "secret in endpoint", "down"],
)
def test_what_goes_wrong_has_its_exit_code_and_says_what_to_do(
    uploaded: Path,
    root: Path,
    quiet: Run,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    change: dict[str, str],
    code: int,
    word: str,
):
    """Of `run` and `plan` alike; nothing is left at the root, and no secret is repeated."""
    for name, text in change.items():
        monkeypatch.setenv(name, text) if text else monkeypatch.delenv(name)
    for command in ("run", "plan"):
        actual = quiet(command, url, "--to", root)
        assert (actual[0], actual[1]) == (code, "")
        assert word in actual[2]
        assert "Traceback" not in actual[2]
    assert not root.exists()


def test_keys_below_a_url_that_climb_are_refused(root: Path, quiet: Run, server: Server, tmp_path: Path):
    """A manifest that names `..` is no manifest, wherever it is read from."""
    names = {"../out": b"x"}
    entries = tuple(manifest.FileEntry(path=path, bytes=1, digest="xxh3_128:" + "0" * 32) for path in names)
    data = manifest.encode_manifest(manifest.Manifest(name="x", episodes=1, steps=1, arrays={}, files=entries))
    s3_server.put(server.port, {f"climb/v/{manifest.MANIFEST_FILE}": data, "climb/out": b"x"})
    code, out, err = quiet("run", f"s3://{BUCKET}/climb/v", "--to", root)
    assert (code, out) == (5, "")
    assert ".." in err
    assert not root.exists()
