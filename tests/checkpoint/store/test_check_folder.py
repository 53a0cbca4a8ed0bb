"""A folder is judged while its run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pitools.checkpoint.store import check_folder, layout, lookup, retention, unreadable, verify
from pitools.checkpoint.store.check_folder import FolderCheck
from pitools.checkpoint.store.problem import CheckpointProblem
from tests.checkpoint.conftest import Save


def test_a_run_that_prunes_is_no_finding(folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being read stays until it has been; what went before its turn is not missed."""
    for step in (1, 2, 3):
        save(step)

    def check(path: Path, **more: Any) -> list[CheckpointProblem]:
        retention.prune_checkpoints(folder, 1)
        return verify.verify_checkpoint(path, **more)

    monkeypatch.setattr(check_folder, "verify_checkpoint", check)
    (summary,) = check_folder.check_folder(folder, [1, 2, 3])
    assert isinstance(summary, FolderCheck)
    assert (summary.checkpoints, summary.findings, summary.newest_good_step) == (1, 0, 3)
    assert layout.listed_steps(folder) == [3]


def test_a_checkpoint_that_reads_again_loses_its_mark(folder: Path, save: Save) -> None:
    """It counts as progress again, and `latest` names it; a damaged one keeps its mark."""
    for step in (1, 2, 3):
        path = save(step)
        unreadable.mark_unreadable(path, "stale handle")
    (path / "payload" / "x").write_bytes(b"more")
    (path / "payload" / "empty").unlink()
    assert lookup.complete_steps(folder) == []
    list(check_folder.check_folder(folder, [1, 2, 3]))
    assert lookup.complete_steps(folder) == [2, 1]
    assert (folder / "latest").readlink() == Path("step_2")
    assert unreadable.is_marked_unreadable(path)


@pytest.mark.parametrize("times", [1, 2])
def test_what_cannot_be_read_is_looked_at_again(
    folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Before it is moved: a server that was away for a moment costs a live run nothing."""
    save(1)
    left = [times]

    def check(path: Path, **more: Any) -> list[CheckpointProblem]:
        left[0] -= 1
        if left[0] < 0:
            return verify.verify_checkpoint(path, **more)
        return [
            CheckpointProblem(
                checkpoint=path.name, path="x", problem="unreadable", expected="a file", got="stale handle"
            )
        ]

    monkeypatch.setattr(check_folder, "verify_checkpoint", check)
    monkeypatch.setattr(check_folder, "_PAUSE_S", 0.01)
    *findings, summary = check_folder.check_folder(folder, [1], move_aside=True)
    assert isinstance(summary, FolderCheck)
    assert (len(findings), summary.quarantined) == (times - 1, times - 1)
    assert layout.listed_steps(folder) == [1] * (2 - times)
