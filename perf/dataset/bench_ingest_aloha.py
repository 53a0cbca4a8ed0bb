"""2 GB of ALOHA episodes, two VGA cameras of raw frames, to a version of raw and of lz4 chunks, durable at the end.

perf/run dataset_ingest_aloha [--quick] [--rounds 5] [--disk /var/tmp] [--memory /dev/shm]

The recordings lie in memory, as on a file system that is faster than the disk, and the version goes to the disk: the
limit is the lower of both bandwidths, the disk's as fio writes as many bytes in the same round with the faster of two
settings. Then both lie on one disk, nothing cached: the limit is fio reading and writing there at once. The peer is a
single process of zarr-python that assigns whole shards. Where PIT_BENCH_LEROBOT names a Python that has lerobot, a
sample goes through its converter, and its time is taken times the bytes that the sample is short of.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree

import msgspec

from perf.dataset.ingest_data import CAMERAS, FRAME_BYTES, record
from perf.harness.harness import Case, compare, from_ratios, report
from perf.harness.workspace import arguments, execute, print_progress, wait_until_idle, workspace
from perf.stage.stage_peers import install

CODECS = ("raw", "lz4")
OF_BANDWIDTH, OF_ZARR, OF_LEROBOT = 0.8, 2.0, 2.0
_DIRECT = ("--direct=1", "--ioengine=libaio", "--iodepth=4", "--bs=16M")
_BUFFERED = ("--direct=0", "--ioengine=psync", "--bs=4M", "--end_fsync=1")


def time_ingest(name: str, codec: str, files: list[Path], disk: Path) -> float:
    """Seconds of one ingest by its own clock, to a disk that has nothing else to write."""
    dest = disk / "made"
    dest.mkdir()
    wait_until_idle(disk)
    out = execute(sys.executable, "-m", "perf.dataset.ingest_variants", name, codec, dest, *files)
    rmtree(dest)
    return float(msgspec.json.decode(out)["wall_s"])


def fio(disk: Path, size: int, *settings: str) -> float:
    """Seconds that fio needs for so many bytes."""
    wait_until_idle(disk)
    argv = ["fio", "--name=x", f"--directory={disk}", f"--size={size}", "--unlink=1", "--output-format=json"]
    out = execute(*argv, *settings)
    jobs = msgspec.json.decode(out[out.index("{") :])["jobs"]
    return max(float(job[kind]["runtime"]) for job in jobs for kind in ("read", "write")) / 1000


def read(files: list[Path]) -> float:
    """Seconds to read the files with as many threads as there are cores."""

    def one(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            block = bytearray(1 << 20)
            while file.readinto(block):
                pass

    began = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(one, files))
    return time.perf_counter() - began


def drop_page_cache(files: list[Path]) -> None:
    """Drop files from the page cache."""
    os.sync()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def from_memory(files: list[Path], disk: Path, rounds: int) -> list[Case]:
    size = sum(path.stat().st_size for path in files)
    case = f"ALOHA, {size / 1e9:.1f} GB in memory to disk"
    times: dict[str, list[float]] = {name: [] for name in (*CODECS, *(f"zarr {codec}" for codec in CODECS), "limit")}
    settings = min((_DIRECT, _BUFFERED), key=lambda chosen: fio(disk, size, "--rw=write", *chosen))
    for number in range(rounds + 1):
        now = {codec: time_ingest("ours", codec, files, disk) for codec in CODECS}
        now["limit"] = max(fio(disk, size, "--rw=write", *settings), read(files))
        now |= {f"zarr {codec}": time_ingest("zarr", codec, files, disk) for codec in CODECS}
        for name, seconds in now.items() if number else ():
            times[name].append(seconds)
        print_progress(f"  {number}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in now.items()))
    cases = []
    for codec in CODECS:
        cases.append(
            compare(
                f"{case}, {codec}, of min(read, write) bandwidth",
                "fio",
                fio_version(),
                times[codec],
                times["limit"],
                target=OF_BANDWIDTH,
                command=" ".join(settings),
            )
        )
        cases.append(
            compare(
                f"{case}, {codec}",
                "zarr-python, one process, whole shards",
                zarr_version(),
                times[codec],
                times[f"zarr {codec}"],
                target=OF_ZARR,
            )
        )
    return cases


def on_one_disk(files: list[Path], disk: Path, rounds: int) -> list[Case]:
    """The recordings cold, on the disk that the version goes to."""
    size = sum(path.stat().st_size for path in files)
    ours, limit = [], []
    fio(disk, size, "--rw=read", *_DIRECT)
    for number in range(rounds + 1):
        drop_page_cache(files)
        pair = time_ingest("ours", "raw", files, disk), fio(disk, 2 * size, "--rw=rw", "--rwmixread=50", *_DIRECT)
        if number:
            ours.append(pair[0])
            limit.append(pair[1])
        print_progress(f"  {number}: ours {pair[0]:.2f} s, fio {pair[1]:.2f} s")
    case = f"ALOHA, {size / 1e9:.1f} GB cold from the same disk, raw, of fio reading and writing at once"
    return [compare(case, "fio", fio_version(), ours, limit, target=OF_BANDWIDTH, command="--rw=rw --direct=1")]


def lerobot(files: list[Path], disk: Path, memory: Path, python: str, *, steps: int, ours_s: float) -> list[Case]:
    import h5py

    sample = memory / "sample"
    with h5py.File(files[0]) as file, sample.open("wb") as out:
        for camera in CAMERAS:
            out.write(file[f"observations/images/{camera}"][:steps].tobytes())
    decoded = msgspec.json.decode(
        execute(python, "-m", "perf.dataset.ingest_lerobot", sample, f"{steps}", disk / "lerobot").splitlines()[-1]
    )
    scale = sum(path.stat().st_size for path in files) / (steps * len(CAMERAS) * FRAME_BYTES)
    how = f"create, add_frame, save_episode, videos; {steps} steps, seconds times {scale:.0f}"
    ratio = float(decoded["wall_s"]) * scale / ours_s
    return [from_ratios("ALOHA, lz4", "lerobot", decoded["version"], [ratio], target=OF_LEROBOT, command=how)]


def fio_version() -> str:
    return execute("fio", "--version").strip().removeprefix("fio-")


def zarr_version() -> str:
    from importlib.metadata import version

    return version("zarr")


def main() -> int:
    args = arguments(__doc__)
    install()
    count, steps = (2, 40) if args.quick else (4, 280)
    size = count * steps * len(CAMERAS) * FRAME_BYTES
    with workspace(args.memory, needed=int(1.1 * size)) as memory, workspace(args.disk, needed=5 * size) as disk:
        print_progress(f"recording {size / 1e9:.1f} GB")
        files = record(memory / "episodes", files=count, steps=steps)
        code = report(from_memory(files, disk, args.rounds))
        if python := os.environ.get("PIT_BENCH_LEROBOT"):
            ours_s = statistics.median(time_ingest("ours", "lz4", files, disk) for _ in range(3))
            code |= report(lerobot(files, disk, memory, python, steps=8 if args.quick else 60, ours_s=ours_s))
        moved = [Path(execute("cp", "-v", path, disk).split("'")[-2]) for path in files]
        return code | report(on_one_disk(moved, disk, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
