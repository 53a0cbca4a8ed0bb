from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, NoSpace
from pitools.store.publish import TEMPORARY, publish, unfinished


@contextmanager
def publishing(final: Path, *, root: Path) -> Iterator[Path]:
    """A new folder to fill, published on a clean exit."""
    with unfinished(root, final.name) as folder:
        yield folder
        publish(folder, final)


def below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_whole(tmp_path) -> None:
    """A filled folder appears under its name, and no trace of the way there stays."""
    root = tmp_path / "made" / "root"
    with publishing(root / "name" / "v1", root=root) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_bytes(b"x")
        assert not (root / "name").exists()
    assert below(root) == {"name", "name/v1", "name/v1/sub", "name/v1/sub/a"}


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_nothing(tmp_path, kind) -> None:
    """After any failure not even the folders made on the way are left."""

    def fail() -> None:
        with publishing(tmp_path / "root" / "name" / "v1", root=tmp_path / "root") as folder:
            (folder / "a").write_bytes(b"x")
            raise kind

    with pytest.raises(kind):
        fail()
    assert below(tmp_path) == set()


def test_what_was_there_stays(tmp_path) -> None:
    """A failure removes no folder that was there before, empty or not."""
    (tmp_path / "root" / "other").mkdir(parents=True)
    with pytest.raises(RuntimeError), publishing(tmp_path / "root" / "name" / "v1", root=tmp_path / "root"):
        raise RuntimeError
    assert below(tmp_path) == {"root", "root/other"}


def test_first_one_stands(tmp_path) -> None:
    """When another process has published first its copy stays, and the late one is told so."""
    final = tmp_path / "name" / "v1"
    with unfinished(tmp_path, "name") as late:
        (late / "a").write_text("late")
        with publishing(final, root=tmp_path) as early:
            (early / "a").write_text("early")
        assert publish(late, final) is False
    assert (final / "a").read_text() == "early"
    assert below(tmp_path) == {"name", "name/v1", "name/v1/a"}


def test_os_errors_become_ours(tmp_path) -> None:
    """A full disk is NoSpace, to be tried later; a root that is a file is a ClusterError that names it."""
    with pytest.raises(NoSpace), unfinished(tmp_path, "name"):
        raise OSError(28, "No space left on device")
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError) as caught, unfinished(tmp_path / "file", "name"):
        pass
    assert str(tmp_path / "file") in caught.value.where


HOLD = """
import sys, time
from pathlib import Path
from pitools.store.publish import unfinished
with unfinished(Path(sys.argv[1]), "name") as folder:
    (folder / "part").write_bytes(b"x" * 100)
    time.sleep(60)
"""


def test_killed_makers_are_swept_and_living_ones_are_not(tmp_path) -> None:
    """What a kill -9 leaves is removed by the next publication; a folder whose maker lives is never touched."""
    dead, alive = (subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)]) for _ in range(2))
    try:
        until = time.monotonic() + 10
        while len(list(tmp_path.glob(f"{TEMPORARY}/*/part"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        dead.kill()
        dead.wait()
        with publishing(tmp_path / "name" / "v1", root=tmp_path):
            pass
        left = list((tmp_path / TEMPORARY).iterdir())
        assert len(left) == 1
        assert f".{alive.pid}." in left[0].name
        assert (left[0] / "part").exists()
    finally:
        alive.kill()
        alive.wait()
