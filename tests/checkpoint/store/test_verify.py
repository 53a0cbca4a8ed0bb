from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.checkpoint.checkpointer import Checkpointer
from pitools.checkpoint.store import check_folder, layout, lookup, verify
from pitools.checkpoint.store.manifest import MANIFEST_FILE, FileEntry, load_manifest
from tests.checkpoint.conftest import Save
from tests.checkpoint.test_checkpointer import Files, on_ranks, saved, state

PATHS = ["payload/_METADATA", "payload/d/0a", "payload/ocdbt.process_0/d/1b", "payload/empty", MANIFEST_FILE]


def kinds(path: Path, **more: object) -> dict[str, str]:
    return {problem.path: problem.problem for problem in verify.verify_checkpoint(path, **more)}


@pytest.fixture(scope="module")
def memory() -> Path:
    """A folder in memory, where thousands of copies cost nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found(data: st.DataObject, save: Save, memory: Path) -> None:
    """Any flipped bit, cut, growth, removal, addition or rename of any file of a checkpoint is found."""
    folder = memory / "checkpoints"
    if not folder.exists():
        assert verify.verify_checkpoint(save(7, to=folder)) == []
    path = folder.parent / "other" / "step_7"
    shutil.rmtree(path.parent, ignore_errors=True)
    shutil.copytree(folder / "step_7", path)
    victim = path / data.draw(st.sampled_from(PATHS))
    content = victim.read_bytes()
    fault = data.draw(st.sampled_from(["flip", "cut", "grow", "remove", "add", "rename", "swap"]))
    if not content and fault in ("flip", "cut"):
        fault = "grow"
    if fault == "flip":
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        victim.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
    elif fault == "cut":
        victim.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif fault == "grow":
        victim.write_bytes(content + data.draw(st.binary(min_size=1, max_size=3)))
    elif fault == "remove":
        victim.unlink()
    elif fault == "add":
        victim.with_name(f"{victim.name}.new").write_bytes(content)
    elif fault == "rename":
        victim.rename(victim.with_name(f"{victim.name}.new"))
    else:
        other = path / "payload" / "ocdbt.process_1" / "manifest"
        theirs = other.read_bytes()
        other.write_bytes(content)
        victim.write_bytes(theirs)
    assert verify.verify_checkpoint(path)
    # Of all that there is to be found, four ranks that share the work find at least as much as one.
    actual = {
        (problem.path, problem.problem)
        for rank in range(4)
        for problem in verify.verify_checkpoint(path, share=(rank, 4))
    }
    assert {(problem.path, problem.problem) for problem in verify.verify_checkpoint(path)} == actual


def test_each_problem_is_told_from_the_others(save: Save) -> None:
    """A finding names the file, what is wrong with it, what it should be and what it is."""
    path = save(3, {"a": b"1", "b": b"2", "c": b"3", "e/f": b"4", "g": b"5"})
    (path / "payload" / "a").unlink()
    (path / "payload" / "b").write_bytes(b"22")
    (path / "payload" / "c").write_bytes(b"4")
    (path / "payload" / "e" / "f").unlink()
    (path / "payload" / "e").rmdir()
    (path / "payload" / "g").unlink()
    os.mkfifo(path / "payload" / "g")
    (path / "payload" / "new").touch()
    (path / "out").symlink_to("/etc")
    assert kinds(path) == {
        "payload/a": "missing",
        "payload/b": "size",
        "payload/c": "digest",
        "payload/e/f": "missing",
        "payload/g": "missing",
        "payload/new": "extra",
        "out": "extra",
    }
    (size,) = (problem for problem in verify.verify_checkpoint(path) if problem.problem == "size")
    assert size.text() == "payload/b: size: 2, expected 1"


def test_names_that_lie(folder: Path, save: Save, tmp_path: Path) -> None:
    """A checkpoint under another step's name, a link to one, and a name that is no checkpoint's are not believed."""
    path = save(3)
    path.rename(folder / "step_5")
    assert kinds(folder / "step_5") == {MANIFEST_FILE: "manifest"}
    assert lookup.latest_step(folder) is None
    (folder / "step_5").rename(tmp_path / "step_3")
    (folder / "step_3").symlink_to(tmp_path / "step_3")
    assert kinds(folder / "step_3") == {"": "manifest"}
    assert lookup.latest_step(folder) is None
    assert kinds(folder / "step_4") == {"": "missing"}


def test_folder_behind_a_link(save: Save, tmp_path: Path) -> None:
    """Where a folder was exchanged for a link, even to the same bytes, the checkpoint is not as it was saved."""
    path = save(3)
    (path / "payload").rename(tmp_path / "elsewhere")
    (path / "payload").symlink_to(tmp_path / "elsewhere")
    assert kinds(path) == {"payload": "extra"}


@pytest.mark.parametrize(
    "name",
    [
        "step_007",
        "step_",
        "step_-1",
        "step_1e9",
        f"step_{10**15}",
        f"step_{'9' * 200}",
        "step_٣",
        "step_3 ",
        "Step_3",
        "step_3.orbax-checkpoint-tmp",
    ],
)
def test_absurd_names(folder: Path, save: Save, name: str) -> None:
    """What is only like a checkpoint's name is none: nothing is found by it, nor removed."""
    save(3)
    (folder / "step_3").rename(folder / name)
    assert (lookup.latest_step(folder), lookup.complete_steps(folder), layout.leftovers(folder)) == (None, [], [])


