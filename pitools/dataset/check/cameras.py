"""Collect statistics of camera frames (brightness, repeated frames), and of arrays too large to read every item."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pitools.dataset.check.finding import Finding
from pitools.dataset.check.thresholds import Thresholds
from pitools.dataset.check.vectors import EpisodeParts, Floats, NonFiniteCounts

_NOT_CAMERA_NAME = re.compile(r"depth|mask|segm|label|instance")
_CAMERA_NAME = re.compile(r"image|rgb|cam|frame|video")
_CHANNELS = (3, 4)
# A camera with this many distinct frames per episode works; a frame repeated for this many steps is frozen.
_SLOW_CAMERA_STEPS = 4
# Sampled points of a frame along each axis, for its brightness.
_SAMPLE_POINTS = 48
# 64-bit words of a frame that are compared first: two frames of a working camera differ in most of them.
_PROBE_ROWS = 64


def is_camera(name: str, row: tuple[int, ...], dtype: str) -> bool:
    """Return whether an array holds camera images: uint8 with three or four channels, or one if the name is a
    camera's."""
    if dtype != "uint8" or len(row) not in (2, 3) or _NOT_CAMERA_NAME.search(name):
        return False
    colours = len(row) == 3 and (row[-1] in _CHANNELS or row[0] in _CHANNELS)
    return colours or bool(_CAMERA_NAME.search(name) and (len(row) == 2 or 1 in (row[0], row[-1])))


class SampledArray:
    """Finiteness of a large array. Checks the first and last step of each chunk and episode; with `deep`, all steps.

    non_finite: counts of the checked steps. checked: their number."""

    def __init__(self, name: str, offsets: NDArray[np.int64], chunk: int, *, deep: bool) -> None:
        self.name, self.non_finite, self.checked = name, NonFiniteCounts(len(offsets) - 1), 0
        self._offsets, self._chunk, self._deep = offsets, chunk, deep
        self._lock = threading.Lock()

    def add_steps(self, start: int, rows: NDArray[Any]) -> None:
        """Add consecutive steps from `start` on. Thread-safe."""
        sampled = self._sampled_rows(start, len(rows))
        finite = np.isfinite(rows[sampled].reshape(len(sampled), -1)).all(axis=1)
        with self._lock:
            self.checked += len(sampled)
            if not finite.all():
                self.non_finite.add(EpisodeParts(self._offsets, start, len(rows)), start, sampled[~finite])

    def _sampled_rows(self, start: int, count: int) -> NDArray[np.intp]:
        """Return the rows to check, of `count` steps from `start` on."""
        if self._deep:
            return np.arange(count)
        stop = start + count
        low, high = np.searchsorted(self._offsets, [start, stop])
        firsts = np.concatenate([[start], np.arange(start, stop, self._chunk), self._offsets[low:high]])
        lasts = np.concatenate([[stop], np.arange(start + self._chunk, stop, self._chunk), self._offsets[low:high]]) - 1
        both = np.unique(np.concatenate([firsts, lasts])) - start
        return both[(both >= 0) & (both < count)].astype(np.intp)


