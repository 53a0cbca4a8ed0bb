"""A run is taken to another site, and goes on there; or it stays where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.checkpoint.store import lookup, owner, verify
from pitools.core.errors import ClusterError, ConfigError, DataError, NoSpace, PitError, TryLater, UsageError
from pitools.launch import plan as planning
from pitools.launch.move import checkpoint_transfer, move_run
from pitools.launch.provenance import provenance
from pitools.launch.recovery import apply_decision, cancel_run
from pitools.launch.recovery.resume import resume_run
from pitools.launch.request import Request
from pitools.launch.submission import local_process, submit
from pitools.run import cancel_request, run_folder
from pitools.site import load
from pitools.site.schema import Site

# What starts a run does not wait for it.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <function Popen.__del__")

# Counts, one step in 50 ms; saves and ends at USR2, as the loops of pitools.train do.
LOOP = """
import os, signal, sys, time
from pathlib import Path
from pitools.checkpoint.store import layout, lookup, owner, publish
told = []
def main(steps, deaf=False):
    signal.signal(signal.SIGUSR2, (lambda *_: None) if deaf else (lambda *_: told.append(1)))
    at, run = Path(os.environ["PIT_CHECKPOINT_DIR"]), Path(os.environ["PIT_RUN_DIR"]).name
    owner.claim_folder(at, run, "m")
    done = lookup.latest_step(at) or 0
    word = Path(os.environ["PIT_ATTEMPT_DIR"]) / "word"
    word.write_text(str(done))
    word.rename(word.with_name("began"))
    while done < steps and not told:
        time.sleep(0.05)
        done += 1
    place = layout.unpublished_path(at, done, "t")
    (layout.create_payload_dir(place) / "state").write_text(str(done) * 1000)
    publish.digest_share(place, 0, 1)
    publish.publish_checkpoint(at, place, done, format="files", run=run, state_fingerprint="m", world_size=1)
    if done < steps:
        sys.exit(140)
"""


class Sites:
    """Two places on this machine, each with its own runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.here, self.there = load.load_site("here"), load.load_site("there")

    def start(self, **asked: object) -> Path:
        expected = {
            "name": "t",
            "entry": "loop:main",
            "args": {"steps": 400},
            "time": "5m",
            "workdir": str(self.root / "work"),
            **asked,
        }
        request = Request(**expected)  # type: ignore[arg-type]
        run_dir = submit.submit_run(planning.make_plan(request, self.here, "test"), self.here)
        until(lambda: (run_dir / "attempts" / "0" / "began").exists())
        return run_dir


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end(run_dir: Path) -> None:
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    if job:
        local_process.terminate_supervisor(job)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    configs = tmp_path / "sites"
    configs.mkdir()
    for name in ("here", "there"):
        text = f'name = "{name}"\nscheduler = "none"\n[paths]\nruns = "{tmp_path}/{name}/runs"\n'
        (configs / f"{name}.toml").write_text(text)
    monkeypatch.setenv("PIT_SITE_PATH", str(configs))
    monkeypatch.delenv("PIT_RUNS", raising=False)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "loop.py").write_text(LOOP)
    return Sites(tmp_path)


def lives(run_dir: Path) -> bool:
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    return job is not None and bool(local_process.is_alive(job))


def test_it_goes_on_there(sites: Sites) -> None:
    """It saves and ends here, and begins there at that very step, with its own code; the old run says where it is."""
    run_dir = sites.start()
    (sites.root / "work" / "loop.py").write_text("raise SystemExit('the live code ran')\n")
    moved = move_run.move_run(run_dir, sites.here, sites.there)
    new = Path(moved.run_dir)
    try:
        assert moved.step == lookup.latest_step(run_dir / "checkpoints") > 0
        until(lambda: (new / "attempts" / "0" / "began").exists())
        assert (new / "attempts" / "0" / "began").read_text() == str(moved.step)
    finally:
        end(new)
    assert verify.verify_checkpoint(new / "checkpoints" / f"step_{moved.step}") == []
    assert (
        (owner.read_owner(new / "checkpoints") or owner.FolderOwner(run="", state_fingerprint="")).run
        == moved.new_run_id
        == new.name
    )
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict is not None
    assert (verdict.code, verdict.state, verdict.kind, verdict.moved_to) == (
        "moved",
        "stopped",
        "moved",
        moved.new_run_id,
    )
    assert f"there as {moved.new_run_id}, with {moved.step} steps" in verdict.reason
    record = provenance.read_provenance(new)
    assert record is not None
    assert record.parent == run_dir.name
    assert not lives(run_dir)
    with pytest.raises(UsageError, match="moved to there"):
        move_run.move_run(run_dir, sites.here, sites.there)
    pit = Path(sys.executable).with_name("pit")
    done = subprocess.run(
        [pit, "launch", "resume", run_dir, "--force"], capture_output=True, text=True, check=False, timeout=60
    )
    end(run_dir)
    assert done.returncode == 0, done.stderr
    assert f"pit launch cancel {moved.new_run_id} --site there" in done.stderr
    assert not (run_dir / "move.json").exists()  # it may be moved again


