"""Damage of every kind, at random places: all of it is seen by a check, and by whoever reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.dataset import check
from pitools.dataset.check.finding import CheckSummary
from pitools.dataset.ingest import chunking
from pitools.dataset.ingest.ingest import ingest
from pitools.store import manifest as manifests
from pitools.store.reader.version_reader import VersionReader

CODECS = ("raw", "lz4", "zstd")
INDEX_BYTES = 4 * 16 + 4


@pytest.fixture(scope="module", params=CODECS)
def whole(request, tmp_path_factory) -> Path:
    """A version of many shards, each of a few chunks."""
    import h5py

    folder = tmp_path_factory.mktemp("damage")
    rng = np.random.default_rng(0)
    with h5py.File(folder / "a.hdf5", "w") as file:
        for number in range(3):
            frames = np.repeat(rng.integers(0, 256, (90, 6, 2, 3), np.uint8), 2, axis=2)  # some of it compresses
            file[f"data/demo_{number}/obs/eye_image"] = frames
            file[f"data/demo_{number}/actions"] = rng.normal(size=(90, 4)).astype(np.float32).round(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunking, "CHUNK_BYTES", 1 << 10)
        patched.setattr(chunking, "SHARD_BYTES", 1 << 12)
        created = ingest([folder / "a.hdf5"], root=folder / "root", name="x", codec=request.param)
    return Path(created.path)


@pytest.fixture
def version(whole, tmp_path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "root/x" / whole.name))


def shards(version: Path, array: str = "**") -> list[Path]:
    return sorted(path for path in version.glob(f"{array}/c/**/*") if path.is_file())


def seen_by_check(version: Path, *, deep: bool = False) -> bool:
    *findings, summary = check.check_version(version, deep=deep, quiet=True, readers=1)
    assert isinstance(summary, CheckSummary)
    return any(finding.level == "damage" for finding in findings)


def seen_by_reading(version: Path) -> bool:
    """Whether reading all there is raises; what was read otherwise is what the manifest's maker wrote."""
    try:
        store = VersionReader(version)
        for name in store.manifest.arrays:
            store.read(name, 0, store.metadata_of(name).shape[0])
    except DataError:
        return True
    return False


@contextmanager
def changed(path: Path, change: Callable[[bytearray], object]) -> Iterator[None]:
    """A file with other bytes, for a moment."""
    before = path.read_bytes()
    data = bytearray(before)
    change(data)
    assert data != before
    path.chmod(0o644)  # a staged copy is read-only
    path.write_bytes(data)
    yield
    path.write_bytes(before)


def flip(data: bytearray, at: int, bit: int) -> None:
    data[at] ^= 1 << bit


def flips(version: Path, count: int, seed: int) -> None:
    """Flip bits one after another, as often in an index as in the payload."""
    rng = np.random.default_rng(seed)
    files = shards(version)
    for trial in range(count):
        path = files[rng.integers(len(files))]
        size = path.stat().st_size
        low, high = (max(0, size - INDEX_BYTES), size) if trial % 3 == 0 else (0, size)
        value, bit = int(rng.integers(low, high)), int(rng.integers(8))
        with changed(path, lambda data, at=value, bit=bit: flip(data, at, bit)):
            assert seen_by_check(version), (path, value, bit)
            assert seen_by_reading(version), (path, value, bit)
    assert not seen_by_check(version, deep=True)
    assert not seen_by_reading(version)


def test_it_is_whole(version) -> None:
    """What is damaged below was whole before."""
    assert len(shards(version)) > 6
    assert not seen_by_check(version, deep=True)
    assert not seen_by_reading(version)


def test_flipped_bits(version) -> None:
    """Of 60 flipped bits, in payload, checksums and indexes, each is seen."""
    flips(version, 60, seed=1)


@pytest.mark.slow
def test_a_thousand_flipped_bits(version) -> None:
    """Of 1,000 flipped bits each is seen."""
    flips(version, 1000, seed=2)


