"""What one node does alone: copies in memory, a file on its disk, work on all CPUs, and its GPUs where there are any.

`python -m pitools.node.bench.single FOLDER` prints a BenchResult a line; srun starts it on each node of a job. Data
that are read back are compared with what was written.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from pitools.core.timestamps import now_rfc3339
from pitools.node.bench import gpu
from pitools.node.bench.compare import BenchResult, Verdict
from pitools.node.bench.worker import end_with_stdin, start_rank
from pitools.node.check import this_node

END = "all"
"""The measure of a node's last result, of all that it measured."""
DISK_BYTES = 1 << 30
_BLOCK = 4 << 20
_NUMBER_BYTES = 8  # of a block, at its beginning: a block in another's place is wrong
_DISK_THREADS = 4  # a queue of requests: an NVMe reaches its rate with several
_MEMORY_BYTES = 128 << 20  # of a thread's source and target: more than caches hold
_MEMORY_SHARE = 0.25  # of what is free, at most
_REPEATS = 9
_CPU_S = 0.5


def _open_unnamed(folder: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether it bypasses the page cache. Raises OSError."""
    for direct in (os.O_DIRECT, 0):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
    descriptor, name = tempfile.mkstemp(prefix=".pit-bench-", dir=folder)  # NFS has no unnamed files
    Path(name).unlink()
    return descriptor, False


def measure_node(folder: Path, node: str = "", *, disk_bytes: int = DISK_BYTES) -> Iterator[BenchResult]:
    """Yield this node's results. folder: on the disk to measure. disk_bytes: of the file, and at most half of its room.

    node: its name, by default Slurm's or the host's.
    """
    node = this_node.node_name(node)
    hardware, at = _cpu_name(), now_rfc3339()

    def result(measure: str, value: float | None, verdict: Verdict = "ok", problem: str = "") -> BenchResult:
        return BenchResult(
            node=node,
            measure=measure,
            value=value,
            verdict=verdict,
            problem=problem,
            hardware=hardware,
            measured_at=at,
        )

    yield result("cpu_bytes_per_s", measure_cpu())
    yield result("memory_bytes_per_s", measure_memory())
    try:
        for name, rate, wrong in measure_disk(folder, disk_bytes):
            yield result(name, rate, "wrong" if wrong else "ok", f"{wrong} wrong blocks" if wrong else "")
    except OSError as error:
        yield result("disk_write_bytes_per_s", None, "failed", f"{folder}: {error.strerror}")
    for measured in gpu.measure_gpus():
        hardware = measured.device
        verdict: Verdict = "wrong" if measured.wrong else "failed" if measured.value is None else "ok"
        yield result(measured.name, measured.value, verdict, measured.problem)
    yield result(END, None)


def measure_cpu() -> float:
    """Return the bytes per second that all CPUs of this process hash, from their caches."""
    block = bytes(64 << 10)

    def work() -> float:
        end, done = time.perf_counter() + _CPU_S, 0
        while time.perf_counter() < end:
            hashlib.sha256(block).digest()  # without the interpreter's lock
            done += len(block)
        return done / _CPU_S

    return sum(_on_each_cpu(work))


def measure_memory() -> float:
    """Return the bytes per second that all CPUs copy at the same time, read and written counted."""
    import numpy
    import psutil

    count = len(os.sched_getaffinity(0))
    size = min(_MEMORY_BYTES, int(psutil.virtual_memory().available * _MEMORY_SHARE / 2 / count))
    all_ready = threading.Barrier(count, timeout=60)  # else one without memory holds all

    def work() -> float:
        # Of its own: memory is of the NUMA node of the CPU that first writes it.
        source, target = numpy.ones(size, dtype=numpy.uint8), numpy.zeros(size, dtype=numpy.uint8)
        target[:] = 2
        all_ready.wait()
        walls_s = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            numpy.copyto(target, source)  # without the interpreter's lock
            walls_s.append(time.perf_counter() - begin)
        return 2 * size / statistics.median(walls_s)

    return sum(_on_each_cpu(work))


def measure_disk(folder: Path, n_bytes: int = DISK_BYTES) -> Iterator[tuple[str, float, int]]:
    """Yield measure, bytes per second and wrong blocks of a write, synced, and of reading it back. Raises OSError.

    By a file without a name, which goes with this process.
    """
    descriptor, is_direct = _open_unnamed(folder)
    try:
        room = os.fstatvfs(descriptor)
        n_blocks = min(n_bytes, room.f_bavail * room.f_frsize // 2) // _BLOCK
        if not n_blocks:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        cached = "" if is_direct else "cached_"
        content = os.urandom(_BLOCK - _NUMBER_BYTES)
        buffers = threading.local()

        def own_block() -> mmap.mmap:
            if not hasattr(buffers, "block"):
                buffers.block = mmap.mmap(-1, _BLOCK)  # whole pages, as O_DIRECT wants
            return buffers.block  # type: ignore[no-any-return]

        def write(number: int) -> None:
            block = own_block()
            block[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES)
            block[_NUMBER_BYTES:] = content
            if os.pwrite(descriptor, block, number * _BLOCK) != _BLOCK:
                raise OSError(errno.EIO, "short write", str(folder))

        def is_wrong(number: int) -> bool:
            block = own_block()
            length = os.preadv(descriptor, [block], number * _BLOCK)
            is_right = int.from_bytes(block[:_NUMBER_BYTES]) == number and block[_NUMBER_BYTES:] == content
            return length != _BLOCK or not is_right

        with ThreadPoolExecutor(_DISK_THREADS) as pool:
            begin = time.perf_counter()
            list(pool.map(write, range(n_blocks)))  # raises what one of them raised
            os.fsync(descriptor)
            yield f"disk_{cached}write_bytes_per_s", n_blocks * _BLOCK / (time.perf_counter() - begin), 0
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            wrong = sum(pool.map(is_wrong, range(n_blocks)))
            yield f"disk_{cached}read_bytes_per_s", n_blocks * _BLOCK / (time.perf_counter() - begin), wrong
    finally:
        os.close(descriptor)


def _on_each_cpu(work: Callable[[], float]) -> list[float]:
    """Call a function on each CPU of this process at the same time, and return the results. Raises what it raised."""

    def work_there(cpu: int) -> float:
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        return work()

    cpus = os.sched_getaffinity(0)
    with ThreadPoolExecutor(len(cpus)) as pool:
        return [future.result() for future in [pool.submit(work_there, cpu) for cpu in cpus]]


def _cpu_name() -> str:
    """Return the CPU's model and number, as `32 x AMD EPYC 7543`; `8 of 32 x` where the node is shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    count, of_all = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    return f"{count} of {of_all} x {name}" if count < of_all else f"{count} x {name}"


def main() -> None:
    """Measure this node, and print a result a line."""
    options = start_rank("node.bench.single", folder={"type": Path})
    threading.Thread(target=end_with_stdin, daemon=True).start()
    for result in measure_node(options.folder):
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
