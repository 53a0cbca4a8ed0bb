"""Map the instructions of a version's episodes to integers for batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pitools.loader.sampling.episode_filter import read_episodes
from pitools.loader.sampling.shuffle import Indices
from pitools.store.manifest import EPISODE_JSON
from pitools.store.reader.version_reader import VersionReader


class InstructionTable:
    """texts: the distinct instructions, sorted. `indices_of` maps episodes to indices into them."""

    def __init__(self, reader: VersionReader) -> None:
        """Reads them now, not at the first batch, which a hanging read would delay. Raises DataError."""
        recorded = read_episodes(reader) if EPISODE_JSON in reader.manifest.arrays else []
        self.texts = tuple(sorted({episode.instruction for episode in recorded} - {""}))
        index_of = {text: index for index, text in enumerate(self.texts)}
        self._numbers = np.array([index_of.get(episode.instruction, -1) for episode in recorded], np.int32)

    def indices_of(self, episode: Indices) -> NDArray[np.int32]:
        """Return each episode's index into `texts`; -1 without an instruction, or for an episode number below 0."""
        if not self.texts:
            return np.full_like(episode, -1, np.int32)
        return np.where(episode < 0, np.int32(-1), self._numbers[episode])