@pytest.mark.parametrize("fault", ["full", "flipped", "refused"])
def test_what_fails_is_taken_back(sites: Sites, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A full disk, bytes that arrive wrong, a job that is refused: nothing is left there, and it goes on here."""
    run_dir = sites.start()
    true_copy = checkpoint_transfer.copy_checkpoint_for_run

    def copy(source: Path, step: int, to: Path, run: str) -> None:
        if fault == "full":
            raise NoSpace("no space left", where=str(to))
        true_copy(source, step, to, run)
        state = to / "checkpoints" / f"step_{step}" / "payload" / "state"
        state.write_text("9" + state.read_text()[1:])
        problems = verify.verify_checkpoint(state.parent.parent)
        assert problems
        raise DataError("the checkpoint did not arrive as it was")

    if fault == "refused":
        monkeypatch.setattr(submit.local_process, "start_supervisor", refuse_once(local_process.start_supervisor))
    else:
        monkeypatch.setattr(checkpoint_transfer, "copy_checkpoint_for_run", copy)
    with pytest.raises(PitError):
        move_run.move_run(run_dir, sites.here, sites.there)
    try:
        assert not [path for path in (sites.root / "there" / "runs").glob("*") if path.is_dir()]
        assert not [path for path in (sites.root / "there" / "runs").glob(".*") if path.is_dir()]
        assert apply_decision.read_verdict(run_dir) is None
        assert not (run_dir / "move.json").exists()
        until(lambda: (run_dir / "attempts" / "1" / "began").exists())
        assert int((run_dir / "attempts" / "1" / "began").read_text()) > 0
    finally:
        end(run_dir)


def test_cancelled_on_the_way(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cancels a run that is being moved means the run: it begins nowhere, and stays where it was."""
    run_dir = sites.start()
    true_copy = checkpoint_transfer.copy_checkpoint_for_run

    def copy(source: Path, step: int, to: Path, run: str) -> None:
        true_copy(source, step, to, run)
        assert cancel_run.cancel_run(run_dir, sites.here) is None

    monkeypatch.setattr(checkpoint_transfer, "copy_checkpoint_for_run", copy)
    with pytest.raises(ClusterError, match="cancelled"):
        move_run.move_run(run_dir, sites.here, sites.there)
    assert list((sites.root / "there" / "runs").glob("t-*")) == []
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict is not None
    assert (verdict.code, verdict.moved_to) == ("cancelled", "")
    assert not (run_dir / "move.json").exists()
    assert not lives(run_dir)


def test_a_cancel_that_waits_for_slurm_is_not_forgotten(sites: Sites) -> None:
    """One that was asked for before the run was stopped here: it stays asked for, and the run begins nowhere else."""
    run_dir = sites.start()
    run_folder.write_record(run_dir / "cancel.json", cancel_request.CancelRequest(t="2026-01-01T00:00:00Z"))
    with pytest.raises(ClusterError):
        move_run.move_run(run_dir, sites.here, sites.there)
    assert not (sites.root / "there" / "runs").exists()
    assert not (run_dir / "move.json").exists()
    assert resume_run(run_dir, sites.here).action == "untouched"  # until its ranks have ended
    until(lambda: not lives(run_dir))
    resume_run(run_dir, sites.here)
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict is not None
    assert verdict.code == "cancelled"


def refuse_once(start: Callable[..., run_folder.JobRef]) -> Callable[..., run_folder.JobRef]:
    """The first start is refused."""
    requested: list[int] = []

    def starting(run_dir: Path, site: Site, *, wait_s: float) -> run_folder.JobRef:
        requested.append(1)
        if len(requested) == 1:
            raise ConfigError("no", where=site.name)
        return start(run_dir, site, wait_s=wait_s)

    return starting


def test_one_that_does_not_stop_goes_on(sites: Sites) -> None:
    """A program that is deaf to the signal is left alone after a while, as if nobody had asked."""
    run_dir = sites.start(args={"steps": 400, "deaf": True})
    try:
        with pytest.raises(TryLater, match="within 1 s"):
            move_run.move_run(run_dir, sites.here, sites.there, stop_s=1)
        assert lives(run_dir)
        assert apply_decision.read_verdict(run_dir) is None
        assert not (sites.root / "there" / "runs").exists()
    finally:
        end(run_dir)


def test_killed_on_the_way_and_called_again(sites: Sites) -> None:
    """However far it got when it was killed, the same command ends with one run there, under the same name."""
    run_dir = sites.start()
    program = f"""
import os
from pathlib import Path
from pitools.launch.move import move_run
from pitools.launch.submission import submit
from pitools.site import load
real = submit.submit_run
def killed(*words, **more):
    real(*words, **more)
    os._exit(9)
submit.submit_run = killed
move_run.move_run(Path({str(run_dir)!r}), load.load_site("here"), load.load_site("there"))
"""
    argv = [str(Path(os.sys.executable)), "-c", program]  # type: ignore[attr-defined]
    assert subprocess.run(argv, check=False, timeout=60).returncode == 9
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict is not None
    (begin,) = (sites.root / "there" / "runs").glob("t-*")
    assert (verdict.code, verdict.moved_to) == ("moving", begin.name)
    try:
        moved = move_run.move_run(run_dir, sites.here, sites.there)
        assert Path(moved.run_dir) == begin
        assert len(list((sites.root / "there" / "runs").glob("t-*"))) == 1
        with pytest.raises(UsageError, match="moved to there"):
            move_run.move_run(run_dir, sites.here, sites.there)
    finally:
        end(begin)


@pytest.mark.parametrize(
    "before",
    ["checkpoint_transfer.copy_checkpoint_for_run", "submit.start_job", "local_process.subprocesses.start_detached"],
)
def test_killed_before_it_was_submitted(sites: Sites, before: str) -> None:
    """While its checkpoint was copied, or just before its job: the same command begins that anew, and it goes on.

    While nobody can say whether a process has begun, it says to come again.
    """
    run_dir = sites.start()
    program = f"""
import os
from pathlib import Path
from pitools.launch.move import checkpoint_transfer
from pitools.launch.submission import local_process, submit
from pitools.launch.move import move_run
from pitools.site import load
{before} = lambda *_, **__: os._exit(9)
move_run.move_run(Path({str(run_dir)!r}), load.load_site("here"), load.load_site("there"))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 9
    if before == "local_process.subprocesses.start_detached":
        with pytest.raises(TryLater):
            move_run.move_run(run_dir, sites.here, sites.there)
        for path in (sites.root / "there" / "runs").glob(f"t-*/{local_process.STARTING_MARK}"):
            os.utime(path, (0, 0))
    moved = move_run.move_run(run_dir, sites.here, sites.there)
    try:
        until(lambda: (Path(moved.run_dir) / "attempts" / "0" / "began").exists())
        assert (Path(moved.run_dir) / "attempts" / "0" / "began").read_text() == str(moved.step) != "0"
        assert len([path for path in (sites.root / "there" / "runs").iterdir() if path.is_dir()]) == 1
    finally:
        end(Path(moved.run_dir))


def test_what_is_refused_before_anything_is_touched(sites: Sites) -> None:
    """The same site, a site that is too small, code that was changed: the run does not notice."""
    run_dir = sites.start()
    try:
        with pytest.raises(UsageError, match='"here"'):
            move_run.move_run(run_dir, sites.here, sites.here)
        (run_dir / "code" / "loop.py").write_text(LOOP + "# changed\n")
        with pytest.raises(DataError, match=r"code/loop\.py"):
            move_run.move_run(run_dir, sites.here, sites.there)
        assert lives(run_dir)
        assert not (run_dir / "verdict.json").exists()
        assert not (run_dir / "move.json").exists()
    finally:
        end(run_dir)


def test_one_that_finished_is_not_moved(sites: Sites) -> None:
    """A run that makes its last step while it is asked to stop has finished, and says so."""
    run_dir = sites.start(args={"steps": 4})
    until(lambda: not lives(run_dir))
    apply_decision.write_verdict(run_dir, "succeeded", "done", 0)
    with pytest.raises(UsageError):
        move_run.move_run(run_dir, sites.here, sites.there)
    assert not (run_dir / "move.json").exists()


def test_damaged_checkpoints_stay(sites: Sites) -> None:
    """Of several checkpoints the newest good one travels; a damaged newer one does not."""
    run_dir = sites.start()
    end(run_dir)
    until(lambda: not lives(run_dir))
    checkpoints = run_dir / "checkpoints"
    source = sites.start(args={"steps": 3})
    until(lambda: not lives(source))
    for step in (3, 7):
        checkpoint_transfer.copy_checkpoint_for_run(source, 3, sites.root / f"copy{step}", run_dir.name)
    checkpoints.mkdir(exist_ok=True)
    (sites.root / "copy3" / "checkpoints" / "step_3").rename(checkpoints / "step_3")
    (sites.root / "copy7" / "checkpoints" / "step_3").rename(checkpoints / "step_7")
    assert lookup.latest_step(checkpoints) == 3  # what says step 3 is not believed to be step 7
    moved = move_run.move_run(run_dir, sites.here, sites.there)
    end(Path(moved.run_dir))
    assert moved.step == 3
    verdict = apply_decision.read_verdict(run_dir)  # also where it had been stopped before
    assert verdict is not None
    assert (verdict.code, verdict.moved_to) == ("moved", moved.new_run_id)
    assert json.loads((Path(moved.run_dir) / "checkpoints" / "owner.json").read_text())["run"] == moved.new_run_id
