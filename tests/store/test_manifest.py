from __future__ import annotations

import hashlib

import msgspec
import pytest

from pitools.core.errors import DataError
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, FileEntry, Manifest


def one(**changes) -> Manifest:
    fields = {
        "name": "reach",
        "episodes": 1,
        "steps": 3,
        "arrays": {"action": ArraySchema(shape=(3, 7), dtype="float32")},
        "files": (FileEntry(path="action/c/0/0", bytes=9, digest="xxh3_128:00"),),
        "source": ({"file": "a.hdf5", "bytes": 1},),
    }
    return Manifest(**(fields | changes))


def test_round_trip_and_name() -> None:
    """A manifest reads back as it was, and its version is the SHA-256 of its bytes."""
    data = manifests.encode(one())
    assert manifests.decode(data, "x") == one()
    assert manifests.version(data) == hashlib.sha256(data).hexdigest()[:32]


def test_frozen_keys() -> None:
    """The keys of pit.manifest/1 only ever grow, and none of them is a time or a machine."""
    assert set(msgspec.json.decode(manifests.encode(one()))) == {
        "schema", "name", "episodes", "steps", "arrays", "files", "source", "parent",
    }  # fmt: skip


def test_source_key_order_is_no_content() -> None:
    """Two manifests that say the same have the same bytes, whatever order their provenance was put together in."""
    turned = one(source=({"bytes": 1, "file": "a.hdf5"},))
    assert manifests.encode(turned) == manifests.encode(one())


@pytest.mark.parametrize("path", ["../x", "/x", "a/../b", "", "a//b", "./a", "a\0b", "manifest.json"])
def test_hostile_paths(path: str) -> None:
    """A manifest that names a path outside the dataset, or itself, is refused."""
    data = manifests.encode(one(files=(FileEntry(path=path, bytes=1, digest="d"),)))
    with pytest.raises(DataError):
        manifests.decode(data, "x")


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"schema":"pit.other/1"}', b"\xff"])
def test_not_a_manifest(data: bytes) -> None:
    """Bytes that are not a manifest are a DataError that says where they were."""
    with pytest.raises(DataError) as caught:
        manifests.decode(data, "there")
    assert caught.value.where == "there"


def test_load_names_the_folder(tmp_path) -> None:
    """A folder without a manifest is not a dataset, and the error says which folder to give."""
    with pytest.raises(DataError, match=r"no manifest\.json"):
        manifests.load(tmp_path)
