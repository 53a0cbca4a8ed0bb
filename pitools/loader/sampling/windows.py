"""Define samples as windows around anchor steps of episodes, with a separate span for each array.

    episode      ├───────────────────────────────┤
    anchor                    │
    obs (1, 1)              ├─┤                         steps [anchor - 1, anchor + 1)
    action (0, 16)            ├───────────────┤         steps [anchor, anchor + 16)

Padded windows extend beyond an episode's ends, where the first or last step is repeated; others stay inside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pitools.core.errors import UsageError
from pitools.loader.sampling.shuffle import Indices


class WindowSpan(NamedTuple):
    """Steps [anchor - before, anchor + after): `before` excludes the anchor step, `after` includes it.

    (1, 0) is the step before the anchor alone, (0, 1) the anchor alone, (1, 1) both.
    """

    before: int
    after: int

    @property
    def length(self) -> int:
        """Steps of a window."""
        return self.before + self.after


class WindowLocations(NamedTuple):
    """(n,) each. episode: number. start, stop: the episode's steps [start, stop). anchor: step of the dataset."""

    episode: Indices
    start: Indices
    stop: Indices
    anchor: Indices


class Windows:
    """The windows of some episodes, numbered in the order of episodes, with anchors `stride` steps apart."""

    def __init__(
        self,
        offsets: Indices,
        episodes: Indices,
        spans: Mapping[str, WindowSpan],
        *,
        stride: int = 1,
        pad: bool = False,
    ) -> None:
        """offsets: (all episodes + 1,) first steps. episodes: numbers, in this order. spans: by array.

        Raises UsageError for no span, an empty span, or a stride below 1.
        """
        if not spans:
            hint = 'for example {"action": WindowSpan(0, 16)}'
            raise UsageError("spans: empty (expected one array or more)", where="spans", hint=hint)
        for name, span in spans.items():
            if span.length < 1:
                raise UsageError(f"span: empty: [-{span.before}, {span.after})", where=name)
        if stride < 1:
            raise UsageError(f"stride: too small (expected 1 or more, got {stride})", where="stride")
        self.spans, self.pad, self._stride = dict(spans), pad, stride
        self._episodes = np.asarray(episodes, np.int64)
        self._starts, self._stops = offsets[self._episodes], offsets[self._episodes + 1]
        lengths = self._stops - self._starts
        # An anchor is a step of its episode, even if its windows are outside the episode.
        self._first = 0 if pad else max(0, *(span.before for span in spans.values()))
        last = 1 if pad else max(1, *(span.after for span in spans.values()))
        counts = np.maximum(0, -(-(lengths - self._first - last + 1) // stride))
        self._ends = np.cumsum(counts)

    @property
    def episodes(self) -> tuple[Indices, Indices, Indices]:
        """Return number, first step and stop of each episode, (n,) each."""
        return self._episodes, self._starts, self._stops

    @property
    def identity(self) -> str:
        """Return a digest of all that determines the numbering of samples within a dataset."""
        spans = sorted((name, *span) for name, span in self.spans.items())
        text = f"pit.windows/1 {spans} {self._stride} {self.pad} ".encode()
        return hashlib.sha256(text + self._episodes.astype("<i8").tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._ends[-1]) if self._ends.size else 0

    def locate(self, samples: Indices) -> WindowLocations:
        """Return the locations of samples by number. Raises IndexError for a number out of range."""
        numbers = np.asarray(samples, np.int64)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} of {len(self)}")
        index = np.searchsorted(self._ends, numbers, "right")
        first_sample = np.where(index > 0, self._ends[index - 1], 0) if numbers.size else numbers
        anchor = self._starts[index] + self._first + (numbers - first_sample) * self._stride
        return WindowLocations(self._episodes[index], self._starts[index], self._stops[index], anchor)
