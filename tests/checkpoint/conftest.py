"""Small checkpoints, saved as any are."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from pitools.checkpoint.store import layout, publish
from pitools.core import subprocesses

RUN, FINGERPRINT = "pick-20261122-010203-abcdef", "xxh3_128:00"
Save = Callable[..., Path]


def contents(seed: int) -> dict[str, bytes]:
    """Files as a framework leaves them: some small, one empty, one in a folder below a folder."""
    rng = random.Random(seed)
    names = ("_METADATA", "d/0a", "ocdbt.process_0/d/1b", "ocdbt.process_1/manifest", "empty")
    return {name: rng.randbytes(rng.randrange(1, 3000)) if name != "empty" else b"" for name in names}


def build(folder: Path, step: int, files: Mapping[str, bytes], *, ranks: int = 1, token: str = "") -> Path:
    """An unpublished folder that is written and digested, for `publish.publish_checkpoint`."""
    place = layout.unpublished_path(folder, step, token or os.urandom(4).hex())
    payload = layout.create_payload_dir(place)
    for name, data in files.items():
        path = payload / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for rank in range(ranks):
        publish.digest_share(place, rank, ranks)
    return place


@contextmanager
def protected(step_dir: Path) -> Iterator[None]:
    """Nobody who runs tests may change or remove this checkpoint; root is kept from it by a mount."""
    if os.geteuid():
        (step_dir / "manifest.json").chmod(0o444)
        yield
        (step_dir / "manifest.json").chmod(0o644)
        return
    for options in (["--bind", str(step_dir)], ["-o", "remount,bind,ro"]):
        assert subprocesses.run(["mount", *options, str(step_dir)], timeout_s=10).code == 0
    try:
        yield
    finally:
        assert subprocesses.run(["umount", str(step_dir)], timeout_s=10).code == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return tmp_path / "checkpoints"


@pytest.fixture
def save(folder: Path) -> Save:
    """Saves a checkpoint of this step."""

    def save(
        step: int,
        files: Mapping[str, bytes] | None = None,
        *,
        ranks: int = 1,
        run: str = RUN,
        state_fingerprint: str = FINGERPRINT,
        to: Path = folder,
    ) -> Path:
        place = build(to, step, contents(step) if files is None else files, ranks=ranks)
        return publish.publish_checkpoint(
            to,
            place,
            step,
            format="files",
            run=run,
            state_fingerprint=state_fingerprint,
            world_size=ranks,
            loader_state={"epoch": step, "rng": 1 << 100},
            custom_metadata={"lr": 0.5},
        )

    return save
