"""Read the frames of a video that are displayed at the times of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import av
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats.model import Column, VideoSource, translate_library_errors

# In frame periods. At 0.5, two frames could match; rounding of a container's clock is far smaller.
TOLERANCE = 0.25
# Frames that are decoded rather than skipped by a seek: in most videos the next key frame is further away.
_SEEK_FRAMES = 16
_RETRY_HINT = "download it again, or convert it again from where it was recorded"


def translate_errors(path: Path) -> AbstractContextManager[None]:
    """Raise FFmpeg's errors in this block as DataError; the block must only read."""
    return translate_library_errors("a video", str(path), _RETRY_HINT, (av.error.FFmpegError, OSError, ValueError))


def frame_count(path: Path) -> int:
    """Return the number of frames in a video's header, 0 if the header has none. Raises DataError."""
    with translate_errors(path), av.open(str(path)) as container:
        return int(_stream(container, path).frames)


def _stream(container: Any, path: Path) -> Any:
    if not container.streams.video:
        raise DataError("the file has no video stream", where=str(path), hint=_RETRY_HINT)
    return container.streams.video[0]


class VideoReader:
    """One open video, for one thread at a time. Reading on from the last frame needs no seek."""

    def __init__(self, path: Path) -> None:
        """Raises DataError."""
        self._path = path
        with translate_errors(path):
            self._container = av.open(str(path))
        self._stream = _stream(self._container, path)
        # There is a worker process per CPU already.
        self._stream.codec_context.thread_count = 1
        # By default, a decoder conceals damage.
        self._stream.codec_context.options = {"err_detect": "explode"}
        self._start_ticks = self._stream.start_time or 0
        self._decoded: Iterator[Any] = iter(())
        self._next_frame: Any = None
        self._rewind(0.0)

    def close(self) -> None:
        """Close the file."""
        self._decoded, self._next_frame = iter(()), None
        self._container.close()

    def read_into(self, column: Column, source: VideoSource, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with the episode's frames [start, stop) as RGB. Raises DataError for a missing frame."""
        slack = TOLERANCE / source.fps
        for step in range(start, stop):
            time_s = source.start_s + step / source.fps
            frame = self._read_frame(time_s, slack, source.fps)
            with translate_errors(self._path):
                # By default, PyAV starts a thread per core and keeps it; a forked process would wait for these threads.
                image = frame.reformat(format="rgb24", threads=1).to_ndarray()
            if image.shape != column.row:
                problem = f"the frame has the size {image.shape[:2]} (expected {column.row[:2]})"
                raise DataError(problem, where=self._describe_time(time_s), hint=_RETRY_HINT)
            out[step - start] = image

    def _read_frame(self, time_s: float, slack: float, fps: float) -> Any:
        """Return the frame at a time. Decodes on from the last frame, or from the preceding key frame."""
        next_s = self._frame_time_s(self._next_frame)
        if next_s is None or next_s > time_s + slack or next_s < time_s - _SEEK_FRAMES / fps:
            self._rewind(time_s - slack)
        while (next_s := self._frame_time_s(self._next_frame)) is not None and next_s < time_s - slack:
            self._advance()
        if next_s is None or next_s > time_s + slack:
            reason = "the video ends before" if next_s is None else f"the next is at {next_s:.4f} s"
            raise DataError(f"no frame at that time: {reason}", where=self._describe_time(time_s), hint=_RETRY_HINT)
        frame = self._next_frame
        if frame.is_corrupt:
            raise DataError("the frame is damaged", where=self._describe_time(time_s), hint=_RETRY_HINT)
        if frame.rotation:
            hint = "encode it again with the rotation applied; or leave it out with --skip-array"
            problem = f"the video has a display rotation of {frame.rotation} degrees"
            raise DataError(problem, where=str(self._path), hint=hint)
        self._advance()
        return frame

    def _rewind(self, time_s: float) -> None:
        with translate_errors(self._path):
            ticks = self._start_ticks + int(max(time_s, 0) / self._stream.time_base)
            self._container.seek(ticks, backward=True, stream=self._stream)
            self._decoded = self._container.decode(self._stream)
        self._advance()

    def _advance(self) -> None:
        with translate_errors(self._path):
            self._next_frame = next(self._decoded, None)

    def _frame_time_s(self, frame: Any) -> float | None:
        """Return a frame's time in seconds from the start of the video, None without a frame."""
        if frame is None:
            return None
        if frame.pts is None:
            raise DataError("a frame has no timestamp", where=str(self._path), hint=_RETRY_HINT)
        return float((frame.pts - self._start_ticks) * self._stream.time_base)

    def _describe_time(self, time_s: float) -> str:
        return f"{self._path}: at {time_s:.4f} s"
