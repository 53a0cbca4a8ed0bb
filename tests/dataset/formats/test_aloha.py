from __future__ import annotations

import io
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from pitools.core.errors import DataError
from pitools.dataset.formats import detect
from pitools.dataset.formats.model import partition_by_schema, schema_difference


def encoded(frame: np.ndarray, kind: str = "JPEG") -> np.ndarray:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, kind)
    return np.frombuffer(out.getvalue(), np.uint8)


def decoded(row: np.ndarray) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(row.tobytes())))


def frames(steps: int) -> np.ndarray:
    return np.random.default_rng(steps).integers(0, 256, (steps, 24, 32, 3), np.uint8)


def replace(path: Path, key: str, **options: object) -> None:
    with h5py.File(path, "r+") as file:
        if key in file:
            del file[key]
        if options:
            file.create_dataset(key, **options)


@pytest.mark.parametrize("form", ["padded", "vlen", "bytes"])
@pytest.mark.parametrize("part", [0, 3])
def test_encoded_rows(aloha, whole, form, part) -> None:
    """JPEG rows, padded to one length, each of its own, or as byte strings, become the frames that PIL decodes."""
    path = aloha(0, 40)
    rows = [encoded(frame) for frame in frames(40)]
    if form == "vlen":
        replace(path, "observations/images/top", shape=(40,), dtype=h5py.vlen_dtype(np.uint8))
        with h5py.File(path, "r+") as file:
            for i, row in enumerate(rows):
                file["observations/images/top"][i] = row
    else:
        width = max(map(len, rows))
        padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
        replace(path, "observations/images/top", data=padded if form == "padded" else padded.view(f"S{width}")[:, 0])
    replace(path, "compress_len", data=np.array([[len(row) for row in rows]] * 2, np.float32))
    recording = detect.scan_recording(path, "auto")
    assert not recording.rejected
    np.testing.assert_array_equal(
        whole(recording.episodes[0], part)["obs/top_image"], np.stack([decoded(row) for row in rows])
    )
    assert set(recording.episodes[0].columns) == {"action", "obs/qpos", "obs/qvel", "obs/top_image", "obs/wrist_image"}


@pytest.mark.parametrize("folder", ["images_depth", "depth"])
@pytest.mark.parametrize("form", ["raw", "png"])
def test_depth(aloha, whole, folder, form) -> None:
    """Depth, raw or as 16-bit PNG, is stored as it was measured under the camera's name."""
    path, depth = aloha(0, 6), np.random.default_rng(0).integers(0, 1 << 16, (6, 24, 32)).astype(np.uint16)
    if form == "raw":
        replace(path, f"observations/{folder}/top", data=depth)
    else:
        replace(path, f"observations/{folder}/top", shape=(6,), dtype=h5py.vlen_dtype(np.uint8))
        with h5py.File(path, "r+") as file:
            for i, frame in enumerate(depth):
                file[f"observations/{folder}/top"][i] = encoded(frame, "PNG")
    (episode,) = detect.scan_recording(path, "auto").episodes
    np.testing.assert_array_equal(whole(episode)["obs/top_depth"], depth)


def test_grey_jpeg(aloha, whole) -> None:
    """A JPEG without colour is stored as RGB, like any other."""
    path, grey = aloha(0, 2), frames(2)[..., 0]
    rows = [encoded(frame) for frame in grey]
    replace(path, "observations/images/top", data=np.stack([np.pad(row, (0, 9999 - len(row))) for row in rows]))
    (episode,) = detect.scan_recording(path, "auto").episodes
    np.testing.assert_array_equal(
        whole(episode)["obs/top_image"], np.stack([decoded(row) for row in rows])[..., None].repeat(3, axis=-1)
    )


@pytest.mark.parametrize(
    ("damage", "what"),
    [("cut", "PNG"), ("flip", "IDAT"), ("size", r"uint16 \(8, 8\).*uint16 \(24, 32\)")],
)
def test_damaged_png(aloha, whole, damage, what) -> None:
    """The error of a PNG that is truncated, has a flipped bit, or another size names file, camera and row."""
    path, depth = aloha(0, 4), np.random.default_rng(0).integers(0, 999, (4, 24, 32)).astype(np.uint16)
    rows = [encoded(frame, "PNG") for frame in depth]
    if damage == "size":
        rows[2] = encoded(depth[0][:8, :8].copy(), "PNG")
    else:
        rows[2] = rows[2].copy()
        rows[2][100 if damage == "flip" else slice(300, None)] ^= 4 if damage == "flip" else rows[2][300:]
    replace(path, "observations/depth/top", data=np.stack([np.pad(row, (0, 4999 - len(row))) for row in rows]))
    (episode,) = detect.scan_recording(path, "auto").episodes
    with pytest.raises(DataError, match=what) as caught:
        whole(episode)
    assert caught.value.where == f"{path}: /observations/depth/top: row 2"


@pytest.mark.parametrize("form", ["16 bits of colour", "4 bits of grey", "no header"])
def test_png_that_would_be_changed(aloha, form) -> None:
    """A PNG of other than 8 bits per channel, which the decoder would convert, or without a header is rejected."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    bits, colour, row = (16, 2, 32 * 6) if form == "16 bits of colour" else (4, 0, 16)
    header = chunk(b"IHDR", (32).to_bytes(4, "big") + (24).to_bytes(4, "big") + bytes([bits, colour, 0, 0, 0]))
    body = chunk(b"IDAT", zlib.compress(bytes(24 * (1 + row)))) + chunk(b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + (b"" if form == "no header" else header) + body
    path = aloha(0, 2)
    replace(path, "observations/images/top", data=np.stack([np.frombuffer(data, np.uint8)] * 2))
    (item,) = detect.scan_recording(path, "auto").rejected
    assert ("IHDR" if form == "no header" else f"{bits} bits") in item.reason


def test_missing_camera(aloha) -> None:
    """An episode without a camera that most others have is rejected, in any position."""
    paths = [aloha(number, 3) for number in range(4)]
    replace(paths[0], "observations/images/wrist")
    episodes = [episode for path in paths for episode in detect.scan_recording(path, "auto").episodes]
    retained, refused = partition_by_schema(episodes)
    assert [episode.name for episode in retained] == ["episode_1", "episode_2", "episode_3"]
    assert [(item.name, item.path, item.reason) for item in refused] == [
        ("episode_0", paths[0], "episode_0 has no obs/wrist_image, which episode_1 has")
    ]
    assert schema_difference(retained[0], retained[1]) == ""


@pytest.mark.parametrize(
    ("key", "options", "why"),
    [
        ("observations/qpos", {"data": np.zeros((2, 14))}, "/observations/qpos has 2 steps"),
        ("action", {"data": np.zeros((0, 14))}, "no steps"),
        ("observations/images/top", {"data": np.zeros((3, 50), np.uint8)}, "end marker"),
        ("observations/images/top", {"shape": (3,), "dtype": h5py.vlen_dtype(np.uint8)}, "never written"),
        ("observations/images/top", {"shape": (3,), "dtype": h5py.vlen_dtype(np.float32)}, "dtype object"),
    ],
)
def test_refused_not_raised(aloha, key, options, why) -> None:
    """An incomplete episode is in `rejected`, with the reason, and the scan does not raise."""
    path = aloha(0, 3)
    replace(path, key, **options)
    recording = detect.scan_recording(path, "auto")
    assert recording.episodes == ()
    (item,) = recording.rejected
    assert (item.name, item.path) == ("episode_0", path)
    assert why in item.reason
