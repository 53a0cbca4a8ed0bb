"""What a node measures alone: real rates, data that are compared, and nothing left on the disk."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from pitools.node.bench import gpu, single
from pitools.node.bench.compare import BenchResult

SIZE = 24 << 20


def test_a_disk_is_written_and_read_and_left_empty(tmp_path: Path) -> None:
    """Past the page cache where the file system can."""
    rows = list(single.measure_disk(tmp_path, SIZE))
    assert [(name.removeprefix("disk_").removeprefix("cached_"), wrong) for name, _, wrong in rows] == [
        ("write_bytes_per_s", 0),
        ("read_bytes_per_s", 0),
    ]
    assert all(rate > 0 for _, rate, _ in rows)
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_no_name_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it goes even if the process is killed; also where the file system has neither unnamed files nor O_DIRECT."""
    real = os.open

    def refuse(path: str, flags: int, *more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *more)

    for is_refused in (False, True):
        if is_refused:
            monkeypatch.setattr(os, "open", refuse)
        measuring = single.measure_disk(tmp_path, SIZE)
        name, _, _ = next(measuring)
        assert list(tmp_path.iterdir()) == []
        assert name.startswith("disk_cached_") or not is_refused
        measuring.close()


def test_a_block_that_differs_or_is_another_s_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a bit flipped, and one that was written in another's place."""
    real = os.pwrite

    def write(descriptor: int, block: bytearray, offset: int) -> int:
        number = int.from_bytes(block[:8])
        if number == 2:
            block[4096] ^= 1
        if number == 4:
            block[:8] = (3).to_bytes(8)
        return real(descriptor, block, offset)

    monkeypatch.setattr(os, "pwrite", write)
    assert [wrong for _, _, wrong in single.measure_disk(tmp_path, SIZE)] == [0, 2]


def test_a_node_has_a_row_for_each_measure(tmp_path: Path) -> None:
    """With its name and hardware; a folder that cannot be written fails its rows alone."""
    rows = list(single.measure_node(tmp_path, "n1", disk_bytes=SIZE))
    assert (rows[-1].measure, rows[-1].value) == (single.END, None)
    measures = [row.measure.replace("cached_", "") for row in rows[:-1]]
    assert measures == ["cpu_bytes_per_s", "memory_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s"]
    assert all(row.node == "n1" and row.hardware and row.measured_at for row in rows)
    assert all(row.value and row.verdict == "ok" for row in rows[:-1])
    rows = list(single.measure_node(tmp_path / "missing", "n1"))
    assert [row.verdict for row in rows] == ["ok", "ok", "failed", "ok"]


def test_a_full_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most half of the room is used, and without any it says so."""
    status = list(os.statvfs(tmp_path))
    status[4] = 0  # f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(status))
    with pytest.raises(OSError) as raised:
        list(single.measure_disk(tmp_path, SIZE))
    assert raised.value.errno == errno.ENOSPC


WORK = """
import importlib, sys
from pitools.node.bench.gpu import jax_gpu, measure_gpu, torch_gpu
sizes = {"n_bytes": 1 << 16, "side": 64}
module = importlib.import_module(sys.argv[1])
work = torch_gpu("cpu", **sizes) if sys.argv[1] == "torch" else jax_gpu(module.devices("cpu")[0], **sizes)
rows = list(measure_gpu(work, 3, **sizes))
assert all(row.value and not row.wrong and row.device == "cpu" for row in rows), rows
products = [work.multiply(), work.multiply() + 1]
rows = list(measure_gpu(work._replace(multiply=lambda: products.reverse() or products[0]), 3, **sizes))
assert rows[-1].wrong == 64 * 64, rows
print(*(row.name for row in rows))
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_work_of_a_gpu(framework: str) -> None:
    """On a CPU device, as there may be no GPU: copies, and products that are equal.

    In a process of its own: JAX's threads would make each later fork of this one a warning.
    """
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    done = subprocess.run([sys.executable, "-c", WORK, framework], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gpu3_h2d_bytes_per_s", "gpu3_d2h_bytes_per_s", "gpu3_gemm_flop_per_s"]


def test_a_gpu_that_fails_has_a_row_and_others_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that is lost raises as torch does; one whose products differ is wrong."""

    products = itertools.count()

    def lost() -> gpu.Gpu:
        raise RuntimeError("CUDA error: device lost\nCUDA kernel errors might be …")

    def bad() -> gpu.Gpu:
        return gpu.Gpu("H100", lambda: None, lambda: None, lambda: numpy.array([next(products)]))

    monkeypatch.setattr(gpu, "_find_gpus", lambda: [lost, bad])
    rows: list[BenchResult] = list(single.measure_node(tmp_path, "n1", disk_bytes=SIZE))
    by_name = {row.measure: row for row in rows if row.measure.startswith("gpu")}
    assert by_name["gpu0_gemm_flop_per_s"].verdict == "failed"
    assert by_name["gpu0_gemm_flop_per_s"].problem == "CUDA error: device lost"
    assert by_name["gpu1_gemm_flop_per_s"].verdict == "wrong"
    assert by_name["gpu1_h2d_bytes_per_s"].hardware == "H100"


def test_the_file_takes_at_most_half_of_the_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Jobs and the system need the rest, also while it is measured."""
    written: list[int] = []
    room, pwrite = SimpleNamespace(f_bavail=5 * single._BLOCK, f_frsize=1), os.pwrite
    monkeypatch.setattr(os, "fstatvfs", lambda _: room)
    monkeypatch.setattr(os, "pwrite", lambda *args: written.append(args[2]) or pwrite(*args))
    assert len(list(single.measure_disk(tmp_path))) == 2
    assert sorted(written) == [0, single._BLOCK]
