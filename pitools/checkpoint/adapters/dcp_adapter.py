"""Save PyTorch states by its distributed checkpoint (DCP): plain, sharded (DTensor, FSDP2), nested; any world size.

Planner, writer and format are torch's: `torch.distributed.checkpoint.load` reads `payload/`. Only the agreement on
which rank writes what is ours: torch uses collectives for it, which in a background thread would mix with the
training's own.
"""

from __future__ import annotations

import base64
import io
import pathlib
import pickle
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from pitools.checkpoint.adapters.base import Digests, load_error
from pitools.checkpoint.adapters.dcp_files import DigestingFileSystem
from pitools.checkpoint.coordination.exchange import SaveExchange
from pitools.core.errors import ClusterError, ConfigError

# Classes that describe what is stored, by name: an unpickled class of another name could run any code.
_ALLOWED_CLASSES = {
    "builtins": "frozenset set slice",
    "collections": "ChainMap OrderedDict",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.distributed.checkpoint.storage": "WriteResult",
}
_ALLOWED_NAMES = {(module, name) for module, names in _ALLOWED_CLASSES.items() for name in names.split()}
# Python 3.13's name is another than that of those before and after.
_ALLOWED_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
# Types that are known to be loadable, also within lists and tuples.
_PLAIN_TYPES = {int, float, complex, bool, str, bytes, type(None), torch.Tensor, torch.nn.Parameter}
_RANK_IN_NAME = re.compile(r"__(\d+)_\d+\.distcp$")


class DcpAdapter:
    """The adapter of a `Checkpointer` for torch: states are (nested) dicts of tensors and plain values.

    Each rank saves its own shards; `load` writes into the tensors of `like`.
    """

    format = "dcp"

    def __init__(self) -> None:
        gpu = torch.cuda.is_available()
        # Keeps its buffers, so that only the first save allocates memory.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
            )
        )

    def describe(self, state: Any) -> dict[str, str]:
        """Name → type and shape of all that a state holds, over all ranks."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(state)
        return {str(name): _type_and_shape(value) for name, value in planner.state_dict.items()}

    def begin_save(self, state: Any, payload_dir: Future[Path]) -> Callable[[SaveExchange], Digests]:
        """Copy a state to this host; return the function that writes it into `payload_dir`, called once, in any thread.

        Raises ConfigError for values that torch can write but not load.
        """
        _require_loadable(state)
        staged = self._stager.stage(state)
        return lambda exchange: self._write(staged, payload_dir.result(), exchange)

    def load(self, payload: Path, like: Any) -> Any:
        """Return the state in `payload`, in the tensors of `like`. Raises DataError, Unreachable, ClusterError."""
        try:
            self._read(payload, like)
        except torch.OutOfMemoryError as error:
            hint = "free the GPU's memory before the restore, or choose a larger GPU"
            raise ClusterError("out of GPU memory while loading", where=str(payload), hint=hint) from error
        except Exception as error:
            raise load_error(error, payload) from error
        return like

    def random_state(self) -> dict[str, Any]:
        """torch's generators: of the CPU, and of this rank's GPU."""
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return {name: base64.b64encode(bytes(state.numpy())).decode() for name, state in states.items()}

    def set_random_state(self, states: dict[str, Any]) -> None:
        """Restore the random generators to `states`; a GPU's only where there is a GPU."""
        decoded = {
            name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            for name, text in states.items()
        }
        torch.set_rng_state(decoded["cpu"])
        if "cuda" in decoded and torch.cuda.is_available():
            torch.cuda.set_rng_state(decoded["cuda"])

    def rank_of_file(self, path: str, world_size: int) -> int:
        """The rank that wrote this file below `payload`."""
        match = _RANK_IN_NAME.match(path)
        return int(match[1]) % world_size if match else 0

    def _read(self, payload: Path, like: Any) -> None:
        planner, reader = _LoadPlanner(), FileSystemReader(payload)
        reader.fs = DigestingFileSystem()
        metadata = _unpickle((payload / ".metadata").read_bytes())
        planner.set_up_planner(like, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        # Every rank plans alone: its reads do not depend on other ranks.
        (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan([plan])
        reader.read_data(planner.finish_plan(plan), planner).wait()

    def _write(self, staged: Any, payload: Path, exchange: SaveExchange) -> Digests:
        is_rank0 = exchange.rank == 0
        # Its files are synced as they are closed; torch's own sync comes before the last bytes.
        planner, writer = DefaultSavePlanner(), _Writer(payload, sync_files=False, overwrite=False)
        writer.fs = files = DigestingFileSystem()
        planner.set_up_planner(staged, writer.storage_meta(), is_rank0)
        writer.set_up_storage_writer(is_rank0)
        described: list[Any] = []

        def divide(plans: list[bytes]) -> list[bytes]:
            shared, metadata = planner.create_global_plan([_unpickle(plan) for plan in plans])
            described.append(metadata)
            return [pickle.dumps(plan) for plan in writer.prepare_global_plan(shared)]

        def finish(results: list[bytes]) -> list[bytes]:
            writer.finish(described[0], [_unpickle(result) for result in results])
            return []

        plan = writer.prepare_local_plan(planner.create_local_plan())
        share = planner.finish_plan(_unpickle(exchange(pickle.dumps(plan), divide)))
        results = writer.write_data(share, planner).wait()
        exchange(pickle.dumps(results), finish)
        return files.digests


class _Writer(FileSystemWriter):  # type: ignore[misc]  # torch's classes are untyped to mypy
    def storage_meta(self) -> Any:
        # As text: a pickled path names a class that depends on the version of Python.
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)


_PythonUnpickler: Any = pickle._Unpickler  # the C unpickler, twice as fast, cannot override BUILD


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # untyped
    """Of descriptions only: a pickle can name any function, and a checkpoint or a message is not to be trusted so."""

    dispatch = dict(_PythonUnpickler.dispatch)

    def load_build(self) -> None:
        # A state that is set on a class, a function or an enum's member would change it for the whole process.
        kind = type(self.stack[-2])
        if not is_dataclass(kind) and kind is not ChainMap:
            raise pickle.UnpicklingError(f"state of class {kind.__name__}: not allowed in a checkpoint's metadata")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def get_extension(self, code: int) -> None:
        # A class seen before would come from a cache, without a call of find_class.
        raise pickle.UnpicklingError(f"pickle extension {code}: not allowed in a checkpoint's metadata")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_PATHS:
            return pathlib.PosixPath
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        # Compared by name before any lookup: importing a module runs its code.
        if (module, name) in _ALLOWED_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), (torch.dtype, torch.layout, torch.memory_format)):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"class {module}.{name}: not allowed in a checkpoint's metadata")


