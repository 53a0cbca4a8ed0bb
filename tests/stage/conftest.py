from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pitools import cli
from pitools.commands.stage import group
from pitools.core import subprocesses
from pitools.core.shared_progress import WorkerSlot
from pitools.store import digest, manifest
from pitools.store.manifest import FileEntry, Manifest

MakeDataset = Callable[..., Path]
PIT_STAGE = [sys.executable, "-c", "from pitools.cli import stage; stage()"]


def build_dataset(root: Path, files: Mapping[str, bytes | int], name: str = "pick") -> Path:
    """`<root>/<name>/<version>/`, with a manifest; a number instead of bytes is a sparse file of that size."""
    folder = root / name / "new"
    entries = []
    for path, content in sorted(files.items()):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            file.touch()
            os.truncate(file, content)
        else:
            file.write_bytes(content)
        size, text = digest.digest_file(file)
        entries.append(FileEntry(path=path, bytes=size, digest=text))
    folder.mkdir(parents=True, exist_ok=True)
    data = manifest.encode_manifest(Manifest(name=name, episodes=1, steps=1, arrays={}, files=tuple(entries)))
    (folder / manifest.MANIFEST_FILE).write_bytes(data)
    return folder.rename(root / name / manifest.version_of(data))


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Builds `<tmp>/data/<name>/<version>/` of the given files."""
    return lambda files, name="pick": build_dataset(tmp_path / "data", files, name)


@pytest.fixture
def small(make_dataset: MakeDataset) -> Path:
    """A dataset of a few files, one empty, one bigger than a read buffer."""
    return make_dataset(
        {
            "zarr.json": b"{}",
            "actions/c/0": os.urandom(1000),
            "actions/c/1": b"",
            "images/c/0/0": os.urandom(3 << 20),
            "images/c/1/0": os.urandom(100_000),
        }
    )


@pytest.fixture
def pit_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Runs `pit-stage …` in this process; returns exit code, stdout, stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pit-stage", *map(str, argv)])
        capsys.readouterr()
        code = cli.run(group, "pit-stage")
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def program() -> list[str]:
    """The argv that starts the real `pit-stage`."""
    return PIT_STAGE


@pytest.fixture
def commons() -> Iterator[Path]:
    """A folder that every user may enter, as a node's disk is."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tmpfs(as_root: None, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of the given options; skips where even root may not."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocesses.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], timeout_s=10)
        if done.code:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        assert subprocesses.run(["umount", str(place)], timeout_s=10).code == 0  # else somebody still has a file open


def left_over(root: Path) -> list[str]:
    """What a finished or failed run must not leave at a staging root: unfinished folders."""
    return sorted(str(path) for path in root.glob(".tmp/*"))


@pytest.fixture
def residue() -> Callable[[Path], list[str]]:
    """Names of unfinished folders at a staging root."""
    return left_over


@pytest.fixture(scope="session")
def build() -> MakeDataset:
    """`build_dataset`, for tests that make folders of their own."""
    return build_dataset


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where to stage to; not there yet."""
    return tmp_path / "nvme" / "pit"


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Callable[[int], None]]:
    """Makes an `advance` that acts once, in the middle of a copy: whoever keeps to `bytes_per_s` waits until it has.

    However late this process comes to it on a busy machine, a first block has been written, and no second.
    """
    acted, keep_pace = multiprocessing.get_context("fork").Event(), WorkerSlot.wait_for_bandwidth

    def wait(seat: WorkerSlot, bytes_per_s: float) -> None:
        acted.wait()
        keep_pace(seat, bytes_per_s)

    monkeypatch.setattr(WorkerSlot, "wait_for_bandwidth", wait)

    def make(action: Callable[[], object]) -> Callable[[int], None]:
        left, lock = [action], threading.Lock()

        def advance(count: int) -> None:
            with lock:
                if left and count:
                    left.pop()()
                    acted.set()

        return advance

    return make
