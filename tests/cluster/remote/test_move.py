"""A run is taken to a site that shares no files: its code, data and checkpoint travel, and are verified there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.checkpoint.store import verify
from pitools.core.errors import DataError
from pitools.launch import plan as planning
from pitools.launch.move import checkpoint_transfer, move_run
from pitools.launch.recovery import apply_decision
from pitools.launch.request import Request
from pitools.launch.submission import local_process, submit
from pitools.run import run_folder
from pitools.site import load
from pitools.site.schema import Site
from pitools.slurm.client import Client
from tests.cluster.remote.conftest import FarSide
from tests.launch.move.test_move_run import LOOP

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.filterwarnings("ignore:Exception ignored in. <function Popen.__del__"),
]


def until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def started(
    site: Site, make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A run on this machine, with data and a checkpoint to come."""
    sites = tmp_path / "sites"
    sites.mkdir()
    (sites / "local.toml").write_text(f'[paths]\nruns = "{tmp_path}/runs"\nnvme = "{tmp_path}/nvme"\n')
    monkeypatch.setenv("PIT_SITE_PATH", str(sites))
    monkeypatch.delenv("PIT_RUNS", raising=False)
    work = tmp_path / "code here"
    work.mkdir()
    (work / "loop.py").write_text(LOOP)
    data = {"demo": str(make_dataset([3000, 5]))}
    request = Request(
        name="t", entry="loop:main", args={"steps": 2000}, time="3m", workdir=str(work), data=data, cpus_per_task=1
    )
    here = load.load_site("local")
    run_dir = submit.submit_run(planning.make_plan(request, here, "test"), here)
    (work / "loop.py").write_text("raise SystemExit('the live code ran')\n")
    until((run_dir / "attempts" / "0" / "began").exists)
    yield run_dir
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    if job:
        local_process.terminate_supervisor(job)


def test_it_goes_on_at_a_site_that_shares_nothing(started: Path, site: Site, far_side: FarSide, alpha: Client) -> None:
    """There is one job there, which begins at the step that was saved here; the checkpoint's bytes are the same, and
    those of what the program keeps beside it.
    """
    (started / "checkpoints").mkdir(exist_ok=True)
    (started / "checkpoints" / "words.json").write_text("[1]")
    moved = move_run.move_run(started, load.load_site("local"), site)
    path = Path(moved.run_dir)
    assert path.is_relative_to(far_side.root)
    assert moved.step > 0
    until((path / "attempts" / "0" / "began").exists)
    assert (path / "attempts" / "0" / "began").read_text() == str(moved.step)
    step = f"checkpoints/step_{moved.step}"
    assert verify.verify_checkpoint(path / step) == []
    assert (path / step / "payload" / "state").read_bytes() == (started / step / "payload" / "state").read_bytes()
    assert (path / "checkpoints" / "words.json").read_text() == "[1]"
    assert json.loads((path / "checkpoints" / "owner.json").read_text())["run"] == moved.new_run_id
    verdict = apply_decision.read_verdict(started)
    assert verdict is not None
    assert (verdict.code, verdict.moved_to) == ("moved", moved.new_run_id)
    alpha.cancel([moved.job_id])


def test_a_checkpoint_that_arrives_wrong_is_not_run(
    started: Path, site: Site, far_side: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that changed on the way are found there: nothing is queued, nothing stays, and the run goes on here."""
    real = checkpoint_transfer.manifest.load_manifest

    def flipping(step_dir: Path) -> checkpoint_transfer.manifest.CheckpointManifest:
        held = real(step_dir)
        state = step_dir / "payload" / "state"
        state.write_text("x" + state.read_text()[1:])  # after it was verified here, and before it is sent
        return held

    monkeypatch.setattr(checkpoint_transfer.manifest, "load_manifest", flipping)
    before = set((far_side.root / "runs").glob("*/*"))
    with pytest.raises(DataError):
        move_run.move_run(started, load.load_site("local"), site)
    monkeypatch.undo()
    assert set((far_side.root / "runs").glob("*/*")) == before
    assert apply_decision.read_verdict(started) is None
    until((started / "attempts" / "1" / "began").exists)
