"""The time of the controller and of the reports."""

from __future__ import annotations

import os

import pytest

from tests.node.control.world import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of journal lines; no test here loses power
    return Clock(monkeypatch)
