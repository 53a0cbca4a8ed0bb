"""Find a loader's bottleneck: the disk, decoding, or the transform of batches.

    read        reads of the samples' stored bytes, in random order        cold, then warm
    decode      read, check at the first read, decode into batches         warm
    transform   the user's function, in the training thread                warm
    loader      all stages together                                        cold

Cold: after the files were dropped from the page cache. Their content is unchanged, but other readers are slower for a
while. Windows do not overlap, so no cold byte is read twice. Resident arrays are loaded before the measurement.
"""

from __future__ import annotations

import math
import os
import random
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pitools.core.record import Record
from pitools.core.units import format_size
from pitools.loader.benchmark import measure
from pitools.loader.benchmark.measure import Measurement, Transform
from pitools.loader.loader import Loader
from pitools.loader.sampling.episode_filter import filter_episodes
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import RESIDENT_BYTES, VersionReader
from pitools.store.zarr.chunk_layout import chunk_layout

_MIN_READ_BYTES = 4096


class StageRate(Record, frozen=True, kw_only=True, tag="pit.dataset-bench/1"):
    """Throughput of one stage. bytes_per_s: stored bytes for stage `read`, else bytes of batches.

    bound, advice: of stage `loader` only: its bottleneck (`disk`, `decode` or `transform`), and a remedy.
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
    """Rates in samples/s. disk: of reads of stored bytes. raw: of reads if the data were stored uncompressed.

    disk, raw: None if all arrays are resident. transform: None without a transform. codecs, stored_bytes: of the
    arrays read from files. fits_memory: these fit into the page cache.
    """

    decode: float
    disk: float | None = None
    raw: float | None = None
    transform: float | None = None
    codecs: frozenset[str] = frozenset()
    stored_bytes: int = 0
    fits_memory: bool = False


class _BenchSetup(NamedTuple):
    """Arguments of the benchmark. large: arrays that are not resident. files: of the large arrays."""

    reader: VersionReader
    names: tuple[str, ...]
    large: tuple[str, ...]
    files: tuple[Path, ...]
    length: int
    batch_size: int
    threads: int
    resident_bytes: int

    def loader(self) -> tuple[Loader, int]:
        """Return a new loader, with small arrays resident and no other chunk checked, and the batches of an epoch."""
        reader = VersionReader(self.reader.path, resident_bytes=self.resident_bytes)
        for name in self.names:
            reader.resident(name)
        spans = dict.fromkeys(self.names, WindowSpan(0, self.length))
        windows = Windows(reader.offsets, filter_episodes(reader), spans, stride=self.length, pad=True)
        loader = Loader(WindowSamples(reader, windows), global_batch_size=self.batch_size, threads=self.threads)
        return loader, max(1, len(windows) // self.batch_size)

    def sample_bytes(self) -> int:
        """Return the bytes of a decoded sample, over all arrays."""
        rows = (self.reader.metadata_of(name).shape[1:] for name in self.names)
        return sum(
            self.length * math.prod(row) * self.reader.dtype(name).itemsize
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
    """Measure the stages of loading windows of `length` steps; the last row names the bottleneck.

    names: arrays; none: all along steps. transform: called with each batch. limit_s: per stage, in seconds.
    resident_bytes: as of `VersionReader`. Raises UsageError or ConfigError for arrays or windows that cannot be
    loaded, DataError for damaged files.
    """
    reader = VersionReader(path, resident_bytes=resident_bytes)
    names = tuple(names) or tuple(name for name in reader.manifest.arrays if reader.manifest.along_steps(name))
    large = tuple(name for name in names if reader.resident(name) is None)
    prefixes = tuple(f"{name}/c/" for name in large)
    files = tuple(path / entry.path for entry in reader.manifest.files if entry.path.startswith(prefixes))
    setup = _BenchSetup(reader, names, large, files, length, batch_size, threads, resident_bytes)
    cold, decode, transformed = _measure_batches(setup, transform, limit_s)
    stored = decode.bytes_read / (decode.operations * batch_size)
    stages = [
        _read_stage(setup, cache, measurement, stored) for cache, measurement in _measure_reads(setup, stored, limit_s)
    ]
    stages.append(_batch_stage(setup, "decode", "warm", decode))
    if transformed:
        stages.append(_batch_stage(setup, "transform", "warm", transformed))
    bound, advice = find_bottleneck(_combine_rates(setup, stages), threads, len(os.sched_getaffinity(0)))
    return [*stages, _batch_stage(setup, "loader", "cold" if stored else "warm", cold, bound, advice)]


def find_bottleneck(rates: StageRates, threads: int, cores: int) -> tuple[str, str]:
    """Return the bottleneck (`disk`, `decode` or `transform`) of a loader with these rates, and advice on it."""
    rate_by_stage = {"decode": rates.decode, "disk": rates.disk, "transform": rates.transform}
    candidates = {
        name: rate
        for name, rate in rate_by_stage.items()
        if rate is not None and not (name == "disk" and rates.fits_memory)
    }
    bound = min(candidates, key=candidates.__getitem__)
    rate = f"{candidates.pop(bound):,.0f} samples/s"
    next_rate = f"{min(candidates.values()):,.0f}" if candidates else ""
    first_pass = ""
    if rates.fits_memory and rates.disk is not None and rates.disk < min(rates.decode, rates.transform or math.inf):
        first_pass = (
            f" The stored {format_size(rates.stored_bytes)} fit into memory: the disk limits only the first pass, "
        )
        first_pass += f"to {rates.disk:,.0f} samples/s."
    if bound == "disk":
        advice = f"Bottleneck: disk, {rate}; next: {next_rate}. Stage the dataset to NVMe (`pit-stage run`)"
        return bound, advice + (", or ingest it with `--codec lz4`." if rates.codecs == {"raw"} else ".")
    if bound == "transform":
        return bound, (
            f"Bottleneck: the transform, {rate}; the loader alone: {next_rate}. Make it cheaper, run it on the GPU, or "
            f"in processes: `StreamLoader` over `BatchStream` of `pitools.loader.torch`.{first_pass}"
        )
    verdict = f"Bottleneck: decoding, {rate}." if rates.disk else f"All arrays are in memory: {rate}."
    return bound, f"{verdict} {_decode_advice(rates, threads, cores)}{first_pass}"


def _decode_advice(rates: StageRates, threads: int, cores: int) -> str:
    """Return advice for faster decoding."""
    if threads < cores:
        return f"Use more threads: {min(2 * threads, cores)} of {cores} cores."
    if rates.disk and rates.codecs != {"raw"}:
        if rates.fits_memory:
            return "Ingest with `--codec raw`, which needs no decoding, if the result fits into memory, too."
        if rates.raw and rates.raw > rates.decode:
            return f"Ingest with `--codec raw`: the disk would reach {rates.raw:,.0f} samples/s."
    if "zstd" in rates.codecs:
        return "Ingest with `--codec lz4`, which decodes several times faster."
    return f"All {cores} cores are in use: choose fewer or smaller cameras, or shorter windows."


def _measure_batches(
    setup: _BenchSetup, transform: Transform | None, limit_s: float
) -> tuple[Measurement, Measurement, Measurement | None]:
    """Measure the loader cold, the same batches warm without the transform, and the transform alone."""
    loader, epoch = setup.loader()
    measure.drop_page_cache(setup.files)
    # With all arrays in memory nothing is cold, and a small version's epoch is too short to be measured.
    cold = measure.time_batches(loader, epoch if setup.large else sys.maxsize, limit_s, transform)
    loader.close()
    loader, _ = setup.loader()
    warm = measure.fastest_pass(loader, cold.operations, limit_s)
    transformed = measure.time_transform(transform, next(loader), limit_s) if transform else None
    loader.close()
    return cold, warm, transformed


def _measure_reads(setup: _BenchSetup, stored: float, limit_s: float) -> list[tuple[str, Measurement]]:
    """Measure random reads from disk, of a sample's bytes of an array each, cold then warm. stored: bytes a sample."""
    if not stored:
        return []
    max_open = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    files = sorted(random.Random(0).sample(setup.files, min(max_open, len(setup.files))))  # noqa: S311 - no secret
    sizes = [file.stat().st_size for file in files]
    ranges = measure.random_ranges(sizes, max(_MIN_READ_BYTES, int(stored / len(setup.large))))
    measure.drop_page_cache(files)
    cold = measure.time_reads(files, ranges, setup.threads, limit_s)
    return [
        ("cold", cold),
        ("warm", measure.time_reads(files, ranges[: cold.operations], setup.threads, math.inf)),
    ]