def test_truncated(version) -> None:
    """A shard cut short at any place is seen."""
    rng = np.random.default_rng(3)
    for path in shards(version):
        data = path.read_bytes()
        for _ in range(2):
            os.truncate(path, int(rng.integers(len(data))))
            assert seen_by_check(version)
            assert seen_by_reading(version)
            path.write_bytes(data)


def test_hole(version) -> None:
    """Zeros where a crash lost the data, anywhere in a shard, are seen; so is a shard of nothing else."""
    rng = np.random.default_rng(4)
    for path in shards(version):
        size = path.stat().st_size
        low = int(rng.integers(size - 40))
        for start, stop in ((low, min(size, low + 600)), (0, size)):

            def zero(data: bytearray, start: int = start, stop: int = stop) -> None:
                data[start:stop] = bytes(stop - start)

            with changed(path, zero):
                assert seen_by_check(version), (path, start, stop)
                assert seen_by_reading(version), (path, start, stop)


def test_missing_shard(version) -> None:
    """A shard that is gone is seen, and never read as zeros."""
    for path in shards(version):
        data = path.read_bytes()
        path.unlink()
        assert seen_by_check(version)
        assert seen_by_reading(version)
        path.write_bytes(data)


def test_swapped_shards(version) -> None:
    """Two shards in each other's place, each whole in itself, are seen by their digests alone."""
    pairs = [
        (a, b)
        for a in shards(version)
        for b in shards(version)
        if a.relative_to(version).parts[:2] == b.relative_to(version).parts[:2] and a.read_bytes() != b.read_bytes()
    ]
    first, second = min(pairs, key=lambda pair: abs(pair[0].stat().st_size - pair[1].stat().st_size))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert seen_by_check(version)


@pytest.mark.parametrize("array", ["action", "obs/eye_image"])
@pytest.mark.parametrize("what", ["shape", "type", "chunk", "codec", "fill"])
def test_stale_metadata(version, array, what) -> None:
    """A `zarr.json` of another version of the array is seen, whatever of it is another."""
    path = version / array / "zarr.json"
    record = json.loads(path.read_bytes())
    sharding = record["codecs"][0]["configuration"]
    if what == "shape":
        record["shape"][0] -= 1
    elif what == "type":
        record["data_type"] = {"float32": "int32", "uint8": "int8"}[record["data_type"]]
    elif what == "chunk":
        sharding["chunk_shape"][0] //= 2
    elif what == "codec":
        sharding["codecs"].insert(1, {"name": "gzip", "configuration": {"level": 1}})
    else:
        record["fill_value"] = 7
    path.write_bytes(json.dumps(record, indent=1).encode())
    assert seen_by_check(version)
    # The fill value stands for chunks that are not stored: in our versions there is none.
    assert seen_by_reading(version) or what == "fill"


def test_manifest_is_the_root_of_trust(version) -> None:
    """A manifest that agrees with damaged files is still not the one that the version is named after."""
    path = shards(version)[0]
    path.write_bytes(path.read_bytes()[::-1])
    data = (version / manifests.MANIFEST_FILE).read_bytes()
    (version / manifests.MANIFEST_FILE).write_bytes(data.replace(b'"parent": ""', b'"parent": "' + b"0" * 32 + b'"'))
    *findings, _ = check.check_version(version, quiet=True)
    assert {finding.file for finding in findings} >= {manifests.MANIFEST_FILE, path.relative_to(version).as_posix()}


def test_part_of_the_steps(version, pit, tmp_path) -> None:
    """A staged part of the steps, of some shards only, is whole; a flipped bit in it is seen."""
    done = pit("stage", "run", str(version), "--to", str(tmp_path / "node"), "--steps", "100:200")
    assert done.returncode == 0, done.stderr
    (staged,) = (tmp_path / "node/objects").iterdir()
    assert 0 < len(shards(staged)) < len(shards(version))
    assert not seen_by_check(staged, deep=True)
    path = shards(staged)[1]
    with changed(path, lambda data: flip(data, 5, 3)):
        assert seen_by_check(staged)
