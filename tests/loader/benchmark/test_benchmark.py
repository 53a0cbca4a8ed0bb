"""What a loader's bench measures, and what it says of it."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pitools.commands.dataset_bench import bench as command
from pitools.core.errors import ConfigError, DataError, UsageError
from pitools.dataset.ingest.ingest import ingest
from pitools.loader.benchmark import measure
from pitools.loader.benchmark.benchmark import StageRates, benchmark_loader, find_bottleneck

LZ4, RAW, ZSTD = (frozenset({codec}) for codec in ("blosc", "raw", "zstd"))


@pytest.fixture(scope="module", params=["lz4", "raw"])
def version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of 3 MB of frames."""
    folder, random = tmp_path_factory.mktemp("recording"), np.random.default_rng(0)
    with h5py.File(folder / "r.hdf5", "w") as file:
        for number in range(4):
            file[f"data/demo_{number}/obs/eye_image"] = random.integers(0, 9, (60, 64, 64, 3), np.uint8)
            file[f"data/demo_{number}/actions"] = random.normal(size=(60, 7)).astype(np.float32)
    return Path(ingest([folder / "r.hdf5"], root=folder / "data", name="pick", codec=request.param).path)


@given(sizes=st.lists(st.integers(0, 5000), max_size=6), n_bytes=st.integers(1, 900), seed=st.integers(0, 9))
def test_ranges_are_every_byte_once(sizes: list[int], n_bytes: int, seed: int):
    """Of all files and of no other bytes, none twice, none longer than asked for."""
    actual = measure.random_ranges(sizes, n_bytes, seed=seed)
    assert all(0 < size <= n_bytes for _, _, size in actual)
    covered = [
        {place for file, low, size in actual if file == number for place in range(low, low + size)}
        for number in range(len(sizes))
    ]
    assert covered == [set(range(size)) for size in sizes]
    assert sum(size for _, _, size in actual) == sum(sizes)


def test_ranges_are_of_all_of_a_large_set():
    """Of a hundred files of 100 GB, 200,000 ranges, of every file, that are made in no time."""
    actual = measure.random_ranges([10**11] * 100, 1 << 16)
    assert len(actual) == len(set(actual)) == 200_000
    assert {file for file, _, _ in actual} == set(range(100))


def test_the_memory_is_the_job_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the limits of a job, its step and the node, in cgroup v1 and v2, the smallest counts; "max" is none."""
    for version, line in (("v2", "0::/slurm/job_7/step_0"), ("v1", "4:memory:/slurm/job_7/step_0")):
        root = tmp_path / version
        folder = root / ("memory" if version == "v1" else "") / "slurm" / "job_7" / "step_0"
        folder.mkdir(parents=True)
        name = "memory.max" if version == "v2" else "memory.limit_in_bytes"
        (folder / name).write_text("max\n")
        (folder.parent / name).write_text("12345\n")
        (tmp_path / "cgroup").write_text(f"9:cpu:/other\n{line}\n")
        monkeypatch.setattr(measure, "_CGROUP_ROOT", root)
        monkeypatch.setattr(measure, "_CGROUPS", tmp_path / "cgroup")
        assert measure.available_memory() == 12345


def test_a_missing_file_leaves_no_descriptor_open(tmp_path: Path):
    """A shard that is gone is an error that names it, and the others are closed."""
    (tmp_path / "a").write_bytes(bytes(10))
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(DataError):
        measure.time_reads([tmp_path / "a", tmp_path / "b"], [(0, 0, 10)], 1, 1.0)
    assert os.listdir("/proc/self/fd") == descriptors


def test_what_is_evicted_is_not_in_memory(version: Path):
    """The kernel would have to wait for the disk; and after `read`, for no range that was read."""
    files = sorted(file for file in version.glob("obs/eye_image/c/**/0") if file.is_file())
    places = measure.random_ranges([file.stat().st_size for file in files], 1 << 14)
    done = measure.time_reads(files, places, 2, 60)
    assert done[:2] == (len(places), sum(file.stat().st_size for file in files))
    if not in_memory(files[0]):
        pytest.fail("what was just read is not in memory: does this file system have RWF_NOWAIT?")
    if files[0].stat().st_dev != Path("/dev/shm").stat().st_dev:  # all that is in tmpfs is in memory
        for _ in range(20):  # the kernel itself may hold a page for a moment, and such are not dropped
            measure.drop_page_cache(files)
            if not in_memory(files[0]):
                return
            time.sleep(0.1)
        pytest.fail("what was evicted is in memory all the same")


def in_memory(file: Path) -> bool:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        raise
    finally:
        os.close(descriptor)


def test_every_stage_is_measured(version: Path):
    """Reads, decoding, the transform and all of it, with rates that agree with what was counted."""
    observed: list[Any] = []
    stages = benchmark_loader(
        version,
        batch_size=4,
        length=8,
        transform=lambda batch: observed.append(batch.arrays.keys()),
        limit_s=0.05,
        resident_bytes=100_000,
    )
    assert [(stage.stage, stage.cache) for stage in stages] == [
        ("read", "cold"),
        ("read", "warm"),
        ("decode", "warm"),
        ("transform", "warm"),
        ("loader", "cold"),
    ]
    assert {frozenset(names) for names in observed} == {frozenset({"action", "obs/eye_image"})}
    for stage in stages:
        assert stage.samples_per_s == pytest.approx(stage.samples / stage.wall_s, rel=0.1)
        assert (stage.dataset, stage.version, stage.threads) == ("pick", version.name, 2)
    sample = 8 * (64 * 64 * 3 + 7 * 4)
    assert stages[2].bytes_per_s == pytest.approx(stages[2].samples_per_s * sample)
    assert [bool(stage.bound) for stage in stages] == [False] * 4 + [True]
    assert stages[-1].advice


class Clock:
    """Time that passes by a millisecond whenever it is asked for, and by what is slept."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_slow_transform_is_what_bounds(version: Path, monkeypatch: pytest.MonkeyPatch):
    """A transform of 20 ms a batch: its rate is that of all, and the advice is about it."""
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    stages = benchmark_loader(
        version, batch_size=4, length=8, transform=lambda _: clock.sleep(0.02), limit_s=0.1, resident_bytes=100_000
    )
    assert stages[-1].bound == "transform"
    assert stages[-2].samples_per_s == pytest.approx(4 / 0.021, rel=0.1)
    assert stages[-1].samples_per_s == pytest.approx(4 / 0.021, rel=0.1)
    assert "BatchStream" in stages[-1].advice


