"""A sweep on this machine, as it is typed: launched, compared, repeated, extended, cancelled."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.launch.sweep import sweep_folder
from pitools.launch.sweep.sweep_folder import SweepPoint
from pitools.run import run_folder

Pit = Callable[..., subprocess.CompletedProcess[str]]

LOOP = """\
import os
from pathlib import Path
from pitools.run.steps import StepLog

log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), int(os.environ["PIT_RANK"]))
lr = float(os.environ["PIT_PARAM_LR"])
for step in range(4):
    metrics = {"success": lr * step, "val/loss": float("nan")} if step == 2 else None
    common = {"wall_s": 0.01, "input_s": 0, "compute_s": 0.01, "comm_s": 0, "rank_samples": 1}
    log.write(step=step, loss=lr + 1 / (step + 1), metrics=metrics, **common)
log.close()
print("lr", lr)


def entry(lr, seed):
    print("keywords", lr, seed)


def mapped(params):
    print("mapping", params["lr"], params["seed"])
"""
REQUEST = 'name = "s"\n{}\n[params]\nlr = 1e-3\nseed = 0\n'


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "loop.py").write_text(LOOP)
    path = tmp_path / "work" / "request.toml"
    path.write_text(REQUEST.format('command = "python loop.py"'))
    return path


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_sweep_from_start_to_end(pit: Pit, request_file: Path, tmp_path: Path) -> None:
    """Each point is a run of its own; repeated, nothing is launched again; with more values, only the new ones."""
    words = ("launch", "run", str(request_file), "--name", "{name}-{lr}-{seed}", "--at-a-time", "2", "--wait")
    rows = records(pit(*words, "--set", "lr=1e-3,3e-4", "--set", "seed=0..1"))
    assert [row["name"] for row in rows] == ["s-1e-3-0", "s-1e-3-1", "s-3e-4-0", "s-3e-4-1"]
    assert {row["state"] for row in rows} == {"COMPLETED"}
    assert [row["loss"] for row in rows] == [0.251, 0.251, 0.2503, 0.2503]
    repeated = pit(*words, "--set", "lr=1e-3,3e-4", "--set", "seed=0..1")
    assert "0 runs launched, 4 were launched before" in repeated.stderr
    again = records(repeated)
    more = records(pit(*words, "--set", "seed=0..1", "--set", "lr=0.001,1"))  # in another order, written otherwise
    assert [row["run_id"] for row in again] == [row["run_id"] for row in rows]
    old_ids = {row["run_id"] for row in rows}
    assert [row["run_id"] in old_ids for row in more] == [True, False, True, False]
    (sweep,) = records(pit("launch", "sweep", "list"))
    table = pit("launch", "sweep", "show", str(sweep["name"]), "--format", "csv", "--sort", "-loss")
    cells = list(csv.DictReader(table.stdout.splitlines()))
    assert [row["lr"] for row in cells] == ["1", "1", "1e-3", "1e-3", "3e-4", "3e-4"]
    name = str(sweep["name"])
    best = records(pit("launch", "sweep", "show", name, "--sort", "-success", "--where", "success>0.001,seed<1"))
    assert [row["metrics"] for row in best] == [{"success": lr * 2, "val/loss": None} for lr in (1.0, 1e-3)]
    assert "success,val/loss" in table.stdout.splitlines()[0]
    assert pit("launch", "sweep", "show", name, "--where", "sucess>0").returncode == 2
    assert len(records(pit("launch", "list", "--where", "loss<0.2505"))) == 2
    for kind in ("losses", "points"):
        done = pit("launch", "sweep", "plot", str(sweep["name"]), "--to", f"{kind}.svg", "--kind", kind)
        assert done.returncode == 0, done.stderr
        assert "<svg" in (tmp_path / f"{kind}.svg").read_text()
    for words in ((), ("--max", "success"), ("--min", "val/loss"), ("--max", "sucess")):
        done = pit("launch", "sweep", "halve", name, "--rungs", "2", "--dry-run", *words)
        assert records(done) == []  # all have ended
        assert ('did you mean "success"?' in done.stderr) == ("sucess" in words)
    assert pit("launch", "sweep", "halve", name, "--rungs", "2", "--min", "a", "--max", "b").returncode == 2
    # Its runs are removed where that is asked for, and the sweep with the last one.
    assert records(pit("launch", "prune", "--where", "age>0s", "--remove")) == []
    assert {row["state"] for row in records(pit("launch", "prune", "--where", "age>0s"))} == {"kept"}
    prune = ("launch", "prune", "--sweep", name)
    assert {row["state"] for row in records(pit(*prune, "--where", "loss<0.2505"))} == {"would be removed"}
    assert [row["state"] for row in records(pit(*prune, "--where", "loss<0.2505", "--remove"))] == ["removed"] * 2
    assert len(records(pit("launch", "sweep", "show", name))) == 4
    assert [row["state"] for row in records(pit(*prune, "--remove"))] == ["removed"] * 4
    assert records(pit("launch", "sweep", "list")) == []
    assert run_folder.run_dirs(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("entry", "output"), [("entry", "keywords 0.5 1"), ("mapped", "mapping 0.5 1")], ids=["keywords", "mapping"]
)
def test_an_entry_gets_its_parameters(pit: Pit, request_file: Path, entry: str, output: str) -> None:
    """As keywords, or as one mapping where it asks for `params`; `--set` with single values is one plain run."""
    request_file.write_text(REQUEST.format(f'entry = "loop:{entry}"'))
    text = request_file.parent.joinpath("loop.py").read_text()
    request_file.parent.joinpath("loop.py").write_text(text[text.index("def entry") :])
    (run,) = records(pit("launch", "run", str(request_file), "--set", "lr=0.5", "--set", "seed=1", "--wait"))
    assert output in pit("launch", "logs", str(run["run_id"])).stdout
    assert records(pit("launch", "sweep", "list")) == []


@pytest.mark.usefixtures("as_root")
def test_users_of_a_sticky_runs_folder_have_sweeps_each() -> None:
    """The first user's sweep does not keep the others from making theirs, of the same name."""
    runs = Path(tempfile.mkdtemp(dir="/tmp"))
    runs.chmod(0o1777)
    try:
        for uid in (54321, 54322):
            os.seteuid(uid)
            sweep_folder.open_sweep(sweep_folder.sweeps_dir(runs) / "s", Path("r"), "d", ("local",), "owner")
            assert sweep_folder.find_sweep(runs, "s").stat().st_uid == uid
            os.seteuid(os.getuid())
        assert sweep_folder.sweeps_dir(runs).name == "sweeps"
    finally:
        os.seteuid(os.getuid())
        shutil.rmtree(runs)