def _combine_rates(setup: _BenchSetup, stages: Sequence[StageRate]) -> StageRates:
    rows = {(stage.stage, stage.cache): stage for stage in stages}
    disk, transform = rows.get(("read", "cold")), rows.get(("transform", "warm"))
    layouts = (chunk_layout(setup.reader.metadata_of(name)) for name in setup.large)
    stored_bytes = sum(file.stat().st_size for file in setup.files)
    return StageRates(
        decode=rows["decode", "warm"].samples_per_s,
        disk=disk.samples_per_s if disk else None,
        raw=disk.bytes_per_s / setup.sample_bytes() if disk else None,
        transform=transform.samples_per_s if transform else None,
        codecs=frozenset(layout.codec if layout else "zarr" for layout in layouts),
        stored_bytes=stored_bytes,
        fits_memory=stored_bytes < measure.available_memory(),
    )


def _read_stage(setup: _BenchSetup, cache: str, measurement: Measurement, stored: float) -> StageRate:
    return _make_stage(
        setup, "read", cache, measurement.bytes_read / stored, measurement.bytes_read, measurement.wall_s
    )


def _batch_stage(
    setup: _BenchSetup, stage: str, cache: str, measurement: Measurement, bound: str = "", advice: str = ""
) -> StageRate:
    samples = measurement.operations * setup.batch_size
    return _make_stage(setup, stage, cache, samples, samples * setup.sample_bytes(), measurement.wall_s, bound, advice)


def _make_stage(
    setup: _BenchSetup,
    stage: str,
    cache: str,
    samples: float,
    n_bytes: int,
    wall_s: float,
    bound: str = "",
    advice: str = "",
) -> StageRate:
    return StageRate(
        dataset=setup.reader.manifest.name,
        version=setup.reader.version,
        stage=stage,
        cache=cache,
        threads=setup.threads,
        samples=round(samples),
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        bytes_per_s=n_bytes / wall_s,
        bound=bound,
        advice=advice,
    )
