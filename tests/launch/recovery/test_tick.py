"""All runs of a site, once: from cron, whoever left them, and with little to ask."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core.errors import ClusterError, Unreachable
from pitools.core.locks import lock
from pitools.launch import slurm_cache
from pitools.launch.monitor import status
from pitools.launch.plan import load_plan
from pitools.launch.recovery import apply_decision, cancel_run, tick
from pitools.launch.recovery.resume import resume_run
from pitools.launch.submission import submissions
from pitools.run import cancel_request, move_record, run_folder
from pitools.site.schema import Site

Runs = Any
Cluster = Any
SITE = Site(name="s")


def ticked(runs: Runs, **asked: Any) -> tuple[dict[str, str], list[str]]:
    """What changed (run → action), and which runs had something wrong."""
    wrong: list[str] = []
    actual = {
        tick_run.run_id: tick_run.action
        for tick_run in tick.tick_runs(runs.root, SITE, lambda path, _: wrong.append(path.name), **asked)
    }
    return actual, wrong


def test_every_run_that_is_due_and_no_other(runs: Runs, cluster: Cluster) -> None:
    """One question to Slurm, one record a change, and nothing the second time."""
    states = ["PENDING", "RUNNING", "NODE_FAIL", "FAILED", "CANCELLED", "COMPLETED"]
    for number, state in enumerate(states):
        run_dir = runs.make(f"t-{number}")
        # Each its own job: the run's folder is all that they share.
        ref = msgspec.structs.replace(
            run_folder.read_record(run_dir / "job.json", run_folder.JobRef), job_id=f"{number}0"
        )
        for path in (run_dir / "job.json", submissions.job_dir(run_dir, 0) / "job.json"):
            run_folder.write_record(path, ref)
        cluster.states[f"{number}0"] = state
        runs.attempt(run_dir, error="ValueError: boom" if state == "FAILED" else "", code={"COMPLETED": 0}.get(state))
    cluster.asked = 0
    actual, wrong = ticked(runs)
    assert actual == {"t-2": "resubmit", "t-3": "stop", "t-4": "stop", "t-5": "done"}
    assert (wrong, cluster.asked, len(cluster.sent)) == ([], 1, 1)
    assert ticked(runs) == ({}, [])


def test_a_cancel_is_carried_out(runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Slurm had not taken; also while nobody can be asked how jobs are."""
    run_dir = runs.make()
    (run_dir / "jobs").rename(run_dir / "no jobs")  # as in an array's folder
    runs.make("t-2")
    monkeypatch.setattr(cancel_run, "client", lambda site: cluster)
    run_folder.write_record(run_dir / "cancel.json", cancel_request.CancelRequest(t="2026-01-01T00:00:00Z"))

    def silent(*_: object, **__: object) -> None:
        raise Unreachable("no answer")

    monkeypatch.setattr(slurm_cache, "require_states", silent)
    ticks = tick.tick_runs(runs.root, SITE, lambda *_: None)
    assert next(ticks).action == "stop"
    with pytest.raises(Unreachable):
        next(ticks)
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict is not None
    assert (verdict.kind, cluster.cancelled) == ("cancelled", ["100"])


