from __future__ import annotations

import threading
import time

import pytest

from pitools.stage.workers import default_readers, for_each


def test_every_item_is_worked_on_once():
    """Threads share the items, none is done twice or left."""
    done: list[int] = []
    for_each(range(1000), lambda item, buffer, stop: done.append(item), threads=4)
    assert sorted(done) == list(range(1000))


def test_nothing_to_do_is_done():
    """An empty dataset needs no thread."""
    for_each([], lambda item, buffer, stop: None, threads=4)


def test_the_first_failure_stops_the_others_and_is_the_one_raised():
    """The other workers leave their items, and their silence hides nothing."""
    done: list[int] = []

    def work(item: int, buffer: memoryview, stop: threading.Event) -> None:
        if item == 3:
            raise KeyError(item)
        stop.wait(0.01)
        done.append(item)

    with pytest.raises(KeyError):
        for_each(range(10_000), work, threads=4)
    assert len(done) < 100


def test_threads_do_not_share_buffers():
    """Each thread reads into memory of its own."""
    seen: dict[int, int] = {}

    def work(item: int, buffer: memoryview, stop: threading.Event) -> None:
        seen[threading.get_ident()] = id(buffer.obj)
        time.sleep(0.001)

    for_each(range(50), work, threads=3)
    assert len(seen) == len(set(seen.values())) == 3


def test_the_default_is_within_bounds():
    """Neither one reader on a small machine nor hundreds on a large one."""
    assert 2 <= default_readers() <= 16
