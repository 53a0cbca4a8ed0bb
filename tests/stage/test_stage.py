from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pitools.core.errors import ClusterError, DataError, NoSpace
from pitools.stage.cache import layout, space
from pitools.stage.cache.space import RootLimits
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import find_source, load_version
from pitools.stage.sources.local import LocalSource
from pitools.stage.stage import stage_version
from pitools.stage.verify import check_versions
from pitools.store import manifest
from pitools.store.digest import RANGE_BYTES, digest_file
from pitools.store.manifest import FileEntry, Manifest


def tree(folder: Path) -> dict[str, bytes]:
    """Content by path of every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_staged_is_the_source(small: Path, root: Path, residue):
    """Every file, byte for byte, and a record that says where."""
    record = stage_version(load_version(small), root)
    assert (record.state, record.files, record.dataset) == ("staged", 5, "pick")
    assert record.copied_bytes == record.verified_bytes == record.bytes == 3 * 2**20 + 101_002
    assert tree(Path(record.path)) == tree(small)
    assert Path(record.path) == root / "objects" / small.name
    assert residue(root) == []


def test_files_that_the_manifest_does_not_name_stay_behind(small: Path, root: Path):
    """Stray files, links and folders in the source are not part of the dataset."""
    before = tree(small)
    (small / "images/stray.partial").write_bytes(b"x")
    (small / "link").symlink_to("/etc/passwd")
    (small / "empty").mkdir()
    record = stage_version(load_version(small), root)
    assert tree(Path(record.path)) == before
    assert not (Path(record.path) / "empty").exists()


def test_a_second_run_copies_nothing(small: Path, root: Path):
    """The copy that stands is found by names and sizes; its files are not even opened."""
    stage_version(load_version(small), root)
    stage_result = stage_version(load_version(small), root)
    assert (stage_result.state, stage_result.copied_bytes, stage_result.verified_bytes) == ("present", 0, 0)


def test_a_staged_copy_can_itself_be_staged(small: Path, root: Path, tmp_path: Path):
    """A node's copy is a dataset like any other, so that nodes can feed each other."""
    first = stage_version(load_version(small), root)
    second = stage_version(load_version(find_source(Path(first.path))), tmp_path / "other")
    assert tree(Path(second.path)) == tree(small)


@pytest.mark.parametrize(
    "damage", ["missing", "short", "long", "link", "fifo", "manifest", "no manifest", "file", "dangling"]
)
def test_a_damaged_copy_is_replaced(small: Path, root: Path, residue, damage: str):
    """Whatever stands in the version's place, a whole copy stands there afterwards and the old one is gone."""
    final = Path(stage_version(load_version(small), root).path)
    file = final / "images/c/0/0"
    if damage == "missing":
        file.unlink()
    elif damage == "link":
        file.unlink()
        file.symlink_to(small / "images/c/0/0")
    elif damage in ("short", "long"):
        file.chmod(0o644)
        os.truncate(file, {"short": 10, "long": 4 << 20}[damage])
    elif damage == "fifo":
        (final / "actions/c/1").unlink()
        os.mkfifo(final / "actions/c/1")  # of the same size as the empty file
    elif damage == "manifest":
        (final / "manifest.json").unlink()
        (final / "manifest.json").write_bytes(b"{}")
    elif damage == "no manifest":
        (final / "manifest.json").unlink()
    else:
        shutil.rmtree(final)
        final.write_bytes(b"") if damage == "file" else final.symlink_to("nowhere")
    assert stage_version(load_version(small), root).state == "repaired"
    assert tree(final) == tree(small)
    assert not final.is_symlink()
    assert residue(root) == []


def test_verify_finds_a_flipped_byte_at_rest(small: Path, root: Path):
    """Names and sizes cannot see it; reading the content does, and the copy is replaced."""
    final = Path(stage_version(load_version(small), root).path)
    flip(final / "images/c/0/0")
    assert stage_version(load_version(small), root).state == "present"
    assert stage_version(load_version(small), root, verify=True).state == "repaired"
    assert tree(final) == tree(small)
    stage_result = stage_version(load_version(small), root, verify=True)
    assert (stage_result.state, stage_result.copied_bytes, stage_result.verified_bytes) == (
        "present",
        0,
        stage_result.bytes,
    )


