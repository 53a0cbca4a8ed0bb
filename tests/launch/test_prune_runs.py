"""Pruning: what is removed is old, over, unnamed and pitools' own; everything else stays, whatever the order."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pitools.checkpoint.store import layout, lookup, owner, publish
from pitools.commands.launch_prune import settle_ended
from pitools.core.errors import Unreachable
from pitools.core.locks import lock
from pitools.launch.monitor import status
from pitools.launch.prune_runs import prune_runs
from pitools.launch.recovery import apply_decision, resume
from pitools.run import run_folder
from pitools.run.run_folder import RunRecord
from pitools.site import load

CONTENTS = st.fixed_dictionaries(
    {
        "steps": st.sets(st.integers(1, 6), max_size=5),
        "named": st.sets(st.integers(1, 6), max_size=2),
        "is_over": st.booleans(),
        "is_moving": st.booleans(),
        "output": st.sampled_from(["", "model.pt", "checkpoints/last.ckpt", "code/metrics.csv"]),
        "is_in_sweep": st.booleans(),
        "is_referenced": st.booleans(),
        "is_damaged": st.booleans(),
    }
)

ENDED: dict[str, object] = {"steps": (), "named": (), "output": "", "is_over": True, "is_moving": False}
ENDED |= dict.fromkeys(("is_in_sweep", "is_referenced", "is_damaged"), False)


def make_checkpoint(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints"
    owner.claim_folder(folder, run=run_dir.name, state_fingerprint="v1")
    building = layout.unpublished_path(folder, step=step, token="a1")
    (layout.create_payload_dir(building) / "weights.bin").write_bytes(bytes(5000))
    publish.digest_share(building, rank=0, world_size=1)
    publish.publish_checkpoint(
        folder, building, step, format="files", run=run_dir.name, state_fingerprint="v1", world_size=1, loader_state={}
    )
    return layout.step_path(folder, step)


def make_run(root: Path, number: int, contents: dict[str, object]) -> RunRecord:
    """A run's folder with these contents, as `pit launch` and a program leave them."""
    run_dir = root / f"r-20261101-0000{number:02}-abcdef"
    (run_dir / "attempts" / "0" / "logs").mkdir(parents=True)
    (run_dir / "plan.json").write_text("{}")
    (run_dir / "events.jsonl").write_text("{}\n")
    for step in sorted(contents["steps"]):  # type: ignore[call-overload]
        path = make_checkpoint(run_dir, step)
        if contents["is_damaged"]:
            with open(path / "payload" / "weights.bin", "r+b") as file:
                file.write(b"x")
    for step in contents["named"]:  # type: ignore[attr-defined]
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (run_dir / "checkpoints" / f"best{step}").symlink_to(f"step_{step}")
    if output := str(contents["output"]):
        (run_dir / output).parent.mkdir(exist_ok=True)
        (run_dir / output).write_text("1")
    for name in ("hooks.json", "supervisor.1.out", ".hooks"):
        (run_dir / name).touch()
    if contents["is_over"]:
        apply_decision.write_verdict(run_dir, "program", "it failed", 1, moved_to="x" if contents["is_moving"] else "")
    if contents["is_in_sweep"]:
        sweep = root / "sweeps" / "s"
        sweep.mkdir(parents=True, exist_ok=True)
        (sweep / f"point{number}").symlink_to(run_dir)
    if contents["is_referenced"]:
        other = root / f"other{number}"
        other.mkdir()
        (other / "plan.json").write_text(f'{{"command": "train --init {run_dir}/checkpoints/step_1"}}')
    return RunRecord(
        run_id=run_dir.name,
        name="r",
        site="s",
        job_id="1",
        run_dir=str(run_dir),
        state="FAILED",
        exit_code=1,
        nodes=1,
        created="",
        is_over=bool(contents["is_over"]),
    )


