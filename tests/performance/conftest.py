"""Profiles: recorded ones beside the tests, and real ones of GPUs beside the checkout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.perf.read.files import find_files
from pitools.perf.read.read import read_table
from pitools.perf.spans import SpanTable


@pytest.fixture
def profiles() -> Path:
    """Two-rank profiles with a fault each, made by the scripts of that folder."""
    return Path(__file__).parent / "profiles"


@pytest.fixture
def real(repo: Path) -> Path:
    """Real profiles of GPUs."""
    folder = repo.parent / "shared" / "data" / "perf"
    if not folder.is_dir():
        pytest.skip("the profiles of GPUs are not beside the checkout (../shared/data/perf)")
    return folder


@pytest.fixture
def read() -> Callable[..., SpanTable]:
    """Read paths into one table."""
    return lambda *paths: read_table(find_files(paths))
