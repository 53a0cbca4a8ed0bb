"""Profiles: recorded ones beside the tests, and real ones of GPUs beside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.perf.read.files import find_files
from pitools.perf.read.read import read_table
from pitools.perf.spans import SpanTable


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `own_process` in one: JAX starts threads, and later tests fork."""
    if not pyfuncitem.get_closest_marker("own_process") or os.environ.get("PIT_OWN_PROCESS"):
        return None
    command = [sys.executable, "-m", "pytest", "-q", pyfuncitem.nodeid]
    env = {**os.environ, "PIT_OWN_PROCESS": "1"}
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return True


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
