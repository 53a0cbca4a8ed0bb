from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.checkpoint.store import manifest
from pitools.checkpoint.store.manifest import (
    CheckpointManifest,
    FileEntry,
    decode_manifest,
    encode_manifest,
    load_manifest,
)
from pitools.core.errors import DataError

DIGEST = "xxh3_128:" + "0" * 31 + "1"


def record(*paths: str, **more: object) -> CheckpointManifest:
    fields = {
        "step": 7,
        "t": "2026-11-22T00:00:00.000Z",
        "format": "files",
        "run": "r",
        "state_fingerprint": "m",
        "world_size": 2,
    }
    files = tuple(FileEntry(path=path, bytes=1, digest=DIGEST) for path in paths)
    return CheckpointManifest(**{**fields, "files": files, **more})


@given(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8) | st.none(), max_size=4))
def test_round_trip(loader: dict[str, object]) -> None:
    """What is written is read, 128-bit integers of a random generator's state included."""
    retained = decode_manifest(
        encode_manifest(record("payload/a", loader_state=loader, custom_metadata={"rng": (1 << 128) - 1})), "here"
    )
    assert retained.loader_state == loader
    assert retained.custom_metadata == {"rng": (1 << 128) - 1}
    assert encode_manifest(retained) == encode_manifest(
        record("payload/a", loader_state=loader, custom_metadata={"rng": (1 << 128) - 1})
    )


def test_every_flipped_bit_is_found() -> None:
    """No bit of a manifest can change unseen, those of the loader's position and of the seal included."""
    data = encode_manifest(record("payload/a", loader_state={"sample": 12345}))
    for number in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[number // 8] ^= 1 << number % 8
        with pytest.raises(DataError):
            decode_manifest(bytes(flipped), "here")


@given(st.integers(0, 10_000), st.binary(max_size=3))
def test_every_cut_and_insertion_is_found(place: int, more: bytes) -> None:
    """A manifest that lost its end, or has more bytes somewhere, is none."""
    data = encode_manifest(record("payload/a"))
    place %= len(data)
    for other in (data[:place], data[:place] + more + data[place:]):
        if other != data:
            with pytest.raises(DataError):
                decode_manifest(other, "here")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "a/", "a\0b", "manifest.json", "a\nb", "a/./b"]
)
def test_paths_outside(path: str) -> None:
    """A manifest cannot name a file outside its folder, nor itself; neither is one written."""
    with pytest.raises(DataError, match=r"outside|invalid"):
        encode_manifest(record(path))
    forged = msgspec.json.format(msgspec.json.encode(record(path)), indent=1) + b"\n"
    with pytest.raises(DataError, match=r"outside|invalid"):
        decode_manifest(
            forged.replace(manifest._EMPTY_SEAL.encode(), manifest.digest_bytes(forged).encode(), 1), "here"
        )


@pytest.mark.parametrize(
    "entry", [{"bytes": -1}, {"digest": "md5:0"}, {"digest": "xxh3_128:" + "g" * 32}, {"path": "payload/b"}]
)
def test_entries_that_cannot_be(entry: dict[str, object]) -> None:
    """Negative sizes, digests of another kind and a file named twice are refused."""
    files = (
        FileEntry(path="payload/b", bytes=1, digest=DIGEST),
        FileEntry(**{"path": "payload/a", "bytes": 1, "digest": DIGEST, **entry}),
    )
    with pytest.raises(DataError, match="payload/"):
        encode_manifest(record(files=files))


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no reader would take is not written: too many files, or too much kept beside them."""
    monkeypatch.setattr(manifest, "MAX_FILES", 3)
    encode_manifest(record("a", "b", "c"))
    with pytest.raises(DataError, match="more than 3 files"):
        encode_manifest(record("a", "b", "c", "d"))
    monkeypatch.setattr(manifest, "MAX_BYTES", 2000)
    with pytest.raises(DataError, match="2000 bytes"):
        encode_manifest(record(custom_metadata={"x": "y" * 2000}))


def test_manifest_of_ten_gigabytes(tmp_path: Path) -> None:
    """A file without end, a FIFO, a link and a folder are refused at once, and no memory is given to them."""
    path = tmp_path / manifest.MANIFEST_FILE
    with path.open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(DataError, match="more than"):
        load_manifest(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        load_manifest(tmp_path)
    path.unlink()
    (tmp_path / "other").write_bytes(encode_manifest(record()))
    path.symlink_to("other")
    with pytest.raises(DataError, match="cannot be read"):
        load_manifest(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="not a regular file"):
        load_manifest(tmp_path)
    path.rmdir()
    with pytest.raises(DataError, match="no manifest"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"schema": "pit.manifest/2"}', b"null", b'{"custom_metadata":' * 9999],
)
def test_not_a_manifest(data: bytes) -> None:
    """Whatever else stands there is told, not followed."""
    with pytest.raises(DataError, match="not a checkpoint's manifest"):
        decode_manifest(data, "here")
