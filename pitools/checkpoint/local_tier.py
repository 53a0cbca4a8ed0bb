"""The node's own disk, to save in first; from there a thread copies to the shared folder.

Rank 0 says before each save whether it goes there: a disk that is full, or fails, is passed by with a warning, and
saves go on to the shared folder at once. A checkpoint that ended half way for want of room is given up for the next,
which is newer, and never for none: with no save after it its error is raised.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

import msgspec

from pitools.checkpoint.background_copy import Drainer
from pitools.checkpoint.coordination.barrier import RemoteRankError
from pitools.checkpoint.store import layout, lookup, retention
from pitools.core.errors import NoSpace, PitError
from pitools.store.digest import of_bytes

# To a checkpoint of the size of the last one.
_ROOM = 1.1


def folder_near(stage: Path | None, folder: Path, run: str, nodes: int, *, lead: bool) -> Path | None:
    """Where on the node's own disk: another place for each shared folder, whatever its name, for runs have the disk in
    turns. None where none is wanted, or each of several nodes would have a part.
    """
    if stage is None:
        return None
    if nodes > 1:
        if lead:
            _warn(f"{stage} is not used: {nodes} nodes have a disk each, and no whole checkpoint would be on any")
        return None
    whose = of_bytes(os.fsencode(os.path.realpath(folder))).rpartition(":")[2][:12]
    return Path(stage).absolute() / f"{run or 'run'}.{folder.absolute().name}.{whose}"


class SaveTarget(msgspec.Struct, frozen=True):
    """Where the next save goes, as rank 0 tells all. replaces_failed: it makes good the last one's error."""

    tier: Literal["local", "shared"] = "shared"
    replaces_failed: bool = False


class Near:
    """Rank 0's: whether the node's own disk is saved in, and what copies from it."""

    def __init__(self, local: Path, folder: Path, keep_last: int, keep_every: int) -> None:
        self._local, self._folder, self._keep = local, folder, (keep_last, keep_every)
        self._drainer: Drainer | None = None
        self._off = False

    def fails(self, error: PitError) -> None:
        """Save there no more."""
        self._off = True
        _warn(f"{self._local}: {error.what}; checkpoints go to {self._folder} at once")

    def takes_next(self, error: BaseException | None) -> SaveTarget:
        """Choose where the next save goes. error: of the last one."""
        if full := self._is_full(error):
            self.fails(NoSpace("no room for a checkpoint"))
        return SaveTarget("local" if not self._off and self._has_room() else "shared", replaces_failed=full)

    def submit(self, step: int) -> None:
        """Copy this checkpoint next."""
        self.start()
        assert self._drainer
        self._drainer.submit(step)

    def start(self) -> None:
        """Copy what an earlier process left here, and whatever is submitted."""
        if not self._drainer:
            last, every = self._keep
            self._drainer = Drainer(self._local, self._folder, keep_last=last, keep_every=every)

    def wait(self, timeout_s: float) -> None:
        """As `Drainer.wait`."""
        if self._drainer:
            self._drainer.wait(timeout_s)

    def close(self) -> None:
        """As `Drainer.close`."""
        if self._drainer:
            self._drainer.close()
            self._drainer = None

    def _is_full(self, error: BaseException | None) -> bool:
        # The shared folder is not asked to make good what it refused itself.
        kind = error.error_kind if isinstance(error, RemoteRankError) else type(error).__name__
        return kind == NoSpace.__name__ and not self._off

    def _has_room(self) -> bool:
        try:
            steps = lookup.whole(self._local)
            last = lookup.whole_at(layout.step_path(self._local, steps[0])) if steps else None
            needed = int(_ROOM * last.total_bytes) if last else 0
            if shutil.disk_usage(self._local).free >= needed:
                return True
            safe = lookup.newest(self._folder)
            retention.prune(self._local, keep=[step for step in steps if safe is None or step > safe], keep_last=1)
            if shutil.disk_usage(self._local).free >= needed:
                return True
            _warn(f"{self._local} has no room for {needed} bytes: this checkpoint goes to {self._folder} at once")
        except (OSError, PitError) as error:
            _warn(f"{self._local}: {error}: this checkpoint goes to {self._folder} at once")
        return False


def _warn(text: str) -> None:
    print(f"PIT_CHECKPOINT_NVME: {text}", file=sys.stderr, flush=True)