def _enum_member(kind: Any, name: Any) -> Enum:
    """Return a member of an enum: Python 3.11.0 to 3.11.3 pickle one as getattr(kind, name), others by its value."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(
        f"getattr of {kind!r}: not allowed in a checkpoint's metadata (expected a member of an enum)"
    )


def _unpickle(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


class _LoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]  # torch's classes are untyped to mypy
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        # Numbers, text and lists of them; any other class that the bytes name is refused here.
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _require_loadable(value: Any, name: str = "") -> None:
    """Check, at each save, that the leaves of a state that are not tensors can be loaded again."""
    if type(value) in _PLAIN_TYPES or isinstance(value, torch.Tensor):
        return
    parts: Mapping[Any, Any] | None = value if isinstance(value, Mapping) else None
    if type(value) in (list, tuple):
        parts = dict(enumerate(value))
    if (
        parts is not None and {*map(type, parts.values())} <= _PLAIN_TYPES
    ):  # the usual case, fast: a state has thousands of leaves
        return
    if parts is None or isinstance(value, tuple):  # torch takes a tuple as one leaf
        _require_round_trip(value, name)
        return
    for key, part in parts.items():
        _require_loadable(part, f"{name}.{key}" if name else str(key))


def _require_round_trip(value: Any, name: str) -> None:
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:
        problem = (
            f'state["{name}"]: {type(value).__module__}.{type(value).__qualname__} cannot be loaded again by torch'
        )
        hint = "save a tensor (torch.from_numpy), a plain number (.item()), text, or lists and dicts of such"
        raise ConfigError(problem, where="the state to save", hint=hint) from error


def _type_and_shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "value"
    return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
