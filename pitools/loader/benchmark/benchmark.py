"""What bounds a loader: the disk, decoding, or what is done to its batches.

    read        the stored bytes that samples need, at random places       cold, and warm again
    decode      read, checked when first read, decoded into batches        warm
    transform   a function of the user's, by the thread that trains        warm
    loader      all of it                                                  cold

Cold is after the files were dropped from the page cache, which makes them no less whole, but slower for a while to
whoever else reads them. Windows follow one another, so that nothing cold is read twice. What a loader holds in memory
is in memory here, too, before anything is measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from pitools.core.record import Record
from pitools.core.units import format_size
from pitools.loader.benchmark import measure
from pitools.loader.benchmark.measure import Measurement, Transform
from pitools.loader.loader import Loader
from pitools.loader.sampling.episode_filter import filter_episodes
from pitools.loader.sampling.protocol import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import RESIDENT_BYTES, VersionReader
from pitools.store.zarr.chunk_layout import chunk_layout

_MIN_READ_BYTES = 4096


class StageRate(Record, frozen=True, kw_only=True, tag="pit.dataset-bench/1"):
    """How fast one stage is. bytes_per_s: stored bytes of `read`, else those of batches.

    bound, advice: of the whole, `loader`: what bounds it (`disk`, `decode`, `transform`), and what to do about it.
    """

    dataset: str
    version: str
    stage: str
    cache: str
    threads: int
    samples: int
    wall_s: float
    samples_per_s: float
    bytes_per_s: float
    bound: str = ""
    advice: str = ""


class StageRates(NamedTuple):
    """Samples a second. disk, raw: from disk, as stored and if it were stored uncompressed; None where nothing is read.

    transform: None where there is none. codecs: of the arrays that are read. stored_bytes: of these. fits_memory:
    whether they would stay in the page cache.
    """

    decode: float
    disk: float | None = None
    raw: float | None = None
    transform: float | None = None
    codecs: frozenset[str] = frozenset()
    stored_bytes: int = 0
    fits_memory: bool = False


class _BenchSetup(NamedTuple):
    """What is measured. large: arrays that are read from files, and which files these are."""

    arrays: VersionReader
    names: tuple[str, ...]
    large: tuple[str, ...]
    files: tuple[Path, ...]
    length: int
    batch_size: int
    threads: int
    resident_bytes: int

    def loader(self) -> tuple[Loader, int]:
        """A new one, with small arrays already in memory and no other chunk known to be good; batches of an epoch."""
        arrays = VersionReader(self.arrays.path, resident_bytes=self.resident_bytes)
        for name in self.names:
            arrays.resident(name)
        spans = dict.fromkeys(self.names, WindowSpan(0, self.length))
        windows = Windows(arrays.offsets, filter_episodes(arrays), spans, stride=self.length, pad=True)
        loader = Loader(WindowSamples(arrays, windows), batch_size=self.batch_size, threads=self.threads)
        return loader, max(1, len(windows) // self.batch_size)

    def sample_bytes(self) -> int:
        """Of all arrays of a sample."""
        rows = (self.arrays.metadata_of(name).shape[1:] for name in self.names)
        return sum(
            self.length * math.prod(row) * self.arrays.dtype(name).itemsize
            for name, row in zip(self.names, rows, strict=True)
        )


def benchmark_loader(
    path: Path,
    *,
    batch_size: int = 64,
    length: int = 16,
    threads: int = 2,
    names: Sequence[str] = (),
    transform: Transform | None = None,
    limit_s: float = 3.0,
    resident_bytes: int = RESIDENT_BYTES,
) -> list[StageRate]:
    """Measure windows of `length` steps, and say what bounds them. names: of arrays, all along steps where none.

    limit_s: of each stage. resident_bytes: as of `VersionReader`. Raises UsageError, ConfigError for what cannot be
    loaded, DataError for damage.
    """
    arrays = VersionReader(path, resident_bytes=resident_bytes)
    names = tuple(names) or tuple(name for name in arrays.manifest.arrays if arrays.manifest.along_steps(name))
    large = tuple(name for name in names if arrays.resident(name) is None)
    prefixes = tuple(f"{name}/c/" for name in large)
    files = tuple(path / entry.path for entry in arrays.manifest.files if entry.path.startswith(prefixes))
    subject = _BenchSetup(arrays, names, large, files, length, batch_size, threads, resident_bytes)
    whole, decode, changed = _measure_batches(subject, transform, limit_s)
    stored = decode.bytes_read / (decode.times * batch_size)
    stages = [_read_stage(subject, cache, done, stored) for cache, done in _measure_reads(subject, stored, limit_s)]
    stages.append(_batch_stage(subject, "decode", "warm", decode))
    if changed:
        stages.append(_batch_stage(subject, "transform", "warm", changed))
    bound, advice = find_bottleneck(_combine_rates(subject, stages), threads, os.cpu_count() or 1)
    return [*stages, _batch_stage(subject, "loader", "cold" if stored else "warm", whole, bound, advice)]


def find_bottleneck(rates: StageRates, threads: int, cores: int) -> tuple[str, str]:
    """What bounds a loader of these rates, and a sentence or two on what to do about it."""
    found = {"decode": rates.decode, "disk": rates.disk, "transform": rates.transform}
    known = {
        name: rate for name, rate in found.items() if rate is not None and not (name == "disk" and rates.fits_memory)
    }
    bound = min(known, key=known.__getitem__)
    rate = f"{known.pop(bound):,.0f} samples/s"
    rest = f"{min(known.values()):,.0f}" if known else ""
    first = ""
    if rates.fits_memory and rates.disk is not None and rates.disk < min(rates.decode, rates.transform or math.inf):
        first = f" Its {format_size(rates.stored_bytes)} fit into memory: the disk bounds the first pass alone, at "
        first += f"{rates.disk:,.0f}."
    if bound == "disk":
        advice = f"The disk bounds it: {rate}, where the rest could do {rest}. Stage it to NVMe (`pit-stage run`)"
        return bound, advice + (", or ingest it with `--codec lz4`." if rates.codecs == {"raw"} else ".")
    if bound == "transform":
        return bound, (
            f"The transform bounds it: {rate}, where the loader alone gives {rest}. Make it cheaper, do it on the GPU, "
            f"or in processes: `StreamLoader` over `BatchStream` of `pitools.loader.torch`.{first}"
        )
    what = f"Decoding bounds it: {rate}." if rates.disk else f"Everything is in memory: {rate}."
    return bound, f"{what} {_decode_advice(rates, threads, cores)}{first}"


def _decode_advice(rates: StageRates, threads: int, cores: int) -> str:
    """What makes decoding faster."""
    if threads < cores:
        return f"Give it more threads: {min(2 * threads, cores)}, of {cores} cores."
    if rates.disk and rates.codecs != {"raw"}:
        if rates.fits_memory:
            return "Ingest it with `--codec raw`, which needs no decoding, if it fits into memory then, too."
        if rates.raw and rates.raw > rates.decode:
            return f"Ingest it with `--codec raw`: the disk would give {rates.raw:,.0f}."
    if "zstd" in rates.codecs:
        return "Ingest it with `--codec lz4`, which decodes several times as fast."
    return f"That is what {cores} cores can: fewer or smaller cameras, or shorter windows, help."


def _measure_batches(
    subject: _BenchSetup, transform: Transform | None, limit_s: float
) -> tuple[Measurement, Measurement, Measurement | None]:
    """The whole, cold; the same batches again, warm and without the transform; and the transform alone."""
    loader, epoch = subject.loader()
    measure.drop_page_cache(subject.files)
    whole = measure.time_batches(loader, epoch, limit_s, transform)
    loader.close()
    loader, _ = subject.loader()
    decode = measure.fastest_pass(loader, whole.times, limit_s)
    changed = measure.time_transform(transform, next(loader), limit_s) if transform else None
    loader.close()
    return whole, decode, changed


def _measure_reads(subject: _BenchSetup, stored: float, limit_s: float) -> list[tuple[str, Measurement]]:
    """Random reads from disk, each of what a sample needs of an array; and the same again. stored: bytes a sample."""
    if not stored:
        return []
    sizes = [file.stat().st_size for file in subject.files]
    places = measure.random_ranges(sizes, max(_MIN_READ_BYTES, int(stored / len(subject.large))))
    measure.drop_page_cache(subject.files)
    cold = measure.time_reads(subject.files, places, subject.threads, limit_s)
    return [
        ("cold", cold),
        ("warm", measure.time_reads(subject.files, places[: cold.times], subject.threads, math.inf)),
    ]


def _combine_rates(subject: _BenchSetup, stages: Sequence[StageRate]) -> StageRates:
    found = {(stage.stage, stage.cache): stage for stage in stages}
    disk, transform = found.get(("read", "cold")), found.get(("transform", "warm"))
    layouts = (chunk_layout(subject.arrays.metadata_of(name)) for name in subject.large)
    stored_bytes = sum(file.stat().st_size for file in subject.files)
    return StageRates(
        decode=found["decode", "warm"].samples_per_s,
        disk=disk.samples_per_s if disk else None,
        raw=disk.bytes_per_s / subject.sample_bytes() if disk else None,
        transform=transform.samples_per_s if transform else None,
        codecs=frozenset(known.codec if known else "zarr" for known in layouts),
        stored_bytes=stored_bytes,
        fits_memory=stored_bytes < psutil.virtual_memory().available,
    )


def _read_stage(subject: _BenchSetup, cache: str, done: Measurement, stored: float) -> StageRate:
    return _make_stage(subject, "read", cache, done.bytes_read / stored, done.bytes_read, done.wall_s)


def _batch_stage(
    subject: _BenchSetup, stage: str, cache: str, done: Measurement, bound: str = "", advice: str = ""
) -> StageRate:
    samples = done.times * subject.batch_size
    return _make_stage(subject, stage, cache, samples, samples * subject.sample_bytes(), done.wall_s, bound, advice)


def _make_stage(
    subject: _BenchSetup,
    stage: str,
    cache: str,
    samples: float,
    n_bytes: int,
    wall_s: float,
    bound: str = "",
    advice: str = "",
) -> StageRate:
    return StageRate(
        dataset=subject.arrays.manifest.name,
        version=subject.arrays.version,
        stage=stage,
        cache=cache,
        threads=subject.threads,
        samples=round(samples),
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        bytes_per_s=n_bytes / wall_s,
        bound=bound,
        advice=advice,
    )