@settings(deadline=None, max_examples=40)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3), keep_last=st.integers(1, 2))
def test_only_what_the_rule_allows_is_removed(
    contents: list[dict[str, object]], keep_last: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every named and newest checkpoint and every other file stays; a dry run says the same, and changes nothing."""
    root = tmp_path_factory.mktemp("runs")
    runs = [make_run(root, number, one) for number, one in enumerate(contents)]
    before = {path for path in root.rglob("*") if path.name != ".lock"}
    planned = list(prune_runs(runs, keep_last=keep_last))
    assert {path for path in root.rglob("*") if path.name != ".lock"} == before
    done = list(prune_runs(runs, keep_last=keep_last, dry_run=False))
    assert [one.state.replace("would be ", "") for one in planned] == [one.state for one in done]
    assert [one.steps for one in planned] == [one.steps for one in done]
    for one, run, result in zip(contents, runs, done, strict=True):
        run_dir = Path(run.run_dir)
        steps: set[int] = one["steps"]  # type: ignore[assignment]
        named: set[int] = one["named"]  # type: ignore[assignment]
        is_prunable = one["is_over"] and not one["is_moving"] and not one["is_referenced"]
        is_emptied = is_prunable and not (steps or named or one["output"] or one["is_in_sweep"])
        assert run_dir.exists() != is_emptied, result
        assert result.state == "removed" or not is_emptied
        newest = set(sorted(steps)[-keep_last:])
        expected = newest | named & steps if is_prunable and not one["is_damaged"] else steps
        assert set(lookup.complete_steps(run_dir / "checkpoints")) == expected
        assert set(result.steps) == steps - expected
        assert not one["output"] or (run_dir / str(one["output"])).exists()
    assert not list(root.glob(".pruned*"))


def test_a_run_that_is_reopened_meanwhile_stays(tmp_path: Path) -> None:
    """Between the listing and the removal a user resumed the run: its verdict is gone, and it is kept."""
    run = make_run(tmp_path, 0, ENDED)
    apply_decision.reopen(Path(run.run_dir))
    (result,) = prune_runs([run], dry_run=False)
    assert result.state == "kept"
    assert (Path(run.run_dir) / "plan.json").exists()


@pytest.mark.parametrize("path", ["", "/", "/checkpoints/step_1"])
def test_a_run_that_another_plan_names_stays(path: str, tmp_path: Path) -> None:
    """Whether the plan has the path of the run's folder or one within it."""
    run = make_run(tmp_path, 0, ENDED)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plan.json").write_text(f'{{"command": "train --init {run.run_dir}{path}"}}')
    (result,) = prune_runs([run], dry_run=False)
    assert (result.state, Path(run.run_dir).exists()) == ("kept", True)


def test_a_run_of_a_sweep_at_another_site_stays(
    pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A sweep over several sites is in the first one's folder of runs; a point without a run would be launched anew."""
    for name in ("alpha", "beta"):
        (tmp_path / "pit_sites").mkdir(exist_ok=True)
        paths = f'[paths]\nruns = "{tmp_path / name}"\n'
        (tmp_path / "pit_sites" / f"{name}.toml").write_text(f'name = "{name}"\nscheduler = "none"\n{paths}')
    (tmp_path / "quick.toml").write_text('name = "quick"\ncommand = "true"\nsnapshot = false\n[params]\na = 0\n')
    sites = {"PIT_SITE_PATH": str(tmp_path / "pit_sites"), "PIT_FORMAT": "tsv"}
    words = ("--site", "alpha", "--site", "beta", "--set", "a=1,2", "--sweep", "s", "--wait")
    assert pit("launch", "run", "quick.toml", *words, **sites).returncode == 0
    shown = pit("launch", "prune", "--where", "age>0s", "--site", "beta", **sites).stdout
    assert [line.split("\t")[2] for line in shown.splitlines()[1:]] == ["kept"]
    removed = pit("launch", "prune", "--sweep", "s", "--site", "alpha", "--remove", **sites).stdout
    assert [line.split("\t")[2] for line in removed.splitlines()[1:]] == ["removed"] * 2


def test_what_a_killed_prune_left_is_removed(tmp_path: Path) -> None:
    """The folder of a run whose removal was interrupted goes with the next prune, not with a dry run."""
    (left := tmp_path / ".pruned.r-1.abcd").mkdir()
    run = make_run(tmp_path, 0, ENDED)
    list(prune_runs([run]))
    assert left.exists()
    list(prune_runs([run], dry_run=False))
    assert not left.exists()


def test_a_run_that_is_locked_is_left_to_the_next_prune(tmp_path: Path) -> None:
    """It is being continued: that is no failure, and the next run is removed."""
    runs = [make_run(tmp_path, number, ENDED) for number in range(2)]
    with lock(Path(runs[0].run_dir) / apply_decision.RUN_LOCK, "the run"):
        assert [result.state for result in prune_runs(runs, dry_run=False)] == ["kept", "removed"]


def test_a_run_that_cannot_be_removed_hides_no_other(tmp_path: Path) -> None:
    """A damaged verdict is reported as a failure of its run; the next run is removed."""
    runs = [make_run(tmp_path, number, ENDED) for number in range(2)]
    (Path(runs[0].run_dir) / "verdict.json").write_text("{")
    assert [result.state for result in prune_runs(runs, dry_run=False)] == ["failed", "removed"]


def test_as_it_is_typed(pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """An ended run is shown, then removed with --remove; a run that is running stays, and a rule is required."""
    for name, command in (("slow", "sleep 600"), ("quick", "true")):
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\ncommand = "{command}"\nsnapshot = false\n')
    runs = str(tmp_path / "runs")

    def launch(*words: str) -> str:
        printed = pit("launch", "run", *words, "--format", "tsv", PIT_RUNS=runs).stdout
        return printed.splitlines()[-1].split("\t")[0]

    running = launch("slow.toml")
    try:
        ended = launch("quick.toml", "--wait")
        assert pit("launch", "prune", PIT_RUNS=runs).returncode == 2
        shown = pit("launch", "prune", "--where", "age>0s", "--format", "tsv", PIT_RUNS=runs).stdout
        states = {line.split("\t")[0]: line.split("\t")[2] for line in shown.splitlines()[1:]}
        assert states == {running: "kept", ended: "would be removed"}
        assert pit("launch", "prune", "--where", "age>0s", "--remove", PIT_RUNS=runs).returncode == 0
        assert [path.name for path in run_folder.run_dirs(tmp_path / "runs")] == [running]
        again = pit("launch", "prune", "--where", "age>0s", "--remove", PIT_RUNS=runs)
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    finally:
        pit("launch", "cancel", running, PIT_RUNS=runs)


def test_a_run_that_ended_unwatched_is_pruned_at_once(
    pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """What is shown is what --remove does next: the verdict that is recorded for it counts already."""
    (tmp_path / "quick.toml").write_text('name = "quick"\ncommand = "true"\nsnapshot = false\n')
    runs = str(tmp_path / "runs")
    pit("launch", "run", "quick.toml", "--wait", PIT_RUNS=runs)
    (run_dir,) = run_folder.run_dirs(tmp_path / "runs")
    (run_dir / "verdict.json").unlink()
    shown = pit("launch", "prune", "--where", "age>0s", "--format", "tsv", PIT_RUNS=runs).stdout
    assert [line.split("\t")[2] for line in shown.splitlines()[1:]] == ["would be removed"]


def test_a_slurm_that_does_not_respond_is_queried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time-out takes 20 s, and there may be a thousand runs; those of another site are settled."""
    contents = ENDED | {"is_over": False}
    runs = [replace(make_run(tmp_path, number, contents), site=site) for number, site in enumerate("aaab")]
    queried: list[str] = []

    def query_ends(run_dirs: list[Path], site: str) -> dict[str, resume.JobEnd]:
        queried.append(site)
        if site == "a":
            raise Unreachable("no answer")
        return {}

    monkeypatch.setattr(resume, "query_ends", query_ends)
    monkeypatch.setattr(resume, "settle_run", lambda *_: True)
    monkeypatch.setattr(load, "load_site", lambda name: name)
    monkeypatch.setattr(status, "run_statuses", lambda _, site, **__: [replace(runs[3], is_over=site == "b")])
    assert list(settle_ended(runs, lambda *_: None)) == [runs[3].run_id]
    assert queried == ["a", "b"]


def test_a_folder_is_removed_without_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS renames a file that is open instead of removing it, and then refuses to remove its folder."""
    run, rmtree = make_run(tmp_path, 0, ENDED), shutil.rmtree

    def remove(folder: Path) -> None:
        with lock(folder / apply_decision.RUN_LOCK, "the run"):
            pass
        rmtree(folder)

    monkeypatch.setattr(shutil, "rmtree", remove)
    assert [result.state for result in prune_runs([run], dry_run=False)] == ["removed"]
    assert list(tmp_path.iterdir()) == []
