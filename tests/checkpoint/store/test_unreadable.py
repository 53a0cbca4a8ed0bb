"""Checkpoints that are there and cannot be read: waited for, passed by for an older one, and never lost."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.checkpoint import search
from pitools.checkpoint.checkpointer import Checkpointer
from pitools.checkpoint.store import layout, lookup, manifest, quarantine, retention, unreadable
from pitools.checkpoint.store.listing import list_checkpoints
from pitools.core.errors import ClusterError
from tests.checkpoint.test_checkpointer import DAMAGES, Files, on_ranks, restored, saved, state

Away = Callable[..., None]


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Away:
    """Makes a file of some checkpoints unreadable: `away("0.w", "step_2", times=…, number=…)`; times=0: readable."""
    real = manifest.open_regular
    monkeypatch.setattr(search, "_PAUSES_S", (0.01,) * 4)

    def begin(name: str, *steps: str, times: int = 1 << 30, number: int = errno.ESTALE) -> None:
        left = [times]

        def opened(path: Path) -> Any:
            if path.name == name and any(step in path.parts for step in steps) and left[0] > 0:
                left[0] -= 1
                raise OSError(number, "it is away", str(path))
            return real(path)

        for module in ("manifest", "hashing"):
            monkeypatch.setattr(f"pitools.checkpoint.store.{module}.open_regular", opened)

    return begin


@pytest.mark.parametrize("name", ["manifest.json", "0.w"])
def test_a_server_that_comes_back_costs_nothing(folder: Path, away: Away, name: str) -> None:
    """It is waited for; the newest is gone on from, and nothing is moved, marked or told."""
    saved(folder, 1, 2)
    away(name, "step_2", times=3)
    assert restored(folder).step == 2  # type: ignore[union-attr]
    assert not list(folder.glob(".unreadable.*"))
    assert not (folder / "quarantine").exists()


def test_a_manifest_that_cannot_be_read_is_not_listed_as_damaged(folder: Path, away: Away) -> None:
    """As `check` has it: its server may be away."""
    saved(folder, 1, 2)
    away("manifest.json", "step_2", number=errno.EIO)
    assert [line.state for line in list_checkpoints(folder)] == ["unreadable", "complete"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("name", ["manifest.json", "0.w"])
def test_an_older_one_that_reads_is_taken(
    folder: Path, away: Away, capfd: pytest.CaptureFixture[str], name: str, number: int
) -> None:
    """By all ranks; both are named, and the steps that it costs; the newest stays where it is, as it is."""
    saved(folder, 10, 40, world_size=2)
    away(name, "step_40", number=number)

    def work(rank: int, options: dict[str, Any]) -> int:
        with Checkpointer(folder, Files(rank), **options) as guard:
            return guard.restore(state(0)).step  # type: ignore[union-attr]

    assert on_ranks(2, work) == [10, 10]
    out, output = capfd.readouterr()
    assert out == ""  # it is the program's
    assert f"{folder}/step_40 cannot be read" in output
    assert f"continuing from {folder}/step_10, 30 steps earlier" in output
    assert layout.listed_steps(folder) == [40, 10]
    assert not (folder / "quarantine").exists()
    assert lookup.latest_step(folder) == 10
    assert (folder / "latest").readlink() == Path("step_10")
    newest, older = list_checkpoints(folder)
    assert (newest.step, newest.state, newest.resumable, older.resumable) == (40, "unreadable", False, True)
    assert "cannot be read" in newest.reason


def test_where_none_reads_it_is_an_error(folder: Path, away: Away) -> None:
    """A store that is away never sends a run back to its beginning; nothing is marked, and later it goes on."""
    saved(folder, 1, 2, 3, world_size=2)
    DAMAGES["flip"](folder / "step_1" / "payload" / "0.w")
    away("0.w", "step_2", "step_3", number=errno.EIO)

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options) as guard:
            guard.restore(state(0))

    for error in on_ranks(2, work):
        assert isinstance(error, ClusterError)
        assert "step_3" in f"{error.where} {error}"
        assert "cannot be read" in str(error)
    assert layout.listed_steps(folder) == [3, 2]
    assert not list(folder.glob(".unreadable.*"))
    away("0.w", times=0)
    assert restored(folder).step == 3  # type: ignore[union-attr]


def test_a_rank_that_cannot_read_is_enough(folder: Path, away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's node alone cannot read the newest: all go on from the older one, and the node is named."""
    saved(folder, 1, 2, world_size=2)
    monkeypatch.setattr(search, "_PAUSES_S", (0.01,))
    real = search.verify.verify_checkpoint

    def check(path: Path, *, share: tuple[int, int] = (0, 1), **more: Any) -> Any:
        actual = real(path, share=share, **more)
        bad = search.CheckpointProblem(
            checkpoint=path.name, path="payload/0.w", problem="unreadable", expected="a file", got="Input/output error"
        )
        return [*actual, bad] if share == (1, 2) and path.name == "step_2" else actual

    monkeypatch.setattr(search.verify, "verify_checkpoint", check)

    def work(rank: int, options: dict[str, Any]) -> int:
        with Checkpointer(folder, Files(rank), **options) as guard:
            return guard.restore(state(0)).step  # type: ignore[union-attr]

    assert on_ranks(2, work) == [1, 1]
    assert "rank 1" in unreadable.unreadable_reason(folder / "step_2")


