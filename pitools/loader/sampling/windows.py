"""Which steps make a sample: a window about each anchor step of an episode, of its own length for each array.

    episode      ├───────────────────────────────┤
    anchor                    │
    obs (1, 1)              ├─┤                         steps [anchor - 1, anchor + 1)
    action (0, 16)            ├───────────────┤         steps [anchor, anchor + 16)

Padded windows reach over an episode's ends, where the first or last step is repeated; others stay inside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import UsageError

Indices = NDArray[np.int64]


class WindowSpan(NamedTuple):
    """Steps [anchor - before, anchor + after)."""

    before: int
    after: int

    @property
    def length(self) -> int:
        """Steps of a window."""
        return self.before + self.after


class WindowLocations(NamedTuple):
    """(n,) samples each: number of the episode, its steps [start, stop), and the anchor among all steps."""

    episode: Indices
    start: Indices
    stop: Indices
    anchor: Indices


class Windows:
    """The samples of some episodes, numbered one episode after another, of anchors `stride` steps apart."""

    def __init__(
        self,
        offsets: Indices,
        episodes: Indices,
        spans: Mapping[str, WindowSpan],
        *,
        stride: int = 1,
        pad: bool = False,
    ) -> None:
        """offsets: (all episodes + 1,) first steps. episodes: those to take, by number, in this order.

        Raises UsageError for no span, one that holds nothing, or a stride below 1.
        """
        if not spans:
            raise UsageError("windows of no array", where="spans", hint='such as {"action": Span(0, 16)}')
        for name, span in spans.items():
            if span.length < 1:
                raise UsageError(f"a window of no steps: [-{span.before}, {span.after})", where=name)
        if stride < 1:
            raise UsageError(f"a stride of {stride} steps", where="stride", hint="1 takes every step")
        self.spans, self.pad, self._stride = dict(spans), pad, stride
        self._episodes = np.asarray(episodes, np.int64)
        self._starts, self._stops = offsets[self._episodes], offsets[self._episodes + 1]
        lengths = self._stops - self._starts
        # An anchor is a step of its episode even where the windows about it lie beside it.
        self._first = 0 if pad else max(0, *(span.before for span in spans.values()))
        last = 1 if pad else max(1, *(span.after for span in spans.values()))
        counts = np.maximum(0, -(-(lengths - self._first - last + 1) // stride))
        self._ends = np.cumsum(counts)

    @property
    def episodes(self) -> tuple[Indices, Indices, Indices]:
        """Number, first step and last of each episode: (n,) each, the last not included."""
        return self._episodes, self._starts, self._stops

    @property
    def identity(self) -> str:
        """A digest of all that decides which sample has which number, in a given dataset."""
        spans = sorted((name, *span) for name, span in self.spans.items())
        text = f"pit.windows/1 {spans} {self._stride} {self.pad} ".encode()
        return hashlib.sha256(text + self._episodes.astype("<i8").tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._ends[-1]) if self._ends.size else 0

    def locate(self, samples: Indices) -> WindowLocations:
        """Where samples are. Raises IndexError for one that is not there."""
        wanted = np.asarray(samples, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        at = np.searchsorted(self._ends, wanted, "right")
        before = np.where(at > 0, self._ends[at - 1], 0) if wanted.size else wanted
        anchor = self._starts[at] + self._first + (wanted - before) * self._stride
        return WindowLocations(self._episodes[at], self._starts[at], self._stops[at], anchor)
