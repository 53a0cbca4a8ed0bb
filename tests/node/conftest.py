"""What the tests of simulated clusters share: their time, and disks that need not be waited for."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from pitools.core import timestamps
from tests.node.simulated import Cluster


@pytest.fixture
def tell_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], None]:
    """Give the controller the time of a simulated cluster."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test here loses power

    def tell(cluster: Cluster) -> None:
        monkeypatch.setattr(timestamps, "now_rfc3339", lambda: timestamps.to_rfc3339(cluster.now))

    return tell
