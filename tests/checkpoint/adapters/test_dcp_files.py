"""Digests that are taken while DCP writes: they are those of the files, and nothing is read a second time."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import random
import re
from collections import ChainMap, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="this framework is not installed")

from torch.distributed.checkpoint.planner import WriteItemType  # noqa: E402

from pitools.checkpoint.adapters import dcp_adapter  # noqa: E402
from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter  # noqa: E402
from pitools.checkpoint.adapters.dcp_files import DigestingFileSystem  # noqa: E402
from pitools.checkpoint.checkpointer import Checkpointer  # noqa: E402
from pitools.checkpoint.store import hashing, layout, lookup, publish, verify  # noqa: E402
from pitools.checkpoint.store.hashing import FileDigest  # noqa: E402
from pitools.core.errors import ConfigError, DataError  # noqa: E402
from pitools.store.digest import digest_file  # noqa: E402


def test_the_digest_is_the_file_s(tmp_path: Path) -> None:
    """Of small and large pieces, of tensors' views and of bytes, over more than one of the digest's ranges."""
    rng, files, path = random.Random(4), DigestingFileSystem(), tmp_path / "a"
    blocks: list[Any] = [rng.randbytes(size) for size in (0, 1, 300_000, 5, (1 << 20) + 3)]
    blocks += [memoryview(bytes(66 << 20)), io.BytesIO(b"described").getbuffer(), torch.arange(70_000).numpy()]
    with files.create_stream(path, "wb") as stream:
        for block in blocks:
            assert stream.write(block) == memoryview(block).nbytes
        assert stream.tell() == sum(memoryview(block).nbytes for block in blocks)
        stream.close()
    files.rename(path, tmp_path / "b")
    assert files.digests == {"b": FileDigest(*digest_file(tmp_path / "b"))}
    with files.create_stream(tmp_path / "b", "rb") as stream:
        assert stream.read(3) == blocks[1] + blocks[2][:2]


def test_what_was_not_written_to_its_end_has_none(tmp_path: Path) -> None:
    """An error in the middle of a file leaves no digest to believe."""
    files = DigestingFileSystem()
    with pytest.raises(TypeError), files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write("no bytes")
    assert files.digests == {}


def test_a_save_reads_nothing_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that DCP writes is sealed as it was given, durable, and found good; only what is ours is read."""
    read: list[str] = []
    real = hashing.open_regular
    monkeypatch.setattr(
        "pitools.checkpoint.store.hashing.open_regular", lambda path: read.append(path.name) or real(path)
    )
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with Checkpointer(folder, DcpAdapter()) as guard:
        guard.save(1, {"w": torch.arange(200_000), "b": {"lr": 0.5}})
    assert sorted(read) == ["rng_states.json", "state_schema.json"]
    assert {"__0_0.distcp", ".metadata.tmp"} <= set(synced)
    assert synced.count("__0_0.distcp") == 1
    assert verify.verify_checkpoint(folder / "step_1") == []


def test_a_file_that_changed_since_is_refused(folder: Path) -> None:
    """Where a file has another size than was written, the digest is not sealed."""
    place = layout.unpublished_path(folder, 1, "a")
    (layout.create_payload_dir(place) / "w").write_bytes(b"12345")
    reference = {"payload/w": FileDigest(4, "xxh3_128:" + "0" * 32)}
    with pytest.raises(DataError, match="expected 4 bytes, got 5"):
        publish.digest_share(place, 0, 1, known_digests=reference)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_index_is_read_by_any_python(folder: Path) -> None:
    """It holds no path, whose pickle names a class that 3.13 has elsewhere; an index with such a one is read as well.

    torch's own load reads what is written.
    """
    with Checkpointer(folder, DcpAdapter()) as guard:
        guard.save(1, {"w": torch.arange(3.0), "epoch": 2})
    payload = folder / "step_1" / "payload"
    assert b"pathlib" not in (payload / ".metadata").read_bytes()
    for module in (b"pathlib", b"pathlib._local"):
        assert dcp_adapter._unpickle(b"c" + module + b"\nPosixPath\n(V/a\ntR.") == Path("/a")
    state = {"w": torch.zeros(3), "epoch": 0}
    torch.distributed.checkpoint.load(state, checkpoint_id=payload, no_dist=True)
    assert (state["w"].tolist(), state["epoch"]) == ([0.0, 1.0, 2.0], 2)


