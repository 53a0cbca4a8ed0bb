"""What is staged on this node."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pitools.core import clock
from pitools.core.errors import PitError
from pitools.core.record import Record
from pitools.stage.root import OBJECTS
from pitools.stage.source import load, reading
from pitools.stage.verify import looks_whole
from pitools.store.manifest import FILE_NAME


class Staged(Record, frozen=True, kw_only=True, tag="pit.staged/1"):
    """One staged version. state: by names and sizes. staged: when it was written, or "" where that is not known."""

    dataset: str
    version: str
    path: str
    state: Literal["whole", "damaged"]
    files: int
    bytes: int
    staged: str


def staged(root: Path) -> Iterator[Staged]:
    """The versions at a root, sorted; none where nothing was ever staged. Raises ClusterError."""
    objects = root.absolute() / OBJECTS
    with reading(objects):
        folders = sorted(objects.iterdir()) if objects.is_dir() else []
    for folder in folders:
        try:
            dataset = load(folder)
            # The manifest is the last file a stager writes.
            written = datetime.fromtimestamp((folder / FILE_NAME).stat().st_mtime, UTC)
        except (PitError, OSError):
            yield Staged(
                dataset="", version=folder.name, path=str(folder), state="damaged", files=0, bytes=0, staged=""
            )
            continue
        yield Staged(
            dataset=dataset.manifest.name,
            version=dataset.version,
            path=str(folder),
            state="whole" if looks_whole(folder, dataset) else "damaged",
            files=len(dataset.manifest.files),
            bytes=dataset.manifest.total_bytes,
            staged=clock.text(written),
        )
