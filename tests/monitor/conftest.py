"""Sites of a test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.monitor.fleet import Runs, write_site


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runs]:
    """A site with a folder of runs, by its name."""
    folder = tmp_path / "sites"
    folder.mkdir()
    monkeypatch.setenv("PIT_SITE_PATH", str(folder))

    def make(name: str, scheduler: str = "none", more: str = "") -> Runs:
        write_site(folder, name, tmp_path / "runs" / name, scheduler, more)
        return Runs(name)

    return make
