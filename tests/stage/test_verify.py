from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, DataError
from pitools.stage import verify
from pitools.stage.cache.inventory import list_sets
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import CheckTotals, FileFinding, check_versions
from pitools.store.version_list import PUBLISHED_FILE


def judge(path: Path) -> tuple[dict[str, str], CheckTotals]:
    """Problem by path, and the summary that comes last."""
    *findings, summary = check_versions(path, readers=2)
    assert isinstance(summary, CheckTotals)
    assert summary.findings == len(findings)
    return {finding.path: finding.problem for finding in findings if isinstance(finding, FileFinding)}, summary


def test_a_whole_dataset_has_no_findings(small: Path):
    """Every file was read, and the summary says how much that was."""
    actual, summary = judge(small)
    assert actual == {}
    assert (summary.sets, summary.files, summary.bytes) == (1, 5, 3 * 2**20 + 101_002)


def test_each_problem_is_told_from_the_others(small: Path):
    """One finding a file: gone, another length, another content, not a file, not named by the manifest."""
    (small / "zarr.json").unlink()
    os.truncate(small / "actions/c/0", 999)
    (small / "images/c/1/0").write_bytes(os.urandom(100_000))
    (small / "actions/c/1").rename(small / "actions/c/2")
    (small / "actions/c/1").symlink_to("2")
    (small / "stray").symlink_to("/")
    actual, _ = judge(small)
    assert actual == {
        "zarr.json": "missing",
        "actions/c/0": "size",
        "images/c/1/0": "digest",
        "actions/c/1": "missing",
        "actions/c/2": "extra",
        "stray": "extra",
    }


def test_a_finding_says_what_was_expected(small: Path):
    """Both lengths, or both digests, are in the record."""
    os.truncate(small / "actions/c/0", 999)
    finding = next(check_versions(small, readers=2))
    assert isinstance(finding, FileFinding)
    assert (finding.dataset, finding.version, finding.expected, finding.got) == ("pick", small.name, "1000", "999")


def test_a_root_is_checked_object_by_object(small: Path, make_dataset, tmp_path: Path):
    """What is not a dataset at all is a finding too, and the others are still checked."""
    root = tmp_path / "pit"
    dataset = make_dataset({"a": b"1"}, "other")
    for folder in (small, dataset):
        stage_version(load_version(folder), root)
    assert judge(root)[1].sets == 2
    (root / "objects/empty").mkdir()
    (root / "objects/odd").mkdir()
    (root / "objects/odd/manifest.json").write_text("{}")
    (root / "objects" / small.name).rename(root / "objects" / ("0" * 32))
    *findings, summary = check_versions(root, readers=1)
    assert [(f.version, f.path, f.problem) for f in findings if isinstance(f, FileFinding)] == [
        ("0" * 32, "manifest.json", "digest"),
        ("empty", "manifest.json", "missing"),
        ("odd", "manifest.json", "digest"),
    ]
    assert isinstance(summary, CheckTotals)
    assert (summary.sets, summary.files) == (4, 1)


def test_a_name_with_several_versions_is_checked_whole(make_dataset):
    """`<root>/<name>` is all its versions."""
    make_dataset({"a": b"1"})
    folder = make_dataset({"a": b"2"}).parent
    assert judge(folder)[1].sets == 2


def test_an_empty_root_is_in_order_and_a_folder_that_is_none_is_not(tmp_path: Path):
    """No object, no finding; but a wrong path must not pass for a checked one."""
    (tmp_path / "objects").mkdir()
    assert judge(tmp_path)[1].sets == 0
    with pytest.raises(DataError):
        judge(tmp_path / "objects")


def test_the_list_tells_whole_from_damaged(small: Path, make_dataset, tmp_path: Path):
    """One record an object, also of one whose manifest is gone."""
    root = tmp_path / "pit"
    dataset = make_dataset({"a": b"1"}, "other")
    assert list(list_sets(root)) == []
    for folder in (small, dataset):
        stage_version(load_version(folder), root)
    (root / "objects/zz").mkdir()
    (root / "objects" / dataset.name / "a").unlink()
    by_version = {record.version: record for record in list_sets(root)}
    assert {version: record.state for version, record in by_version.items()} == {
        small.name: "present",
        dataset.name: "damaged",
        "zz": "damaged",
    }
    assert (by_version[small.name].dataset, by_version[small.name].files) == ("pick", 5)
    assert by_version[small.name].staged.endswith("Z")


def test_a_manifest_that_cannot_be_opened_does_not_end_the_check(
    small: Path, make_dataset, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """The set is a finding, and the other sets are read."""
    for folder in (small, make_dataset({"a": b"1"}, "other")):
        stage_version(load_version(folder), root)
    unreadable, _ = sorted(path.name for path in (root / "objects").iterdir())

    def load(folder: Path) -> DatasetVersion:
        if folder.name == unreadable:
            raise ClusterError("cannot read: Permission denied", where=str(folder))
        return load_version(folder)

    monkeypatch.setattr(verify, "load_version", load)
    finding, totals = check_versions(root, readers=1)
    assert (finding.version, finding.problem) == (unreadable, "unreadable")
    assert (totals.sets, totals.findings) == (2, 1)


def test_an_ingested_version_has_no_extra_file(make_dataset):
    """The time of its publication is beside the manifest, which does not list it."""
    folder = make_dataset({"a": b"x"})
    (folder / PUBLISHED_FILE).write_text("{}")
    (folder / "b").mkdir()
    (folder / "b" / PUBLISHED_FILE).write_text("{}")
    *findings, totals = check_versions(folder, readers=1)
    assert isinstance(totals, CheckTotals)
    assert [finding.path for finding in findings if isinstance(finding, FileFinding)] == [f"b/{PUBLISHED_FILE}"]
