from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import zarr

from pitools.dataset.ingest.ingest import ingest
from pitools.store import manifest as manifests


def only(findings) -> tuple:
    (finding,) = findings
    return finding.level, finding.check, finding.file


def test_missing_file(copy, found) -> None:
    """A shard that is not there is damage: Zarr would read zeros."""
    (copy / "obs/eye_image/c/0/0/0/0").unlink()
    assert only(found(copy)) == ("damage", "file", "obs/eye_image/c/0/0/0/0")


def test_large_metadata(tmp_path, found) -> None:
    """Attributes of any size that an ingest keeps are no damage."""
    root = zarr.open_group(tmp_path / "x.zarr", mode="w", attributes={"notes": "x" * (17 << 20)})
    root.create_array("data/action", data=np.ones((4, 2), np.float32))
    root.create_array("meta/episode_ends", data=np.array([2, 4]))
    version = Path(ingest([tmp_path / "x.zarr"], root=tmp_path / "root", name="x").path)
    assert (version / "zarr.json").stat().st_size > 16 << 20
    assert [finding for finding in found(version) if finding.level == "damage"] == []


def test_missing_metadata(copy, found) -> None:
    """An array without metadata is damage, and the others are still checked."""
    (copy / "reward/zarr.json").unlink()
    findings = found(copy)
    assert {(finding.level, finding.file or finding.array) for finding in findings} >= {
        ("damage", "reward/zarr.json"),
        ("damage", "reward"),
    }


def test_manifest_lacks_a_file(copy, found, manifest_of) -> None:
    """A manifest that was made without one of an array's files is damage."""
    retained = tuple(entry for entry in manifest_of(copy).files if not entry.path.startswith("action/c/"))
    data = manifests.encode_manifest(msgspec.structs.replace(manifest_of(copy), files=retained))
    (copy / "manifest.json").write_bytes(data)
    copy = copy.rename(copy.with_name(manifests.version_of(data)))
    findings = found(copy)
    assert {(finding.level, finding.check, finding.file) for finding in findings} == {
        ("damage", "manifest", "action/c/0/0"),
        ("fault", "extra", "action/c/0/0"),
    }


def test_edited_manifest(copy, found, manifest_of) -> None:
    """A manifest that is not the one that the version is named after is damage."""
    data = manifests.encode_manifest(msgspec.structs.replace(manifest_of(copy), parent="0" * 32))
    (copy / "manifest.json").write_bytes(data)
    assert only(found(copy)) == ("damage", "manifest", "manifest.json")


def test_extra_file(copy, found) -> None:
    """Files, and links, that nobody named are a fault, and are not followed."""
    (copy / "notes.txt").write_text("mine")
    (copy / "obs/link").symlink_to("/")
    findings = found(copy)
    assert {(finding.level, finding.check, finding.file) for finding in findings} == {
        ("fault", "extra", "notes.txt"),
        ("fault", "extra", "obs/link"),
    }


def test_link_in_place_of_a_file(copy, found, tmp_path) -> None:
    """A shard that is a link is damage, wherever that leads."""
    shard = copy / "action/c/0/0"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert only(found(copy)) == ("damage", "file", "action/c/0/0")


@pytest.mark.parametrize(
    "change",
    [
        lambda known: known.__setitem__("data_type", "int32"),
        lambda known: known.__setitem__("shape", [known["shape"][0] - 1, 7]),
    ],
    ids=["type", "shape"],
)
def test_schema(copy, found, resign, edit, change) -> None:
    """Metadata that say otherwise than the manifest's schema are damage, though their digest is right."""
    edit(copy, "action/zarr.json", change)
    (finding,) = found(resign(copy))
    assert (finding.level, finding.check, finding.array) == ("damage", "schema", "action")
    assert "float32" in finding.expected


def test_absent_chunk(copy, found, resign) -> None:
    """An inner chunk that was never stored reads as the fill value, which is worth a look."""
    import zarr

    values = zarr.open_array(copy / "reward", mode="r", zarr_format=3)[:]
    assert not values.any()
    # zarr-python does not write chunks of nothing but the fill value.
    zarr.open_array(copy / "action", mode="r+", zarr_format=3)[256:] = 0
    findings = found(resign(copy))
    assert ("warning", "missing-chunk", "action/c/0/0") in {
        (finding.level, finding.check, finding.file) for finding in findings
    }


