"""scripts/devcluster, run as a user does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

Devcluster = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def devcluster() -> Devcluster:
    """Run the script as a user does."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        argv = [str(SCRIPTS / "devcluster"), *map(str, words)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)

    return run
