"""The parts of scripts/devcluster are no package of ours: they are found as the script itself finds them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

Devcluster = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def devcluster() -> Devcluster:
    """Run the script as a user does."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        argv = [str(SCRIPTS / "devcluster"), *map(str, words)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)

    return run