def test_no_checksums_inside(tmp_path, found, copy, resign, manifest_of) -> None:
    """Of an array without checksums of its own every digest is compared."""
    import shutil

    import numpy as np
    import zarr

    values = zarr.open_array(copy / "obs/joints", mode="r", zarr_format=3)[:]
    shutil.rmtree(copy / "obs/joints")
    array = zarr.create_array(
        copy / "obs/joints", shape=values.shape, dtype=values.dtype, chunks=(64, 7), compressors=None, fill_value=0
    )
    array[:] = values
    copy = resign(copy)
    assert found(copy) == []
    shard = copy / "obs/joints/c/1/0"
    data = np.frombuffer(shard.read_bytes(), np.uint8).copy()
    data[100] ^= 1
    shard.write_bytes(data.tobytes())
    assert only(found(copy)) == ("damage", "digest", "obs/joints/c/1/0")


def test_not_a_dataset(tmp_path) -> None:
    """A folder without a manifest is an error, not a finding."""
    from pitools.core.errors import DataError
    from pitools.dataset import check

    with pytest.raises(DataError, match="not a dataset"):
        list(check.check_version(tmp_path))


def test_forms_that_only_zarr_python_reads(copy, found, resign) -> None:
    """Arrays of codecs and grids that are not ours are read by zarr-python, and judged by their digests."""
    import shutil

    import numpy as np
    import zarr
    from zarr.codecs import GzipCodec

    joints = zarr.open_array(copy / "obs/joints", mode="r", zarr_format=3)[:]
    joints[60, 2] = np.nan
    shutil.rmtree(copy / "obs/joints")
    array = zarr.create_array(
        copy / "obs/joints",
        shape=joints.shape,
        dtype=joints.dtype,
        chunks=(64, 4),
        compressors=GzipCodec(level=1),
        fill_value=0,
    )
    array[:] = joints
    copy = resign(copy)
    wrong = found(copy)  # also the manifest's statistics, which are of what was there before
    assert {(item.check, item.episode, item.step) for item in wrong} == {("nan", 1, 20), ("statistics", None, None)}
    assert {item.array for item in wrong} == {"obs/joints"}
    shard = copy / "obs/joints/c/2/1"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 8
    shard.write_bytes(data)
    assert ("damage", "digest", "obs/joints/c/2/1") in {(item.level, item.check, item.file) for item in found(copy)}


def test_part_of_a_version(pit, clean, found, tmp_path) -> None:
    """A staged part of a version is checked as far as it is there, and what was left out is not missed."""
    done = pit("stage", "run", str(clean), "--to", str(tmp_path / "node"), "--arrays", "action,obs/eye_image")
    assert done.returncode == 0, done.stderr
    (staged,) = (tmp_path / "node/objects").iterdir()
    assert found(staged, deep=True) == []
    (staged / "action/c/0/0").chmod(0o600)
    (staged / "action/c/0/0").unlink()
    assert only(found(staged)) == ("damage", "file", "action/c/0/0")


def test_other_metadata(copy, found) -> None:
    """Metadata of the same size, that say something else, are damage: a split could name other episodes."""
    text = (copy / "zarr.json").read_bytes()
    assert text.count(b"train") == 1
    (copy / "zarr.json").write_bytes(text.replace(b"train", b"trein"))
    (finding,) = found(copy)
    assert (finding.level, finding.file, finding.problem) == (
        "damage",
        "zarr.json",
        "the metadata differ from the manifest",
    )


def test_other_content(make, found, rewrite) -> None:
    """A file whose checksums inside are right, but which is not the manifest's, is found by its digest."""
    from pitools.store.reader.version_reader import VersionReader

    path = make(codec="raw")
    store = VersionReader(path)
    rewrite(path, "obs/timestamp", store.read("obs/timestamp", 0, store.manifest.steps) + 0.5)
    findings = found(path)
    assert {(finding.level, finding.check, finding.array) for finding in findings} >= {
        ("damage", "digest", "obs/timestamp")
    }
