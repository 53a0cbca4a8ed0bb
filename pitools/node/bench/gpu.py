"""What each GPU of this node does alone: copies from and to the host, and matrix products, by torch or jax.

The product is of whole numbers, made twice: float32 sums of them are exact in any order, so both results are equal.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

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


class TorchWork:
    """Work on one GPU by torch; each call returns when the GPU has finished.

    device: such as `cuda:0`. n_bytes: of the copies. side: of the matrices.
    """

    def __init__(self, device: str, *, n_bytes: int = _COPY_BYTES, side: int = _SIDE) -> None:
        import torch

        self._torch: Any = torch
        self._place = device
        is_gpu = device != "cpu"
        self.device = torch.cuda.get_device_name(device) if is_gpu else "cpu"
        self._host = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._on_device = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        random = torch.Generator(device=device).manual_seed(1)
        self._left, self._right = (
            torch.randint(-1, 2, (side, side), device=device, generator=random).to(torch.bfloat16) for _ in range(2)
        )

    def to_device(self) -> None:
        """Copy the buffer to the GPU."""
        self._on_device.copy_(self._host)
        self._synchronize()

    def to_host(self) -> None:
        """Copy it back."""
        self._host.copy_(self._on_device)
        self._synchronize()

    def multiply(self) -> Any:
        """Return the product of two matrices."""
        product = self._left @ self._right
        self._synchronize()
        return product

    def count_different(self, one: Any, other: Any) -> int:
        """Return how many elements of two products differ."""
        return int((one != other).sum())

    def _synchronize(self) -> None:
        if self._place != "cpu":
            self._torch.cuda.synchronize(self._place)


class JaxWork:
    """The same by jax. device: one of `jax.devices()`."""

    def __init__(self, device: Any, *, n_bytes: int = _COPY_BYTES, side: int = _SIDE) -> None:
        import jax
        import numpy

        self._jax: Any = jax
        self._place, self.device = device, str(device.device_kind)
        self._host = numpy.zeros(n_bytes, dtype=numpy.uint8)
        random = numpy.random.default_rng(1)
        self._left, self._right = (
            jax.device_put(random.integers(-1, 2, (side, side)).astype("float32"), device).astype("bfloat16")
            for _ in range(2)
        )
        self._multiply = jax.jit(lambda left, right: left @ right)

    def to_device(self) -> None:
        """As TorchWork does."""
        self._on_device = self._jax.device_put(self._host, self._place).block_until_ready()

    def to_host(self) -> None:
        """As TorchWork does. An array keeps its copy on the host: it is made of a new one."""
        import numpy

        numpy.asarray(self._on_device.copy())

    def multiply(self) -> Any:
        """As TorchWork does."""
        return self._multiply(self._left, self._right).block_until_ready()

    def count_different(self, one: Any, other: Any) -> int:
        """As TorchWork does."""
        return int((one != other).sum())


GpuWork = TorchWork | JaxWork


def measure_gpus() -> Iterator[GpuMeasure]:
    """Yield the measures of all GPUs that torch, or else jax, finds; none where neither is installed."""
    for number, make in enumerate(_find_gpus()):
        try:
            yield from measure_gpu(make(), number)
        except (RuntimeError, ValueError) as error:  # as torch and jax report a GPU that is lost or full
            problem = str(error).partition("\n")[0]
            yield GpuMeasure(name=f"gpu{number}_gemm_flop_per_s", device="", value=None, problem=problem)


def measure_gpu(work: GpuWork, number: int, *, n_bytes: int = _COPY_BYTES, side: int = _SIDE) -> Iterator[GpuMeasure]:
    """Yield the measures of one GPU. number: in its node."""
    for name, call, amount in (
        ("h2d_bytes_per_s", work.to_device, n_bytes),
        ("d2h_bytes_per_s", work.to_host, n_bytes),
        ("gemm_flop_per_s", work.multiply, 2 * side**3),
    ):
        wall_s = _median_wall_s(call)
        wrong = work.count_different(work.multiply(), work.multiply()) if call == work.multiply else 0
        yield GpuMeasure(
            name=f"gpu{number}_{name}",
            device=work.device,
            value=amount / wall_s,
            wrong=wrong,
            problem=f"{wrong} elements differ between two equal products" if wrong else "",
        )


def _find_gpus() -> list[Callable[[], GpuWork]]:
    if not any(map(os.path.exists, _DEVICES)):  # saves the import, seconds long
        return []
    if importlib.util.find_spec("torch"):
        import torch

        names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        return [lambda name=name: TorchWork(name) for name in names]  # type: ignore[misc]
    if importlib.util.find_spec("jax"):
        import jax

        try:
            devices = jax.devices("gpu")
        except RuntimeError:  # none
            devices = []
        return [lambda device=device: JaxWork(device) for device in devices]  # type: ignore[misc]
    return []


def _median_wall_s(call: Callable[[], Any]) -> float:
    call()  # compiles, allocates, and sets clocks up
    walls_s = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        walls_s.append(time.perf_counter() - begin)
    return max(statistics.median(walls_s), 1e-9)
