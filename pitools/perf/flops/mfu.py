"""Relate a speed to the peak of its devices: model FLOPs utilization, in three conventions."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from pitools.core.errors import ToolMissing, UsageError
from pitools.core.record import Record
from pitools.core.strict_toml import convert_tables, read_toml
from pitools.perf.flops.model import CONVENTIONS, ModelFile, flops_per_token

_SIZES = (1024, 2048, 4096, 8192)
_SECONDS_A_SIZE = 1.0
# Words of a driver's name that make another device of it, with another rate.
_VARIANTS = frozenset(("d", "grid", "laptop", "lite", "max", "mig", "nvl", "pcie", "q", "super", "ti"))
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Peak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rate of a device for dense products. names: other names of it.

    dtype: of the inputs; sums are in fp32. tflops: 1e12 operations per second. source, date: of the figure.
    """

    device: str
    tflops: float
    source: str
    date: str
    names: tuple[str, ...] = ()
    dtype: str = "bf16"


class _PeakTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peak: tuple[Peak, ...]


class Mfu(Record, frozen=True, kw_only=True, tag="pit.perf-mfu/1"):
    """The utilization in one convention. flops_per_token: of forward and backward. tflops_per_device: reached.

    mfu: tflops_per_device ÷ peak_tflops; None for a device without a known peak. peak_source: of that figure.
    """

    convention: str
    flops_per_token: float
    tflops_per_device: float
    mfu: float | None
    device: str
    dtype: str
    peak_tflops: float | None
    peak_source: str


class Calibration(Record, frozen=True, kw_only=True, tag="pit.perf-calibration/1"):
    """The rate of matrix products of one size on this device, the median of several. size: n of an n by n product."""

    device: str
    dtype: str
    size: int
    tflops: float
    library: str


@cache
def read_peaks() -> tuple[Peak, ...]:
    """Return the table of known devices."""
    path = Path(__file__).with_name("peaks.toml")
    return convert_tables(read_toml(path), _PeakTable, str(path)).peak


def find_peak(device: str, dtype: str) -> Peak | None:
    """Return the peak of a device by the name that its driver gives; None for an unknown one, never a guess.

    All words of an entry's name must be in the device's, and all of `_VARIANTS` in the device's in the entry's.
    A profile of a vGPU, such as 10C, is a share of a device: unknown.
    """
    words = set(_words(device))
    if any(re.fullmatch(r"\d+[abcq]", word) for word in words):
        return None
    for peak in read_peaks():
        if peak.dtype == dtype:
            for name in (peak.device, *peak.names):
                if words.issuperset(_words(name)) and not (words - set(_words(name))) & _VARIANTS:
                    return peak
    return None


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def utilization(
    model: ModelFile, tokens_per_s: float, devices: int, device: str, dtype: str, peak_tflops: float | None = None
) -> list[Mfu]:
    """Return the utilization in each convention.

    tokens_per_s: of the main tower, over all devices. peak_tflops: of one device, instead of the table's. Raises
    UsageError if the figures give more than the peak: one of them must be wrong.
    """
    if not 0 < tokens_per_s < math.inf or devices < 1:
        raise UsageError(f"{tokens_per_s:g} tokens/s on {devices} devices (expected more than 0, and finite)")
    if peak_tflops is not None and not 0 < peak_tflops < math.inf:
        raise UsageError(f"a peak of {peak_tflops:g} TFLOP/s (expected more than 0, and finite)", where="--peak")
    known = None if peak_tflops else find_peak(device, dtype)
    peak = peak_tflops or (known.tflops if known else None)
    source = "given" if peak_tflops else f"{known.source} ({known.date})" if known else ""
    rows = []
    for convention in CONVENTIONS:
        flops = flops_per_token(model, convention)
        reached = flops * tokens_per_s / devices / 1e12
        if convention != "full" and peak and reached > peak:
            message = f"{reached:.4g} TFLOP/s per device is above its peak of {peak:g} ({convention})"
            raise UsageError(message, hint="check --tokens-per-s, --devices, --dtype and seq_lens of the model file")
        rows.append(
            Mfu(
                convention=convention,
                flops_per_token=flops,
                tflops_per_device=reached,
                mfu=reached / peak if peak else None,
                device=device,
                dtype=dtype,
                peak_tflops=peak,
                peak_source=source,
            )
        )
    return rows


def calibrate(dtype: str) -> list[Calibration]:
    """Measure matrix products of several sizes on this machine's first device, with torch, else JAX.

    Raises ToolMissing without either, UsageError for an unknown type.
    """
    if dtype not in _DTYPES:
        raise UsageError(f'dtype "{dtype}" (expected one of: {", ".join(_DTYPES)})', where="--dtype")
    device, library, multiply = _torch_product(dtype) or _jax_product(dtype)
    rows = []
    for size in _SIZES:
        seconds = _time_product(multiply(size))
        rows.append(
            Calibration(device=device, dtype=dtype, size=size, tflops=2 * size**3 / seconds / 1e12, library=library)
        )
        if seconds > _SECONDS_A_SIZE / 8:  # larger ones take eight times as long, and reach no more
            break
    return rows


def _time_product(run: Callable[[], object]) -> float:
    """Return the median seconds of a product, after one that is not counted."""
    run()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS_A_SIZE
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _torch_product(dtype: str) -> tuple[str, str, Callable[[int], Callable[[], object]]] | None:
    try:
        import torch
    except ImportError:
        return None
    is_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_gpu else "CPU"

    def multiply(size: int) -> Callable[[], object]:
        # Random: products of zeros draw less power, and run faster.
        a: Any = torch.randn(size, size, device="cuda" if is_gpu else "cpu").to(getattr(torch, _DTYPES[dtype]))

        def run() -> None:
            torch.matmul(a, a)
            if is_gpu:
                torch.cuda.synchronize()

        return run

    return device, f"torch {torch.__version__}", multiply


def _jax_product(dtype: str) -> tuple[str, str, Callable[[int], Callable[[], object]]]:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        message = "calibration needs torch or JAX"
        raise ToolMissing(message, hint="pip install 'pitools-hpc[torch]'") from error
    product: Any = jax.jit(jnp.matmul)

    def multiply(size: int) -> Callable[[], object]:
        a = jax.random.normal(jax.random.key(0), (size, size)).astype(_DTYPES[dtype])
        return lambda: product(a, a).block_until_ready()

    return jax.devices()[0].device_kind, f"jax {jax.__version__}", multiply
