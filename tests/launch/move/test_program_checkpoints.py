"""A program that keeps its checkpoints in a form of its own is moved with them, or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pitools.checkpoint.store import layout
from pitools.core.errors import DataError, UsageError
from pitools.launch import plan as planning
from pitools.launch.move import move_run, program_checkpoints
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.site import load
from tests.launch.move.test_move_run import Sites, end, lives, sites, until

__all__ = ["sites"]

pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <function Popen.__del__")

# Counts from what it saved, in a file and a link of its own; goes on counting until it is ended.
COMMAND = """
at={where}; n=$(cat $at/latest 2>/dev/null || echo 0); echo $n > $PIT_ATTEMPT_DIR/began
while sleep 0.05; do n=$((n+1)); mkdir -p $at/s; echo $n > $at/s/$n.tmp && mv $at/s/$n.tmp $at/s/$n
ln -sfn s/$n $at/latest; echo $n > $PIT_RUN_DIR/progress; done
"""


def start(sites: Sites, where: str) -> Path:
    """A run that has saved some steps."""
    run_dir = sites.start(entry="", args={}, command=COMMAND.format(where=where))
    until(lambda: program_checkpoints.program_progress(run_dir) > 2)
    return run_dir


def test_what_it_keeps_in_the_checkpoint_folder_goes_along(sites: Sites) -> None:
    """It goes on there with the step that it saved last, as its own link says."""
    run_dir = start(sites, "$PIT_CHECKPOINT_DIR")
    moved = move_run.move_run(run_dir, sites.here, sites.there)
    new = Path(moved.run_dir)
    try:
        assert moved.step == program_checkpoints.program_progress(run_dir) > 2
        until((new / "attempts" / "0" / "began").exists)
        latest = int((run_dir / "checkpoints" / "latest").read_text())
        assert int((new / "attempts" / "0" / "began").read_text()) == latest >= moved.step
        assert (new / "checkpoints" / "latest").is_symlink()
    finally:
        end(new)


def test_where_nothing_can_go_along_it_stays(sites: Sites) -> None:
    """Checkpoints that are elsewhere: refused before anything is touched, also without a word of its progress."""
    run_dir = start(sites, str(sites.root / "mine"))
    try:
        for _ in range(2):
            with pytest.raises(UsageError):
                move_run.move_run(run_dir, sites.here, sites.there)
            assert lives(run_dir)
            assert not (run_dir / "verdict.json").exists()
            assert not (run_dir / "move.json").exists()
            (run_dir / "progress").unlink(missing_ok=True)
    finally:
        end(run_dir)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run's folder with files of a program's own beside what `pitools.checkpoint` makes."""
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_20").mkdir(parents=True)
    (folder / "step_20" / "model.pt").write_bytes(os.urandom(3000))
    (folder / "empty").mkdir()
    (folder / "latest").symlink_to(folder / "step_20")
    (folder / "step_7" / "payload").mkdir(parents=True)
    (folder / "step_7" / "payload" / "state").write_text("ours")
    layout.create_payload_dir(layout.unpublished_path(folder, 8, "t"))
    (folder / "owner.json").write_text("{}")
    (tmp_path / "run" / "progress").write_text("20\n")
    return tmp_path / "run"


def test_only_what_is_its_own_and_as_it_was(saved: Path, tmp_path: Path) -> None:
    """Ours stays out, whole or not; a link leads to the same file there; the sums are what sha256sum checks."""
    actual = program_checkpoints.program_entries(saved)
    names = ["empty", "latest", "step_20", "step_20/model.pt"]
    assert [entry.name for entry in actual] == [*(f"checkpoints/{name}" for name in names), "progress"]
    new = tmp_path / "new"
    (saved / "checkpoints" / "step_20" / "model.pt").chmod(0o600)
    for name in ("checkpoints/step_20/model.pt", "checkpoints/step_20", "checkpoints/empty"):
        os.utime(saved / name, (1_700_000_000, 1_700_000_000))
    program_checkpoints.copy_entries(actual, saved, new)
    for entry in actual:
        before, after = ((root / entry.name).lstat() for root in (saved, new))
        assert (before.st_mtime_ns, before.st_mode) == (after.st_mtime_ns, after.st_mode)
    assert (new / "checkpoints" / "latest").readlink() == Path("step_20")
    for name in ("checkpoints/step_20/model.pt", "progress"):
        assert (new / name).read_bytes() == (saved / name).read_bytes()
    argv = ["sha256sum", "--check", "--quiet", "--strict", "-"]
    text = program_checkpoints.sha256_lines(actual)
    assert subprocess.run(argv, input=text, text=True, cwd=new, check=False).returncode == 0
    (new / "checkpoints" / "step_20" / "model.pt").write_bytes(b"")
    assert subprocess.run(argv, input=text, text=True, cwd=new, check=False, capture_output=True).returncode == 1


def test_what_cannot_travel_is_said(saved: Path) -> None:
    """A link that leads out of the folder, what is no file, and a name that a list cannot hold."""
    folder = saved / "checkpoints" / "extra"
    for make in (lambda: folder.symlink_to("/etc/passwd"), lambda: os.mkfifo(folder)):
        make()
        with pytest.raises(DataError):
            program_checkpoints.program_entries(saved)
        folder.unlink()
    (saved / "checkpoints" / "a\nb").touch()
    with pytest.raises(DataError):
        program_checkpoints.program_entries(saved)


def test_damaged_checkpoints_are_no_beginning(tmp_path: Path) -> None:
    """A run that has checkpoints of which none is whole does not begin anew elsewhere without a word."""
    (tmp_path / "checkpoints" / "step_5" / "payload").mkdir(parents=True)
    request = Request(name="t", entry="loop:main", time="5m", workdir=str(tmp_path))
    plan = planning.make_plan(request, load.load_site("local"), "test")
    with pytest.raises(DataError):
        program_checkpoints.step_to_resume(tmp_path, plan)
    assert run_folder.attempt_dirs(tmp_path) == []


def test_a_link_by_the_name_that_the_program_knows(saved: Path, tmp_path: Path) -> None:
    """The run's folder is often known by a link, as of a scratch: what leads there leads to itself."""
    (tmp_path / "scratch").symlink_to(tmp_path)
    (saved / "checkpoints" / "best").symlink_to(tmp_path / "scratch" / "run" / "checkpoints" / "latest")
    links = {entry.name: entry.link for entry in program_checkpoints.program_entries(saved) if entry.link}
    assert links == {"checkpoints/latest": "step_20", "checkpoints/best": "latest"}
