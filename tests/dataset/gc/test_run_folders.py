from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from pitools.core.errors import ClusterError
from pitools.dataset.gc import run_folders


@pytest.fixture
def people(tmp_path) -> Path:
    """Storage where each user has a folder, and two have runs."""
    for name in ("ada/runs", "bob/runs", "eve/data", ".snapshot/runs"):
        (tmp_path / "fs" / name).mkdir(parents=True)
    return tmp_path / "fs"


def test_everybodys(people, monkeypatch) -> None:
    """Where each user's runs have a place of their own, all of them count."""
    monkeypatch.setenv("PIT_RUNS", f"{people}/{{user}}/runs")
    assert run_folders.run_roots("local") == [people / "ada/runs", people / "bob/runs"]
    monkeypatch.setenv("PIT_RUNS", f"{people}/a{{user}}/runs")
    assert run_folders.run_roots("local") == [people / "ada/runs"]
    stat = Path.stat

    def private(path, **settings):
        if path == people / "eve/runs":
            raise PermissionError
        return stat(path, **settings)

    monkeypatch.setenv("PIT_RUNS", f"{people}/{{user}}/runs")
    with patch("pathlib.Path.stat", private):
        assert people / "eve/runs" in run_folders.run_roots("local")


def test_one_folder(people, monkeypatch) -> None:
    """A folder that all share, also one that is relative, is the one; none where nobody has launched anything."""
    monkeypatch.chdir(people / "ada")
    assert run_folders.run_roots("local") == [people / "ada/runs"]
    monkeypatch.chdir(people)
    assert run_folders.run_roots("local") == []
    monkeypatch.setenv("PIT_RUNS", str(people / "ada/runs"))
    assert run_folders.run_roots("local") == [people / "ada/runs"]


@pytest.mark.parametrize("text", ["nowhere/{user}/runs", "nowhere/runs", "runs"])
def test_storage_that_is_not_mounted(people, monkeypatch, text) -> None:
    """Where the site's storage cannot be seen, nobody knows what its runs name."""
    monkeypatch.setenv("PIT_RUNS", f"{people}/{text}")
    with pytest.raises(ClusterError) as caught:
        run_folders.run_roots("local")
    assert "--no-site-runs" in caught.value.hint
    assert os.fspath(people) in caught.value.where