def test_newest_looks_at_sizes_alone(folder: Path, save: Save) -> None:
    """A checkpoint that lost a file is passed over for the one before it; a flipped bit is for `check` to find."""
    for step in (1, 2, 3):
        save(step)
    (folder / "step_3" / "payload" / "d" / "0a").unlink()
    assert lookup.latest_step(folder) == 2
    path = folder / "step_2" / "payload" / "d" / "0a"
    path.write_bytes(bytes(path.stat().st_size))
    assert lookup.latest_step(folder) == 2
    assert kinds(folder / "step_2") == {"payload/d/0a": "digest"}
    assert lookup.latest_step(folder / "nowhere") is None


def test_unreadable_file(save: Save) -> None:
    """A link or a folder in a file's place is no file, and is not followed; the rest is still judged."""
    path = save(3)
    for name in ("_METADATA", "d/0a"):
        (path / "payload" / name).unlink()
    (path / "payload" / "_METADATA").symlink_to("/proc/self/mem")  # not followed
    (path / "payload" / "d" / "0a").mkdir()
    assert kinds(path) == {"payload/_METADATA": "missing", "payload/d/0a": "missing"}


def test_forged_sizes_cost_nothing(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that claims exabytes is answered by one look at the file."""
    from pitools.checkpoint.store.manifest import FileEntry

    path = save(3)
    entry = load_manifest(path).files[0]
    forged = FileEntry(path=entry.path, bytes=1 << 60, digest=entry.digest)
    (problem,) = verify._contents(path, [forged], 1, lambda _: None)
    assert (problem.problem, problem.expected, problem.got) == ("size", str(1 << 60), str(entry.bytes))


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 9))
def test_shares_cover_everything_once(sizes: list[int], ranks: int) -> None:
    """Ranks that share a verification read each file once, and about as much each."""
    from pitools.checkpoint.store.manifest import FileEntry

    files = tuple(FileEntry(path=f"f{n}", bytes=size, digest="") for n, size in enumerate(sizes))
    shares = verify.split_files(files, ranks)
    assert sorted(entry.path for share in shares for entry in share) == sorted(entry.path for entry in files)
    loads = [sum(entry.bytes for entry in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_little_work_has_no_bar(folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal nothing is drawn for what is over in a moment, and something for what is not."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    save(3)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    assert [
        problem
        for problem in check_folder.check_folder(folder, [3])
        if not isinstance(problem, check_folder.FolderCheck)
    ] == []
    assert check_folder.newest_good_step(folder) == 3
    assert shown.getvalue() == ""
    monkeypatch.setattr(check_folder, "_PROGRESS_BAR_BYTES", 1)
    list(check_folder.check_folder(folder, [3]))
    assert "step_3" in shown.getvalue()


def entries(*sizes: int) -> tuple[FileEntry, ...]:
    return tuple(FileEntry(path=f"payload/{n}.w", bytes=size, digest="") for n, size in enumerate(sizes))


def test_each_rank_reads_what_it_wrote() -> None:
    """Its node loads that, and fetches it once; where one rank wrote much more, the work is shared evenly."""
    writer = lambda path, ranks: int(Path(path).name.split(".")[0]) % ranks  # noqa: E731
    even, uneven = entries(100 << 20, 90 << 20, 110 << 20, 95 << 20), entries(1 << 30, 10, 10, 1 << 30)
    for files in (even, uneven):
        for shares in (verify.split_files(files, 3, writer), verify.split_files(files, 4, writer)):
            assert sorted(entry.path for share in shares for entry in share) == [entry.path for entry in files]
    assert verify.split_files(even, 4, writer) == [[entry] for entry in even]
    assert verify.split_files(uneven, 4, writer) == verify.split_files(uneven, 4)
    assert verify.split_files((), 4, writer) == [[]] * 4


def test_a_restore_shares_by_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three ranks digests the files that it saved."""
    saved(folder, 1, world_size=3)
    read: dict[int, set[str]] = {}
    ranks: dict[int, int] = {}
    real = verify.hash_files

    def noted(root: Path, sizes: dict[str, int], **more: Any) -> Any:
        read[ranks[threading.get_ident()]] = {path for path in sizes if path[-2:] in (".w", "um")}
        return real(root, sizes, **more)

    monkeypatch.setattr(verify, "hash_files", noted)

    def work(rank: int, options: dict[str, Any]) -> int:
        ranks[threading.get_ident()] = rank
        with Checkpointer(folder, Files(rank), **options) as guard:
            return guard.restore(state(0)).step  # type: ignore[union-attr]

    assert on_ranks(3, work) == [1, 1, 1]
    assert read == {rank: {f"payload/{rank}.w", f"payload/{rank}.momentum"} for rank in range(3)}
