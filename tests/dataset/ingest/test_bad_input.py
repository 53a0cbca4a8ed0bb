from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from pitools.core.errors import ConfigError, DataError, PitError, Unreachable, UsageError
from pitools.dataset.formats import detect, readers
from pitools.dataset.formats.model import ChangedDuringRead
from pitools.dataset.ingest import unreadable_episodes
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset


@pytest.fixture
def refused(tmp_path) -> Callable[..., PitError]:
    """Return the error of ingesting recordings; assert that the root was not created."""

    def attempt(*paths: Path, expected: type[PitError] = DataError, **options) -> PitError:
        with pytest.raises(expected) as caught:
            ingest(list(paths), root=tmp_path / "root", name="x", **options)
        assert not (tmp_path / "root").exists()
        return caught.value

    return attempt


def change(path: Path, key: str, value: object) -> None:
    with h5py.File(path, "r+") as file:
        if key in file:
            del file[key]
        if value is not None:
            file[key] = value


@pytest.mark.parametrize("keep", [0.5, 0.99, 0.01, 0])
def test_truncated(robomimic, refused, keep) -> None:
    """A truncated recording is refused by name."""
    path = robomimic(20, 20)
    os.truncate(path, int(path.stat().st_size * keep))
    error = refused(path)
    assert "cannot be read as HDF5" in error.message
    assert error.where == str(path)


def test_not_hdf5(tmp_path, refused) -> None:
    """A file that is not HDF5 is refused."""
    (tmp_path / "notes.txt").write_text("hello\n" * 100)
    assert "a text file" in refused(tmp_path / "notes.txt").message


@pytest.fixture
def corrupt(robomimic) -> Callable[..., Path]:
    """Write a recording with a damaged chunk, of steps [5, 10) of the compressed frames of these demos."""

    def write(*numbers: int, name: str = "reach.hdf5") -> Path:
        path = robomimic(20, 20, 20, name=name)
        offsets = []
        with h5py.File(path, "r+") as file:
            for number in numbers:
                key = f"data/demo_{number}/obs/eye_image"
                frames = file[key][:]
                del file[key]
                dataset = file.create_dataset(key, data=frames, compression="gzip", chunks=(5, 8, 8, 3))
                offsets.append(dataset.id.get_chunk_info_by_coord((5, 0, 0, 0)).byte_offset)
        data = bytearray(path.read_bytes())
        for offset in offsets:
            data[offset : offset + 8] = b"\xff" * 8
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("workers", [1, 2])
def test_damaged_inside(corrupt, refused, tmp_path, workers) -> None:
    """The error of damaged compressed frames, found while they are read, names episode, array and chunk; so does the
    report."""
    path, report = corrupt(1), tmp_path / "report.jsonl"
    error = refused(path, workers=workers, report=report)
    records = [json.loads(line) for line in report.read_text().splitlines()]
    assert [(record["episode"], record["accepted"], record["reason"]) for record in records] == [
        ("demo_0", True, ""),
        ("demo_2", True, ""),
        ("demo_1", False, error.message),
    ]
    assert error.where == f"{path}: /data/demo_1/obs/eye_image: steps 5 to 10"
    assert error.message.startswith("demo_1: ")
    assert "--skip-rejected" in error.hint