def test_a_pickle_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only a description names is not imported to see what it is: that would run its code."""
    (tmp_path / "named_in_a_pickle.py").write_text("import pathlib; pathlib.Path(__file__ + '.ran').touch()\nx = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for data in (b"cnamed_in_a_pickle\nx\n.", b"ctorch\nserialization.os.system\n.", b"cos\nsystem\n."):
        with pytest.raises(pickle.UnpicklingError, match="not allowed"):
            dcp_adapter._unpickle(data)
    assert not (tmp_path / "named_in_a_pickle.py.ran").exists()
    reference = [torch.float32, torch.Size([2]), torch.strided, ChainMap({"a": 1}), OrderedDict(a=1)]
    assert dcp_adapter._unpickle(pickle.dumps(reference)) == reference


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("_fsspec_filesystem", "FsspecReader"),
        ("filesystem", "FileSystemWriter"),
        ("metadata", "os.system"),
        ("metadata", "Metadata.__init__"),
        ("metadata", "TensorProperties.create_from_tensor"),
    ],
)
def test_a_class_of_torch_s_is_let_in_by_its_name(module: str, name: str) -> None:
    """One beside those that describe may open any address that it is given, and run what a template there says."""
    data = f"\x80\x04ctorch.distributed.checkpoint.{module}\n{name}\n(Vmemory://x\ntR.".encode("latin-1")
    with pytest.raises(pickle.UnpicklingError, match=rf"{module}.{name}: "):
        dcp_adapter._unpickle(data)


_FILE_SYSTEM, _PLANNER = "ctorch.distributed.checkpoint.filesystem\n", "ctorch.distributed.checkpoint.planner\n"
_SLOTS, _DICT = "N}Vx\nNs\x86b", "}Vx\nNsb"
_STATES = {
    "of a path's class": f"cpathlib\nPosixPath\n{_SLOTS}",
    "of a dataclass": f"{_FILE_SYSTEM}_StorageInfo\n{_SLOTS}",
    "of a mapping's class": f"ccollections\nChainMap\n{_SLOTS}",
    "of an enum": f"{_PLANNER}WriteItemType\n{_SLOTS}",
    "of its member": f"{_PLANNER}WriteItemType\nK\x01\x85R{_DICT}",
    "of a function": f"ctorch.serialization\n_get_layout\n{_DICT}",
    "of a function of ours": f"cbuiltins\ngetattr\n{_SLOTS}",
}


@pytest.mark.parametrize("what", _STATES)
def test_a_state_is_of_what_the_pickle_made(what: str) -> None:
    """BUILD sets attributes: those of a class, a function or a member are the whole process's, and are left alone."""

    def shared() -> list[dict[str, object]]:
        named = [
            dcp_adapter._Unpickler(io.BytesIO()).find_class(*name)
            for name in dcp_adapter._ALLOWED_NAMES | dcp_adapter._ALLOWED_PATHS
        ]
        return [dict(vars(item)) for item in (*named, *WriteItemType, dcp_adapter._enum_member)]

    before = shared()
    with pytest.raises(pickle.UnpicklingError, match=r"state of class \w+: "):
        dcp_adapter._unpickle(f"\x80\x02{_STATES[what]}.".encode("latin-1"))
    assert shared() == before


def test_no_other_opcode_reaches_what_is_shared() -> None:
    """Objects come from find_class alone, and REDUCE, OBJ, INST, NEWOBJ and NEWOBJ_EX call those that it lets in.

    SETITEM, SETITEMS, APPEND, APPENDS and ADDITEMS call a method of what they add to: no class, function or member has
    one that takes it. EXT asks a registry of the process's, PERSID and NEXT_BUFFER whoever loads: both are refused.
    READONLY_BUFFER is of bytes. The others, PUT and GET too, see the pickle's own stack and memo.
    """
    adding = ["Vx\nNs", "(Vx\nNu", "Na", "(Ne", "(N\x90", "(\x8f\x90", "\x98"]
    full = ["Px\n", "NQ", "\x82\xf0", "\x97", "(ios\nsystem\n", "(cos\nsystem\no", "Vos\nVsystem\n\x93"]
    names = [f"c{module}\n{name}\n" for module, name in (dcp_adapter._ALLOWED_NAMES | dcp_adapter._ALLOWED_PATHS)]
    extension = ("os", "system", 240)
    copyreg.add_extension(*extension)
    try:
        assert pickle.loads(b"\x82\xf0.") is os.system  # which puts it into a cache
        for data in [*full, *(name + add for name in names for add in adding)]:
            with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)):
                dcp_adapter._unpickle(f"\x80\x02{data}.".encode("latin-1"))
    finally:
        copyreg.remove_extension(*extension)


