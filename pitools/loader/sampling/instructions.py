"""The instructions of a version's episodes, as numbers that a batch can hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pitools.loader.sampling.order import Indices
from pitools.loader.sampling.select import episodes
from pitools.store.arrays import Arrays


class Instructions:
    """Distinct instructions, and which of them each episode has; read from the version when first asked for."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._known: tuple[tuple[str, ...], NDArray[np.int32]] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them, sorted. Raises DataError."""
        return self._read()[0]

    def of(self, episode: Indices) -> NDArray[np.int32]:
        """The number in `texts` of each episode's; -1 where it has none, or the number of the episode is below 0.

        Raises DataError.
        """
        numbers = self._read()[1]
        return (
            np.where(episode < 0, np.int32(-1), numbers[episode]) if numbers.size else np.full_like(episode, -1, "i4")
        )

    def _read(self) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        if self._known is None:
            told = episodes(self._arrays) if "episode_json" in self._arrays.manifest.arrays else []
            texts = tuple(sorted({one.language for one in told} - {""}))
            number = {text: at for at, text in enumerate(texts)}
            self._known = texts, np.array([number.get(one.language, -1) for one in told], np.int32)
        return self._known