def test_what_is_in_memory_reads_nothing(version: Path):
    """Small arrays alone: no disk is measured, and none is blamed."""
    stages = benchmark_loader(version, batch_size=4, length=8, names=["action"], limit_s=0.02)
    assert [(stage.stage, stage.cache) for stage in stages] == [("decode", "warm"), ("loader", "warm")]
    assert stages[-1].bound == "decode"
    assert f"{stages[-1].samples_per_s:,.0f} samples/s" not in stages[-1].advice  # the rate of decoding, not of all
    assert "disk" not in stages[-1].advice


def test_a_version_of_less_than_a_batch_is_measured_for_longer(version: Path):
    """What is in memory is as warm the second time: an epoch of one batch is not all that is measured."""
    stages = benchmark_loader(version, batch_size=64, length=8, names=["action"], limit_s=0)
    assert min(stage.samples for stage in stages) >= 2 * 64


def test_invalid_input_is_refused(version: Path, tmp_path: Path):
    """A missing array, a failing transform and a folder without a dataset raise errors that name them."""
    with pytest.raises(UsageError, match="obs/eye_imag"):
        benchmark_loader(version, names=["obs/eye_imag"])
    with pytest.raises(ConfigError, match="ZeroDivisionError") as error:
        benchmark_loader(version, transform=lambda batch: 1 / 0, limit_s=0.02)
    assert "obs/eye_image (64, 16, 64, 64, 3) uint8" in error.value.hint
    with pytest.raises(DataError):
        benchmark_loader(tmp_path)


@pytest.mark.parametrize(
    ("rates", "threads", "bound", "pattern"),
    [
        (StageRates(900, disk=300, raw=250, codecs=LZ4), 2, "disk", "300 samples/s.* 900.*NVMe"),
        (StageRates(900, disk=300, raw=300, codecs=RAW), 2, "disk", "codec lz4"),
        (StageRates(900, disk=2000, raw=800, codecs=LZ4), 2, "decode", "900 samples/s.*threads: 4 of 8"),
        (StageRates(900, disk=2000, raw=1500, codecs=ZSTD), 8, "decode", "codec raw`.* 1,500"),
        (StageRates(900, disk=2000, raw=700, codecs=ZSTD), 8, "decode", "codec lz4"),
        (StageRates(900, disk=2000, raw=2000, codecs=RAW), 8, "decode", "8 cores.*cameras"),
        (
            StageRates(900, disk=300, raw=200, codecs=LZ4, stored_bytes=1 << 30, fits_memory=True),
            8,
            "decode",
            r"codec raw`.*1\.0 GiB .*first pass, to 300 samples/s",
        ),
        (
            StageRates(900, disk=2000, raw=2000, transform=70, codecs=RAW),
            2,
            "transform",
            "70 samples/s.* 900.*GPU",
        ),
        (StageRates(900), 2, "decode", "memory: 900 samples/s.*threads: 4 of 8"),
    ],
)
def test_the_advice_depends_on_the_slowest_stage(rates: StageRates, threads: int, bound: str, pattern: str):
    """The bottleneck is the slowest stage; the advice contains its rate and a remedy that can help."""
    import re

    bottleneck, advice = find_bottleneck(rates, threads, 8)
    assert bottleneck == bound
    assert re.search(pattern, advice), advice


def test_the_command_prints_records_and_a_sentence(version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stages as JSON Lines, the advice for people; the dataset by its name, the transform by its module."""
    (tmp_path / "my_transforms.py").write_text("def halve(batch):\n    return batch.arrays['action'] / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    argv = [
        str(version.parent),
        "--batch-size",
        "8",
        "--length",
        "4",
        "--arrays",
        "action, obs/eye_image",
        "--seconds",
        "0.1",
    ]
    done = CliRunner().invoke(command, [*argv, "--batch-transform", "my_transforms:halve", "--format", "jsonl"])
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {record["schema"] for record in records} == {"pit.dataset-bench/1"}
    assert records[-1]["stage"] == "loader"
    assert done.stderr.strip() == records[-1]["advice"]
    wrong = CliRunner().invoke(command, [*argv, "--batch-transform", "my_transforms:hlave"])
    assert isinstance(wrong.exception, ConfigError)
    assert "halve" in wrong.exception.hint
