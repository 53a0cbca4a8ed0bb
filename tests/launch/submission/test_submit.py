"""A plan becomes a run: what its folder holds at every moment at which its maker may be killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core import timestamps
from pitools.launch import plan as planning
from pitools.launch.recovery import tick
from pitools.launch.recovery.resume import resume_run
from pitools.launch.submission import exactly_once, exclusions, submit
from pitools.run import run_folder
from pitools.run.attempt_records import Cause
from pitools.site.load import load_site

MakePlan = Callable[..., planning.Plan]


class Killed(BaseException):
    """What SIGKILL does."""


@pytest.fixture
def plan(make_plan: MakePlan, tmp_path: Path) -> planning.Plan:
    """A plan for the cluster alpha, with its runs in the test's own folder."""
    return msgspec.structs.replace(make_plan("alpha", topology="none"), runs_dir=str(tmp_path / "runs"))


def test_the_first_job_leaves_bad_nodes_out(plan: planning.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other runs learnt about a node counts from the start; by then the folder has all that a tick needs."""
    site, runs = load_site("alpha"), Path(plan.runs_dir)
    runs.mkdir()
    bad = Cause(attempt="0", kind="gpu", confidence="certain", reason="Xid 79")
    exclusions.exclude_nodes(runs, site, ["alpha07"], bad, "other-run")
    sent: list[tuple[str, ...]] = []

    def send(
        run_dir: Path, _: object, *, args: Sequence[str], job_number: int, retry_for_s: float | None
    ) -> run_folder.JobRef:
        sent.append(tuple(args))
        assert (job_number, retry_for_s) == (0, None), "a person waits for it"
        assert (run_dir / "script.sbatch").read_text().startswith("#!")
        assert tick.unfinished_runs(runs, site, lambda path, error: pytest.fail(f"{path}: {error}")) == [run_dir]
        return run_folder.JobRef(job_id="7", site="alpha", submitted=timestamps.now_rfc3339())

    monkeypatch.setattr(exactly_once, "submit_once", send)
    submit.submit_run(plan, site)
    assert sent == [("--exclude=alpha07",)]


def test_killed_before_there_is_a_script(plan: planning.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is known, no tick submits it while its maker may be alive, and a resume writes its script and submits."""
    site, runs = load_site("alpha"), Path(plan.runs_dir)

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(submit.node_choice, "load_fabric", killed)
    monkeypatch.setattr(submit, "rollback", lambda *_: None)  # SIGKILL lets nobody tidy up
    with pytest.raises(Killed):
        submit.submit_run(plan, site)
    (run_dir,) = tick.unfinished_runs(runs, site, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert list(tick.tick_runs(runs, site, lambda path, error: pytest.fail(f"{path}: {error}"))) == []
    sent: list[str] = []

    def send(run_dir: Path, *_: object, **__: object) -> run_folder.JobRef:
        sent.append((run_dir / "script.sbatch").read_text())
        return run_folder.JobRef(job_id="7", site="alpha", submitted=timestamps.now_rfc3339())

    monkeypatch.setattr(exactly_once, "submit_once", send)
    assert (resume_run(run_dir, site).job_id, sent) == ("7", [planning.render_script(plan, site, run_dir=str(run_dir))])
