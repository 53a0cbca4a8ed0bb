"""What icechunk and DVC do when their garbage collection finds nothing to do: each runs in .venv-peers.

python -m perf.dataset.gc_peers icechunk make|gc FOLDER SHARDS CHUNKS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def repository(folder: Path, *, new: bool) -> Any:
    import icechunk

    storage = icechunk.local_filesystem_storage(str(folder))
    if not new:
        return icechunk.Repository.open(storage)
    config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=0)
    return icechunk.Repository.create(storage, config=config)


def make(folder: Path, shards: int, chunks: int) -> None:
    """One snapshot of an array of so many shards, each of so many chunks of 16 bytes."""
    import numpy as np
    import zarr

    repo = repository(folder, new=True)
    session = repo.writable_session("main")
    shape = (shards * chunks * 16,)
    array = zarr.create_array(
        session.store, name="a", shape=shape, dtype="u1", chunks=(16,), shards=(chunks * 16,), compressors=None
    )
    values = np.random.default_rng(1).integers(1, 256, chunks * 16, np.uint8)
    for shard in range(shards):
        array[shard * chunks * 16 : (shard + 1) * chunks * 16] = values
    session.commit("made")


def collect(folder: Path) -> float:
    """Seconds of a garbage collection of what is older than a day, in a process that has started."""
    from datetime import UTC, datetime, timedelta

    repo = repository(folder, new=False)
    began = time.perf_counter()
    repo.garbage_collect(datetime.now(UTC) - timedelta(days=1))
    return time.perf_counter() - began


if __name__ == "__main__":
    case, place = sys.argv[2], Path(sys.argv[3])
    if case == "make":
        make(place, int(sys.argv[4]), int(sys.argv[5]))
    else:
        print(collect(place))
