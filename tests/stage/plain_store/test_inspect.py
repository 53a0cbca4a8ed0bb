from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec

from pitools.core import forked_pool
from pitools.core.errors import DataError
from pitools.stage.cache.layout import journal_path, partial_path
from pitools.stage.plain_store import structure
from pitools.stage.plain_store.stage_store import stage_store
from pitools.stage.resolve import PlainStore, resolve_source

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of small chunks with checksums, and of shards that are too large to be held at once."""
    group = zarr.create_group(tmp_path / "x.zarr")
    values = np.random.default_rng(0).integers(1, 255, (12, MIB), dtype="uint8")
    small = group.create_array("small", shape=(12, 999), chunks=(1, 999), dtype="uint8", compressors=Crc32cCodec())
    small[...] = values[:, :999]
    large = group.create_array(
        "large", shape=values.shape, chunks=(1, MIB), shards=(4, MIB), dtype="uint8", compressors=Crc32cCodec()
    )
    large[...] = values
    return tmp_path / "x.zarr"


def resolved(place: Path) -> PlainStore:
    """The store, to be staged."""
    source = resolve_source(place)
    assert isinstance(source, PlainStore)
    return source


def flip(path: Path) -> None:
    """One bit of the content, the time of writing as it was."""
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def test_small_chunks_are_judged_as_they_are_copied(store: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    """Only shards that do not fit a reader's buffer are read once more; the answer is the same."""
    again: list[int] = []
    run = forked_pool.run_tasks

    def counted(todo, *args, **settings):
        again.append(sum(len(task.files) for task in todo))
        return run(todo, *args, **settings)

    monkeypatch.setattr(structure.forked_pool, "run_tasks", counted)
    assert stage_store(resolved(store), root).state == "staged"
    assert again[-1] == 3
    assert sum(again) == 3 + 3 + 12 + 3  # metadata, chunks and shards are copied


@pytest.mark.parametrize("path", ["small/c/5/0", "large/c/2/0"])
def test_damage_is_found_wherever_it_is_judged(store: Path, root: Path, residue, path: str):
    """A flipped bit that a checksum shows: exit with the file's name, and nothing is staged."""
    flip(store / path)
    with pytest.raises(DataError) as error:
        stage_store(resolved(store), root)
    assert error.value.where.endswith(path)
    assert os.listdir(root / "objects") == []
    assert residue(root) == []


def test_what_an_interrupted_copy_did_is_judged_when_it_goes_on(
    store: Path, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """A damaged chunk that was copied by a call that was then killed is not passed by."""
    flip(store / "small/c/5/0")
    created = resolved(store)
    with monkeypatch.context() as patch:
        patch.setattr("pitools.stage.plain_store.stage_store._verify_copy", stop)
        with pytest.raises(KeyboardInterrupt):
            stage_store(created, root)
    assert partial_path(root, created.key).exists()
    assert journal_path(root, created.key).exists()
    with pytest.raises(DataError) as error:
        stage_store(created, root)
    assert error.value.where.endswith("small/c/5/0")


def stop(*_: object) -> None:
    """Ctrl-C, when all is copied."""
    raise KeyboardInterrupt


def test_metadata_that_change_meanwhile_are_no_judge(store: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    """What the chunks were judged by must be what was copied with them."""
    created = resolved(store)
    inspector = structure.StructureChecker(created.source, created.manifest)
    text = (store / "small/zarr.json").read_text()
    (store / "small/zarr.json").write_text(text.replace("crc32c", "crc32x"))
    with pytest.raises(DataError):
        structure.check_structure(created.source, created.manifest, readers=1, inspected=inspector)


def test_stores_of_the_same_content_share_a_copy_for_good(store: Path, root: Path, tmp_path: Path):
    """Each is copied once, then found, in whatever order the jobs name them."""
    twin = tmp_path / "elsewhere" / store.name
    shutil.copytree(store, twin)
    results = [stage_store(resolved(place), root) for place in (store, twin, store, twin)]
    assert [result.state for result in results] == ["staged", "staged", "present", "present"]
    assert len({result.version for result in results}) == 1
