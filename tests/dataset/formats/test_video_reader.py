from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import av
import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.dataset.formats import detect
from pitools.dataset.formats.model import Column, VideoSource
from pitools.dataset.formats.readers import open_reader

CAMERA = "observation.images.top"


def test_lost_frame(lerobot, whole) -> None:
    """A missing frame is an error, even if the video has as many frames as expected."""
    dataset = lerobot(9, 5)
    dataset.clip(dataset.path / f"videos/{CAMERA}/chunk-000/file-000.mp4", dataset.frames, drop=[4])
    dataset.clip(
        dataset.path / f"videos/{CAMERA}/chunk-000/file-000.mp4",
        np.concatenate([dataset.frames, dataset.frames[-1:]]),
        drop=[4],
    )
    recording = detect.scan_recording(dataset.path, "auto")
    with pytest.raises(DataError, match=r"0\.25") as caught:
        whole(recording.episodes[0])
    assert caught.value.where.endswith("file-000.mp4: at 0.2000 s")
    assert len(whole(recording.episodes[1])["action"]) == 5


@pytest.mark.parametrize("where", [0.3, 0.6])
def test_damaged_video(lerobot, whole, where) -> None:
    """A damaged video raises, or returns the original frames: never wrong frames silently."""
    dataset = lerobot(40)
    path = dataset.path / f"videos/{CAMERA}/chunk-000/file-000.mp4"
    contents = whole(detect.scan_recording(dataset.path, "auto").episodes[0])["obs/top_image"]
    data = bytearray(path.read_bytes())
    position = data.index(b"mdat")
    for i in range(int(where * 100), int(where * 100) + 60):
        data[position + 400 + i] ^= 0xA5
    path.write_bytes(data)
    with contextlib.suppress(DataError):
        after = whole(detect.scan_recording(dataset.path, "auto").episodes[0])["obs/top_image"]
        np.testing.assert_array_equal(after, contents)


def test_b_frames_and_odd_sizes(tmp_path: Path) -> None:
    """Frames are returned in display order, not in storage order, also for odd sizes."""
    path, bits = tmp_path / "a.mp4", (np.arange(40)[:, None] >> np.arange(6)) & 1
    frames = np.repeat(np.repeat((np.repeat(bits, 8, axis=1) * 200 + 20)[:, None, :47, None], 31, axis=1), 3, axis=3)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264", rate=20, options={"x264-params": "bframes=3:b-adapt=0:scenecut=0:keyint=15", "crf": "10"}
        )
        stream.height, stream.width, stream.pix_fmt = 31, 47, "yuv444p"
        for frame in frames.astype(np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    with av.open(str(path)) as container:
        order = [packet.pts for packet in container.demux(video=0) if packet.pts is not None]
    assert order != sorted(order)
    column = Column(
        dataset="x", steps=30, row=(31, 47, 3), dtype="uint8", source=VideoSource(path=path, start_s=0.5, fps=20)
    )
    out, reader = np.empty((30, 31, 47, 3), np.uint8), open_reader(None)
    for start, stop in [(12, 30), (0, 12), (29, 30), (5, 6)]:
        reader.read_into(column, out[start:stop], start, stop)
        assert ((out[start:stop, 16, 4::8, 1] > 120) << np.arange(6)).sum(axis=1).tolist() == list(
            range(10 + start, 10 + stop)
        )
    reader.close()


def test_colours(tmp_path: Path) -> None:
    """Red is red: the channels of a frame are red, green, blue."""
    path, frames = tmp_path / "a.mp4", np.zeros((3, 32, 48, 3), np.uint8)
    for channel in range(3):
        frames[channel, ..., channel] = 230
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=20, options={"crf": "5"})
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    column = Column(
        dataset="x", steps=3, row=(32, 48, 3), dtype="uint8", source=VideoSource(path=path, start_s=0, fps=20)
    )
    out, reader = np.empty(frames.shape, np.uint8), open_reader(None)
    reader.read_into(column, out, 0, 3)
    assert np.abs(out.astype(int) - frames).max() < 12
    reader.close()


def test_reading_leaves_no_thread(lerobot) -> None:
    """No thread of PyAV survives a read: a process forked by another thread would wait for it forever."""
    created, out, threads = lerobot(4), np.empty((4, 32, 48, 3), np.uint8), []
    path = created.path / f"videos/{CAMERA}/chunk-000/file-000.mp4"
    column = Column(
        dataset="x", steps=4, row=(32, 48, 3), dtype="uint8", source=VideoSource(path=path, start_s=0, fps=20)
    )

    def read() -> None:
        threads.append(len(os.listdir("/proc/self/task")))
        reader = open_reader(None)
        reader.read_into(column, out, 0, 4)
        reader.close()
        threads.append(len(os.listdir("/proc/self/task")))

    reading = threading.Thread(target=read)
    reading.start()
    reading.join()
    assert threads[0] == threads[1]


def test_turned_video(lerobot, whole) -> None:
    """A video with a display rotation is refused, because its stored frames are not upright."""
    dataset = lerobot(4)
    path = dataset.path / f"videos/{CAMERA}/chunk-000/file-000.mp4"
    data = bytearray(path.read_bytes())
    position = data.index(b"tkhd", data.index(b"trak")) + 4 + 40
    assert int.from_bytes(data[position : position + 4], "big") == 1 << 16
    for i, value in enumerate((-1 << 16, 0, 0, 0, -1 << 16)):
        data[position + 4 * i : position + 4 * i + 4] = (value & 0xFFFFFFFF).to_bytes(4, "big")
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rotation of -?180"):
        whole(detect.scan_recording(dataset.path, "auto").episodes[0])
