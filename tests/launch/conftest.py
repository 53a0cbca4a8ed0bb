"""Requests and plans of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.launch import plan as planning
from pitools.launch.request import Request
from pitools.site import load

MakePlan = Callable[..., planning.Plan]


@pytest.fixture
def make_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """A plan of a small request on a site, with its runs in the test's folder unless the site is a cluster."""

    def make(site: str, **asked: Any) -> planning.Plan:
        if site == "local":
            monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
        wanted = {"name": "t", "time": "5m", "workdir": str(tmp_path), **asked}
        if "entry" not in wanted:
            wanted.setdefault("command", "true")
        return planning.make(Request(**wanted), load.load(site), "test")

    return make
