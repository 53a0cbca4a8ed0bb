"""Operations of a model's step against two independent counters, and the peaks of devices."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, UsageError
from pitools.perf.flops import mfu
from pitools.perf.flops.mfu import calibrate, find_peak, read_peaks, utilization
from pitools.perf.flops.model import ModelFile, Tower, attention_pairs, flops_per_sample, flops_per_token, load_model
from tests.performance import counted_models

BASE = {"layers": 2, "d_model": 512, "heads": 8, "d_ff": 1024, "gated": True, "vocab": 1024, "seq_lens": (256,)}
SHAPES = {
    "dense": ModelFile(towers={"language": Tower(**BASE)}),
    "gqa": ModelFile(towers={"language": Tower(**BASE, kv_heads=2)}),
    "moe": ModelFile(towers={"language": Tower(**BASE, experts=8, active_experts=2)}),
    "window": ModelFile(towers={"language": Tower(**BASE, window=64)}),
    "packed": ModelFile(towers={"language": Tower(**{**BASE, "seq_lens": (128, 96, 32)})}),
    "two towers": ModelFile(
        towers={
            "vision": Tower(**{**BASE, "vocab": 0, "seq_lens": (64,)}, frozen=True, bidirectional=True),
            "language": Tower(**BASE),
        },
        main="language",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(counted_models.torch_count, id="torch"),
        pytest.param(counted_models.xla_count, id="xla", marks=pytest.mark.own_process),
    ],
)
def test_three_counts_agree(name: str, count: object) -> None:
    """The closed form, with all pairs of a sequence as they compute them, is torch's, and XLA's within 2 %."""
    pytest.importorskip("torch" if count is counted_models.torch_count else "jax")
    model = SHAPES[name]
    counted = count(model, counted_models.maker(model))  # type: ignore[operator]
    # XLA also counts additions, exponentials and such.
    rel = 1e-9 if count is counted_models.torch_count else 0.02
    assert flops_per_sample(model, "full") == pytest.approx(counted, rel=rel)


# Llama 3 8B.
LLAMA = {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "gated": True, "vocab": 128256}


def test_published_figures() -> None:
    """GFLOP a token of Llama 3 8B at 8,192; and KempnerForge's 57.8 % on an H200, with the embedding in its 6 N."""
    model = ModelFile(towers={"language": Tower(**LLAMA, seq_lens=(8192,))})
    assert [round(flops_per_token(model, convention) / 1e9, 1) for convention in ("causal", "full")] == [51.5, 57.9]
    embedding = LLAMA["vocab"] * LLAMA["d_model"]
    model = ModelFile(towers={"language": Tower(**LLAMA, seq_lens=(4096,), extra_weights=embedding)})
    rows = utilization(model, 10471, 1, "NVIDIA H200", "bf16")
    assert [round(100 * (row.mfu or 0), 1) for row in rows] == [51.0, 54.4, 57.8]


def test_pairs_of_windows_and_packs() -> None:
    """Counted one by one: each query sees itself and what is before it, in its window and its document."""
    tower = Tower(**{**BASE, "layers": 3, "seq_lens": (700, 300)}, window=100, window_layers=1)
    for convention, share in (("causal", 1), ("full", 0)):
        counted = 0.0
        for length in tower.seq_lens:
            for query in range(length):
                for reach in (100, length, length):
                    counted += min(query + 0.5, reach) if share else min(length, reach)
        assert attention_pairs(tower, convention) == pytest.approx(counted, rel=0.01)  # type: ignore[arg-type]
    assert attention_pairs(tower, "weights") == 0


