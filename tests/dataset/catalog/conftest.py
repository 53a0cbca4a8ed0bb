"""Tiny published versions, made by writing a manifest and a few files, without an ingest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.files import write_atomic
from pitools.store import digest
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, FileEntry, Manifest, Subset


def write(
    root: Path, name: str, number: int = 0, *, parent: str = "", shares: Path | None = None, episodes: int = 1,
    arrays: tuple[str, ...] = ("action",), tasks: dict[str, int] | None = None, part_of: str = "",
) -> Path:  # fmt: skip
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
        entries.append(FileEntry(path=path, bytes=len(content), digest=digest.of_bytes(content)))
    manifest = Manifest(
        name=name, episodes=episodes, steps=episodes * 10, files=tuple(entries), parent=parent,
        arrays={array: ArraySchema(shape=(episodes * 10, 7), dtype="float32") for array in arrays},
        source=({"file": f"{number}.hdf5", "bytes": 1000, "digest": f"xxh3_128:{number:032x}"},),
        **({"tasks": tasks} if tasks else {}),
        **({"subset": Subset(parent=part_of, arrays=arrays, steps=((0, 5),))} if part_of else {}),
    )  # fmt: skip
    data = manifests.encode(manifest)
    write_atomic(temporary / manifests.FILE_NAME, data, durable=False)
    final = root / name / manifests.version(data)
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
