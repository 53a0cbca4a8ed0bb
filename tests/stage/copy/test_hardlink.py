from __future__ import annotations

import os
from pathlib import Path

from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version


def test_a_new_version_copies_only_what_changed(make_dataset, root: Path):
    """Files of the same content are hard links of the older version's, wherever they are in the new one."""
    old = {f"c/{i}": os.urandom(100_000) for i in range(10)}
    new = {**old, "c/3": os.urandom(100_000), "d/moved": old["c/4"], "d/again": old["c/4"]}
    first = stage_version(load_version(make_dataset(old)), root)
    second = stage_version(load_version(make_dataset(new)), root)
    assert (second.state, second.copied_bytes, second.linked_bytes) == ("staged", 100_000, 1_100_000)
    for path, content in new.items():
        assert (Path(second.path) / path).read_bytes() == content
    assert (Path(first.path) / "c/1").samefile(Path(second.path) / "c/1")
    assert not (Path(first.path) / "c/3").samefile(Path(second.path) / "c/3")


def test_another_dataset_s_files_are_not_searched(make_dataset, root: Path):
    """Only versions of the same name, or the parent, are worth reading manifests for."""
    content = {"c/0": os.urandom(1000)}
    stage_version(load_version(make_dataset(content, name="pick")), root)
    assert stage_version(load_version(make_dataset(content, name="place")), root).linked_bytes == 0


def test_a_file_that_was_written_to_since_is_copied(make_dataset, root: Path):
    """Damage at rest that left a trace is not passed on to the next version."""
    old = {f"c/{i}": bytes([i]) * 1000 for i in range(4)}
    first = Path(stage_version(load_version(make_dataset(old)), root).path)
    (first / "c/0").chmod(0o600)
    (first / "c/0").write_bytes(b"y" * 1000)
    (first / "c/1").unlink()
    (first / "c/2").unlink()
    (first / "c/2").write_bytes(b"short")
    os.utime(first / "c/2", ns=(0, 0))
    os.utime(first / "c/0", ns=(10**20 // 10, 10**19))
    second = stage_version(load_version(make_dataset({**old, "new": b"1"})), root)
    assert (second.copied_bytes, second.linked_bytes) == (3001, 1000)
    assert (Path(second.path) / "c/0").read_bytes() == old["c/0"]


def test_a_broken_older_version_does_not_stop_a_new_one(make_dataset, root: Path):
    """Its manifest is damaged, missing, a folder, or not text: the new version is copied."""
    for number, wreck in enumerate((b"{", None, b"\xff\xff", b'{"name": "pick"}')):
        manifest = (
            Path(stage_version(load_version(make_dataset({"a": bytes([number]) * 10})), root).path) / "manifest.json"
        )
        manifest.unlink()
        if wreck is None:
            manifest.mkdir()
        else:
            manifest.write_bytes(wreck)
    record = stage_version(load_version(make_dataset({"a": b"new"})), root)
    assert (record.copied_bytes, record.linked_bytes) == (3, 0)


def test_linked_files_survive_the_older_version(make_dataset, root: Path):
    """Removing one version takes nothing from another that shares its files."""
    content = os.urandom(1000)
    first = Path(stage_version(load_version(make_dataset({"a": content})), root).path)
    second = Path(stage_version(load_version(make_dataset({"a": content, "b": b"1"})), root).path)
    (first / "a").unlink()
    assert (second / "a").read_bytes() == content


def test_a_manifest_that_is_a_fifo_keeps_nobody_waiting(make_dataset, root: Path):
    """Whatever stands in the place of a manifest, a run takes another copy and goes on."""
    source = make_dataset({"a": b"1"})
    manifest = Path(stage_version(load_version(source), root).path) / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    assert stage_version(load_version(make_dataset({"a": b"2"})), root).state == "staged"
    assert stage_version(load_version(source), root).state == "repaired"
