from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.core.errors import DataError
from pitools.stage.sources.find import load_version
from pitools.stage.sources.local import LocalReader
from pitools.stage.stage import stage_version
from pitools.stage.verify import check_versions

FILES = {"zarr.json": b"{}", **{f"c/{i}": os.urandom(3_000_000 + i) for i in range(6)}}
MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"], "btrfs": ["mkfs.btrfs", "-q", "-f"]}


@pytest.fixture
def disk(as_root: None, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes and mounts a file system of a kind in a file, where this machine allows it."""
    mounted: list[Path] = []

    def mount(kind: str) -> Path:
        place, image = tmp_path / f"disk{len(mounted)}", tmp_path / f"image{len(mounted)}"
        place.mkdir()
        if kind == "tmpfs":
            done = subprocesses.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(place)], timeout_s=10)
        else:
            if not shutil.which(MAKE[kind][0]):
                pytest.skip(f"{MAKE[kind][0]} is not installed")
            image.touch()
            os.truncate(image, 400 << 20)
            subprocesses.run([*MAKE[kind], str(image)], timeout_s=60)
            done = subprocesses.run(["mount", "-o", "loop", str(image), str(place)], timeout_s=30)
        if done.code:
            pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        assert subprocesses.run(["umount", str(place)], timeout_s=30).code == 0  # else somebody still has a file open


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs", "btrfs"])
def test_a_set_arrives_on_any_file_system(kind: str, disk, make_dataset):
    """From another file system onto this one, large and small files, whole and equal."""
    place = disk(kind)
    record = stage_version(load_version(make_dataset(FILES)), place / "pit")
    *findings, _ = check_versions(place / "pit", readers=2)
    assert findings == []
    assert record.copied_bytes == sum(map(len, FILES.values()))


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_blocks_are_shared_where_the_file_system_can(kind: str, disk, build):
    """On one XFS or Btrfs a set takes no room of its own; it is verified all the same."""
    place = disk(kind)
    source = build(place / "data", FILES)
    os.sync()
    before = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    record = stage_version(load_version(source), place / "pit")
    os.sync()
    used = before - os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    assert used < record.bytes / 3
    assert not (source / "c/0").samefile(Path(record.path) / "c/0")
    shutil.rmtree(source)
    *findings, _ = check_versions(place / "pit", readers=2)
    assert findings == []


def test_a_damaged_source_is_found_through_a_clone_too(disk, build):
    """Sharing blocks shares the damage: it is read, and refused."""
    place = disk("xfs")
    source = build(place / "data", FILES)
    with (source / "c/3").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"xxxx")
    with pytest.raises(DataError) as error:
        stage_version(load_version(source), place / "pit")
    assert error.value.where == str(source / "c/3")
    assert os.listdir(place / "pit/objects") == []


def test_a_copy_leaves_the_page_cache_to_others(disk, build):
    """What was read once is dropped, and large files are written past the cache: what training reads stays in it."""
    place = disk("ext4")
    source = build(place / "data", {f"c/{i}": os.urandom(8 << 20) for i in range(4)})
    os.sync()
    files = list(source.rglob("c/*"))
    assert sum(_cached(path) for path in files) == 32 << 20
    record = stage_version(load_version(source), place / "pit")
    files += Path(record.path).rglob("c/*")
    assert len(files) == 8
    assert sum(_cached(path) for path in files) < 2 << 20


def test_only_what_was_read_is_dropped_from_the_page_cache(disk):
    """Other workers read ahead in the file's other ranges."""
    file = disk("ext4") / "a"
    file.write_bytes(os.urandom(8 << 20))
    os.sync()
    reader = LocalReader(file.parent, drop_cache=True)
    opened = reader.open("a")
    assert opened.read_into(memoryview(bytearray(4 << 20)), 4 << 20) == 4 << 20
    opened.close()
    reader.close()
    assert _cached(file) == 4 << 20


def _cached(path: Path) -> int:
    """Bytes of a file in the page cache."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        position = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(position), ctypes.c_size_t(size), pages)
        del position  # else it could not be unmapped
    assert not failed
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