@pytest.mark.parametrize("damage", ["flip", "short", "long", "missing", "link", "fifo", "linked folder"])
def test_a_damaged_source_is_refused_naming_the_file(small: Path, root: Path, damage: str):
    """What does not match the manifest is never published, and the error says which file and how."""
    file = small / "images/c/0/0"
    if damage == "flip":
        flip(file)
    elif damage in ("short", "long"):
        os.truncate(file, {"short": 10, "long": 4 << 20}[damage])
    elif damage == "linked folder":
        (small / "images").rename(small.parent / "elsewhere")
        (small / "images").symlink_to(small.parent / "elsewhere")
    else:
        file.rename(small.parent / "aside")
        if damage == "link":
            file.symlink_to(small.parent / "aside")
        elif damage == "fifo":
            os.mkfifo(file)
    with pytest.raises(DataError) as error:
        stage_version(load_version(small), root)
    assert "images/c/" in error.value.where
    if damage in ("short", "long"):
        assert str(3 << 20) in error.value.message
        assert str(file.stat().st_size) in error.value.message
    assert os.listdir(root / "objects") == []


def test_a_mended_source_resumes_what_was_copied_of_it(tmp_path: Path, build, root: Path):
    """A damaged file costs its own bytes alone: verified files of the failed call are kept, wrong ranges are not."""
    folder = build(tmp_path / "data", {"L": RANGE_BYTES + 5, **{f"c/{i}": os.urandom(1 << 20) for i in range(4)}})
    for content in (b"wrong", bytes(5)):
        with (folder / "L").open("r+b") as file:
            file.write(content)
        if content == b"wrong":
            with pytest.raises(DataError) as error:
                stage_version(load_version(folder), root, readers=1)
            assert error.value.where == str(folder / "L")
    record = stage_version(load_version(folder), root, readers=1)
    assert (record.resumed_bytes, record.copied_bytes) == (4 << 20, RANGE_BYTES + 5)
    assert tree(Path(record.path)) == tree(folder)


@pytest.mark.usefixtures("as_root")
def test_a_disk_that_was_full_for_a_moment_costs_no_finished_file(tmpfs, make_dataset):
    """What others filled meanwhile ends the call to be tried later; the next one goes on where it stopped."""
    root = tmpfs("size=64m") / "pit"
    folder = make_dataset({f"c/{i}": os.urandom(2 << 20) for i in range(12)})

    def fill(_: int) -> None:
        if len(list(root.glob(".tmp/*/c/*"))) > 4:
            with (root.parent / "others").open("wb") as file, contextlib.suppress(OSError):
                file.write(bytes(64 << 20))

    with pytest.raises(NoSpace):
        stage_version(load_version(folder), root, readers=1, bytes_per_s=64 << 20, advance=fill)
    (root.parent / "others").unlink()
    record = stage_version(load_version(folder), root)
    assert record.resumed_bytes >= 2 << 20
    assert tree(Path(record.path)) == tree(folder)


def test_nodes_whose_locks_do_not_reach_each_other_copy_apart(
    make_dataset, root: Path, residue, once, monkeypatch: pytest.MonkeyPatch
):
    """On a shared root with flock of each node's own, a second stager leaves the published set as it is."""
    for module in (layout, space):
        monkeypatch.setattr(module, "lock_within", lambda *_, **__: True)
    monkeypatch.setattr(layout, "fs_type", lambda _: "nfs")
    dataset = load_version(make_dataset({"a": os.urandom(4 << 20), **{f"c/{i}": bytes([i]) for i in range(9)}}))

    def stage_on_other_node() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "uname", lambda: SimpleNamespace(nodename="n2"))
            assert stage_version(dataset, root).state == "staged"
        inodes.append((root / "objects" / dataset.version).stat().st_ino)

    inodes: list[int] = []
    record = stage_version(dataset, root, readers=1, bytes_per_s=16 << 20, advance=once(stage_on_other_node))
    assert inodes == [Path(record.path).stat().st_ino]
    *findings, _ = check_versions(Path(record.path), readers=1)
    assert findings == []
    assert residue(root) == []


