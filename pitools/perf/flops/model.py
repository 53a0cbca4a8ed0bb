"""Count the operations of a training step, in closed form, from a model file.

Matrix products of the weights cost 2 operations a weight and token forward, once more for the gradient of the input and
once more for that of the weight: 6 N. Attention costs 4 · heads · head_dim for each pair of a query and a key forward,
twice that backward. The conventions differ in the pairs of a sequence of length L:

    weights   none: "6 N"
    causal    L² / 2: what a causal model needs, as Megatron and MaxText count
    full      L²: as PaLM, torchtitan and KempnerForge count

With a window W < L these are L·W - W²/2 and L·W. Neither recomputed activations nor the embedding table are counted;
where another's "6 N" includes the table, as KempnerForge's does, name it in extra_weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from pitools.core.errors import ConfigError
from pitools.core.strict_toml import convert_tables, read_toml

Convention = Literal["weights", "causal", "full"]
CONVENTIONS: tuple[Convention, ...] = ("weights", "causal", "full")


class Tower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stack of equal transformer layers.

    head_dim: 0 is d_model / heads. kv_heads: 0 is heads. gated: an MLP of three matrices, as SwiGLU, instead of two; to
    be given, as the difference is a quarter of the operations, and no other number shows it.
    experts: of a mixture, 0 for none; active_experts: of them for each token; shared_experts: for every token; each has
    d_ff. window: of sliding attention, 0 for none; window_layers: the layers that have it, -1 for all. vocab: of the
    output layer, 0 without one; an embedding table costs nothing. extra_weights: of other matrices, used once a token.
    seq_lens: lengths of the sequences of one sample that cannot see each other: one, or the documents packed in it.
    frozen: no gradient of the weights. gradients_pass: a frozen tower has gradients of its input, for towers below.
    bidirectional: every token sees all, as in a vision tower.
    """

    layers: int
    d_model: int
    heads: int
    d_ff: int
    gated: bool
    seq_lens: tuple[int, ...]
    head_dim: int = 0
    kv_heads: int = 0
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    window: int = 0
    window_layers: int = -1
    vocab: int = 0
    extra_weights: int = 0
    frozen: bool = False
    gradients_pass: bool = False
    bidirectional: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return sum(self.seq_lens)

    @property
    def passes(self) -> int:
        """Forward 1, gradients of the inputs 1, of the weights 1."""
        return 3 if not self.frozen else 1 + self.gradients_pass

    @property
    def _width(self) -> int:
        return self.heads * (self.head_dim or self.d_model // self.heads)


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model: towers that each see their own tokens of a sample. `tokens` of a step's speed are those of `main`, the
    name of a tower; "" is the only one."""

    towers: dict[str, Tower]
    main: str = ""

    @property
    def main_tower(self) -> Tower:
        """The tower whose tokens are counted."""
        return self.towers[self.main or next(iter(self.towers))]


def load_model(path: Path) -> ModelFile:
    """Read a model file. Raises ConfigError with the wrong key."""
    model = convert_tables(read_toml(path), ModelFile, str(path))
    if not model.towers or ((model.main or len(model.towers) > 1) and model.main not in model.towers):
        names = ", ".join(model.towers) or "none"
        message = f'main = "{model.main}" is no tower (expected one of: {names})'
        raise ConfigError(message, where=str(path), hint='main = "language"')
    for name, tower in model.towers.items():
        if problem := _problem(tower):
            raise ConfigError(problem, where=f"{path}: towers.{name}")
    return model


def _problem(tower: Tower) -> str:
    sizes = {name: getattr(tower, name) for name in ("layers", "d_model", "heads", "d_ff")}
    for name, value in sizes.items():
        if value < 1:
            return f"{name} = {value} (expected at least 1)"
    least = {name: getattr(tower, name) for name in ("head_dim", "shared_experts", "window", "vocab", "extra_weights")}
    for name, value in least.items():
        if value < 0:
            return f"{name} = {value} (expected 0 or more)"
    if not -1 <= tower.window_layers <= tower.layers:
        return f"window_layers = {tower.window_layers} of layers = {tower.layers} (expected -1 for all, or 0 or more)"
    if not tower.head_dim and tower.d_model % tower.heads:
        return f"heads = {tower.heads} does not divide d_model = {tower.d_model} (expected head_dim)"
    if tower.kv_heads < 0 or tower.heads % (tower.kv_heads or tower.heads):
        return f"kv_heads = {tower.kv_heads} does not divide heads = {tower.heads}"
    if not tower.seq_lens or min(tower.seq_lens) < 1:
        return "seq_lens: expected at least one length of 1 or more"
    if bool(tower.experts) != bool(tower.active_experts) or not 0 <= tower.active_experts <= tower.experts:
        return f"active_experts = {tower.active_experts} of experts = {tower.experts}"
    if tower.shared_experts and not tower.experts:
        return f"shared_experts = {tower.shared_experts} of experts = 0 (expected a mixture)"
    return ""


def active_weights(tower: Tower) -> int:
    """Return the weights of matrices that each token meets; of a mixture, those of its active experts."""
    width = tower._width
    kv_width = width // tower.heads * (tower.kv_heads or tower.heads)
    attention = 2 * tower.d_model * width + 2 * tower.d_model * kv_width
    mlp = (3 if tower.gated else 2) * tower.d_model * tower.d_ff
    mlps = tower.active_experts + tower.shared_experts if tower.experts else 1
    layer = attention + mlps * mlp + tower.d_model * tower.experts  # the router sees all experts
    return tower.layers * layer + tower.d_model * tower.vocab + tower.extra_weights


def attention_pairs(tower: Tower, convention: Convention) -> float:
    """Return the pairs of query and key of one sample, over all layers."""
    if convention == "weights":
        return 0.0
    windowed = 0 if not tower.window else tower.layers if tower.window_layers < 0 else tower.window_layers
    is_causal = convention == "causal" and not tower.bidirectional
    total = 0.0
    for length in tower.seq_lens:
        span = min(length, tower.window) if tower.window else length
        for layers, reach in ((windowed, span), (tower.layers - windowed, length)):
            total += layers * (length * reach - (reach**2 / 2 if is_causal else 0.0))
    return total


def flops_per_sample(model: ModelFile, convention: Convention) -> float:
    """Return the operations of forward and backward of one sample, over all towers."""
    total = 0.0
    for tower in model.towers.values():
        attention = 4 * tower._width * attention_pairs(tower, convention)
        # A frozen tower still has the gradients of queries, keys and values if gradients pass: twice the forward.
        attention_passes = 3 if tower.passes > 1 else 1
        total += tower.passes * 2 * active_weights(tower) * tower.tokens + attention_passes * attention
    return total


def flops_per_token(model: ModelFile, convention: Convention) -> float:
    """Return the operations of forward and backward for each token of the main tower."""
    return flops_per_sample(model, convention) / model.main_tower.tokens
