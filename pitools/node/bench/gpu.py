"""What each GPU of this node does alone: copies from and to the host, and matrix products, by torch or jax.

The product is of whole numbers, made twice: float32 sums of them are exact in any order, so both results are equal.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

_COPY_BYTES = 256 << 20
_SIDE = 8192  # of the matrices, in bfloat16
_REPEATS = 10
_DEVICES = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA's and AMD's drivers


class GpuMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of one GPU. name: ends with its unit. wrong: elements that differ between two equal products."""

    name: str
    device: str
    value: float | None
    wrong: int = 0
    problem: str = ""


class Gpu(NamedTuple):
    """Work on one GPU. device: its model. Each call returns when the GPU has finished; multiply, with the product."""

    device: str
    to_device: Callable[[], Any]
    to_host: Callable[[], Any]
    multiply: Callable[[], Any]


def torch_gpu(device: str, *, n_bytes: int = _COPY_BYTES, side: int = _SIDE) -> Gpu:
    """Return the work of a device of torch, such as `cuda:0`. n_bytes: of the copies. side: of the matrices."""
    import torch

    is_gpu = device != "cpu"
    host = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    there = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    random = torch.Generator(device=device).manual_seed(1)
    left, right = (
        torch.randint(-1, 2, (side, side), device=device, generator=random).to(torch.bfloat16) for _ in range(2)
    )

    def finish(call: Callable[[], Any]) -> Any:
        result = call()
        if is_gpu:
            torch.cuda.synchronize(device)
        return result

    return Gpu(
        torch.cuda.get_device_name(device) if is_gpu else "cpu",
        to_device=partial(finish, partial(there.copy_, host)),
        to_host=partial(finish, partial(host.copy_, there)),
        multiply=partial(finish, partial(torch.matmul, left, right)),
    )


def jax_gpu(device: Any, *, n_bytes: int = _COPY_BYTES, side: int = _SIDE) -> Gpu:
    """Return the same of one of `jax.devices()`."""
    import jax
    import numpy

    host = numpy.zeros(n_bytes, dtype=numpy.uint8)
    there = jax.device_put(host, device)
    random = numpy.random.default_rng(1)
    left, right = (
        jax.device_put(random.integers(-1, 2, (side, side)).astype("float32"), device).astype("bfloat16")
        for _ in range(2)
    )
    multiply = jax.jit(jax.numpy.matmul)
    return Gpu(
        str(device.device_kind),
        to_device=lambda: jax.device_put(host, device).block_until_ready(),
        to_host=lambda: numpy.asarray(there.copy()),  # an array keeps its copy on the host: of a new one
        multiply=lambda: multiply(left, right).block_until_ready(),
    )


def has_device() -> bool:
    """Return whether this node has a GPU's driver: without one, no framework need be imported."""
    return any(map(os.path.exists, _DEVICES))


def measure_gpus() -> Iterator[GpuMeasure]:
    """Yield the measures of all GPUs that torch, or else jax, finds; none where neither is installed."""
    for number, make in enumerate(_find_gpus()):
        try:
            yield from measure_gpu(make(), number)
        except (RuntimeError, ValueError) as error:  # as torch and jax report a GPU that is lost or full
            problem = str(error).partition("\n")[0]
            yield GpuMeasure(name=f"gpu{number}_gemm_flop_per_s", device="", value=None, problem=problem)


def measure_gpu(work: Gpu, number: int, *, n_bytes: int = _COPY_BYTES, side: int = _SIDE) -> Iterator[GpuMeasure]:
    """Yield the measures of one GPU. number: in its node."""
    for name, call, amount in (
        ("h2d_bytes_per_s", work.to_device, n_bytes),
        ("d2h_bytes_per_s", work.to_host, n_bytes),
        ("gemm_flop_per_s", work.multiply, 2 * side**3),
    ):
        wall_s = _median_wall_s(call)
        wrong = int((call() != call()).sum()) if call == work.multiply else 0
        yield GpuMeasure(
            name=f"gpu{number}_{name}",
            device=work.device,
            value=amount / wall_s,
            wrong=wrong,
            problem=f"{wrong} elements differ between two equal products" if wrong else "",
        )


def _find_gpus() -> list[Callable[[], Gpu]]:
    if not has_device():
        return []
    if importlib.util.find_spec("torch"):
        import torch

        return [partial(torch_gpu, f"cuda:{number}") for number in range(torch.cuda.device_count())]
    if importlib.util.find_spec("jax"):
        import jax

        try:
            return [partial(jax_gpu, device) for device in jax.devices("gpu")]
        except RuntimeError:  # none
            return []
    return []


def _median_wall_s(call: Callable[[], Any]) -> float:
    call()  # compiles, allocates, and sets clocks up
    walls_s = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        walls_s.append(time.perf_counter() - begin)
    return max(statistics.median(walls_s), 1e-9)
