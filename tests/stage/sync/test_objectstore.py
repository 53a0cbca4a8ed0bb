"""`pit-stage sync` from a bucket: a real server on loopback, and what it was asked."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pitools.store.retirement import Retirement
from pitools.store.version_state import Quarantine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sources/object_store"))
import s3_server
from s3_server import BUCKET, Exchange, Server, proxied

MakeDataset = Callable[..., Path]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One S3 server; each test has a prefix of its own."""
    with s3_server.serving(tmp_path_factory.mktemp("s3")) as running:
        yield running


class Bucket:
    """A prefix with datasets, and a policy that keeps them at a root."""

    def __init__(self, folder: Path, build: MakeDataset, server: Server, pit_stage: Callable[..., tuple]) -> None:
        self.folder, self.root, self.file = folder, folder / "nvme" / "pit", folder / "stage.toml"
        self.port, self.prefix = server.port, f"sets/{folder.name}"
        self._build, self._pit_stage = build, pit_stage
        self.rule()

    def rule(self, more: str = "", source: str = "") -> None:
        source = source or f"s3://{BUCKET}/{self.prefix}"
        self.file.write_text(f'[[rules]]\nname = "r"\nfrom = "{source}"\nto = "{self.root}"\n{more}')

    def put(self, name: str, *, without: str = "") -> str:
        """Upload a new version, its manifest last; its name."""
        folder = self._build(self.folder / "data", {"zarr.json": b"{}", "a/c/0": os.urandom(5000)}, name)
        files = {f"{self.prefix}/{name}/{folder.name}/{path}": folder / path for path in ("zarr.json", "a/c/0")}
        files[f"{self.prefix}/{name}/{folder.name}/manifest.json"] = folder / "manifest.json"
        s3_server.put(self.port, {key: path for key, path in files.items() if not (without and key.endswith(without))})
        return folder.name

    def sync(self, *more: object) -> tuple[int, list[tuple[str, str]], str]:
        code, out, err = self._pit_stage("sync", "--policy", self.file, "--format", "jsonl", *more)
        return code, [(record["action"], record["version"]) for record in map(json.loads, out.splitlines())], err

    def staged(self) -> set[str]:
        return {path.name for path in (self.root / "objects").glob("*")}

    def age(self) -> None:
        for path in (self.root / ".leases").iterdir():
            os.utime(path, (1000, 1000))


@pytest.fixture
def bucket(
    tmp_path: Path,
    build: MakeDataset,
    server: Server,
    pit_stage: Callable[..., tuple],
    monkeypatch: pytest.MonkeyPatch,
) -> Bucket:
    """Nothing uploaded, nothing staged; the user's environment names the server."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return Bucket(tmp_path, build, server, pit_stage)


def test_the_newest_of_a_prefix_are_kept(bucket: Bucket):
    """Newest is uploaded last; what is replaced is evicted, what is unfinished is none, a quiet run does nothing."""
    bucket.rule('pattern = "pick*"\nnewest = 1\ncap = "1MiB"\n')
    first, other = bucket.put("pick"), bucket.put("pick2")
    bucket.put("place")
    bucket.put("pick3", without="manifest.json")
    code, changes, err = bucket.sync()
    assert (code, sorted(changes), err) == (0, sorted([("staged", first), ("staged", other)]), "")
    assert bucket.sync() == (0, [], "")
    bucket.age()
    time.sleep(1.1)  # an upload's time is in whole seconds
    second = bucket.put("pick")
    assert bucket.sync("--dry-run")[1] == [("stage", second), ("evict", first)]
    assert bucket.sync() == (0, [("staged", second), ("evicted", first)], "")
    assert bucket.staged() == {second, other}
    record = json.loads((bucket.root / ".records" / f"{second}.json").read_text())
    assert record["source"] == f"s3://{BUCKET}/{bucket.prefix}/pick/{second}"


def test_what_the_uploaded_catalog_rules_out_is_not_kept(bucket: Bucket):
    """A retired version and one in quarantine are passed over; one of which episodes are excluded is kept."""
    versions = []
    for kind, record in (
        ("quarantine", Quarantine(whole_version=False, set_at="", set_by="", episodes={3: ("blurred",)})),
        ("quarantine", Quarantine(whole_version=True, set_at="", set_by="")),
        ("retired", Retirement(name="pick", version="", published="", retired_at="", retired_by="")),
    ):
        versions.append(bucket.put("pick"))
        file = bucket.folder / "record.json"
        file.write_bytes(msgspec.json.encode(record))
        s3_server.put(bucket.port, {f"{bucket.prefix}/pick/.catalog/{kind}/{versions[-1]}.json": file})
    bucket.rule("newest = 3\n")
    assert bucket.sync() == (0, [("staged", versions[0])], "")


def test_few_questions_are_asked(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    """A listing of names, one of each wanted dataset, three for each version: cron asks every few minutes."""
    for name in ("pick", "pick", "other1", "other2", "other3"):
        bucket.put(name)
    bucket.rule('pattern = "pick"\nnewest = 2\n')
    assert len(bucket.sync()[1]) == 2
    with proxied(bucket.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        assert bucket.sync() == (0, [], "")
        assert proxy.asked.value <= 2 + 3 * 2


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"s3://{BUCKET}/sets/nothing", "are bucket and prefix the right ones?"),
        ("s3://no-such-bucket/sets", "no bucket 'no-such-bucket'"),
    ],
)
def test_a_wrong_place_is_the_policys_mistake(bucket: Bucket, source: str, said: str):
    """Exit 3, one line that names the URL, and nothing that stands is given up."""
    version = bucket.put("pick")
    assert bucket.sync()[1] == [("staged", version)]
    bucket.age()
    bucket.rule(source=source)
    metrics = bucket.folder / "stage.prom"
    code, changes, err = bucket.sync("--metrics", metrics)
    assert (code, changes, len(err.splitlines())) == (3, [], 1), err
    assert source in err
    assert said in err
    assert f'errors_total{{policy="{bucket.file}",kind="policy"}} 1' in metrics.read_text()
    assert bucket.staged() == {version}


def test_a_store_that_is_down_costs_nothing_that_stands(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    """Exit 75, to be tried again; yesterday's data stays."""
    version = bucket.put("pick")
    assert bucket.sync()[1] == [("staged", version)]
    bucket.age()
    monkeypatch.setattr("pitools.stage.sources.object_store.client.RETRIES", 0)

    def busy(_: Exchange) -> tuple[bytes, bytes]:
        return b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0", b""

    with proxied(bucket.port, busy) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        code, changes, err = bucket.sync()
    assert (code, changes, "busy" in err) == (75, [], True), err
    assert bucket.staged() == {version}


def test_a_pattern_with_a_mistake_names_the_nearest(bucket: Bucket):
    """As for folders."""
    bucket.put("place")
    bucket.rule('pattern = "plase"\n')
    code, _, err = bucket.sync()
    assert (code, 'did you mean "place"?' in err) == (3, True), err