@pytest.mark.parametrize("change", ["rewrite", "truncate", "unlink"])
def test_a_source_that_changes_during_the_copy_is_refused(make_dataset, root: Path, once, change: str):
    """The copy began with a good source; what was read in the end is compared, not what was promised."""
    folder = make_dataset({"a": os.urandom(4 << 20), "b": os.urandom(1000)})
    file = folder / "a"

    def act() -> None:
        if change == "rewrite":
            with file.open("r+b") as opened:
                opened.seek(3 << 20)
                opened.write(os.urandom(1 << 20))
        elif change == "truncate":
            os.truncate(file, 2 << 20)
        else:
            (folder / "b").unlink()

    with pytest.raises(DataError) as error:
        stage_version(load_version(folder), root, readers=1, bytes_per_s=16 << 20, advance=once(act))
    assert error.value.where == str(folder / ("b" if change == "unlink" else "a"))
    assert {"rewrite": "xxh3_128", "unlink": "missing", "truncate": f"{2 << 20} bytes"}[change] in error.value.message
    assert os.listdir(root / "objects") == []


def test_a_source_that_grows_during_the_copy_is_not_followed(make_dataset, root: Path):
    """What is copied is what the manifest names, to its last byte and no further, however fast the file grows."""
    folder = make_dataset({"a": os.urandom(4 << 20)})
    data = (folder / "a").read_bytes()

    def grow(count: int) -> None:
        with (folder / "a").open("ab") as opened:
            opened.write(bytes(1000 if count else 0))

    record = stage_version(load_version(folder), root, readers=1, bytes_per_s=16 << 20, advance=grow)
    assert (Path(record.path) / "a").read_bytes() == data
    assert (folder / "a").stat().st_size > len(data)


def test_a_failed_repair_leaves_the_damaged_copy(small: Path, root: Path):
    """Jobs that still read it lose nothing before there is something better."""
    final = Path(stage_version(load_version(small), root).path)
    (final / "actions/c/0").chmod(0o644)
    os.truncate(final / "actions/c/0", 1)
    flip(small / "images/c/0/0")
    with pytest.raises(DataError):
        stage_version(load_version(small), root)
    assert (final / "images/c/0/0").stat().st_size == 3 << 20


def test_many_small_files_are_staged(make_dataset, root: Path):
    """Above some hundreds of small files they are synced by file system, not one by one."""
    folder = make_dataset({f"a/c/{i // 50}/{i}": i.to_bytes(4) * 10 for i in range(400)})
    record = stage_version(load_version(folder), root)
    assert record.files == 400
    assert tree(Path(record.path)) == tree(folder)


def test_a_dataset_of_no_files_is_a_dataset(make_dataset, root: Path):
    """The manifest alone is staged."""
    record = stage_version(load_version(make_dataset({})), root)
    assert os.listdir(record.path) == ["manifest.json"]


def test_large_files_are_copied_by_ranges(tmp_path: Path, build, root: Path):
    """A file of several ranges, its end not on a block's boundary, arrives whole; a flip in any range is found."""
    size = 2 * RANGE_BYTES + 12_345
    folder = build(tmp_path / "data", {"a": size, "b": RANGE_BYTES})
    with (folder / "a").open("r+b") as file:
        for offset in (0, RANGE_BYTES - 3, 2 * RANGE_BYTES - 5, size - 9):
            file.seek(offset)
            file.write(b"012345678")
    files = tuple(
        FileEntry(path=name, bytes=n, digest=digest_file(folder / name)[1])
        for name, n in (("a", size), ("b", RANGE_BYTES))
    )
    assert [entry.digest.partition(":")[0] for entry in files] == ["xxh3_128x64m", "xxh3_128"]
    data = manifest.encode_manifest(Manifest(name="pick", episodes=1, steps=1, arrays={}, files=files))
    (folder / "manifest.json").write_bytes(data)
    folder = folder.rename(folder.with_name(manifest.version_of(data)))
    record = stage_version(load_version(folder), root, readers=3)
    assert digest_file(Path(record.path) / "a")[1] == files[0].digest
    assert (Path(record.path) / "a").stat().st_mode & 0o777 == 0o444
    assert (Path(record.path) / "a").stat().st_size == size
    shutil.rmtree(record.path)
    with (folder / "a").open("r+b") as file:
        file.seek(RANGE_BYTES + 7)
        file.write(b"x")
    with pytest.raises(DataError, match=rf"digest xxh3_128x64m:\w+ \(expected {files[0].digest}"):
        stage_version(load_version(folder), root)
    assert os.listdir(root / "objects") == []


