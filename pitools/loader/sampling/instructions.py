"""The instructions of a version's episodes, as numbers that a batch can hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pitools.loader.sampling.episode_filter import read_episodes
from pitools.loader.sampling.shuffle import Indices
from pitools.store.reader.version_reader import VersionReader


class InstructionTable:
    """Distinct instructions, `texts`, sorted; and which of them each episode has."""

    def __init__(self, arrays: VersionReader) -> None:
        """Reads them now: a read that does not come back must hold up no batch. Raises DataError."""
        told = read_episodes(arrays) if "episode_json" in arrays.manifest.arrays else []
        self.texts = tuple(sorted({one.language for one in told} - {""}))
        number = {text: at for at, text in enumerate(self.texts)}
        self._numbers = np.array([number.get(one.language, -1) for one in told], np.int32)

    def indices_of(self, episode: Indices) -> NDArray[np.int32]:
        """The number in `texts` of each episode's; -1 where it has none, or the number of the episode is below 0."""
        if not self.texts:
            return np.full_like(episode, -1, np.int32)
        return np.where(episode < 0, np.int32(-1), self._numbers[episode])