def test_frozen_towers_cost_what_they_compute() -> None:
    """Forward alone is a third of training; with gradients through it two thirds of the weights' part."""
    trained, frozen, passing = (
        flops_per_sample(ModelFile(towers={"t": Tower(**BASE, frozen=frozen, gradients_pass=passing)}), "weights")
        for frozen, passing in ((False, False), (True, False), (True, True))
    )
    assert (frozen / trained, passing / trained) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 4090", 165), ("TPU v5 lite", 197), ("TPU v4", 275),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None), ("TPU v5", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA A10G", None), ("NVIDIA GH200 480GB", None), ("cpu", None),
        ("GRID A100-10C", None), ("NVIDIA A100-40C", None), ("TPU v4 lite", None), ("NVIDIA H200 NVL", None),
        ("", None),
    ],
)  # fmt: skip
def test_peaks_by_the_names_of_drivers(name: str, tflops: float | None) -> None:
    """A variant with another rate is not the device it is named after, and an unknown one has no peak."""
    peak = find_peak(name, "bf16")
    assert (peak and peak.tflops) == tflops
    assert find_peak(name, "fp8") is None


def test_every_peak_has_its_source() -> None:
    """And is found by its own name."""
    for peak in read_peaks():
        assert peak.source
        assert peak.date
        assert find_peak(peak.device, peak.dtype) == peak


def test_more_than_the_peak_is_refused() -> None:
    """As is a speed or a peak that is none; without a peak there is no utilization."""
    model = ModelFile(towers={"t": Tower(**BASE)})
    with pytest.raises(UsageError):
        utilization(model, 1e9, 1, "NVIDIA H100 80GB HBM3", "bf16")
    for speed, peak in ((0.0, None), (math.inf, None), (1e3, 0.0), (1e3, -5.0), (1e3, math.nan)):
        with pytest.raises(UsageError):
            utilization(model, speed, 1, "NVIDIA H100 80GB HBM3", "bf16", peak)
    assert {row.mfu for row in utilization(model, 1e3, 1, "NVIDIA Unheard", "bf16")} == {None}
    assert utilization(model, 1e3, 2, "NVIDIA Unheard", "bf16", 100.0)[0].peak_source == "given"


@pytest.mark.own_process
def test_this_machine_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By products of torch or, without it, JAX; an unknown type is refused."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setattr(mfu, "_SIZES", (64, 128))
    monkeypatch.setattr(mfu, "_SECONDS_A_SIZE", 60.0)  # a busy machine may take long; 50 products end it
    by_torch = calibrate("fp32")
    monkeypatch.setitem(sys.modules, "torch", None)
    by_jax = calibrate("bf16")
    assert [row.size for row in by_torch + by_jax][:2] == [64, 128]
    assert {row.library.split()[0] for row in by_torch + by_jax} == {"torch", "jax"}
    assert all(row.tflops > 0 for row in by_torch + by_jax)
    with pytest.raises(UsageError):
        calibrate("int3")


@pytest.mark.parametrize(
    "change",
    [
        "heads = 3",
        "heads = 0",
        "kv_heads = 3",
        "seq_lens = []",
        "seq_lens = [0]",
        "experts = 8",
        "window_size = 4",
        "window_layers = 3",
        "window_layers = -2",
        "window = -1",
        "head_dim = -8",
        "shared_experts = -1",
        "vocab = -1",
        "shared_experts = 1",
        "extra_weights = -1",
        "active_experts = -1",
    ],
)
def test_a_wrong_model_file_is_refused(tmp_path: Path, change: str) -> None:
    """With its key; and a main tower that there is not."""
    keys = {"layers": "2", "d_model": "64", "heads": "4", "d_ff": "128", "gated": "false", "seq_lens": "[32]"}
    path = tmp_path / "model.toml"
    path.write_text("[towers.a]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()))
    assert load_model(path).main_tower.tokens == 32
    name, _, value = change.partition(" = ")
    path.write_text("[towers.a]\n" + "".join(f"{key} = {text}\n" for key, text in {**keys, name: value}.items()))
    with pytest.raises(ConfigError):
        load_model(path)
    path.write_text('main = "b"\n[towers.a]\n' + "".join(f"{key} = {text}\n" for key, text in keys.items()))
    with pytest.raises(ConfigError):
        load_model(path)