@pytest.mark.parametrize("workers", [1, 2])
def test_damaged_inside_and_left_out(corrupt, robomimic, tmp_path, workers) -> None:
    """With --skip-rejected, episodes that prove damaged when read are left out, all in one run."""
    paths = [corrupt(0, 2), corrupt(0, 1, 2, name="none.hdf5"), robomimic(4, name="whole.hdf5", seed=3)]
    options = {"root": tmp_path / "root", "name": "x", "skip_rejected": True, "workers": workers}
    version = ingest(paths, report=tmp_path / "report.jsonl", **options)
    opened = open_dataset(Path(version.path))
    assert [episode["name"] for episode in opened.episodes] == ["demo_1", "demo_0"]
    with h5py.File(paths[0]) as file:
        np.testing.assert_array_equal(opened.read("obs/eye_image", 0, 20), file["data/demo_1/obs/eye_image"][:])
    records = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [(Path(record["file"]).name, record["episode"]) for record in records if not record["accepted"]] == [
        ("none.hdf5", "demo_0"),
        ("none.hdf5", "demo_1"),
        ("none.hdf5", "demo_2"),
        ("reach.hdf5", "demo_0"),
        ("reach.hdf5", "demo_2"),
    ]
    assert [record["file"] for record in opened.manifest.recordings] == ["reach.hdf5", "whole.hdf5"]
    assert not ingest(paths, **options).new
    assert not (tmp_path / "root/.tmp").exists()
    with pytest.raises(DataError):
        ingest(paths[1:2], root=tmp_path / "none", name="x", skip_rejected=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("first", [True, False])
def test_a_file_system_that_fails_for_now(corrupt, tmp_path, monkeypatch, first) -> None:
    """An I/O error of the file system never leaves an episode out, neither at first nor in the search for damage."""
    path, read, done = corrupt(1), os.preadv, []

    def failing(descriptor, views, offset) -> int:
        if (first or done) and Path(f"/proc/self/fd/{descriptor}").samefile(path):
            views.clear()  # no view of a buffer outlives the call
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, views, offset)

    damaged = unreadable_episodes.find_unreadable
    monkeypatch.setattr(unreadable_episodes, "find_unreadable", lambda *rest: done.append(True) or damaged(*rest))
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(Unreachable):
        ingest([path], root=tmp_path / "root", name="x", skip_rejected=True, workers=1)
    assert not list((tmp_path / "root").glob("x/*"))


def test_unequal_lengths(robomimic, refused) -> None:
    """The error of arrays of unequal length names file, demo, both arrays and both lengths."""
    path = robomimic(5, 6)
    change(path, "data/demo_1/obs/eye_image", np.zeros((4, 8, 8, 3), np.uint8))
    error = refused(path)
    assert error.message == "/data/demo_1/obs/eye_image has 4 steps where actions has 6"
    assert error.where == f"{path}: /data/demo_1"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.zeros((6, 9, 8, 3), np.uint8), r"uint8 \(9, 8, 3\), but uint8 \(8, 8, 3\) in demo_0"),
        (np.zeros((6, 8, 8, 3), np.float32), r"float32 \(8, 8, 3\), but uint8 \(8, 8, 3\) in demo_0"),
        (None, "demo_1 has no obs/eye_image, which demo_0 has"),
    ],
)
def test_episodes_differ(robomimic, refused, value, what) -> None:
    """The error of an episode with another shape, dtype or set of arrays than the first names its demo."""
    path = robomimic(5, 6)
    change(path, "data/demo_1/obs/eye_image", value)
    error = refused(path)
    assert re.search(what, error.message)
    assert error.where == f"{path}: demo_1"


def test_files_differ(robomimic, refused) -> None:
    """The error of recordings of different schemas names the file that differs."""
    first, two = robomimic(3, name="a1.hdf5"), robomimic(3, name="a2.hdf5", row=(4, 4, 3))
    error = refused(first, two)
    assert error.where == f"{two}: demo_0"
    assert "a1.hdf5" in error.message


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("data", None, "layout.*mask"),
        ("data/demo_0/actions", None, "no actions"),
        ("data/demo_0/actions", np.zeros((0, 7)), r"actions has 0 steps \(expected 3"),
        ("data/demo_0/names", np.array([b"a", b"b", b"c"]), r"dtype \|S1"),
        ("data/demo_0/obs/scale", 3.0, "scalar .*3 steps"),
        ("data/demo_0/obs/none", np.zeros((3, 0)), "0 bytes"),
        ("data/demo_0/obs/a b", np.zeros(3), "'obs/a b'"),
        ("data/demo_0/obs/..", np.zeros(3), r"'obs/\.\.'"),
        ("data/demo_0/zarr.json", np.zeros(3), r"'zarr\.json'"),
        ("data/demo_0/episode_offsets", np.zeros(3), "'episode_offsets'"),
        ("data/demo_0/action", np.zeros(3), "'action'"),
        ("data/demo_0/state/x", np.zeros(3), None),
        ("mask/odd", np.array([b"demo_7"]), "mask odd names demo_7"),
        ("data/demo_0/far", h5py.ExternalLink("/etc/passwd", "/x"), "demo_0/far"),
        ("data/demo_0/loop", h5py.SoftLink("/data/demo_0"), "/data/demo_0/loop is linked twice"),
        ("data/demo_0/lost", h5py.SoftLink("/nowhere"), "a link to"),
    ],
)
def test_what_cannot_be_stored(robomimic, refused, tmp_path, key, value, what) -> None:
    """The error of any array or member that cannot be stored names it; it is never left out silently."""
    path = robomimic(3)
    change(path, key, value)
    if what is None:
        ingest([path], root=tmp_path / "root", name="x")
        return
    error = refused(path)
    assert re.search(what, error.message)
    assert error.where.startswith(str(path))


