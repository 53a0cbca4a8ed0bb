"""Digests that are taken while DCP writes: they are those of the files, and nothing is read a second time."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="this framework is not installed")

from pitools.checkpoint import hashing, layout, seal, verify  # noqa: E402
from pitools.checkpoint.dcp import Dcp  # noqa: E402
from pitools.checkpoint.dcp_files import Files  # noqa: E402
from pitools.checkpoint.guard import Guard  # noqa: E402
from pitools.checkpoint.hashing import Hashed  # noqa: E402
from pitools.core.errors import DataError  # noqa: E402
from pitools.store.digest import of_file  # noqa: E402


def test_the_digest_is_the_file_s(tmp_path: Path) -> None:
    """Of small and large pieces, of tensors' views and of bytes, over more than one of the digest's ranges."""
    rng, files, path = random.Random(4), Files(), tmp_path / "a"
    blocks: list[Any] = [rng.randbytes(size) for size in (0, 1, 300_000, 5, (1 << 20) + 3)]
    blocks += [memoryview(bytes(66 << 20)), io.BytesIO(b"described").getbuffer(), torch.arange(70_000).numpy()]
    with files.create_stream(path, "wb") as stream:
        for block in blocks:
            assert stream.write(block) == memoryview(block).nbytes
        assert stream.tell() == sum(memoryview(block).nbytes for block in blocks)
        stream.close()
    files.rename(path, tmp_path / "b")
    assert files.digests == {"b": Hashed(*of_file(tmp_path / "b"))}
    with files.create_stream(tmp_path / "b", "rb") as stream:
        assert stream.read(3) == blocks[1] + blocks[2][:2]


def test_what_was_not_written_to_its_end_has_none(tmp_path: Path) -> None:
    """An error in the middle of a file leaves no digest to believe."""
    files = Files()
    with pytest.raises(TypeError), files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write("no bytes")
    assert files.digests == {}


def test_a_save_reads_nothing_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that DCP writes is sealed as it was given, durable, and found good; only what is ours is read."""
    read: list[str] = []
    real = hashing.plain_file
    monkeypatch.setattr("pitools.checkpoint.hashing.plain_file", lambda path: read.append(path.name) or real(path))
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with Guard(folder, Dcp()) as guard:
        guard.save(1, {"w": torch.arange(200_000), "b": {"lr": 0.5}})
    assert sorted(read) == ["model.json", "random.json"]
    assert {"__0_0.distcp", ".metadata.tmp"} <= set(synced)
    assert synced.count("__0_0.distcp") == 1
    assert verify.check(folder / "step_1") == []


def test_a_file_that_changed_since_is_refused(folder: Path) -> None:
    """Where a file has another size than was written, the digest is not sealed."""
    place = layout.begin(folder, 1, "a")
    layout.payload(place).mkdir()
    (layout.payload(place) / "w").write_bytes(b"12345")
    known = {"payload/w": Hashed(4, "xxh3_128:" + "0" * 32)}
    with pytest.raises(DataError, match="it has 5 bytes, and 4 were written"):
        seal.digest_share(place, 0, 1, known=known)
