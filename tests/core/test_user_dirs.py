"""Folders that only their user may write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError
from pitools.core.user_dirs import ensure_private_dir


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_it_makes_it_accepts(tmp_path: Path, umask: int) -> None:
    """Under any umask, the folders that it makes are the user's alone, and a second call takes them."""
    old_umask = os.umask(umask)
    try:
        private_dir = ensure_private_dir(tmp_path / "cache" / "pitools" / "jobs")
    finally:
        os.umask(old_umask)
    assert private_dir.stat().st_mode & 0o777 == 0o700
    assert ensure_private_dir(private_dir) == private_dir


def test_a_sticky_folder_will_do_above_it(tmp_path: Path) -> None:
    """As in /tmp: others cannot exchange what lies there; a folder that is sticky itself is as open as any."""
    tmp_path.chmod(0o1777)
    private_dir = ensure_private_dir(tmp_path / "queue")
    private_dir.chmod(0o1777)
    with pytest.raises(ClusterError):
        ensure_private_dir(private_dir)


def test_what_others_can_write_is_refused(tmp_path: Path) -> None:
    """A folder, or its parent, that others can write to is not believed."""
    for opened in ("", "pitools"):
        private_dir = ensure_private_dir(tmp_path / opened / "pitools" / "jobs")
        (private_dir.parent if opened else private_dir).chmod(0o777)
        with pytest.raises(ClusterError):
            ensure_private_dir(private_dir)
