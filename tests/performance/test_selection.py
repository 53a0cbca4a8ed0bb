"""Runs and stored points selected by commit, site and request, and compared."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.core.errors import DataError, UsageError
from pitools.perf.regression.selection import (
    Selected,
    Selector,
    compare_selected,
    parse_selector,
    select_points,
    select_runs,
)
from pitools.perf.regression.sources import point_of_run, read_run
from pitools.perf.regression.store import Point, add_points
from tests.performance.test_stragglers import write_run

Pit = Callable[..., subprocess.CompletedProcess[str]]

LOOP = """
import os
from pathlib import Path
from pitools.run.steps import StepLog
log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), 0)
for step in range(40):
    log.write(step=step, loss=1, wall_s={wall_s} + step % 3 * 1e-4, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
log.close()
"""


def add_run(runs: Path, name: str, *, slow: int | None = None, site: str = "alpha", commit: str, dirty: bool = False,
            device: int = 2, request: str = "bc") -> None:  # fmt: skip
    """A run whose rank 0 needs 0.13 s a step, or 0.15 s as the slow one."""
    run = write_run(runs / name, slow=slow)
    plan = {"name": request, "site": site, "job": {"nodes": device, "tasks_per_node": 2}}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "provenance.json").write_text(json.dumps({"code": "c0de" * 8, "git": {"commit": commit, "dirty": dirty}}))


def test_two_commits_and_two_sites(pit: Pit, tmp_path: Path) -> None:
    """By the runs' medians; runs of other requests, sizes and sites do not count, nor those with changes on top."""
    runs = tmp_path / "runs"
    for number in range(6):
        add_run(runs, f"old-{number}", commit="aaaa1")
        add_run(runs, f"new-{number}", commit="bbbb1", slow=0)
        add_run(runs, f"far-{number}", commit="aaaa1", site="beta")
    add_run(runs, "wide", commit="bbbb1", device=4)
    add_run(runs, "edited", commit="bbbb1", dirty=True)
    add_run(runs, "other", commit="aaaa1", request="eval")
    (runs / "empty").mkdir()
    (runs / "empty" / "plan.json").write_text("{}")
    at = ("--site", "alpha")
    done = pit("perf", "compare", "commit:aaaa", "commit:bbbb", *at, PIT_RUNS=str(runs))
    assert done.returncode == 1, done.stderr
    (found,) = map(json.loads, done.stdout.splitlines())
    assert [found[key] for key in ("measure", "device", "a_points", "b_points", "verdict")] == [
        "bc/step_s", "2x2 cpu", 6, 6, "regression"
    ]  # fmt: skip
    assert "1 runs with uncommitted changes" in done.stderr
    done = pit("perf", "compare", "site:alpha,commit:aaaa", "site:beta", PIT_RUNS=str(runs))
    (found,) = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, found["verdict"], found["a_points"], found["b_points"]) == (0, "same", 6, 6)
    (found,) = map(
        json.loads, pit("perf", "compare", "old-0", "commit:bbbb", *at, PIT_RUNS=str(runs)).stdout.splitlines()
    )
    assert (found["a_points"], found["b_points"], found["verdict"]) == (1, 6, "inconclusive")
    for words, code, problem in (
        (("commit:aaaa,name:eval", "commit:bbbb"), 5, "nothing that both have measured on the same device"),
        (("commit:cccc", "commit:bbbb"), 2, "commit:cccc: nothing measured"),
        (("commit:aa", "commit:bbbb"), 2, "fewer than 4 characters"),
        (("commit:aaaa", "commit:bbbb", "--higher-is-better"), 2, "--higher-is-better"),
        (("old-0", "old-1", "--store", "perf.sqlite"), 2, "--store"),
    ):
        done = pit("perf", "compare", *words, *at, PIT_RUNS=str(runs))
        assert (done.returncode, problem in done.stderr) == (code, True), done.stderr


