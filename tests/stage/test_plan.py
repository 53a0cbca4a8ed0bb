from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.stage import plan as planning
from pitools.stage.cache.layout import create_root, journal_path, partial_path, version_lock
from pitools.stage.cache.space import RootLimits, reserve
from pitools.stage.copy.journal import CopyJournal
from pitools.stage.request import StageRequest
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version


def test_a_plan_says_what_run_would_copy_and_changes_nothing(small: Path, tmp_path: Path):
    """Absent, then present, then damaged: as `run` will find it."""
    root = tmp_path / "deep" / "pit"
    (plan,) = planning.plan_requests([StageRequest(load_version(small), root)])
    assert (plan.state, plan.copy_bytes, plan.fits) == ("absent", plan.bytes, True)
    assert not root.parent.exists()
    path = stage_version(load_version(small), root).path
    assert plan.path == path
    (plan,) = planning.plan_requests([StageRequest(load_version(small), root)])
    assert (plan.state, plan.copy_bytes) == ("present", 0)
    (Path(path) / "zarr.json").chmod(0o644)
    os.truncate(Path(path) / "zarr.json", 1)
    (plan,) = planning.plan_requests([StageRequest(load_version(small), root)])
    assert (plan.state, plan.copy_bytes) == ("damaged", plan.bytes)


def test_plans_add_up(make_dataset, tmpfs):
    """Each fits alone, both do not: the second one says so."""
    disk = tmpfs("size=20m")
    datasets = [load_version(make_dataset({"a": os.urandom(6 << 20)}, name)) for name in ("one", "two")]
    assert [plan.fits for plan in planning.plan_requests(StageRequest(dataset, disk) for dataset in datasets)] == [
        True,
        False,
    ]
    assert [next(planning.plan_requests([StageRequest(dataset, disk)])).fits for dataset in datasets] == [True, True]


def test_a_plan_evicts_nothing_that_it_names(make_dataset, tmp_path: Path):
    """`run` leases a set that it finds present until its end, so that it makes no room for the next."""
    first, second = (load_version(make_dataset({"a": os.urandom(6 << 20)}, name)) for name in ("one", "two"))
    stage_version(first, tmp_path)
    os.utime(tmp_path / ".leases" / first.version, (1000, 1000))
    requests = [StageRequest(dataset, tmp_path, limits=RootLimits(quota_bytes=17 << 20)) for dataset in (first, second)]
    assert [(plan.state, plan.fits) for plan in planning.plan_requests(requests)] == [
        ("present", True),
        ("absent", False),
    ]
    assert [plan.fits for plan in planning.plan_requests(requests[1:])] == [True]


def test_a_plan_counts_what_others_are_copying(make_dataset, tmp_path: Path):
    """The whole copy of a running stager counts towards the quota, as for `run`."""
    dataset = load_version(make_dataset({"a": os.urandom(6 << 20)}))
    request = StageRequest(dataset, tmp_path, limits=RootLimits(quota_bytes=20 << 20))
    create_root(tmp_path)
    with version_lock(tmp_path, "f" * 32, timeout_s=1), reserve(tmp_path, "f" * 32, 15 << 20, RootLimits()):
        assert [plan.fits for plan in planning.plan_requests([request])] == [False]
    assert [plan.fits for plan in planning.plan_requests([request])] == [True]


def test_a_plan_counts_what_need_not_be_copied(build, tmp_path: Path, tmpfs):
    """Files of another version there and those of an interrupted copy take no room again."""
    disk = tmpfs("size=22m")
    files = {"a": os.urandom(8 << 20), "b": os.urandom(2 << 20), "c": os.urandom(2 << 20)}
    for path, folder in {"older": {"a": files["a"]}, "new": files}.items():
        source = build(tmp_path / path, folder)
        dataset = load_version(source)
        if path == "new":
            (source / "c").write_bytes(b"wrong")
            with pytest.raises(DataError):
                stage_version(dataset, disk, readers=1)
        else:
            stage_version(dataset, disk)
    (plan,) = planning.plan_requests([StageRequest(dataset, disk)])
    assert (plan.bytes, plan.copy_bytes, plan.fits) == (12 << 20, 2 << 20, True)
    assert plan.free_bytes < 12 << 20
    (source / "c").write_bytes(files["c"])
    assert stage_version(dataset, disk).copied_bytes == plan.copy_bytes


def test_ranges_of_a_file_that_is_gone_are_copied_again(small: Path, tmp_path: Path):
    """A file that failed its digest is removed, while the journal goes on to list its ranges."""
    dataset = load_version(small)
    create_root(tmp_path)
    partial_path(tmp_path, dataset.version).mkdir()
    journal = CopyJournal(journal_path(tmp_path, dataset.version), dataset.version, durable=True, append=False)
    journal.add_range(0, 0, b"x" * 16)
    journal.close()
    (plan,) = planning.plan_requests([StageRequest(dataset, tmp_path)])
    assert plan.copy_bytes == plan.bytes


def test_an_unsafe_root_is_refused(small: Path, tmp_path: Path):
    """A plan refuses what `run` would."""
    (tmp_path / "objects").symlink_to("/tmp")
    with pytest.raises(ClusterError):
        list(planning.plan_requests([StageRequest(load_version(small), tmp_path)]))


def test_plans_are_read_back_as_written(small: Path, tmp_path: Path):
    """What `plan` prints, `run -` reads."""
    plans = list(planning.plan_requests([StageRequest(load_version(small), tmp_path)]))
    assert planning.read_plans([msgspec.json.encode(plan).decode() for plan in plans]) == plans


@pytest.mark.parametrize("line", ["", "{}", '{"schema": "pit.node/1"}', "x"])
def test_what_is_no_plan_is_refused_by_line(line: str):
    """The line's number is in the error."""
    with pytest.raises(UsageError) as error:
        planning.read_plans([line])
    assert error.value.where == "stdin, line 1"