def test_a_pipe_is_no_recording(tmp_path) -> None:
    """A pipe is refused without opening it, which would block."""
    os.mkfifo(tmp_path / "a.hdf5")
    with pytest.raises(DataError) as caught:
        ingest([tmp_path / "a.hdf5"], root=tmp_path / "root", name="x")
    assert caught.value.where == str(tmp_path / "a.hdf5")


def test_all_names_that_cannot_be_are_told_at_once(robomimic, refused) -> None:
    """One error lists all invalid array names, and the valid characters."""
    path = robomimic(3)
    for name in ("étoile", "a b", "fine"):
        change(path, f"data/demo_0/obs/{name}", np.zeros(3))
    message = refused(path).message
    assert [text in message for text in ("'obs/étoile'", "'obs/a b'", "fine", "a-z, 0-9, _")] == [
        True,
        True,
        False,
        True,
    ]


def test_skip_is_the_way_out(robomimic, tmp_path) -> None:
    """An array that cannot be stored can be left out by --skip-array."""
    path = robomimic(3)
    change(path, "data/demo_0/names", np.array([b"a", b"b", b"c"]))
    assert ingest([path], root=tmp_path / "root", name="x", skip_arrays=["names"]).new


def test_a_pattern_that_matches_nothing(robomimic, refused, tmp_path) -> None:
    """A mistyped --skip-array or drop would leave its array in: both are refused, with what was meant; one that matches
    in one of many recordings is not."""
    path, transform = robomimic(3), tmp_path / "t.toml"
    transform.write_text('drop = ["rewards"]\n')
    error = refused(path, skip_arrays=["rewrad"], expected=UsageError)
    assert "reward" in error.hint
    assert "reward" in refused(path, transform=transform, expected=ConfigError).hint
    other = robomimic(3, name="other.hdf5", seed=1)
    change(other, "data/demo_0/names", np.array([b"a", b"b", b"c"]))
    assert ingest([path, other], root=tmp_path / "root", name="x", skip_arrays=["names", "next_obs/*"]).new


def test_name_within_a_name(robomimic, refused) -> None:
    """An array cannot be inside another array."""
    path = robomimic(3)
    change(path, "data/demo_0/states", np.zeros(3))
    change(path, "data/demo_0/state/x", np.zeros(3))
    assert re.search("'state/x' .*'state'", refused(path).message)


def test_data_in_another_file(robomimic, refused, tmp_path) -> None:
    """A dataset with its data outside of the recording, possibly any file of the user, is refused."""
    path = robomimic(3)
    (tmp_path / "secret").write_bytes(b"x" * 3)
    with h5py.File(path, "r+") as file:
        file.create_dataset("data/demo_0/obs/s", (3,), "u1", external=[(str(tmp_path / "secret"), 0, 3)])
    assert refused(path).where == f"{path}: /data/demo_0/obs/s"


@pytest.mark.parametrize(("lengths", "what"), [((), "no demos"), ((3, 0), "no steps")])
def test_nothing_to_ingest(robomimic, refused, lengths, what) -> None:
    """A recording without demos, or a demo without steps, is refused."""
    assert what in refused(robomimic(*lengths)).message


def test_wrong_layout(robomimic, aloha, refused) -> None:
    """A recording of another layout than `layout` is refused."""
    assert "ALOHA" in refused(robomimic(3), layout="aloha").message
    assert "robomimic" in refused(aloha(0, 3), layout="robomimic").message


def test_claimed_length(robomimic, refused) -> None:
    """A demo whose num_samples is not the length of its actions is refused."""
    path = robomimic(3)
    with h5py.File(path, "r+") as file:
        file["data/demo_0"].attrs["num_samples"] = 9
    assert re.search("3 steps .*9: num_samples", refused(path).message)