def test_a_limit_on_bandwidth_is_kept(make_dataset, root: Path):
    """All readers together stay below it, whether files are large or small."""
    folder = make_dataset({"a": os.urandom(2 << 20), **{f"c/{i}": os.urandom(10_000) for i in range(200)}})
    began = time.monotonic()
    stage_version(load_version(folder), root, bytes_per_s=8 << 20)
    assert time.monotonic() - began > 0.35


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", manifest.MANIFEST_FILE)
)


@settings(max_examples=25, deadline=None)
@given(
    files=st.dictionaries(st.lists(names, min_size=2, max_size=3).map("/".join), st.binary(max_size=300), max_size=6)
)
def test_any_tree_arrives_whole(files: dict[str, bytes], build):
    """Whatever the file names and contents, the copy equals the source."""
    folders = {"/".join(path.split("/")[:n]) for path in files for n in range(1, path.count("/") + 1)}
    files = {path: content for path, content in files.items() if path not in folders}
    with tempfile.TemporaryDirectory() as temporary:
        folder = build(Path(temporary) / "data", files)
        record = stage_version(load_version(folder), Path(temporary) / "pit", readers=2)
        assert tree(Path(record.path)) == tree(folder)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, build):
    """One bit anywhere in the source, its manifest included, and nothing is published."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = build(Path(temporary) / "data", {"a": b"0123456789" * 5, "b/c": b"abc"})
        file = folder / data.draw(st.sampled_from(["a", "b/c", manifest.MANIFEST_FILE]))
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        with pytest.raises(DataError):
            stage_version(_load(folder), Path(temporary) / "pit", readers=2)
        assert list((Path(temporary) / "pit").glob("objects/*")) == []


def _load(folder: Path) -> DatasetVersion:
    return load_version(find_source(folder))


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    mode = file.stat().st_mode
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 4]))
    file.chmod(mode)


def test_a_set_that_is_found_in_place_was_used_now(small: Path, root: Path):
    """A run that copies nothing is a use, so that the set is not the first to go."""
    stage_version(load_version(small), root)
    lease = root / ".leases" / small.name
    os.utime(lease, (1, 1))
    assert stage_version(load_version(small), root).state == "present"
    assert lease.stat().st_mtime > 1


def test_what_never_fits_leaves_nothing(small: Path, root: Path):
    """A set larger than the whole quota is refused for good, and no empty unfinished copy stays."""
    with pytest.raises(ClusterError, match="quota of 1000 B"):
        stage_version(load_version(small), root, limits=RootLimits(quota_bytes=1000))
    assert os.listdir(root / ".tmp") == []


def test_a_damaged_set_is_read_once_before_it_is_replaced(small: Path, root: Path):
    """Verified, found damaged, copied: the bytes of the first read are taken back from the progress."""
    final = Path(stage_version(load_version(small), root).path)
    flip(final / "images/c/0/0")
    counts: list[int] = []
    record = stage_version(load_version(small), root, verify=True, advance=counts.append)
    assert (record.state, sum(counts)) == ("repaired", record.bytes)
    assert sum(count for count in counts if count > 0) == 2 * record.bytes


def test_a_source_at_the_same_root_is_not_evicted_for_its_copy(make_dataset, root: Path):
    """What is read is in use, though it was last used long ago."""
    files = {"a": os.urandom(9 << 20)}
    source = Path(stage_version(load_version(make_dataset(files, "one")), root).path)
    dataset = load_version(make_dataset({**files, "b": b"x"}, "two"))
    os.utime(root / ".leases" / source.name, (1, 1))
    with pytest.raises(NoSpace):
        stage_version(
            structs.replace(dataset, source=LocalSource(folder=source)), root, limits=RootLimits(quota_bytes=20 << 20)
        )
    assert source.exists()


def test_a_set_that_takes_long_to_verify_is_in_use_until_then(small: Path, root: Path):
    """It is leased while it is read, and was last used when that ended."""
    final = Path(stage_version(load_version(small), root).path)
    lease = root / ".leases" / small.name
    seen: list[bool] = []

    def advance(_: int) -> None:
        seen.append(layout.is_leased(root, small.name))
        os.utime(lease, (1, 1))

    assert stage_version(load_version(small), root, verify=True, advance=advance).state == "present"
    assert seen
    assert all(seen)
    assert lease.stat().st_mtime > 1
    assert final.exists()