def test_a_damaged_record_does_not_hide_the_others(pit: Pit, tmp_path: Path) -> None:
    """The other points, and the other sweeps, are shown and cancelled; the record is named once, with exit code 5."""
    sweeps = tmp_path / "runs" / "sweeps"
    for name in ("s-1", "s-2"):
        sweep = sweep_folder.Sweep(name=name, request="r", digest="", sites=("local",), created="")
        run_folder.write_record(sweeps / name / "sweep.json", sweep)
    for index in range(2):
        point = SweepPoint(index=index, point={}, name=f"p-{index}", site="local", run_dir=f"/none/p-{index}")
        run_folder.write_record(sweeps / "s-1" / "points" / f"{index}.json", point)
    (sweeps / "s-1" / "points" / "0.json").write_text("{")
    (sweeps / "s-2" / "sweep.json").write_text("{")
    for words, name, damaged in (
        (("show", "s-1"), "p-1", "0.json"),
        (("list",), "s-1", "s-2"),
        (("cancel", "s-1"), "p-1", "0.json"),
    ):
        done = pit("launch", "sweep", *words)
        assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == [name]
        assert (done.returncode, sum(damaged in line for line in done.stderr.splitlines())) == (5, 1)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--set", "seed=0..100000"), 2, "100001 points"),
        (("--set", "sede=0,1"), 3, '"sede"'),
        (("--set", "lr=1,2", "--set", "lr=3"), 2, '"lr" is given twice'),
        (("--set", "lr=1,2", "--name", "{name}"), 3, "the same name"),
        (("--set", "lr=1,2", "--name", "{nmae}"), 2, "{nmae}"),
        (("--set", "lr=1,2", "--sweep", "../x"), 2, "../x"),
        (("--set", "nodes=0,1"), 3, "nodes = 0"),
        (("--points", "missing.csv"), 3, "missing.csv"),
    ],
)
def test_nothing_is_launched_for_a_wrong_sweep(
    pit: Pit, request_file: Path, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    """The whole sweep is planned before its first run."""
    done = pit("launch", "run", str(request_file), *words)
    assert done.returncode == code
    assert message in done.stderr
    assert not list(tmp_path.glob("runs/*/plan.json"))


def test_another_request_is_another_sweep(pit: Pit, request_file: Path) -> None:
    """A changed request under the same name of a sweep is refused: its runs would not be comparable."""
    words = ("launch", "run", str(request_file), "--set", "lr=1,2", "--sweep", "mine", "--wait", "--at-a-time", "2")
    records(pit(*words))
    request_file.write_text(request_file.read_text() + "more = 1\n")
    done = pit(*words)
    assert (done.returncode, "--sweep NAME" in done.stderr) == (2, True)


def test_a_new_point_gets_no_number_that_is_taken(tmp_path: Path) -> None:
    """Points that were refused leave gaps: the next number is behind the largest."""
    for index in (0, 2):
        point = SweepPoint(index=index, point={"lr": str(index)}, name=f"p{index}", site="s", run_dir=f"/r/{index}")
        sweep_folder.add_point(tmp_path, point)
    assert sweep_folder.next_index(sweep_folder.read_points(tmp_path)) == 3
    assert sweep_folder.next_index([]) == 0


def test_a_sweep_that_goes_on_with_other_code_says_so(pit: Pit, request_file: Path) -> None:
    """New values after an edit: a note about the code and about runs that stopped; none where both are as before."""
    words = ("launch", "run", str(request_file), "--sweep", "mine", "--wait", "--at-a-time", "2")
    program = request_file.with_name("loop.py")
    program.write_text(LOOP + "raise SystemError(lr)\n")
    assert pit(*words, "--set", "lr=1,2").returncode == 1
    program.write_text(LOOP)
    done = pit(*words, "--set", "lr=1,2,3")
    assert "the code has changed" in done.stderr
    assert "2 runs were stopped" in done.stderr
    assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["FAILED", "FAILED", "COMPLETED"]