def test_commits_of_real_runs(pit: Pit, tmp_path: Path) -> None:
    """As a run records the repository that it was launched from; one run a side is compared by its steps."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "loop.toml").write_text('name = "loop"\ncommand = "python loop.py"\n')
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    commits = []
    for wall_s in ("0.01", "0.012"):
        (repository / "loop.py").write_text(LOOP.format(wall_s=wall_s))
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
            subprocess.run([*git, *words], check=True)
        commits.append(subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)[:10])
        done = pit("launch", "run", str(repository / "loop.toml"), "--wait")
        assert done.returncode == 0, done.stderr
    done = pit("perf", "compare", *(f"commit:{commit}" for commit in commits))
    (found,) = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, found["verdict"], found["a_points"]) == (1, "regression", 39)
    assert found["effect"] == pytest.approx(0.2, abs=0.03)


def test_stored_points(pit: Pit, tmp_path: Path) -> None:
    """Of two sites, in the direction that the points say; a commit is a source, or a digest of the software."""
    points = [
        Point(measure="bc/rate", value=value + 0.01 * (number % 3), t=f"2026-01-{number + 1:02}T00:00:00.000Z",
              site=site, device="8xh100", source=f"{site}{number}", software="feed+beef", better="higher")
        for number in range(9) for site, value in (("alpha", 10.0), ("beta", 8.0))
    ]  # fmt: skip
    add_points(tmp_path / "perf.sqlite", points)
    done = pit("perf", "compare", "site:alpha", "site:beta", "--store", "perf.sqlite")
    (found,) = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, found["verdict"], found["device"]) == (1, "regression", "8xh100")
    assert len(select_points(Selector(commit="beef"), points)) == 18
    digest = [Point(measure="m", value=1, t="", software="0123456789ab+")]
    assert len(select_points(Selector(commit="0123456789abcdef"), digest)) == 1
    assert select_points(Selector(commit="0123456789acdef"), digest) == []
    assert len(select_points(Selector(commit="alpha3", name="bc"), points)) == 1
    assert select_points(Selector(name="rate"), points) == []


def test_points_of_runs_have_their_commit(tmp_path: Path) -> None:
    """If nothing was changed on top of it; a longer name of the same commit is the same."""
    for name in ("clean", "dirty"):
        add_run(tmp_path, name, commit=40 * "a", dirty=name == "dirty")
    points = [point_of_run(tmp_path / name) for name in ("clean", "dirty")]
    assert [point.software for point in points] == ["c0dec0dec0de++aaaaaaaaaaaa", "c0dec0dec0de"]
    for commit in (4 * "a", 40 * "a"):
        assert [each.point.source for each in select_points(Selector(commit=commit), points)] == ["clean"]


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    """As first made, except where it was an attempt's first."""
    add_run(tmp_path, "run", commit="aaaa1")
    log = tmp_path / "run/attempts/0/steps/0.jsonl"
    again = tmp_path / "run/attempts/1/steps/0.jsonl"
    again.parent.mkdir(parents=True)
    again.write_text("".join(log.read_text().splitlines(keepends=True)[20:]).replace('"wall_s":0.', '"wall_s":9.'))
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:30]))
    steps = read_run(tmp_path / "run").steps
    assert [step.step for step in steps] == list(range(1, 40))
    assert [step.wall_s > 9 for step in steps] == [step.step >= 30 for step in steps]


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    """Nor does a pipe in place of a file, which has no end; steps without a duration do not count."""
    add_run(tmp_path, "good", commit="aaaa1")
    plans, logs = ["[" * 3000, '{"job": "x"}', ""], [""]
    files = {"plan.json": plans, "provenance.json": ['{"git": "oops"}', ""], "attempts/0/steps/0.jsonl": logs}
    for name, texts in files.items():
        for number, text in enumerate(texts):
            add_run(tmp_path, f"{name[:4]}{number}", commit="aaaa1")
            (path := tmp_path / f"{name[:4]}{number}" / name).unlink()
            path.write_text(text) if text else os.mkfifo(path)
    found, _ = select_runs(Selector(commit="aaaa", site="alpha"), tmp_path.iterdir())
    assert [each.point.source for each in found] == ["good"]
    log = tmp_path / "good/attempts/0/steps/0.jsonl"
    log.write_text(log.read_text().replace('"wall_s":0.', '"wall_s":0,"was":0.', 5))
    assert len(read_run(tmp_path / "good").steps) == 34


def test_partitions_of_a_site_are_not_mixed() -> None:
    """Though both sides name their site; those of two sites have their own."""
    slow, fast = (Point(measure="m", value=1, t="", site="alpha", partition=name) for name in ("slow", "fast"))
    far = msgspec.structs.replace(fast, site="beta")
    for other, by_site, verdicts in ((fast, True, None), (far, False, None), (far, True, ["same"])):
        sides = [Selected(slow)] * 6, [Selected(other)] * 6
        try:
            results = compare_selected(*sides, names=("a", "b"), by_site=by_site, min_effect=0.02)
        except DataError:
            assert verdicts is None
        else:
            assert [one.verdict for one in results] == verdicts


@pytest.mark.parametrize("text", ["site:", "site:a,site:b", "commit:abcd,when:now", "commit:abc"])
def test_wrong_selectors(text: str) -> None:
    """Are refused; a text without a known key is none."""
    with pytest.raises(UsageError):
        parse_selector(text)
    assert parse_selector("run-20261126-0101") is None
