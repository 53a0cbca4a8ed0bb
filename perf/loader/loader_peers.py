"""The peers of the loader's benchmarks, in one interpreter with us; each reads windows of one Zarr array into a batch.

A way fills `out`, (n, length, *row), with the windows that begin at n steps. The ways of a peer are the settings that
its documentation names; before a case, each is tried and the peer runs with its fastest.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from perf.harness.workspace import PEERS, REPO

# This release of torch has a CPU build; an open range would bring gigabytes of CUDA.
PACKAGES = {
    "torch": "torch==2.13.0",
    "zarr": "zarr",
    "zarrs": "zarrs",
    "tensorstore": "tensorstore",
    "grain": "grain",
    "array_record": "array-record",
    "streaming": "mosaicml-streaming",
    "psutil": "psutil",
}
_MISSING = "import sys; from importlib.util import find_spec; print(*(m for m in sys.argv[1:] if not find_spec(m)))"
CORES = len(os.sched_getaffinity(0))
CACHE_BYTES = 64 << 20  # tensorstore's: shard indexes stay in it, chunks of a random order do not
Fill = Callable[[Sequence[int], Any], None]


class Variant(NamedTuple):
    """How one peer reads. description: the settings, in words."""

    description: str
    fill: Fill


def enter_peer_venv() -> None:
    """Go on in the interpreter of .venv-peers, after the peers and we are installed there: the script that is run there
    imports them at its first lines.
    """
    if Path(sys.prefix).resolve() == PEERS.resolve():
        return
    python = str(PEERS / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    expected = {**PACKAGES, "pitools": f"--editable={REPO}[data]"}
    # Isolated: in the checkout, pitools is found also where it is not installed.
    argv = [python, "-I", "-c", _MISSING, *expected]
    missing = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    if missing:
        packages = [expected[module] for module in missing]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
    os.execv(python, [python, *sys.orig_argv[1:]])


def zarr_ways(path: Path, length: int) -> list[Variant]:
    """zarr-python as it comes: one window after another, or all of a batch at once on its event loop."""
    import zarr

    return _zarr_ways(zarr.open_array(path, mode="r", zarr_format=3), length)


def zarrs_ways(path: Path, length: int) -> list[Variant]:
    """zarr-python with the codec pipeline of zarrs, which has threads of its own; also called from several."""
    import zarr
    import zarrs  # noqa: F401  registers the pipeline

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        array = zarr.open_array(path, mode="r", zarr_format=3)
    return [*_zarr_ways(array, length), *(_by_threads(array, length, count) for count in (CORES, 8))]


def tensorstore_ways(path: Path, length: int, *, threads: int = max(4, CORES)) -> list[Variant]:
    """tensorstore: each window written to its place, or copied there, with a cache for shard indexes and without.

    threads: that read files.
    """
    import tensorstore

    def ways(cache_bytes: int) -> list[Variant]:
        context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": cache_bytes},
                "data_copy_concurrency": {"limit": CORES},
                "file_io_concurrency": {"limit": threads},
            }
        )
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "recheck_cached_data": "open"}
        store = tensorstore.open(spec, context=context, read=True).result()

        def write(starts: Sequence[int], out: Any) -> None:
            pairs = zip(out, starts, strict=True)
            for job in [
                tensorstore.array(place).write(store[position : position + length]) for place, position in pairs
            ]:
                job.result()

        def copy(starts: Sequence[int], out: Any) -> None:
            for place, job in zip(out, [store[start : start + length].read() for start in starts], strict=True):
                place[:] = job.result()

        about = f"of a batch at once, cache_pool {cache_bytes >> 20} MiB, recheck_cached_data open"
        return [Variant(f"ts.array(out).write(store[a:b]) {about}", write), Variant(f"store[a:b].read() {about}", copy)]

    return [*ways(CACHE_BYTES), *ways(0)]


WAYS: Mapping[str, Callable[[Path, int], list[Variant]]] = {
    "zarr": zarr_ways,
    "zarrs": zarrs_ways,
    "tensorstore": tensorstore_ways,
}


def _zarr_ways(array: Any, length: int) -> list[Variant]:
    import asyncio

    from zarr.core.buffer.cpu import NDBuffer
    from zarr.core.sync import sync

    def loop(starts: Sequence[int], out: Any) -> None:
        for place, position in zip(out, starts, strict=True):
            array.get_basic_selection(slice(position, position + length), out=NDBuffer(place))

    async def together(starts: Sequence[int]) -> list[Any]:
        jobs = (array.async_array.getitem(slice(start, start + length)) for start in starts)
        return await asyncio.gather(*jobs)

    def gather(starts: Sequence[int], out: Any) -> None:
        for place, window in zip(out, sync(together(starts)), strict=True):
            place[:] = window

    return [Variant("asyncio.gather of a batch", gather), Variant("get_basic_selection(out=), one by one", loop)]


def _by_threads(array: Any, length: int, count: int) -> Variant:
    from zarr.core.buffer.cpu import NDBuffer

    pool = ThreadPoolExecutor(count)

    def one(place: Any, at: int) -> None:
        array.get_basic_selection(slice(at, at + length), out=NDBuffer(place))

    def threads(starts: Sequence[int], out: Any) -> None:
        list(pool.map(one, out, starts))

    return Variant(f"get_basic_selection(out=) by {count} threads", threads)


def copies(array: Any, length: int, threads: int) -> Variant:
    """A memory map, copied by so many threads."""
    pool = ThreadPoolExecutor(threads)

    def part(starts: Sequence[int], out: Any) -> None:
        for place, position in zip(out, starts, strict=True):
            place[:] = array[position : position + length]

    def copy(starts: Sequence[int], out: Any) -> None:
        cuts = [len(starts) * i // threads for i in range(threads + 1)]
        jobs = [pool.submit(part, starts[a:b], out[a:b]) for a, b in itertools.pairwise(cuts)]
        for job in jobs:
            job.result()

    return Variant(
        f"out[i] = memmap[a:b] by {threads} threads" if threads > 1 else "out[i] = memmap[a:b]",
        copy if threads > 1 else part,
    )


def fastest_variant(ways: Sequence[Variant], try_out: Callable[[Variant], object], *, tune: bool) -> Variant:
    """The way that was fastest in the best of three trials after one to warm up; the first one where `tune` is off."""
    if len(ways) == 1 or not tune:
        return ways[0]
    times: dict[Variant, float] = {}
    for number, way in itertools.product(range(4), ways):
        began = time.perf_counter()
        try_out(way)
        took = time.perf_counter() - began
        times[way] = min(times.get(way, took), took) if number else math.inf
    return min(ways, key=lambda way: times[way])


def peer_version(peer: str) -> str:
    """The version of a peer that is installed, and of what it runs in."""
    packages = {
        "zarrs": ["zarrs", "zarr"],
        "memmap": ["numpy"],
        "DataLoader": ["torch"],
        "array_record": ["array-record", "grain"],
    }
    name = peer.split()[0].rstrip(",")
    first, *inside = packages.get(name, [name])
    return " in ".join([version(first), *(f"{package} {version(package)}" for package in inside)])