class CameraFrames(SampledArray):
    """One camera's frames, (steps, H, W[, C]) uint8. repeats: (steps,) bool, whether a frame equals the one before.
    first_frames: (episodes,), a digest of each episode's first frame. brightness: of the checked frames, (n, 3): step,
    mean grey level, and the largest deviation of a channel."""

    def __init__(self, name: str, offsets: NDArray[np.int64], chunk: int, *, deep: bool) -> None:
        super().__init__(name, offsets, chunk, deep=deep)
        self.repeats = np.zeros(int(offsets[-1]), np.bool_)
        self.first_frames = np.zeros(len(offsets) - 1, np.uint64)
        self._light: list[Floats] = []
        self._edges: list[tuple[int, int, int, int]] = []

    @property
    def brightness(self) -> Floats:
        """Return the brightness rows, in the order of steps."""
        light = np.concatenate(self._light) if self._light else np.zeros((0, 3))
        return light[np.argsort(light[:, 0], kind="stable")]

    def add_steps(self, start: int, rows: NDArray[Any]) -> None:
        """Add consecutive frames from step `start` on. Thread-safe."""
        sampled = self._sampled_rows(start, len(rows))
        light = np.column_stack([start + sampled, *_brightness(_subsample(rows)[sampled])])
        for i in np.flatnonzero(light[:, 2] == 0).tolist():  # something small may be between the points
            light[i, 1:] = np.concatenate(_brightness(rows[sampled[i]][None]))
        flat = rows.reshape(len(rows), -1)
        repeats = _repeated_rows(flat)
        ends = xxhash.xxh3_64_intdigest(flat[0]), xxhash.xxh3_64_intdigest(flat[-1])
        low, high = np.searchsorted(self._offsets[:-1], [start, start + len(rows)])
        firsts = [xxhash.xxh3_64_intdigest(flat[first - start]) for first in self._offsets[low:high]]
        with self._lock:
            self.checked += len(sampled)
            self._light.append(light)
            self.first_frames[low:high] = firsts
            self.repeats[start + 1 : start + len(rows)] = repeats
            self._edges.append((start, start + len(rows), *ends))

    def frozen_runs(self, at_least: int) -> Iterator[tuple[int, int, int]]:
        """Yield (episode, first step, stop) of each frame that is repeated for `at_least` steps, or longer if the
        camera is slow."""
        for (_, stop, _, last), (start, _, first, _) in pairwise(sorted(self._edges)):
            self.repeats[start] |= start == stop and first == last
        repeats = self.repeats.copy()
        begins = self._offsets[:-1]
        repeats[begins[begins < len(repeats)]] = False  # the last frame of one episode is no part of the next
        lasts = np.diff(np.flatnonzero(~repeats), append=len(repeats))
        if len(lasts) >= _SLOW_CAMERA_STEPS * len(begins):
            at_least = max(at_least, int(_SLOW_CAMERA_STEPS * np.median(lasts)))
        edges = np.flatnonzero(np.diff(repeats, prepend=False, append=False))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if high - low + 1 >= at_least:
                yield int(np.searchsorted(self._offsets, low, "right")) - 1, low - 1, high


def find_blank(camera: CameraFrames, offsets: NDArray[np.int64], bounds: Thresholds) -> Iterator[Finding]:
    """Yield a finding for each episode with frames that are black or of one colour."""
    light = camera.brightness
    dark = (light[:, 1] < bounds.blank_mean) & (light[:, 2] < bounds.blank_deviation)
    wrong = light[dark | (light[:, 2] == 0)]
    episodes = np.searchsorted(offsets, wrong[:, 0], "right") - 1
    for episode in np.unique(episodes).tolist():
        steps = wrong[episodes == episode]
        step, mean, deviation = steps[0]
        yield Finding(
            level="fault",
            check="blank",
            array=camera.name,
            episode=episode,
            step=int(step - offsets[episode]),
            problem=f"{len(steps)} of the checked frames are black or of one colour",
            got=f"mean {mean:.1f}, deviation {deviation:.1f}",
            expected=f"a mean of {bounds.blank_mean:g} or more, or a deviation of {bounds.blank_deviation:g} or more",
        )


def _brightness(frames: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """Return (n,) mean and (n,) largest deviation of a channel, of frames (n, H, W[, C]) or (n, C, H, W)."""
    if frames.ndim == 4 and frames.shape[3] in (1, *_CHANNELS):
        frames = np.moveaxis(frames, 3, 1)
    # Each channel in one piece: reducing along a last axis of three takes several times as long.
    channels = frames.astype(np.float32, order="C").reshape(len(frames), -1, frames.shape[-2] * frames.shape[-1])
    mean, spread = channels.mean(axis=2), channels.std(axis=2)
    return mean.mean(axis=1), spread.max(axis=1)


def _subsample(frames: NDArray[Any]) -> NDArray[Any]:
    """Return a view of evenly spaced points of each frame."""
    steps = (max(1, size // _SAMPLE_POINTS) for size in frames.shape[1:])
    return frames[(slice(None), *(slice(None, None, step) for step in steps))]


def _repeated_rows(flat: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return (n - 1,): whether row i + 1 equals row i."""
    blocks = flat.view(np.uint64) if flat.shape[1] % 8 == 0 else flat
    probes = blocks[:, :: max(1, blocks.shape[1] // _PROBE_ROWS)]
    same: NDArray[np.bool_] = (probes[1:] == probes[:-1]).all(axis=1)
    for i in np.flatnonzero(same).tolist():
        same[i] = np.array_equal(blocks[i], blocks[i + 1])
    return same
