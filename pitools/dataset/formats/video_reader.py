"""Frames of a video, each the one that is shown at its step's time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats.model import Column, VideoSource

# Of the time that a frame is shown. Half of it could be either of two frames; a container's clock rounds far less.
TOLERANCE = 0.25
# Frames that are rather decoded than sought: in most videos the next key frame is further.
_SEEK_FRAMES = 16
_RETRY_HINT = "download it again, or convert it again from where it was recorded"


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Whatever FFmpeg says in this block is raised as DataError: only read in it."""
    try:
        yield
    except (av.error.FFmpegError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise DataError(f"cannot be read as a video: {text}", where=str(path), hint=_RETRY_HINT) from error


def frame_count(path: Path) -> int:
    """How many frames a video has by its own header, 0 where that does not say. Raises DataError."""
    with translate_errors(path), av.open(str(path)) as container:
        return int(_stream(container, path).frames)


def _stream(container: Any, path: Path) -> Any:
    if not container.streams.video:
        raise DataError("it has no video stream", where=str(path), hint=_RETRY_HINT)
    return container.streams.video[0]


class VideoReader:
    """One video, open to be read by one thread at a time. What follows the last frame read is at hand."""

    def __init__(self, path: Path) -> None:
        """Raises DataError."""
        self._path = path
        with translate_errors(path):
            self._container = av.open(str(path))
        self._stream = _stream(self._container, path)
        # Workers are many already: one shard each.
        self._stream.codec_context.thread_count = 1
        # Else a decoder hides damage as well as it can.
        self._stream.codec_context.options = {"err_detect": "explode"}
        self._start = self._stream.start_time or 0
        self._decoded: Iterator[Any] = iter(())
        self._next: Any = None
        self._rewind(0.0)

    def close(self) -> None:
        """Let go of the file."""
        self._decoded, self._next = iter(()), None
        self._container.close()

    def read_into(self, column: Column, source: VideoSource, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with the episode's frames [start, stop) as RGB. Raises DataError for one that is not there."""
        slack = TOLERANCE / source.fps
        for step in range(start, stop):
            time_s = source.start_s + step / source.fps
            frame = self._frame(time_s, slack, source.fps)
            with translate_errors(self._path):
                # Else as many threads as there are cores, which PyAV keeps and a forked process would wait for.
                image = frame.reformat(format="rgb24", threads=1).to_ndarray()
            if image.shape != column.row:
                problem = f"the frame is {image.shape[0]} x {image.shape[1]}, others {column.row[:2]}"
                raise DataError(problem, where=self._describe_time(time_s), hint=_RETRY_HINT)
            out[step - start] = image

    def _frame(self, time_s: float, slack: float, fps: float) -> Any:
        """The frame of this time. Decodes on from the last, or from the key frame before."""
        here = self._time(self._next)
        if here is None or here > time_s + slack or here < time_s - _SEEK_FRAMES / fps:
            self._rewind(time_s - slack)
        while (here := self._time(self._next)) is not None and here < time_s - slack:
            self._advance()
        if here is None or here > time_s + slack:
            found = "it ends before" if here is None else f"the next is at {here:.4f} s"
            raise DataError(
                f"there is no frame of that time: {found}", where=self._describe_time(time_s), hint=_RETRY_HINT
            )
        frame = self._next
        if frame.is_corrupt:
            raise DataError("the frame is damaged", where=self._describe_time(time_s), hint=_RETRY_HINT)
        if frame.rotation:
            hint = "encode it again, turned; or leave it out with --skip"
            raise DataError(f"players turn the video by {frame.rotation} degrees", where=str(self._path), hint=hint)
        self._advance()
        return frame

    def _rewind(self, time_s: float) -> None:
        with translate_errors(self._path):
            ticks = self._start + int(max(time_s, 0) / self._stream.time_base)
            self._container.seek(ticks, backward=True, stream=self._stream)
            self._decoded = self._container.decode(self._stream)
        self._advance()

    def _advance(self) -> None:
        with translate_errors(self._path):
            self._next = next(self._decoded, None)

    def _time(self, frame: Any) -> float | None:
        """Seconds into the video at which a frame is shown."""
        if frame is None:
            return None
        if frame.pts is None:
            raise DataError("a frame has no time", where=str(self._path), hint=_RETRY_HINT)
        return float((frame.pts - self._start) * self._stream.time_base)

    def _describe_time(self, time_s: float) -> str:
        return f"{self._path}: at {time_s:.4f} s"