@pytest.mark.parametrize("damage", ["cut", "noise", "size"])
def test_bad_jpeg(aloha, refused, damage) -> None:
    """The error of a JPEG row that is truncated, invalid, or of another size names file, camera and row."""
    path, other = aloha(0, 4, compressed=True), aloha(1, 4, compressed=True)
    with h5py.File(path, "r+") as file, h5py.File(other) as wide:
        rows = file["observations/images/top"]
        if damage == "cut":
            rows[2, 300:] = 0
        elif damage == "noise":
            rows[2] = 7
        else:
            rows[2] = 0
            small = _small_jpeg(wide["observations/images/top"][0])
            rows[2, : len(small)] = small
    error = refused(path)
    assert "JPEG" in error.message
    assert error.where == f"{path}: /observations/images/top: row 2"


def _small_jpeg(row: np.ndarray) -> np.ndarray:
    # The header's height and width, in its start-of-frame segment.
    data = bytearray(row.tobytes().rstrip(b"\0"))
    position = data.index(b"\xff\xc0")
    data[position + 5 : position + 9] = bytes([0, 16, 0, 16])
    return np.frombuffer(bytes(data), np.uint8)


@pytest.mark.parametrize("how", ["written to", "longer", "cut", "replaced"])
def test_changed_while_read(robomimic, refused, monkeypatch, how) -> None:
    """A recording that changes after its first rows were read is refused, and nothing is published."""
    path = robomimic(30, 40)
    full, time_ns = path.read_bytes(), path.stat().st_mtime_ns
    read, done = readers._CachingReader.read_into, []

    def changing(*args) -> None:
        read(*args)
        if done:
            return
        done.append(True)
        if how == "replaced":
            path.rename(path.with_suffix(".old"))
            path.write_bytes(full)
            os.utime(path, ns=(time_ns, time_ns))
        elif how == "cut":
            os.truncate(path, len(full) // 2)
        else:
            with path.open("r+b") as file:
                file.seek(len(full) if how == "longer" else len(full) // 2)
                file.write(b"new")

    monkeypatch.setattr(readers._CachingReader, "read_into", changing)
    error = refused(path)
    assert done
    assert error.where.startswith(str(path))
    assert how == "cut" or isinstance(error, ChangedDuringRead)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", ".tmp", "a\nb", "a b", "x" * 101])
def test_bad_name(robomimic, tmp_path, name) -> None:
    """A name that is not a plain folder name is a usage error."""
    with pytest.raises(UsageError):
        ingest([robomimic(3)], root=tmp_path / "root", name=name)
    assert not (tmp_path / "root").exists()


def test_failure_spares_the_rest(robomimic, tmp_path, below) -> None:
    """A failed ingest leaves the root unchanged: other versions stay, and no file is added."""
    root = tmp_path / "root"
    ingest([robomimic(3)], root=root, name="x")
    before = below(root)
    path = robomimic(5, name="bad.hdf5")
    change(path, "data/demo_0/dones", np.zeros(4))
    for name in ("x", "y"):
        with pytest.raises(DataError):
            ingest([path], root=root, name=name)
    assert below(root) == before


@pytest.mark.parametrize("report", ["r.hdf5", "link.jsonl"])
def test_report_over_a_recording(robomimic, tmp_path, report) -> None:
    """A report that is a recording, be it by a link, is refused, and the recording stays."""
    source = robomimic(3, name="r.hdf5")
    (tmp_path / "link.jsonl").symlink_to(source)
    content = source.read_bytes()
    with pytest.raises(UsageError):
        ingest([source], root=tmp_path / "root", name="x", report=tmp_path / report)
    assert source.read_bytes() == content


def test_store_that_grows_behind_its_scan(tmp_path, monkeypatch) -> None:
    """A store that gets an episode after it was scanned is refused; afterwards it is ingested with all episodes."""
    group = zarr.create_group(tmp_path / "z.zarr")
    group.create_array("action", shape=(9, 7), chunks=(100, 7), dtype="f4")[:] = 1
    group.create_array("episode_ends", data=np.array([4, 9]), chunks=(100,))
    scan_recording = detect.scan_recording

    def scan_then_grow(*args, **options):
        recording = scan_recording(*args, **options)
        for name, rows in (("action", np.ones((3, 7), "f4")), ("episode_ends", np.array([12]))):
            group[name].append(rows)
        return recording

    with monkeypatch.context() as patched:
        patched.setattr(detect, "scan_recording", scan_then_grow)
        with pytest.raises(ChangedDuringRead):
            ingest([tmp_path / "z.zarr"], root=tmp_path / "root", name="x")
    assert ingest([tmp_path / "z.zarr"], root=tmp_path / "root", name="x").episodes == 3
