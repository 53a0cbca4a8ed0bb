"""Rows of picture files, wherever a recording has them: decoded, or refused; never stored as bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from PIL import Image

from pitools.core.errors import DataError
from pitools.dataset.formats import detect

EYE = "obs/eye_image"
JPEG_XL = b"\xff\x0a" + bytes(range(1, 120))
FOREIGN = {
    "JPEG XL": JPEG_XL,
    "JPEG XL in a container": b"\0\0\0\x0cJXL \r\n\x87\n" + b"x" * 90,
    "WebP": b"RIFF\x50\0\0\0WEBPVP8 " + b"x" * 90,
    "AVIF": b"\0\0\0\x20ftypavif" + b"x" * 90,
}


def encoded(frame: np.ndarray, kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, kind)
    return out.getvalue()


def put(path: Path, key: str, rows: Sequence[bytes], form: str) -> None:
    """Store rows in place of a dataset: padded by `form` bytes, of a length of their own, or as strings of bytes."""
    width = max(map(len, rows))
    with h5py.File(path, "r+") as file:
        if key in file:
            del file[key]
        if form == "vlen":
            dataset = file.create_dataset(key, (len(rows),), h5py.vlen_dtype(np.uint8))
            for number, row in enumerate(rows):
                dataset[number] = np.frombuffer(row, np.uint8)
        elif form == "bytes":
            file[key] = np.array(rows, f"S{width}")
        else:
            width += int(form)
            file[key] = np.stack([np.frombuffer(row.ljust(width, b"\0"), np.uint8) for row in rows])


@pytest.mark.parametrize("forms", [("0", "0"), ("3", "900"), ("vlen", "vlen"), ("bytes", "7")], ids="-".join)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_rows_of_robomimic(robomimic, whole, kind, forms) -> None:
    """Rows of JPEG or PNG are frames in robomimic too: padded to a width of each demo, or not."""
    path, rng = robomimic(4, 5), np.random.default_rng(0)
    sent = []
    for number, form in enumerate(forms):
        frames = rng.integers(0, 256, (4 + number, 24, 32, 3), np.uint8)
        rows = [encoded(frame, kind) for frame in frames]
        put(path, f"data/demo_{number}/{EYE}", rows, form)
        sent.append(np.stack([np.asarray(Image.open(io.BytesIO(row)).convert("RGB")) for row in rows]))
    recording = detect.scan_recording(path, "auto")
    assert not recording.rejected
    for episode, frames in zip(recording.episodes, sent, strict=True):
        np.testing.assert_array_equal(whole(episode)[EYE], frames)


def test_a_first_row_of_nothing(robomimic) -> None:
    """A row of zeros before the pictures refuses its demo; the others are not taken for numbers."""
    path = robomimic(4, 4)
    row = encoded(np.zeros((24, 32, 3), np.uint8), "PNG")
    for number, first in enumerate((row, b"")):
        put(path, f"data/demo_{number}/{EYE}", [first, row, row, row], "5")
    recording = detect.scan_recording(path, "auto")
    assert [item.name for item in recording.rejected] == ["demo_1"]
    assert recording.episodes[0].columns[EYE].row == (24, 32, 3)


def test_a_damaged_chunk_of_pictures(robomimic) -> None:
    """A chunk of pictures that is damaged where the scan looks refuses its demo, and names the array."""
    path, row = robomimic(4, 4), encoded(np.zeros((24, 32, 3), np.uint8), "PNG")
    for number in range(2):
        put(path, f"data/demo_{number}/{EYE}", [row] * 4, "5")
    with h5py.File(path, "r+") as file:
        rows = file[f"data/demo_1/{EYE}"][:]
        del file[f"data/demo_1/{EYE}"]
        dataset = file["data/demo_1"].create_dataset(EYE, data=rows, chunks=(1, rows.shape[1]), compression="gzip")
        offset = dataset.id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 8] = b"\xff" * 8
    path.write_bytes(data)
    recording = detect.scan_recording(path, "auto")
    assert [episode.name for episode in recording.episodes] == ["demo_0"]
    assert recording.rejected[0].where == f"{path}: /data/demo_1/{EYE}"


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("form", ["7", "vlen", "bytes"])
def test_formats_that_are_not_read(robomimic, aloha, kind, form) -> None:
    """Pictures of a format that is not read are refused by its name, in whatever array they lie, and never stored."""
    path, episode, pressure = robomimic(3), aloha(0, 3), aloha(1, 3)
    put(path, f"data/demo_0/{EYE}", [FOREIGN[kind]] * 3, form)
    put(episode, "observations/images/top", [FOREIGN[kind]] * 3, form)
    put(pressure, "observations/thermal", [FOREIGN[kind]] * 3, form)
    for each in (path, episode, pressure):
        (item,) = detect.scan_recording(each, "auto").rejected
        assert kind.split()[0] in item.reason


def test_jpeg_xl_after_a_row_of_nothing(robomimic) -> None:
    """A row of zeros among JPEG XL ones does not make numbers of them."""
    path = robomimic(3)
    put(path, f"data/demo_0/{EYE}", [b"", JPEG_XL, JPEG_XL], "7")
    (item,) = detect.scan_recording(path, "auto").rejected
    assert "JPEG XL" in item.reason


def test_bytes_that_are_numbers(robomimic, whole) -> None:
    """Rows of measured bytes stay numbers, though they begin as a picture file does."""
    path = robomimic(3)
    values = np.arange(3 * 40, dtype=np.uint8).reshape(3, 40)
    values[:, :2] = 0xFF, 0x0A
    values = np.concatenate([values, values], axis=1)
    with h5py.File(path, "r+") as file:
        file["data/demo_0/obs/touch"] = values[:, :40]
        file["data/demo_0/obs/light"] = np.full((3, 3), (0xFF, 0xD8, 0xFF), np.uint8)
        file["data/demo_0/obs/taxels"] = np.concatenate([values[:2], np.ones((1, 80), np.uint8)])
    (episode,) = detect.scan_recording(path, "auto").episodes
    contents = whole(episode)
    np.testing.assert_array_equal(contents["obs/touch"], values[:, :40])
    assert contents["obs/light"].tolist() == [[0xFF, 0xD8, 0xFF]] * 3
    assert contents["obs/taxels"].shape == (3, 80)


@pytest.mark.parametrize("rows", [encoded(np.zeros((24, 32, 3), np.uint8), "JPEG"), JPEG_XL], ids=["JPEG", "JPEG XL"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_rows_of_zarr(tmp_path, rows, zarr_format) -> None:
    """Picture files in rows of a Zarr array are refused: a version would hold bytes, and not say of what."""
    path = tmp_path / "buffer.zarr"
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    root.create_array("data/action", data=np.ones((4, 2), np.float32))
    root.create_array("data/img", data=np.stack([np.frombuffer(rows.ljust(999, b"\0"), np.uint8)] * 4))
    root.create_array("meta/episode_ends", data=np.array([2, 4]))
    with pytest.raises(DataError) as caught:
        detect.scan_recording(path, "auto")
    assert caught.value.where == f"{path}: data/img"
    assert set(detect.scan_recording(path, "auto", ["img"]).episodes[0].columns) == {"action"}
