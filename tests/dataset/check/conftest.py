"""Small recordings with a fault in them, versions made of these, and versions changed after they were made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest

from pitools.core.fs import write_atomic
from pitools.dataset import check
from pitools.dataset.check.finding import CheckSummary, Finding
from pitools.dataset.ingest.ingest import ingest
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import FileEntry, Manifest
from pitools.store.version_list import PUBLISHED_FILE

Demo = dict[str, Any]
EPISODES = 8


def demo(number: int, rng: np.random.Generator) -> Demo:
    """One episode of a robot that moves smoothly before a camera that lives."""
    steps = 40 + number
    t = np.arange(steps)
    turn = np.linspace(0.5, 2, 7) * (t[:, None] / 9 + number)
    frames = rng.integers(0, 60, (steps, 16, 16, 3)) + 90 + (t % 40)[:, None, None, None]
    return {
        "actions": (np.sin(turn) + 0.02 * rng.normal(size=turn.shape)).astype(np.float32),
        "rewards": np.zeros(steps, np.float32),
        "dones": (t == steps - 1).astype(np.int64),
        "obs/joints": np.cos(turn) + 0.02 * rng.normal(size=turn.shape),
        "obs/timestamp": 1e3 * number + 0.1 * t + 0.002 * rng.normal(size=steps),
        "obs/eye_image": frames.astype(np.uint8),
        "language": "pick" if number % 2 else "place",
    }


def record(path: Path, change: Callable[[list[Demo]], object] = lambda _: None, *, seed: int = 0) -> Path:
    """A robomimic recording of eight such episodes, after `change` had its way with them."""
    rng = np.random.default_rng(seed)
    demos = [demo(number, rng) for number in range(EPISODES)]
    change(demos)
    with h5py.File(path, "w") as file:
        for number, reference in enumerate(demos):
            group = file.create_group(f"data/demo_{number}")
            for key, value in reference.items():
                if isinstance(value, str):
                    group.attrs[key] = value
                else:
                    group[key] = value
        names = np.array([f"demo_{number}" for number in range(len(demos))], "S")
        file["mask/train"], file["mask/valid"] = names[1:], names[:1]
    return path


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Ingests a recording with this change, and returns the folder of the version."""

    def run(change: Callable[[list[Demo]], object] = lambda _: None, *, name: str = "x", **how: Any) -> Path:
        file = record(tmp_path / f"{name}.hdf5", change, seed=how.pop("seed", 0))
        return Path(ingest([file], root=tmp_path / "root", name=name, **how).path)

    return run


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version in which nothing is wrong; not to be changed."""
    folder = tmp_path_factory.mktemp("clean")
    return Path(ingest([record(folder / "a.hdf5")], root=folder / "root", name="x").path)


@pytest.fixture
def copy(clean: Path, tmp_path: Path) -> Path:
    """The same version, to be changed."""
    return Path(shutil.copytree(clean, tmp_path / "root/x" / clean.name))


def found(path: Path, **how: Any) -> list[Finding]:
    """What a check finds, and the summary agrees with."""
    *findings, summary = check.check_version(path, quiet=True, **how)
    assert isinstance(summary, CheckSummary)
    levels = [finding.level for finding in findings]
    assert [summary.damage, summary.faults, summary.warnings] == [
        levels.count("damage"),
        levels.count("fault"),
        levels.count("warning"),
    ]
    return findings


def places(findings: list[Finding]) -> set[tuple[str, str, int | None, int | None]]:
    """Which check says what of where."""
    return {(finding.check, finding.array, finding.episode, finding.step) for finding in findings}


def resign(path: Path, **changes: Any) -> Path:
    """Give a changed version the manifest that it would have if it had been made like this."""
    manifest = manifests.load_manifest(path)[0]
    entries = []
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path).as_posix()
        if file.is_file() and relative not in (manifests.MANIFEST_FILE, PUBLISHED_FILE):
            size, text = digest.digest_file(file)
            entries.append(FileEntry(path=relative, bytes=size, digest=text))
    files = tuple(sorted(entries, key=lambda entry: entry.path))
    data = manifests.encode_manifest(msgspec.structs.replace(manifest, **{"files": files, **changes}))
    write_atomic(path / manifests.MANIFEST_FILE, data)
    return path.rename(path.with_name(manifests.version_of(data)))


def rewrite(path: Path, name: str, values: np.ndarray) -> None:
    """Other values for an array, written by zarr-python."""
    import zarr

    zarr.open_array(path / name, mode="r+", zarr_format=3)[:] = values


def edit(path: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a metadata file."""
    reference = json.loads((path / file).read_bytes())
    change(reference)
    (path / file).write_bytes(json.dumps(reference).encode())


def manifest_of(path: Path) -> Manifest:
    """The manifest of a version."""
    return manifests.load_manifest(path)[0]


@pytest.fixture(name="found")
def _found() -> Callable[..., list[Finding]]:
    return found


@pytest.fixture(name="places")
def _places() -> Callable[..., set[tuple[str, str, int | None, int | None]]]:
    return places


@pytest.fixture(name="resign")
def _resign() -> Callable[..., Path]:
    return resign


@pytest.fixture(name="rewrite")
def _rewrite() -> Callable[..., None]:
    return rewrite


@pytest.fixture(name="edit")
def _edit() -> Callable[..., None]:
    return edit


@pytest.fixture(name="manifest_of")
def _manifest_of() -> Callable[..., Manifest]:
    return manifest_of
