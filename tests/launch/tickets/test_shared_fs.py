"""Tickets on a file system that this machine shares: what is refused before a submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, NoSpace
from pitools.launch import plan as planning
from pitools.launch.request import Request
from pitools.launch.tickets import shared_fs
from pitools.launch.tickets.ticket_state import FolderNotCreated
from pitools.site.schema import Paths, Site, SitePartition


def test_a_relative_folder_of_runs_is_refused() -> None:
    """It would be another folder for a tick that has another working directory."""
    with pytest.raises(ConfigError):
        shared_fs.runs_dir(Site(name="a", paths=Paths(runs="runs")))


def test_a_full_disk_is_no_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that no job can exist, and nothing is left of the folder."""
    site = Site(name="a", paths=Paths(runs=str(tmp_path / "runs")), partitions={"train": SitePartition(nodes=1)})
    request = Request(name="bc", command="true", time="1m", partition="train", workdir=str(tmp_path))

    def full(*_: object) -> None:
        raise NoSpace("disk full")

    monkeypatch.setattr(shared_fs.provenance, "capture", full)
    with pytest.raises(FolderNotCreated):
        shared_fs.submit_ticket(planning.make_plan(request, site, "test"), site, name="bc.1")
    assert list((tmp_path / "runs").iterdir()) == []
