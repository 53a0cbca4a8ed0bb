"""Tickets on a file system that this machine shares: what is refused before a submission."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, NoSpace, Unreachable
from pitools.launch import hooks
from pitools.launch import plan as planning
from pitools.launch.recovery import tick
from pitools.launch.request import Request
from pitools.launch.submission import submissions
from pitools.launch.tickets import shared_fs
from pitools.launch.tickets.ticket_state import FolderNotCreated
from pitools.run import run_folder
from pitools.site.schema import Hook, Paths, Site, SitePartition


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


@pytest.mark.parametrize("removed", [False, True])
def test_what_a_killed_tick_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool) -> None:
    """The folder that was being built when the tick was killed is replaced by the ticket's, or removed with it."""
    runs = tmp_path / "runs"
    site = Site(name="a", paths=Paths(runs=str(runs)), partitions={"train": SitePartition(nodes=1)})
    plan = planning.make_plan(
        Request(name="bc", command="true", time="1m", partition="train", workdir=str(tmp_path)), site, "test"
    )
    if (pid := os.fork()) == 0:
        monkeypatch.setattr(shared_fs.provenance, "capture", lambda *_: os._exit(9))
        shared_fs.submit_ticket(plan, site, name="bc.1")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(list(runs.iterdir())) == 1
    if removed:
        shared_fs.remove_ticket_dirs(site, ["bc.1"])
    else:
        monkeypatch.setattr(shared_fs, "_submit_with_node_choice", lambda *_: None)
        shared_fs.submit_ticket(plan, site, name="bc.1")
    assert [path.name for path in runs.iterdir()] == ([] if removed else ["bc.1"])


def test_its_run_is_known_as_a_ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing but the queue decides on another job: the run's script permits only one."""
    site = Site(name="a", paths=Paths(runs=str(tmp_path / "runs")), partitions={"train": SitePartition(nodes=1)})
    request = Request(name="bc", command="true", time="1m", partition="train", workdir=str(tmp_path), snapshot=False)

    def no_slurm(*_: object, **__: object) -> None:
        raise Unreachable("no answer")

    monkeypatch.setattr(shared_fs.exactly_once, "submit_once", no_slurm)
    with pytest.raises(Unreachable):
        shared_fs.submit_ticket(planning.make_plan(request, site, "test"), site, name="bc.1")
    assert run_folder.is_ticket(tmp_path / "runs" / "bc.1")


def test_a_ticket_with_hooks_is_not_continued_by_launch_tick(tmp_path: Path) -> None:
    """`pit place` decides on its next job; `pit launch tick` delivers its events."""
    runs, hook = tmp_path / "runs", Hook(command=("true",))
    site = Site(name="a", paths=Paths(runs=str(runs)), partitions={"train": SitePartition(nodes=1)}, hooks=(hook,))
    request = Request(name="bc", command="true", time="1m", partition="train", workdir=str(tmp_path))
    plan = planning.make_plan(request, site, "test")
    assert plan.hooks
    shared_fs._create_ticket_dir(runs / "bc.1", plan, site, lambda _: None)
    submissions.record_intent(runs / "bc.1", 0, site, ())
    assert hooks.is_pending(runs / "bc.1")
    assert tick.unfinished_runs(runs, site, lambda path, error: pytest.fail(str(error))) == []
