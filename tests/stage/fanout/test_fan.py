"""A node that leaves a fan-out before it has done its part."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pitools.stage.fanout.fan import joined
from pitools.stage.fanout.group import Group, Patience
from pitools.stage.source import Source

GroupOf = Callable[[int], Group]
NOWHERE = cast(Source, None)  # nothing is read


@pytest.fixture
def group() -> GroupOf:
    """A group of nodes on this machine, as its n-th node knows it."""
    job, secret = secrets.token_hex(4), secrets.token_bytes(16)
    names = ["n0", "n1", "n2"]
    return lambda me: Group(names, ["127.0.0.1"] * len(names), me, job, (20000, 31999), secret)


def join(group: GroupOf, me: int, tmp_path: Path) -> Any:
    return joined(NOWHERE, [], "v", [tmp_path], group(me), Patience())


def fail(group: GroupOf, me: int, tmp_path: Path) -> None:
    with join(group, me, tmp_path):
        raise FileNotFoundError("the source")


def test_a_node_that_fails_was_seen(group, tmp_path) -> None:
    """Who never met it knows that it was there, and so that it is gone; it is not taken for one that has all."""
    with join(group, 0, tmp_path) as there:
        assert not there.source.board.seen[1]
        began = time.monotonic()
        with pytest.raises(FileNotFoundError):
            fail(group, 1, tmp_path)
        assert time.monotonic() - began < 10  # n2 never comes, and is not visited for long
        assert there.source.board.seen[1]
        assert not there.source.board.finished[1]


def test_who_comes_a_moment_later_sees_it(group, tmp_path) -> None:
    """A node that fails at once is seen also by one that begins to listen a little later."""
    child = os.fork()
    if not child:
        try:
            fail(group, 1, tmp_path)
        finally:
            os._exit(0)
    time.sleep(0.5)
    with join(group, 0, tmp_path) as there:
        os.waitpid(child, 0)
        assert there.source.board.seen[1]
