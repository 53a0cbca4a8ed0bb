from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, NoSpace
from pitools.store import publish as publishing
from pitools.store.publish import BUILD_DIR, publish_dir


def below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def filled(tmp_path) -> Path:
    """A folder with a file in a folder, where unfinished work lies."""
    folder = tmp_path / BUILD_DIR / "name.key"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a").write_text("late")
    return folder


def test_whole(tmp_path, filled) -> None:
    """A filled folder appears under its name, with all that is in it."""
    assert publish_dir(filled, tmp_path / "name" / "v1") is True
    assert below(tmp_path) == {BUILD_DIR, "name", "name/v1", "name/v1/sub", "name/v1/sub/a"}


def test_first_one_stands(tmp_path, filled) -> None:
    """When another process has published first its copy stays, and the late one is told so."""
    final = tmp_path / "name" / "v1"
    (final / "sub").mkdir(parents=True)
    (final / "sub" / "a").write_text("early")
    assert publish_dir(filled, final) is False
    assert (final / "sub" / "a").read_text() == "early"
    assert (filled / "sub" / "a").exists()


def test_renamed_meanwhile(tmp_path, filled, monkeypatch) -> None:
    """When another process renames the same folder while its names are synced, the late one is told so."""
    final = tmp_path / "name" / "v1"
    sync = publishing.fsync_dir

    def renamed(folder: Path) -> None:
        if folder == filled:
            final.parent.mkdir()
            filled.rename(final)
        sync(folder)

    monkeypatch.setattr(publishing, "fsync_dir", renamed)
    assert publish_dir(filled, final) is False
    assert (final / "sub" / "a").read_text() == "late"


def test_os_errors_become_ours(tmp_path, filled, monkeypatch) -> None:
    """A full disk is NoSpace, to be tried later; a name that is a file is a ClusterError; no empty folder stays."""
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError) as caught:
        publish_dir(filled, tmp_path / "file" / "v1")
    assert str(tmp_path / "file") in caught.value.where

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(NoSpace):
        publish_dir(filled, tmp_path / "name" / "v1")
    assert not (tmp_path / "name").exists()


def test_names_survive_power_loss(tmp_path, filled, monkeypatch) -> None:
    """Every folder in which a name is new is synced: those of the version, and those that it is in."""
    synced: list[str] = []
    monkeypatch.setattr(publishing, "fsync_dir", lambda folder: synced.append(str(folder.relative_to(tmp_path))))
    publish_dir(filled, tmp_path / "name" / "v1")
    assert synced == [".tmp/name.key", ".tmp/name.key/sub", "name", "."]
