from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.stage import verify
from pitools.stage.cache import evict
from pitools.stage.cache.evict import EvictionCandidate, KeptReason
from pitools.stage.cache.layout import is_leased, trash, version_lock
from pitools.stage.cache.lease import leased_set
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import CheckTotals, check_versions

FUTURE = 4_000_000_000  # the last use by a clock that was wrong


@pytest.fixture
def finals(make_dataset, root: Path) -> list[Path]:
    """Two sets staged long ago; a third was moved aside by a process that was killed."""
    created = [
        Path(stage_version(load_version(make_dataset({"a": os.urandom(9000)}, f"pick{n}")), root).path)
        for n in range(3)
    ]
    for final in created:
        os.utime(root / ".leases" / final.name, (1000, 1000))
    trash(created.pop(), root)
    return created


def state(root: Path) -> dict[str, tuple[int, ...]]:
    """What any change would change, of every file and folder at the root."""
    actual = {str(path): path.lstat() for path in [root, *root.rglob("*")]}
    return {path: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns, s.st_size) for path, s in actual.items()}


@pytest.mark.parametrize("bare", [False, True])
def test_what_says_that_it_changes_nothing_changes_nothing(
    finals: list[Path], root: Path, make_dataset, pit_stage, bare: bool
):
    """`plan` and `evict --dry-run` make, write and remove nothing, be lock and lease files there or not."""
    os.utime(root / ".leases" / finals[0].name, (FUTURE, FUTURE))
    for folder in (".locks", ".leases") if bare else ():
        for path in (root / folder).iterdir():
            path.unlink()
    new = make_dataset({"a": os.urandom(9000)}, "new")
    before = state(root)
    assert pit_stage("plan", new, "--to", root, "--quota", "8MiB")[0] == 1  # with nothing else there it is too little
    assert pit_stage("run", new, "--to", root, "--dry-run", "--min-free", "900000TiB")[0] == 1
    assert pit_stage("evict", "--to", root, "--need", "900000TiB", "--dry-run")[0] == 1
    assert [pit_stage("evict", final.name, "--to", root, "--dry-run")[0] for final in finals] == [0, 0]
    assert state(root) == before


def test_a_dry_run_sees_who_uses_a_set(finals: list[Path], root: Path):
    """The same reasons as of an eviction."""
    item = EvictionCandidate(finals[0].name, finals[0])
    with leased_set(finals[0], touch=False):
        assert evict.evict_item(root, item, dry_run=True) == KeptReason.LEASED
    with version_lock(root, item.version, timeout_s=0):
        assert evict.evict_item(root, item, dry_run=True) == KeptReason.LOCKED


def test_a_set_is_leased_while_it_is_checked(finals: list[Path], root: Path, monkeypatch: pytest.MonkeyPatch):
    """An evictor leaves it; afterwards it may go, and its last use is what it was."""
    problems, tried = verify.verify_files, []

    def read(dataset, **how):
        tried.append(
            (
                is_leased(root, dataset.version),
                evict.evict_item(root, EvictionCandidate(dataset.version, dataset.source.folder)),
            )
        )
        return problems(dataset, **how)

    monkeypatch.setattr(verify, "verify_files", read)
    [summary] = check_versions(root, readers=1)
    assert tried == [(True, KeptReason.LEASED)] * 2
    assert isinstance(summary, CheckTotals)
    assert (summary.sets, summary.findings) == (2, 0)
    assert not is_leased(root, finals[0].name)


def test_a_set_that_is_evicted_before_its_turn_is_no_finding(
    finals: list[Path], root: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of what was listed and then removed nothing is missing; what was there was checked."""
    first, second = sorted(finals)
    problems = verify.verify_files

    def read(dataset, **how):
        assert evict.evict_item(root, EvictionCandidate(second.name, second)) is None
        return problems(dataset, **how)

    monkeypatch.setattr(verify, "verify_files", read)
    [summary] = check_versions(root, readers=1)
    assert isinstance(summary, CheckTotals)
    assert (first.name, summary.sets, summary.findings) == (first.name, 1, 0)
