"""Batches in five lines: `pitools.load`."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pitools.core.errors import ConfigError, UsageError
from pitools.loader.loader import Loader, require_one_worker
from pitools.loader.open import open_version
from pitools.loader.sampling.episode_filter import EpisodeFilters, filter_episodes
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan

if TYPE_CHECKING:
    from pitools.loader.device_prefetch import DevicePrefetcher
    from pitools.loader.torch import StreamLoader

Framework = Literal["numpy", "torch", "jax"]


def load(
    dataset: str | Path,
    *,
    windows: Mapping[str, tuple[int, int]],
    batch_size: int,
    seed: int = 0,
    framework: Framework = "numpy",
    device: Any = None,
    workers: int = 0,
    transform: Callable[[Any], Any] | None = None,
    splits: Sequence[str] = (),
    instructions: Sequence[str] = (),
    shuffle: bool = True,
    pad: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    cache: Path | None = None,
) -> Loader | DevicePrefetcher[Any] | StreamLoader:
    """Return an endless iterator of batches of windows around each step; it has `state_dict` and `load_state_dict`.

    dataset: a version's folder, ROOT/NAME, ROOT/NAME@TAG, or a URL with `cache`. windows: array → (before, after), the
    steps [t - before, t + after) around step t: `after` includes t, so that (0, 1) is step t alone and (1, 0) the one
    before it. batch_size: samples of all ranks together. framework, device: NumPy arrays; tensors on a torch device, by
    default the CPU; or JAX arrays on a device or sharding, by default this process's first device. workers, transform:
    processes of torch's DataLoader, which call `transform` with each batch and return CPU tensors. splits,
    instructions: only episodes of these; patterns for instructions. pad: also windows beyond an episode's ends, masked
    in `batch.valid_mask`. rank, world_size: None for those of this process (PIT_RANK, RANK, or one rank).

    A batch has `arrays`, `valid_mask` and `extras` by name: see `pitools.loader.loader.Batch`. Without workers, NumPy
    and CPU tensors are valid until the next batch. Raises UsageError, ConfigError, DataError.
    """
    _require_device(framework, device, workers)
    if workers and framework != "torch":
        raise UsageError("workers without torch", where="load", hint='framework="torch"; others read by threads')
    if transform and not workers:
        raise UsageError("transform without workers", where="load", hint="call it in the loop, or give workers=4")
    for name, value in (("splits", splits), ("instructions", instructions)):
        if isinstance(value, str):  # a sequence of letters
            raise UsageError(f"{name} = {value!r}: not a sequence of texts", where="load", hint=f"{name}=[{value!r}]")
    if rank is None or world_size is None:
        require_one_worker("pitools.load")
    own_rank, ranks = _ranks() if rank is None or world_size is None else (rank, world_size)
    make = partial(
        _make_loader,
        str(dataset),
        _spans(windows),
        EpisodeFilters(splits=tuple(splits), instructions=tuple(instructions)),
        batch_size,
        seed,
        shuffle,
        pad,
        own_rank if rank is None else rank,
        ranks if world_size is None else world_size,
        cache,
    )
    if framework == "torch" and workers:
        from pitools.loader.torch import BatchStream, StreamLoader

        return StreamLoader(BatchStream(make, transform=transform), num_workers=workers)
    if framework == "torch":
        from pitools.loader.torch import torch_batches

        return torch_batches(make(), device or "cpu")
    if framework == "jax":
        import jax

        from pitools.loader.jax import jax_batches

        return jax_batches(make(), device or jax.local_devices()[0])
    return make()


def _spans(windows: Mapping[str, tuple[int, int]]) -> dict[str, WindowSpan]:
    """Return the windows as spans. Raises UsageError for another form."""
    try:
        return {name: WindowSpan(*map(operator.index, span)) for name, span in windows.items()}
    except (AttributeError, TypeError) as error:
        hint = 'windows={"action": (0, 16)}: this step and the 15 after it'
        raise UsageError(f"windows = {windows!r}: not array → (before, after)", where="load", hint=hint) from error


def _make_loader(
    dataset: str,
    spans: Mapping[str, WindowSpan],
    filters: EpisodeFilters,
    global_batch_size: int,
    seed: int,
    shuffle: bool,
    pad: bool,
    rank: int,
    world_size: int,
    cache: Path | None,
) -> Loader:
    """Return a loader; a function of a module, because torch's workers unpickle it."""
    reader = open_version(dataset, cache=cache)
    windows = Windows(reader.offsets, filter_episodes(reader, filters), spans, pad=pad)
    samples = WindowSamples(reader, windows, seed=seed, shuffle=shuffle)
    return Loader(samples, global_batch_size=global_batch_size, rank=rank, world_size=world_size)


def _require_device(framework: str, device: Any, workers: int) -> None:
    """Raise UsageError for an unknown framework, and for a device that it would not use."""
    if framework not in get_args(Framework):
        hint = f"one of {', '.join(get_args(Framework))}"
        raise UsageError(f'framework "{framework}": unknown', where="load", hint=hint)
    if device is not None and framework == "numpy":
        raise UsageError("device with NumPy arrays", where="load", hint='framework="torch" or "jax"')
    if workers and device is not None and str(device) != "cpu":
        hint = "call tensor.to(device) in the loop, or load without workers"
        raise UsageError(f"device {device} with workers, which return CPU tensors", where="load", hint=hint)


def _ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, of pitools' variables or torch's; (0, 1) without either.

    Raises ConfigError for several Slurm tasks without either: each would read the whole batch.
    """
    for prefix in ("PIT_", ""):
        rank, world_size = os.environ.get(f"{prefix}RANK", ""), os.environ.get(f"{prefix}WORLD_SIZE", "")
        if rank.isdecimal() and world_size.isdecimal():
            return int(rank), int(world_size)
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        hint = "start the ranks by `pit launch run`, or give rank= and world_size="
        problem = f"SLURM_STEP_NUM_TASKS={os.environ['SLURM_STEP_NUM_TASKS']}, but PIT_WORLD_SIZE is not set"
        raise ConfigError(problem, where="environment", hint=hint)
    return 0, 1
