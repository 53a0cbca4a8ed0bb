"""What of a workdir travels, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError
from pitools.launch.provenance import workdir_walk


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A workdir as people have them."""
    root = tmp_path / "work"
    for name in (
        "pkg/a.py",
        "pkg/__pycache__/a.pyc",
        ".git/HEAD",
        ".venv/pyvenv.cfg",
        ".venv/bin/python",
        "conda/conda-meta/history",
        "runs/x-1/plan.json",
        "runs/x-1/attempts/0/logs/0.out",
        "plan.json",
        ".hidden",
        "a b.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    return root


def names(work: Path) -> set[str]:
    return {entry.name for entry in workdir_walk.workdir_entries(work)}


def test_what_can_be_made_again_stays(work: Path) -> None:
    """No version control, caches, environments or runs; hidden files and odd names are part of it."""
    assert names(work) == {
        "code",
        "code/pkg",
        "code/pkg/a.py",
        "code/plan.json",
        "code/.hidden",
        "code/a b.txt",
        "code/runs",
    }


def test_links_stay_inside(work: Path) -> None:
    """A link to what is in the folder goes along, relative; one that leads out is named."""
    (work / "pkg" / "b.py").symlink_to(work / "a b.txt")
    (work / "again").symlink_to("pkg")
    links = {entry.name: entry.link for entry in workdir_walk.workdir_entries(work) if entry.link}
    assert links == {"code/pkg/b.py": "../a b.txt", "code/again": "pkg"}
    for target in ("/etc", "../elsewhere", "/nowhere"):
        (work / "out").symlink_to(target)
        with pytest.raises(ConfigError, match='"out"'):
            workdir_walk.workdir_entries(work)
        (work / "out").unlink()


def test_a_workdir_that_is_a_link(work: Path) -> None:
    """The folder itself may be one."""
    link = work.with_name("link")
    link.symlink_to("work")
    assert names(link) == names(work)


def test_what_is_refused(work: Path) -> None:
    """Too much names the largest; a pipe, a name of two lines, and a folder that is not there are no code."""
    (work / "pkg" / "large").write_bytes(b"")
    os.truncate(work / "pkg" / "large", 300 << 20)
    with pytest.raises(ConfigError, match=r"300\.0 MiB in \d+ files") as caught:
        workdir_walk.workdir_entries(work)
    assert "pkg/large, 300.0 MiB" in caught.value.hint
    (work / "pkg" / "large").unlink()
    os.mkfifo(work / "pipe")
    with pytest.raises(ConfigError, match='"pipe"'):
        workdir_walk.workdir_entries(work)
    (work / "pipe").unlink()
    (work / "a\nb").write_text("x")
    with pytest.raises(ConfigError, match="printable"):
        workdir_walk.workdir_entries(work)
    with pytest.raises(ConfigError, match="none"):
        workdir_walk.workdir_entries(work / "none")
