from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from pitools.core import fs
from pitools.stage.cache import layout
from pitools.stage.cache.lease import leased_set
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version


@pytest.fixture
def damaged(small: Path, root: Path) -> Path:
    """A staged set with one file cut short."""
    final = Path(stage_version(load_version(small), root).path)
    file = final / "actions/c/0"
    file.chmod(0o600)
    file.write_bytes(b"damaged")
    return final


def aside(root: Path) -> list[Path]:
    """Sets that were replaced and are kept."""
    return list((root / ".tmp").glob("*.old.*"))


def test_a_leased_set_that_is_replaced_stays_with_its_readers(damaged: Path, small: Path, root: Path):
    """Who reads beneath an open folder reads on, until the lease is free; then the next command removes the old set."""
    with leased_set(damaged):
        folder = os.open(damaged, os.O_PATH)
        assert stage_version(load_version(small), root).state == "repaired"
        descriptor = os.open("actions/c/0", os.O_RDONLY, dir_fd=folder)
        assert os.read(descriptor, 100) == b"damaged"
        os.close(descriptor)
        os.close(folder)
        [retained] = aside(root)
        assert stage_version(load_version(small), root, verify=True).state == "present"
        assert aside(root) == [retained]
    assert stage_version(load_version(small), root, verify=True).state == "present"
    with layout.version_lock(root, damaged.name, timeout_s=0):
        pass
    assert aside(root) == []


def test_a_set_is_there_at_every_moment_of_its_repair(damaged: Path, small: Path, root: Path):
    """Old or new, the path always stands while a damaged set is replaced, again and again."""
    missing, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                os.stat(damaged)  # noqa: PTH116 - fast
            except FileNotFoundError:
                missing.append(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(40):
            (damaged / "zarr.json").unlink()
            assert stage_version(load_version(small), root, readers=1).state == "repaired"
    finally:
        done.set()
        watcher.join()
    assert missing == []


def test_a_file_system_that_cannot_exchange_gets_two_renames(
    damaged: Path, small: Path, root: Path, residue, monkeypatch: pytest.MonkeyPatch
):
    """As NFS and Lustre: the set is replaced all the same."""
    monkeypatch.setattr(layout, "exchange_names", lambda *_: False)
    assert stage_version(load_version(small), root).state == "repaired"
    assert (damaged / "actions/c/0").stat().st_size == 1000
    assert residue(root) == []


def test_names_are_exchanged_or_nothing_is(tmp_path: Path):
    """Two names swap what they stand for, whatever that is; a name that is not there changes nothing."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("b")
    assert fs.exchange_names(tmp_path / "a", tmp_path / "b")
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").is_dir()) == ("b", True)
    with pytest.raises(OSError) as error:
        fs.exchange_names(tmp_path / "a", tmp_path / "c")
    assert error.value.errno == errno.ENOENT
    assert (tmp_path / "a").read_text() == "b"
