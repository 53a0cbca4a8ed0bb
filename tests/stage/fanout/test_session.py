"""A node that leaves a fan-out before it has done its part."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pitools.stage.fanout import session
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.sources.base import Source

GroupOf = Callable[..., Group]
NOWHERE = cast(Source, None)  # nothing is read


@pytest.fixture
def group() -> GroupOf:
    """A group of some nodes on this machine, as its n-th knows it."""
    job, secret = secrets.token_hex(4), secrets.token_bytes(16)
    names = ["n0", "n1", "n2"]
    return lambda me, count=3: Group(names[:count], ["127.0.0.1"] * count, me, job, (20000, 31999), secret)


class Clock:
    """Time as it is, and what passed asleep, in no time."""

    passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of a node that waits for the others."""
    clock = Clock()
    monkeypatch.setattr(session, "time", clock)
    return clock


def join(group: Group, tmp_path: Path) -> Any:
    return session.join(NOWHERE, [], "v", [tmp_path], group, Timeouts())


def fail(group: Group, tmp_path: Path) -> None:
    with join(group, tmp_path):
        raise FileNotFoundError("the source")


def test_a_node_that_fails_was_seen(group: GroupOf, tmp_path: Path, clock: Clock) -> None:
    """Who never met it knows that it was there, and so that it is gone; it is not taken for one that has all."""
    with join(group(0), tmp_path) as target:
        assert not target.source.state.contacted[1]
        with pytest.raises(FileNotFoundError):
            fail(group(1), tmp_path)
        assert 0 < clock.passed_s < 5  # n2 never comes, and is not visited for long
        assert target.source.state.contacted[1]
        assert not target.source.state.finished[1]


def test_a_node_alone_waits_for_nobody(group: GroupOf, tmp_path: Path, clock: Clock) -> None:
    """When it is done it ends; one that does not know what became of another stays."""
    for count in (1, 2):
        with join(group(0, count), tmp_path) as target:
            target.mark_all_done()
            target.serve_until_done()
        assert bool(clock.passed_s) == (count > 1)


def test_who_comes_a_moment_later_sees_it(group: GroupOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that fails at once is seen also by one that begins to listen a little later."""
    monkeypatch.setattr(session, "_STARTUP_S", 60.0)
    child = os.fork()
    if not child:
        try:
            fail(group(1, 2), tmp_path)
        finally:
            os._exit(0)
    time.sleep(0.5)
    with join(group(0, 2), tmp_path) as target:
        os.waitpid(child, 0)
        assert target.source.state.contacted[1]
