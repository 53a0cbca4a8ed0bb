"""Episodes that cannot be read, though their metadata are whole: found by reading all, once one has been met."""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from pitools.core import worker_pool
from pitools.core.errors import DataError, Unreachable
from pitools.core.progress import bar
from pitools.dataset.formats.model import Changed, Column, Damaged, Episode, Refused, refusal
from pitools.dataset.formats.readers import open_reader

# What a network file system says for a while.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO}
_BLOCK_BYTES = 4 << 20


def damaged(episodes: Sequence[Episode], workers: int) -> tuple[Refused, ...]:
    """Read every array of the episodes, and return those that cannot be read, in order.

    Raises Changed for a file that is still being written, Unreachable where a file system fails for now.
    """
    found: dict[int, Refused] = {}
    with bar("verify", len(episodes), unit="episodes") as advance:
        for number, item in worker_pool.run(partial(_Examiner, episodes), range(len(episodes)), workers=workers):
            advance(1)
            if item:
                found[number] = item
    return tuple(found[number] for number in sorted(found))


class _Examiner:
    """Reads episodes by their numbers."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = episodes
        self._reader = open_reader(episodes[0])

    def close(self) -> None:
        """Let go of files."""
        self._reader.close()

    def __call__(self, job: int) -> tuple[int, Refused | None]:
        episode = self._episodes[job]
        try:
            for column in episode.columns.values():
                self._read(column)
        except Changed:
            raise
        except DataError as error:
            told = in_episode(error, episode)
            if not isinstance(told, Damaged):
                raise told from error
            return job, refusal(episode.name, episode.path, told)
        return job, None

    def _read(self, column: Column) -> None:
        rows = max(1, _BLOCK_BYTES // (math.prod(column.row) * np.dtype(column.dtype).itemsize))
        block = np.empty((min(rows, column.steps), *column.row), column.dtype)
        for start in range(0, column.steps, rows):
            stop = min(start + rows, column.steps)
            self._reader.read_into(column, block[: stop - start], start, stop)


def in_episode(error: DataError, episode: Episode) -> Damaged | Unreachable:
    """The error of reading an episode, with its name and how to go on without it. Where the file system fails for now
    that says nothing of the episode, which must not be left out for it."""
    if isinstance(cause := error.__cause__, OSError) and cause.errno in PASSING:
        return Unreachable(error.what, where=error.where, hint="run this again")
    hint = f"{error.hint or 'record it again'}; or leave the episode out with --skip-refused"
    return Damaged(f"{episode.name} cannot be read: {error.what}", where=error.where, hint=hint)