def test_saving_goes_on_past_it(folder: Path, away: Away) -> None:
    """The same step is saved anew and the unreadable one is put aside with the reason; others leave it alone."""
    saved(folder, 10, 30, 40, run="r")
    away("0.w", "step_30", "step_40", number=errno.EIO)
    with Checkpointer(folder, Files(), run="r", keep_last=1) as guard:
        assert guard.restore(state(0)).step == 10  # type: ignore[union-attr]
        for step in (20, 30):
            guard.save(step, {"w": b"a" * 3000, "momentum": b"b" * 1400}, {"position": step})
            guard.wait()
            assert lookup.latest_step(folder) == step
            assert (folder / "latest").readlink() == Path(f"step_{step}")
        away("0.w", "step_40", number=errno.EIO)  # what is written anew is on another server
        guard.save(50, state(50))
    assert layout.listed_steps(folder) == [50, 40]
    (aside,) = (folder / "quarantine").iterdir()
    assert (aside / "step_30" / "payload" / "0.w").read_bytes() == state(30)["w"]
    assert "cannot be read" in (aside / "reason.json").read_text()
    assert retention.prune_checkpoints(folder, 1)[0].step == 50
    assert layout.listed_steps(folder) == [50, 40]


def test_it_is_gone_on_from_once_it_reads(folder: Path, away: Away) -> None:
    """The next attempt looks again: what is newer and reads now is the newest, and no more marked."""
    saved(folder, 10, 40)
    away("0.w", "step_40")
    with Checkpointer(folder, Files()) as guard:
        guard.restore(state(0))
        guard.save(20, state(20))
    away("0.w", times=0)
    assert restored(folder).step == 40  # type: ignore[union-attr]
    assert not unreadable.is_marked_unreadable(folder / "step_40")
    assert (folder / "latest").readlink() == Path("step_40")


def test_a_mark_does_not_outlive_its_checkpoint(folder: Path) -> None:
    """Moved aside, or removed by hand and saved anew, the step is as any other."""
    saved(folder, 1, 2, 3)
    unreadable.mark_unreadable(folder / "step_3", "it was away")
    quarantine.quarantine_checkpoint(folder / "step_3", ())
    assert not list(folder.glob(".unreadable.*"))
    unreadable.mark_unreadable(folder / "step_3", "it was away")
    saved(folder, 3)
    assert lookup.complete_steps(folder) == [3, 2, 1]
