"""One ingest in an interpreter of its own, timed from after its imports to when all is on the disk: one JSON line.

python -m perf.dataset.ingest_variants ours|zarr CODEC DEST FILE…

ours: `pitools.dataset.ingest.ingest`, with digests, statistics, manifest and fsync. zarr: what a careful user of
zarr-python writes, in one process: the same arrays in the same chunks, shards and codecs, each shard read with h5py and
assigned whole, and one syncfs at the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def ours(codec: str, dest: Path, files: list[Path]) -> tuple[Callable[[], None], str]:
    import numcodecs.blosc  # noqa: F401

    from pitools import __version__
    from pitools.dataset.formats import hdf5_reader  # noqa: F401
    from pitools.dataset.ingest.ingest import ingest

    return lambda: print(ingest(files, root=dest, name="aloha", codec=codec).bytes, file=sys.stderr), __version__


def by_zarr(codec: str, dest: Path, files: list[Path]) -> tuple[Callable[[], None], str]:
    import h5py
    import numpy as np
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec

    from pitools.core.fs import sync_fs
    from pitools.dataset.ingest import chunking

    names = {"action": "action", "observations/qpos": "obs/qpos", "observations/qvel": "obs/qvel"}
    names |= {f"observations/images/{camera}": f"obs/{camera}_image" for camera in ("top", "wrist")}

    def write() -> None:
        opened = [h5py.File(path) for path in files]
        ends = np.cumsum([len(file["action"]) for file in opened])
        root = zarr.create_group(dest / "store")
        for key, name in names.items():
            first = opened[0][key]
            spec = chunking.choose_array_spec((int(ends[-1]), *first.shape[1:]), first.dtype.name, codec)
            blosc = BloscCodec(
                cname="lz4",
                clevel=chunking.LZ4_LEVEL,
                typesize=spec.itemsize,
                shuffle="shuffle" if spec.itemsize > 1 else "noshuffle",
            )
            array = root.create_array(
                name,
                shape=spec.shape,
                dtype=spec.dtype,
                chunks=(spec.chunk, *spec.shape[1:]),
                shards=(spec.shard, *spec.shape[1:]),
                compressors=[*([blosc] if codec == "lz4" else []), Crc32cCodec()],
            )
            for start in range(0, spec.shape[0], spec.shard):
                stop = min(start + spec.shard, spec.shape[0])
                block = np.empty((stop - start, *spec.shape[1:]), spec.dtype)
                for file, end in zip(opened, ends, strict=True):
                    begin = end - len(file[key])
                    low, high = max(start, begin), min(stop, end)
                    if low < high:
                        file[key].read_direct(
                            block, np.s_[low - begin : high - begin], np.s_[low - start : high - start]
                        )
                array[start:stop] = block
        root.create_array("episode_offsets", data=np.array([0, *ends]))
        sync_fs(dest)

    return write, zarr.__version__


if __name__ == "__main__":
    way, codec, dest, *arguments = sys.argv[1:]
    run, version = {"ours": ours, "zarr": by_zarr}[way](codec, Path(dest), [Path(name) for name in arguments])
    began = time.perf_counter()
    run()
    print(json.dumps({"wall_s": time.perf_counter() - began, "version": version}))