def test_an_interrupted_submission_is_finished(runs: Runs, cluster: Cluster) -> None:
    """An intent that nobody is at any more; one of this minute is still its own process's."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    intent = submissions.record_intent(run_dir, 1, SITE, ())
    assert ticked(runs) == ({}, [])
    old = msgspec.structs.replace(
        intent, intended_at="2026-01-01T00:00:00.000Z", last_tried_at="2026-01-01T00:00:00.000Z"
    )
    run_folder.write_record(submissions.job_dir(run_dir, 1) / "intent.json", old)
    assert ticked(runs) == ({"t-1": "submitted"}, [])


def test_what_is_not_its_own_is_left_alone(runs: Runs, cluster: Cluster) -> None:
    """A ticket of `pit place`, another site's run, and a run of before there were verdicts."""
    for name in ("ticket", "other", "old"):
        runs.attempt(runs.make(name))
    cluster.states["100"] = "NODE_FAIL"
    event = '{"schema":"pit.event/1","t":"","event":"submitted","detail":{"event":"created"}}'
    (runs.root / "ticket" / "events.jsonl").write_text(event + "\n")
    plan = load_plan(runs.root / "other")
    (runs.root / "other" / "plan.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, site="beta")))
    (runs.root / "old" / "jobs").rename(runs.root / "old" / "no-jobs")
    assert ticked(runs) == ({}, [])


@pytest.mark.parametrize("name", ["plan.json", "verdict.json", "job.json", "intent.json", "events.jsonl"])
def test_a_stale_handle_is_one_run_s_matter(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever of its files cannot be had, the other runs are done, and it is named unless it is nobody's concern."""
    for run in ("t-1", "t-2"):
        runs.attempt(runs.make(run))
    cluster.states["100"] = "NODE_FAIL"

    def stale(real: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: str | Path, *args: Any, **more: Any) -> Any:
            if "t-1" in Path(path).parts and Path(path).name == name:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return real(path, *args, **more)

        return checked

    for call in ("stat", "open", "read_bytes"):
        monkeypatch.setattr(Path, call, stale(getattr(Path, call)))
    monkeypatch.setattr(os, "open", stale(os.open))
    actual, wrong = ticked(runs)
    assert actual == {"t-2": "resubmit"}
    assert wrong == ([] if name == "events.jsonl" else ["t-1"])


def test_one_broken_run_does_not_hide_the_others(runs: Runs, cluster: Cluster) -> None:
    """What is wrong is told with its name, and the rest is done."""
    for name in ("t-1", "t-2", "t-3"):
        runs.attempt(runs.make(name))
    (runs.root / "t-1" / "plan.json").write_text("{")
    (runs.root / "t-2" / "script.sbatch").unlink()
    cluster.states["100"] = "NODE_FAIL"
    assert ticked(runs) == ({"t-3": "resubmit"}, ["t-1", "t-2"])


def test_a_folder_that_cannot_be_written_does_not_hide_the_others(runs: Runs, cluster: Cluster) -> None:
    """An archived run, or one whose file server is away: told like any other trouble."""
    for name in ("t-1", "t-2"):
        runs.attempt(runs.make(name))
    del cluster.states["100"]
    (runs.root / "t-1" / ".missed.100").symlink_to("/no/such/folder/mark")
    assert ticked(runs) == ({}, ["t-1"])
    assert (runs.root / "t-2" / ".missed.100").exists()


@pytest.mark.usefixtures("as_root")
def test_the_run_of_another_user(runs: Runs, cluster: Cluster) -> None:
    """What it would submit would run as whoever ticks: it is passed over, and who asks for it by name is told."""
    for name in ("t-1", "t-2"):
        runs.attempt(runs.make(name))
    cluster.states["100"] = "NODE_FAIL"
    os.chown(runs.root / "t-1", os.geteuid() + 12345, -1)
    assert ticked(runs) == ({"t-2": "resubmit"}, [])
    with pytest.raises(ClusterError, match="run t-1 is "):
        resume_run(runs.root / "t-1", SITE)
    assert len(cluster.sent) == 1


def test_a_run_that_others_can_write(runs: Runs, cluster: Cluster) -> None:
    """Its script would run as whoever ticks: the folder, the script or the copy of the code is enough to refuse it."""
    for name, position in (("t-1", "."), ("t-2", "script.sbatch"), ("t-3", "attempts")):
        runs.attempt(runs.make(name))
        (runs.root / name / position).chmod(0o777)
    cluster.states["100"] = "NODE_FAIL"
    assert ticked(runs) == ({"t-3": "resubmit"}, ["t-1", "t-2"])
    assert len(cluster.sent) == 1


def test_an_interrupted_move_is_reported(runs: Runs, cluster: Cluster) -> None:
    """Nothing else would tell of a run that was stopped for a move whose process is gone."""
    run_dir = runs.make()
    intent = move_record.MoveIntent(new_run_id="t-2", target_site="there", t="2026-01-01T00:00:00Z")
    run_folder.write_record(run_dir / move_record.MOVE_FILE, intent)
    apply_decision.write_verdict(run_dir, "moved", "being moved", moved_to="t-2")
    command = "pit launch move t-1 --site there"
    with lock(run_dir / move_record.MOVE_LOCK, "it"):
        assert ticked(runs) == ({}, [])
        assert command not in status.run_status(run_dir, SITE).reason
    assert ticked(runs) == ({}, ["t-1"])
    assert command in status.run_status(run_dir, SITE).reason


def test_two_ticks_at_once(runs: Runs, cluster: Cluster) -> None:
    """The second says so and does nothing."""
    runs.attempt(runs.make())
    cluster.states["100"] = "NODE_FAIL"
    with lock(tick.tick_lock_path(runs.root), "it"), pytest.raises(tick.TickRunning):
        ticked(runs)
    assert cluster.sent == []
    assert ticked(runs)[0] == {"t-1": "resubmit"}


@pytest.mark.usefixtures("as_root")
def test_another_user_s_lock_file_is_refused(runs: Runs, cluster: Cluster) -> None:
    """A lock file that another user made, and could hold for ever, is an error; another user's own lock is not."""
    runs.attempt(runs.make())
    cluster.states["100"] = "NODE_FAIL"
    path = tick.tick_lock_path(runs.root)
    path.touch(0o666)
    os.chown(path, os.geteuid() + 12345, -1)
    with pytest.raises(ClusterError):
        ticked(runs)
    path.rename(runs.root / f".tick.{os.geteuid() + 12345}.lock")
    assert ticked(runs)[0] == {"t-1": "resubmit"}


def test_old_folders_of_killed_submitters_are_removed(runs: Runs, cluster: Cluster) -> None:
    """A folder in which a run was being made a week ago goes; a young one, and what has no run's id, stay."""
    runs.make()
    names = [".t-20260101-000000-abcdef", ".t-20260102-000000-abcdef", ".mine"]
    for name in names:
        (runs.root / name / "code").mkdir(parents=True)
    week_ago = time.time() - 8 * 86400
    for name in (names[0], names[2]):
        os.utime(runs.root / name, (week_ago, week_ago))
    assert ticked(runs) == ({}, [])
    assert [(runs.root / name).exists() for name in names] == [False, True, True]


def test_its_time_is_bounded(runs: Runs, cluster: Cluster) -> None:
    """What there is no time for is the next tick's."""
    for name in ("t-1", "t-2"):
        runs.attempt(runs.make(name))
    cluster.states["100"] = "NODE_FAIL"
    assert ticked(runs, max_tick_s=-1.0) == ({}, ["t-1"])
    assert len(ticked(runs)[0]) == 2


def test_a_silent_slurm_decides_nothing(
    runs: Runs, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is judged because a question failed; a folder without runs asks nothing."""
    run_dir = runs.make()
    runs.attempt(run_dir)

    def silent(*_: object, **__: object) -> dict[str, str]:
        raise Unreachable("Unable to contact slurm controller")

    monkeypatch.setattr(slurm_cache, "require_states", silent)
    with pytest.raises(Unreachable):
        ticked(runs)
    assert apply_decision.read_verdict(run_dir) is None
    assert list(tick.tick_runs(tmp_path / "none", SITE, lambda *_: None)) == []


def test_a_thousand_runs_that_are_over_cost_little(runs: Runs, cluster: Cluster) -> None:
    """Cron looks every few minutes: a run with its verdict is one look at its folder."""
    first = runs.make("t-0")
    apply_decision.write_verdict(first, "program", "over")
    for number in range(1, 1000):
        path = runs.root / f"t-{number}"
        path.mkdir()
        for name in ("plan.json", "verdict.json"):
            (path / name).hardlink_to(first / name)
    started = time.process_time()
    assert ticked(runs) == ({}, [])
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("script", "age_s", "found"), [(True, 120, True), (True, 5, False), (False, 120, False), (False, 1200, True)]
)
def test_a_run_whose_maker_was_killed(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, script: bool, age_s: int, found: bool
) -> None:
    """Made, and never submitted: its first job is sent, once, unless its maker may still be about to."""
    run_dir = runs.make()
    shutil.rmtree(run_dir / "jobs" / "0")
    (run_dir / "job.json").unlink()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age_s)
    if not script:
        (run_dir / "script.sbatch").unlink()
    assert ticked(runs) == ({"t-1": "submitted"} if found else {}, [])
    assert ticked(runs) == ({}, [])
    assert len(cluster.sent) == found
    assert (run_dir / "script.sbatch").exists() == (script or found)


def test_a_job_that_is_seen_again_was_not_missed(runs: Runs, cluster: Cluster) -> None:
    """What a look long ago missed does not count when it is missed again."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    (run_dir / ".missed.100").touch()
    ticked(runs)
    assert not (run_dir / ".missed.100").exists()