@pytest.mark.parametrize("kind", ["above", "absolute", "a path"])
def test_an_index_that_names_a_file_elsewhere_is_refused(folder: Path, kind: str) -> None:
    """What is restored is what was checked: no other file that this process may read gets into a state."""
    state = {"w": torch.arange(3.0)}
    with Checkpointer(folder, DcpAdapter()) as guard:
        guard.save(1, state)
    payload = folder / "step_1" / "payload"
    outside = folder / "outside"
    (payload / "__0_0.distcp").rename(outside)
    named = {"above": "../../outside", "absolute": str(outside), "a path": outside}
    index = pickle.loads((payload / ".metadata").read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = named[kind]
    (payload / ".metadata").chmod(0o600)
    (payload / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match="the index names a file outside"):
        DcpAdapter().load(payload, state)


@dataclass
class Schedule:
    """What torch pickles, and refuses to load."""

    lr: float = 0.1


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("n", np.float64(0.5)),
        ("n.a", {"a": np.zeros(3)}),
        ("n.1", [1, Schedule()]),
        ("n", (1, Schedule())),
        ("n.0.a", [{"a": lambda: 0}]),
    ],
)
def test_what_would_not_be_loaded_is_not_saved(folder: Path, name: str, leaf: object) -> None:
    """The first save says so, with the leaf's name, and not the first restore; the guard goes on without it."""
    with Checkpointer(folder, DcpAdapter()) as guard:
        with pytest.raises(ConfigError, match=re.escape(f'"{name}"')) as caught:
            guard.save(1, {"w": torch.zeros(2), "n": leaf})
        assert ".item()" in str(caught.value.hint)
        assert lookup.complete_steps(folder) == []


def test_plain_leaves_are_saved_and_loaded(folder: Path) -> None:
    """Whatever torch reads again: numbers, text, what is made of them, and some of its own."""
    leaves = {"a": [1, 2.5, None, "x", True], "b": ((1, 2), b"y"), "c": {"d": {1, 2}, "e": torch.float16}, "f": 2j}
    with Checkpointer(folder, DcpAdapter()) as guard:
        guard.save(1, {"w": torch.ones(2), **leaves})
    like = {"a": [0], "b": (), "c": {"d": set(), "e": None}, "f": 0, "w": torch.zeros(2)}
    with Checkpointer(folder, DcpAdapter()) as guard:
        restored_state = guard.restore(like)
    assert restored_state
    assert {name: restored_state.state[name] for name in leaves} == leaves


def _getattr_of(module: str, kind: str, name: str) -> bytes:
    """A pickle of getattr(kind, name), as Python 3.11.0 to 3.11.3 write an enum's member."""
    return b"".join([b"cbuiltins\ngetattr\n(c", module.encode(), b"\n", kind.encode(), b"\nV", name.encode(), b"\ntR."])


def test_members_of_enums_in_either_form() -> None:
    """A member of torch's enums comes back as any Python pickles it; getattr of anything else is refused."""
    module = "torch.distributed.checkpoint.planner"
    expected = WriteItemType.TENSOR
    assert dcp_adapter._unpickle(pickle.dumps(expected)) is expected
    assert dcp_adapter._unpickle(_getattr_of(module, "WriteItemType", "TENSOR")) is expected
    refused = [
        (module, "WriteItemType", "mro"),
        (module, "SavePlan", "__init__"),
        (module, "WriteItemType", "__class__"),
        ("enum", "Enum", "mro"),
        ("builtins", "set", "add"),
        ("signal", "Signals", "SIGKILL"),
    ]
    for words in refused:
        with pytest.raises(pickle.UnpicklingError):
            dcp_adapter._unpickle(_getattr_of(*words))
