"""Small transformers that torch and XLA count: the same equations, over either library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pitools.perf.flops.model import ModelFile, Tower


class Ops(NamedTuple):
    """What the libraries call differently."""

    array: Callable[[Any], Any]
    softmax: Callable[[Any], Any]
    relu: Callable[[Any], Any]
    concat: Callable[[list[Any]], Any]


def random_weights(tower: Tower, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    width, kv = tower.d_model, tower.d_model // tower.heads * (tower.kv_heads or tower.heads)
    experts = (tower.active_experts and tower.experts) or 1
    shapes = {
        "q": (width, width), "k": (width, kv), "v": (width, kv), "o": (width, width), "router": (width, tower.experts),
        "gate": (experts, width, tower.d_ff), "up": (experts, width, tower.d_ff), "down": (experts, tower.d_ff, width),
    }  # fmt: skip
    return [
        {name: (0.02 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items() if shape[-1]}
        for _ in range(tower.layers)
    ]


def attend(ops: Ops, tower: Tower, q: Any, k: Any, v: Any, reach: int) -> Any:
    """Attention of one sequence, (L, heads x head_dim), each query over `reach` keys."""
    length, heads, dim = len(q), tower.heads, tower.d_model // tower.heads
    q, k, v = (x.reshape(length, -1, dim) for x in (q, k, v))
    group = heads // k.shape[1]
    q = q.reshape(length, k.shape[1], group, dim)
    if reach < length:
        near = ops.array(np.clip(np.arange(length)[:, None] - np.arange(reach)[None], 0, None))
        k, v = k[near], v[near]  # (L, reach, kv heads, dim)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        scores = q @ k.swapaxes(2, 3) / math.sqrt(dim)  # (L, kv heads, group, reach)
        return (ops.softmax(scores) @ v).reshape(length, -1)
    q = q.swapaxes(0, 1).reshape(k.shape[1], length * group, dim)
    k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    out = ops.softmax(q @ k.swapaxes(1, 2) / math.sqrt(dim)) @ v
    return out.reshape(-1, length, group, dim).swapaxes(0, 1).reshape(length, -1)


def mlp(ops: Ops, tower: Tower, layer: dict[str, Any], x: Any) -> Any:
    tokens, width = x.shape
    if not tower.experts:
        gate, up, down = layer["gate"][0], layer["up"][0], layer["down"][0]
        return (ops.relu(x @ gate) * (x @ up)) @ down
    scores = ops.softmax(x @ layer["router"])
    slots = ops.array(np.arange(tokens * tower.active_experts).reshape(tower.experts, -1) % tokens)  # balanced
    chosen = x[slots]
    out = (ops.relu(chosen @ layer["gate"]) * (chosen @ layer["up"])) @ layer["down"]
    out = out.reshape(tower.active_experts, tokens, width).sum(0)  # each token is in as many slots
    return out * scores.sum(-1, keepdims=True) * scores[:, :1]


def run_tower(ops: Ops, tower: Tower, layers: list[dict[str, Any]], x: Any) -> Any:
    for layer in layers:
        q, k, v = x @ layer["q"], x @ layer["k"], x @ layer["v"]
        parts, start = [], 0
        for length in tower.seq_lens:
            end = start + length
            reach = min(length, tower.window or length)
            parts.append(attend(ops, tower, q[start:end], k[start:end], v[start:end], reach))
            start = end
        x = x + ops.concat(parts) @ layer["o"]
        x = x + mlp(ops, tower, layer, x)
    return x


def loss(ops: Ops, model: ModelFile, trained: Any, frozen: Any, inputs: dict[str, Any]) -> Any:
    """The mean of the logits' softmax of class 0. The tokens of a frozen tower come first in the main one's."""
    seen = [run_tower(ops, model.towers[name], layers, inputs[name]) for name, layers in frozen.items()]
    main = model.main or next(iter(model.towers))
    x = run_tower(ops, model.towers[main], trained["layers"], ops.concat([*seen, inputs[main] + trained["embedding"]]))
    return ops.softmax(x @ trained["head"])[:, 0].mean()


def torch_count(model: ModelFile, make: Callable[[], tuple[Any, Any, Any]]) -> float:
    import torch
    from torch.utils._pytree import tree_map
    from torch.utils.flop_counter import FlopCounterMode

    ops = Ops(torch.as_tensor, lambda x: torch.softmax(x, -1), torch.relu, torch.cat)
    trained, frozen, inputs = make()
    trained = tree_map(lambda x: torch.tensor(x, requires_grad=True), trained)
    frozen, inputs = (tree_map(torch.tensor, x) for x in (frozen, inputs))
    with FlopCounterMode(display=False) as counter:
        loss(ops, model, trained, frozen, inputs).backward()
    return float(counter.get_total_flops())


def xla_count(model: ModelFile, make: Callable[[], tuple[Any, Any, Any]]) -> float:
    import jax
    import jax.numpy as jnp

    ops = Ops(jnp.asarray, lambda x: jax.nn.softmax(x, -1), jax.nn.relu, jnp.concatenate)
    trained, frozen, inputs = make()
    gradient = jax.jit(jax.grad(lambda trained, frozen, inputs: loss(ops, model, trained, frozen, inputs)))
    return float(gradient.lower(trained, frozen, inputs).cost_analysis()["flops"])


def maker(model: ModelFile) -> Callable[[], tuple[Any, Any, Any]]:
    """Return what makes (trained, frozen, inputs) of a model."""
    main = model.main or next(iter(model.towers))

    def make() -> tuple[Any, Any, Any]:
        rng = np.random.default_rng(0)
        tower = model.towers[main]
        frozen = {name: random_weights(other, rng) for name, other in model.towers.items() if name != main}
        seen = sum(model.towers[name].tokens for name in frozen)
        inputs = {name: rng.standard_normal((model.towers[name].tokens, tower.d_model)) for name in frozen}
        inputs[main] = rng.standard_normal((tower.tokens - seen, tower.d_model))
        trained = {
            "layers": random_weights(tower, rng),
            "embedding": rng.standard_normal((1, tower.d_model)).astype(np.float32),
            "head": rng.standard_normal((tower.d_model, tower.vocab)).astype(np.float32),
        }
        return trained, frozen, {name: x.astype(np.float32) for name, x in inputs.items()}

    return make
