"""Sites as files in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

WriteSite = Callable[[str, str], Path]


@pytest.fixture
def write_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteSite:
    """Writes `<name>.toml` where PIT_SITE_PATH finds it."""
    folder = tmp_path / "sites"
    folder.mkdir()
    monkeypatch.setenv("PIT_SITE_PATH", str(folder))

    def write(name: str, text: str) -> Path:
        path = folder / f"{name}.toml"
        path.write_text(text)
        return path

    return write
