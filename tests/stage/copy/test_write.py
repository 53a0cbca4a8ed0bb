from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from pitools.core.errors import NoSpace
from pitools.stage.copy import write
from pitools.stage.copy.write import BackgroundSync


def test_what_was_written_goes_to_the_disk_early_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A sync begins as soon as much waits, one at a time, beside the copy; and one is the last of all."""
    event, may_end, began = threading.get_ident(), threading.Event(), threading.Event()
    syncs: list[bool] = []
    descriptors: set[int] = set()

    def sync(path: Path, descriptor: int) -> None:
        assert (path, os.fstat(descriptor).st_ino) == (tmp_path, tmp_path.stat().st_ino)
        descriptors.add(descriptor)
        syncs.append(threading.get_ident() != event)
        began.set()
        if syncs[-1]:
            assert may_end.wait(10)

    monkeypatch.setattr(write, "sync_fs", sync)
    with BackgroundSync(tmp_path) as flusher:
        flusher.add_bytes(write._FLUSH_EVERY_BYTES - 1)
        assert syncs == []
        flusher.add_bytes(1)
        assert began.wait(10)
        flusher.add_bytes(10 * write._FLUSH_EVERY_BYTES)  # while the first one is at it
        assert syncs == [True]
        may_end.set()
    assert syncs == [True, False]
    (descriptor,) = descriptors  # opened before the first byte: the kernel tells it of every error since
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_error_of_an_early_sync_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel tells it once; the last sync, which then succeeds, must not pass for all."""
    answers = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None]

    def sync(path: Path, descriptor: int) -> None:
        if answer := answers.pop(0):
            raise answer

    monkeypatch.setattr(write, "sync_fs", sync)
    with pytest.raises(NoSpace) as error, BackgroundSync(tmp_path) as flusher:
        flusher.add_bytes(write._FLUSH_EVERY_BYTES)
    assert error.value.where == str(tmp_path)
    assert answers == []
