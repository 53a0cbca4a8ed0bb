from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import s3_server
from s3_reads import OBJECT
from s3_server import PUBLIC, Server

MiB = 1 << 20


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One S3 server for all tests; each puts what it needs below a prefix of its own."""
    with s3_server.serving(tmp_path_factory.mktemp("s3")) as running:
        s3_server.put(running.port, {"objects/o": OBJECT, "objects/deep/a b#c~é%20+=&.bin": b"odd"})
        s3_server.put(running.port, {"objects/o": OBJECT}, PUBLIC)
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server) -> Callable[[int], None]:
    """A user's environment that names the server, and a home without files; call it to name another port."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def use(port: int) -> None:
        for name, value in s3_server.environment(port).items():
            monkeypatch.setenv(name, value)

    use(server.port)
    return use


@pytest.fixture(scope="session")
def uploaded(server: Server, tmp_path_factory: pytest.TempPathFactory, build) -> Path:
    """A dataset on disk, whose copy is at s3://lab/data/pick/<version>."""
    files = {
        "zarr.json": b"{}",
        "actions/c/0": os.urandom(1000),
        "actions/c/1": b"",
        "images/c/0/0": os.urandom(9 * MiB + 17),
        "images/c/1/0": os.urandom(100_000),
    }
    folder = build(tmp_path_factory.mktemp("uploaded"), files)
    s3_server.put_tree(server.port, folder, f"data/pick/{folder.name}")
    return folder
