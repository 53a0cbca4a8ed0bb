"""The far side's part: batches become a dataset when all of it is there, and right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, DataError
from pitools.launch.tickets.remote.receive import receive_dataset
from pitools.store import digest, manifest
from pitools.store.version_list import published_at

PUBLISHED = "2026-01-02T03:04:05.678Z"


@pytest.fixture
def come(tmp_path: Path) -> tuple[Path, Path, bytes]:
    """(home, final, manifest) of two batches that have come, with a stray unfinished one beside them."""
    home = tmp_path / ".tmp" / "pick.x"
    entries = []
    for number in range(4):
        path = home / f"b{number // 2}" / "a" / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1000 * number))
        size, text = digest.digest_file(path)
        entries.append(manifest.FileEntry(path=f"a/{number}", bytes=size, digest=text))
    (home / ".b2.x.part").mkdir()
    raw = manifest.encode_manifest(manifest.Manifest(name="pick", episodes=1, steps=1, arrays={}, files=tuple(entries)))
    return home, tmp_path / "pick" / manifest.version_of(raw), raw


def test_all_of_it_appears(come: tuple[Path, Path, bytes]) -> None:
    """By one rename, with its manifest and time; what was for the journey is gone, and again is no harm."""
    home, final, raw = come
    for _ in range(2):
        receive_dataset(home, final, raw, PUBLISHED)
        assert {path.name for path in final.iterdir()} == {"a", "manifest.json", "published.json"}
        assert published_at(final) == PUBLISHED
        assert (final / "a" / "3").stat().st_size == 3000
        assert not home.exists()


@pytest.mark.parametrize("damage", ["gone", "other", "short", "link"])
def test_what_is_not_right_does_not_appear(come: tuple[Path, Path, bytes], damage: str) -> None:
    """A file that is missing or differs is named, and its batch is to be sent again; the others stay."""
    home, final, raw = come
    path = home / "b1" / "a" / "3"
    if damage == "gone":
        path.unlink()
    elif damage == "other":
        path.write_bytes(b"\0" * 3000)
    elif damage == "short":
        os.truncate(path, 2999)
    else:
        path.rename(home / "b0" / "elsewhere")
        path.symlink_to(home / "b0" / "elsewhere")
    with pytest.raises(DataError, match="a/3:"):
        receive_dataset(home, final, raw, PUBLISHED)
    assert not final.exists()
    assert {path.name for path in home.iterdir()} <= {"b0", "b1", ".b2.x.part"}
    assert (home / "b0").exists() == (damage != "gone")  # nobody there knows in which batch it should have come
    assert not (home / "b1").exists()


def test_a_manifest_of_another_version(come: tuple[Path, Path, bytes]) -> None:
    """The name is the manifest's digest, or nothing is done."""
    home, final, raw = come
    with pytest.raises(ConfigError, match=final.name):
        receive_dataset(home, final, raw + b" ", PUBLISHED)


def test_as_a_program(come: tuple[Path, Path, bytes]) -> None:
    """Exit codes and words, as ssh carries them back."""
    home, final, raw = come
    argv = [sys.executable, "-m", "pitools.launch.tickets.remote.receive", str(home), str(final), PUBLISHED]
    (home / "b0" / "a" / "1").unlink()
    done = subprocess.run(argv, input=raw, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (5, b"a/1: missing\n")
