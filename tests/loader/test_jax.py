"""Batches as JAX arrays: on one device, over a mesh, and over the processes of a job."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train import forked_ranks

pytest.importorskip("jax", reason="JAX is not installed")

LENGTHS = (40, 3, 25, 60, 17)
# As a module for programs of their own: JAX's devices are counted once, when a process starts.
COMMON = """
import json, os, sys
from itertools import islice
from pathlib import Path
import numpy as np
from pitools.loader.loader import Loader
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

def loader(path=sys.argv[-1], **more):
    arrays = VersionReader(Path(path), resident_bytes=0)
    spans = {"obs/image": WindowSpan(1, 1), "action": WindowSpan(0, 8), "obs/state": WindowSpan(1, 1)}
    windows = Windows(arrays.offsets, np.arange(5), spans, pad=True)
    return Loader(WindowSamples(arrays, windows), **{"global_batch_size": 16, **more})
"""


@pytest.fixture(scope="module")
def path(record: Callable[..., Path]) -> Path:
    """A small version."""
    return record(LENGTHS)


Ran = tuple[forked_ranks.Fork, Path]


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[[str], forked_ranks.Server]]:
    """A server of forks, by framework."""
    yield from forked_ranks.servers()


@pytest.fixture
def run(server: Callable[[str], forked_ranks.Server], tmp_path: Path) -> Iterator[Callable[..., Ran]]:
    """Starts a program with `COMMON` before it: `run(code, *argv, NAME=value)`."""
    begin: list[Ran] = []

    def run(code: str, *argv: str, **env: str) -> Ran:
        out = tmp_path / f"{len(begin)}.out"
        code = f"import sys\nsys.argv = {['', *argv]!r}\n{COMMON}{code}"
        begin.append((server("jax").start(code, forked_ranks.environment() | env, out), out))
        return begin[-1]

    yield run
    for process, _ in begin:
        process.kill()
        process.wait(100)


def said(*ran: Ran) -> list[Any]:
    """What each printed, as JSON."""
    ends = [process.wait(100) for process, _ in ran]
    texts = [out.read_text() for _, out in ran]
    assert ends == [0] * len(ran), "\n".join(texts)
    return [json.loads(next(line for line in text.splitlines() if line.startswith("[["))) for text in texts]


MESH = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pitools.loader.jax import jax_batches
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
plain, batches = loader(), jax_batches(loader(), NamedSharding(mesh, PartitionSpec("data")))
kept = []
for batch, expected in zip(islice(batches, 6), plain):
    for part in ("arrays", "valid_mask"):
        for name, array in getattr(expected, part).items():
            found = getattr(batch, part)[name]
            assert found.sharding.spec == PartitionSpec("data") and found.addressable_shards[0].data.shape[0] == 4
            np.testing.assert_array_equal(found, array.astype(found.dtype))
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(shard.data, array[shard.index].astype(found.dtype))
    np.testing.assert_array_equal(np.asarray(batch.sample_seeds).view(np.uint64)[:, 0], expected.sample_seeds)
    assert jax.random.uniform(jax.random.wrap_key_data(batch.sample_seeds[3])).shape == ()
    assert batch.sample_indices.tolist() == expected.sample_indices.tolist()
    kept.append((batch, {name: array.copy() for name, array in expected.arrays.items()}))
for batch, arrays in kept:  # after their buffers have been filled again
    for name, array in arrays.items():
        np.testing.assert_array_equal(batch.arrays[name], array.astype(batch.arrays[name].dtype))
assert batches.state().position == 6 * 16 and len(jax.devices()) == 8
print(json.dumps([sorted(batch.arrays), str(batch.arrays["obs/image"].dtype)]))
"""


def test_a_batch_over_a_mesh_is_the_global_batch(path: Path, run: Callable[..., Ran]):
    """On eight devices of four rows: each shard has its samples, also after the loader has filled its buffers again."""
    (actual,) = said(run(MESH, str(path), XLA_FLAGS="--xla_force_host_platform_device_count=8"))
    assert actual == [["action", "obs/image", "obs/state"], "uint8"]


RANKS = """
import jax
rank, count, port = map(int, sys.argv[1:4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.experimental import multihost_utils
from pitools.core.errors import ConfigError
from pitools.loader.jax import jax_batches
mesh = Mesh(np.array(jax.devices()), ("data",))
over = NamedSharding(mesh, PartitionSpec("data"))
batches = jax_batches(loader(rank=rank, world_size=count), over)
sums = []
for batch in islice(batches, 5):
    assert batch.arrays["obs/image"].shape[0] == 16 and len(batch.sample_indices) == 16 // count
    images, seeds = batch.arrays["obs/image"], batch.sample_seeds
    weighted = jax.jit(lambda x, k: (x.astype(float).sum((1, 2, 3, 4)), k))(images, seeds)
    whole, keys = multihost_utils.process_allgather(weighted, tiled=True)
    sums.append([whole.tolist(), np.asarray(keys).tolist()])
wrong = jax_batches(loader(rank=count - 1 - rank, world_size=count), over)
try:
    next(wrong)
    raise SystemExit("a part that belongs elsewhere was taken")
except ConfigError as error:
    assert f"rank={rank}, world_size={count}" in error.hint, error.hint
alone = jax_batches(loader(rank=rank, world_size=count), jax.local_devices()[0])
assert next(alone).arrays["action"].shape[0] == 16 // count
batches.close(), wrong.close(), alone.close()
multihost_utils.sync_global_devices("end")
print(json.dumps(sums))
jax.distributed.shutdown()
"""


@pytest.mark.parametrize("count", [2, 4])
def test_processes_put_the_global_batch_together(path: Path, run: Callable[..., Ran], count: int):
    """Each reads its part, all see one batch, the same for 2 and 4; a part that belongs elsewhere is refused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    actual = said(*(run(RANKS, str(rank), str(count), port, str(path), NPROC="1") for rank in range(count)))
    scope: dict[str, Any] = {}
    exec(COMMON.replace("sys.argv[-1]", "None"), scope)
    expected = [
        [
            batch.arrays["obs/image"].astype(np.float32).sum((1, 2, 3, 4)).tolist(),
            batch.sample_seeds.view(np.uint32).reshape(-1, 2).tolist(),
        ]
        for batch in islice(scope["loader"](path), 5)
    ]
    for sums in actual:
        assert sums == expected
