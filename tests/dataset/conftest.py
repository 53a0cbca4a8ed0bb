"""Small recordings, tiny published versions, file systems that refuse, and what h5py reads from a recording."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from pitools.core.fs import write_atomic
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, FileEntry, Manifest, Subset


def write_robomimic(path: Path, lengths: Sequence[int], row: tuple[int, ...], seed: int) -> Path:
    """A robomimic recording of these episode lengths, filled with noise."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = '{"env_name": "Reach"}'
        for i, steps in enumerate(lengths):
            demo = file.create_group(f"data/demo_{i}")
            demo.attrs["num_samples"], demo.attrs["language"] = steps, f"reach {i}"
            demo["actions"] = rng.normal(size=(steps, 7)).astype(np.float32)
            demo["rewards"] = np.zeros(steps, np.float32)
            demo["dones"] = np.arange(steps) == steps - 1
            demo["obs/eye_image"] = rng.integers(0, 256, (steps, *row), np.uint8)
            demo["next_obs/eye_image"] = np.zeros((steps, *row), np.uint8)
        names = [f"demo_{i}" for i in range(len(lengths))]
        file["mask/train"], file["mask/valid"] = np.array(names[1:], "S"), np.array(names[:1], "S")
    return path


@pytest.fixture
def robomimic(tmp_path: Path) -> Callable[..., Path]:
    """Writes a robomimic recording of these episode lengths, filled with noise."""

    def write(*lengths: int, name: str = "reach.hdf5", row: tuple[int, ...] = (8, 8, 3), seed: int = 0) -> Path:
        return write_robomimic(tmp_path / name, lengths, row, seed)

    return write


def jpeg(frame: np.ndarray) -> bytes:
    """A frame as a JPEG file."""
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "JPEG", quality=90)
    return out.getvalue()


@pytest.fixture
def aloha(tmp_path: Path) -> Callable[..., Path]:
    """Writes one ALOHA episode, its frames as they are or as padded JPEG rows."""

    def write(number: int, steps: int, *, compressed: bool = False, seed: int = 0) -> Path:
        rng = np.random.default_rng(seed + number)
        path = tmp_path / f"episode_{number}.hdf5"
        with h5py.File(path, "w") as file:
            file.attrs["sim"], file.attrs["compress"] = True, compressed
            file["action"] = rng.normal(size=(steps, 14)).astype(np.float32)
            file["observations/qpos"] = rng.normal(size=(steps, 14))
            file["observations/qvel"] = rng.normal(size=(steps, 14))
            for camera in ("top", "wrist"):
                frames = rng.integers(0, 256, (steps, 24, 32, 3), np.uint8)
                if compressed:
                    rows = [np.frombuffer(jpeg(frame), np.uint8) for frame in frames]
                    width = max(len(row) for row in rows) + 5
                    frames = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
                    file.require_dataset("compress_len", (2, steps), np.int64)
                file[f"observations/images/{camera}"] = frames
        return path

    return write


@pytest.fixture
def oracle() -> Callable[[list[Path]], dict[str, np.ndarray]]:
    """What h5py reads from robomimic recordings, concatenated under the names of the store."""
    singular = {"actions": "action", "rewards": "reward", "dones": "done", "states": "state"}

    def read(paths: list[Path]) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {}
        lengths = []
        for path in paths:
            with h5py.File(path) as file:
                for name in sorted(file["data"], key=lambda name: int(name.removeprefix("demo_"))):
                    demo = file["data"][name]
                    lengths.append(len(demo["actions"]))
                    for key in [key for key in demo if isinstance(demo[key], h5py.Dataset)]:
                        parts.setdefault(singular.get(key, key), []).append(demo[key][:])
                    for key in demo.get("obs", ()):
                        parts.setdefault(f"obs/{key}", []).append(demo["obs"][key][:])
        arrays = {name: np.concatenate(values) for name, values in parts.items()}
        return arrays | {"episode_offsets": np.cumsum([0, *lengths])}

    return read


@pytest.fixture
def mounted(as_root: None, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options, for a disk that is full or read-only; skips where even root may not."""
    points: list[Path] = []

    def mount(options: str) -> Path:
        point = tmp_path / f"mount{len(points)}"
        point.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def below() -> Callable[[Path], set[str]]:
    """Names of all that is below a folder, `.tmp` too."""
    return lambda root: {str(path.relative_to(root)) for path in root.rglob("*")}


def write(
    root: Path,
    name: str,
    number: int = 0,
    *,
    parent: str = "",
    shares: Path | None = None,
    episodes: int = 1,
    arrays: tuple[str, ...] = ("action",),
    instructions: dict[str, int] | None = None,
    part_of: str = "",
    recording: str = "",
) -> Path:
    """Publish version `number` of a dataset; it has a hard link to a file of version `shares`."""
    temporary = root / ".making" / os.urandom(4).hex()
    (temporary / "action/c").mkdir(parents=True)
    entries = []
    for i, content in enumerate((b"common" * 10, f"own {name} {number}".encode() * 50)):
        path = f"action/c/{i}"
        if shares and i == 0:
            os.link(shares / path, temporary / path)
        else:
            (temporary / path).write_bytes(content)
        entries.append(FileEntry(path=path, bytes=len(content), digest=digest.digest_bytes(content)))
    manifest = Manifest(
        name=name,
        episodes=episodes,
        steps=episodes * 10,
        files=tuple(entries),
        parent=parent,
        arrays={array: ArraySchema(shape=(episodes * 10, 7), dtype="float32") for array in arrays},
        recordings=({"file": recording or f"{number}.hdf5", "bytes": 1000, "digest": f"xxh3_128:{number:032x}"},),
        **({"instructions": instructions} if instructions else {}),
        **({"subset": Subset(whole=part_of, arrays=arrays, steps=((0, 5),))} if part_of else {}),
    )
    data = manifests.encode_manifest(manifest)
    write_atomic(temporary / manifests.MANIFEST_FILE, data, durable=False)
    final = root / name / manifests.version_of(data)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(temporary, final)
    except OSError:
        shutil.rmtree(temporary)
    shutil.rmtree(root / ".making")
    return final


@pytest.fixture
def publish() -> Callable[..., Path]:
    """`write`, above."""
    return write


@pytest.fixture
def lines() -> Callable[..., list[dict]]:
    """The records that a command wrote."""
    return lambda done, code=0: _checked(done, code)


def _checked(done, code):
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
