"""A run is taken from one real cluster to another, which shares its files, while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.checkpoint.store import lookup, verify
from pitools.core.errors import PitError
from pitools.launch import plan as planning
from pitools.launch.move import move_run
from pitools.launch.recovery import apply_decision, slurm_query
from pitools.launch.request import Request
from pitools.launch.submission import submit
from pitools.run import run_folder
from pitools.site import load
from pitools.site.connect import client
from pitools.slurm.states import is_final
from tests.launch.move.test_move_run import LOOP

pytestmark = pytest.mark.slurm


def until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def started(clusters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run on alpha, of a program that counts steps and saves when it is asked to end."""
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
    tmp_path.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "loop.py").write_text(LOOP)
    alpha = load.load_site("alpha")
    request = Request(name="t-move", entry="loop:main", args={"steps": 2000}, time="5m", workdir=str(work))
    run_dir = submit.submit_run(planning.make_plan(request, alpha, "test"), alpha)
    yield run_dir
    for item in run_folder.run_dirs(tmp_path / "runs"):
        job = run_folder.read_record(item / "job.json", run_folder.JobRef)
        if job:
            client(load.load_site(job.site)).cancel([job.job_id])


def began(run_dir: Path) -> Path:
    return run_dir / "attempts" / "0" / "began"


def test_it_goes_on_at_the_other_cluster(started: Path) -> None:
    """alpha's job saves, ends, and does not come back; beta's begins at that step; one run is open in the end."""
    alpha, beta = load.load_site("alpha"), load.load_site("beta")
    until(began(started).exists)
    moved = move_run.move_run(started, alpha, beta)
    new = Path(moved.run_dir)
    assert moved.step > 0
    assert verify.verify_checkpoint(new / "checkpoints" / f"step_{moved.step}") == []
    until(began(new).exists)
    assert began(new).read_text() == str(moved.step)
    assert lookup.latest_step(started / "checkpoints") == moved.step
    job = run_folder.read_record(started / "job.json", run_folder.JobRef)
    assert job is not None
    assert is_final(client(alpha).state_of([job.job_id])[job.job_id])
    assert len(run_folder.attempt_dirs(started)) == 1
    verdict = apply_decision.read_verdict(started)
    assert verdict is not None
    assert (verdict.code, verdict.moved_to) == ("moved", new.name)


def test_a_refused_job_leaves_it_where_it_was(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What beta does not take goes on at alpha, in a fresh job, from the checkpoint that was made for the move."""
    alpha, beta = load.load_site("alpha"), load.load_site("beta")
    until(began(started).exists)
    real = planning.make_plan

    def asking_too_much(*words: object, **more: object) -> planning.Plan:
        import msgspec

        plan = real(*words, **more)  # type: ignore[arg-type]
        return msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, constraint="nosuch"))

    monkeypatch.setattr(planning, "make_plan", asking_too_much)
    job = run_folder.read_record(started / "job.json", run_folder.JobRef)
    assert job is not None
    # Whoever looks keeps what Slurm said for others, for some seconds: the move is over sooner.
    assert slurm_query.job_states(alpha, [job], max_age_s=0.0) == {job.job_id: "RUNNING"}
    with pytest.raises(PitError, match=r"(?i)feature|constraint|configuration"):
        move_run.move_run(started, alpha, beta)
    assert apply_decision.read_verdict(started) is None
    assert [path.name for path in started.parent.iterdir() if path.is_dir()] == [started.name]
    second = started / "attempts" / "1" / "began"
    until(second.exists, 120)  # the cluster may have others to serve
    assert second.read_text() == str(lookup.latest_step(started / "checkpoints")) != "0"
