"""A workdir as people have them, and runs that were made from it, without anything that starts them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.launch import plan as planning
from pitools.launch.reproduce import provenance
from pitools.launch.request import Request
from pitools.site import load

Git = Callable[..., str]
MakeRun = Callable[..., Path]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a module that tells where it is."""
    root = tmp_path / "work"
    root.mkdir()
    (root / "loop.py").write_text("def main(**args):\n    print('from', __file__)\n")
    (root / "settings.toml").write_text("rate = 1\n")
    return root


@pytest.fixture
def git(work: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """git in the workdir, which becomes a repository with one commit."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(work.parent))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def run(*words: str, at: Path = work) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
        done = subprocess.run(["git", *who, *words], cwd=at, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    run("init", "-q", "-b", "main")
    run("add", "-A")
    run("commit", "-q", "-m", "first")
    return run


@pytest.fixture
def make_run(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Makes the folder of a run of the workdir, as submission does; `site` and keys of the request may be given."""
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))

    def make(name: str = "r-1", *, site: str = "local", **asked: Any) -> Path:
        wanted = {"name": "t", "time": "5m", "workdir": str(work), **asked}
        if "entry" not in wanted:
            wanted.setdefault("command", "true")
        at = load.load(site)
        plan = planning.make(msgspec.convert(wanted, Request), at, "test")
        run_dir = tmp_path / "runs" / name
        building = run_dir.with_name(f".{name}")
        building.mkdir(parents=True)
        plan = provenance.capture(plan, at, building, run_dir)
        (building / "plan.json").write_bytes(msgspec.json.encode(plan))
        (building / "attempts").mkdir()
        return building.rename(run_dir)

    return make
