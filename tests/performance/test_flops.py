"""Operations of a model's step against two independent counters, and the peaks of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, UsageError
from pitools.perf.flops.mfu import calibrate, find_peak, read_peaks, utilization
from pitools.perf.flops.model import ModelFile, Tower, attention_pairs, flops_per_sample, flops_per_token, load_model
from tests.performance import counted_models

BASE = {"layers": 2, "d_model": 512, "heads": 8, "d_ff": 1024, "vocab": 1024, "seq_lens": (256,)}
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
@pytest.mark.parametrize("count", [counted_models.torch_count, counted_models.xla_count], ids=["torch", "xla"])
def test_three_counts_agree(name: str, count: object) -> None:
    """The closed form, with all pairs of a sequence as these libraries compute them, is within 2 % of each counter."""
    pytest.importorskip("torch" if count is counted_models.torch_count else "jax")
    model = SHAPES[name]
    counted = count(model, counted_models.maker(model))  # type: ignore[operator]
    assert flops_per_sample(model, "full") == pytest.approx(counted, rel=0.02)
