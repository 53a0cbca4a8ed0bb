"""Find the episodes that cannot be read although their metadata are complete, by reading all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from pitools.core import worker_pool
from pitools.core.errors import DataError, Unreachable
from pitools.core.fs import TRANSIENT_ERRNOS
from pitools.core.progress import progress_bar
from pitools.dataset.formats.model import (
    ChangedDuringRead,
    Column,
    Episode,
    EpisodeUnreadable,
    RejectedEpisode,
    rejection,
)
from pitools.dataset.formats.readers import open_reader

_BLOCK_BYTES = 4 << 20


def find_unreadable(episodes: Sequence[Episode], workers: int) -> tuple[RejectedEpisode, ...]:
    """Read every array of the episodes and return the unreadable episodes, in order.

    Raises ChangedDuringRead for a file that is being written, Unreachable for a transient failure of a file system.
    """
    rejected: dict[int, RejectedEpisode] = {}
    with progress_bar("verify", len(episodes), unit="episodes") as advance:
        for number, item in worker_pool.run_tasks(
            range(len(episodes)), partial(_EpisodeReader, episodes), workers=workers
        ):
            advance(1)
            if item:
                rejected[number] = item
    return tuple(rejected[number] for number in sorted(rejected))


class _EpisodeReader:
    """Read episodes by their numbers."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = episodes
        self._reader = open_reader(episodes[0])

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __call__(self, job: int) -> tuple[int, RejectedEpisode | None]:
        episode = self._episodes[job]
        try:
            for column in episode.columns.values():
                self._read(column)
        except ChangedDuringRead:
            raise
        except DataError as error:
            named_error = add_episode(error, episode)
            if not isinstance(named_error, EpisodeUnreadable):
                raise named_error from error
            return job, named_error.rejected
        return job, None

    def _read(self, column: Column) -> None:
        rows = max(1, _BLOCK_BYTES // (math.prod(column.row) * np.dtype(column.dtype).itemsize))
        block = np.empty((min(rows, column.steps), *column.row), column.dtype)
        for start in range(0, column.steps, rows):
            stop = min(start + rows, column.steps)
            self._reader.read_into(column, block[: stop - start], start, stop)


def add_episode(error: DataError, episode: Episode) -> EpisodeUnreadable | Unreachable:
    """Return a read error with the episode's name and a hint to skip it. A transient failure of the file system gives
    Unreachable instead: it does not prove that the episode is damaged."""
    if isinstance(cause := error.__cause__, OSError) and cause.errno in TRANSIENT_ERRNOS:
        return Unreachable(error.message, where=error.where, hint="run this again")
    hint = f"{error.hint or 'record it again'}; or leave the episode out with --skip-rejected"
    unreadable = EpisodeUnreadable(f"{episode.name}: {error.message}", where=error.where, hint=hint)
    unreadable.rejected = rejection(episode.name, episode.path, unreadable)
    return unreadable
