from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pitools.checkpoint.store import layout, lookup, publish, verify
from pitools.checkpoint.store.manifest import load_manifest
from pitools.core import subprocesses
from pitools.core.errors import ClusterError, ConfigError, DataError, NoSpace, UsageError
from tests.checkpoint.conftest import FINGERPRINT, RUN, Save, build, contents
from tests.checkpoint.kill_injection import killed

AS_ROOT = pytest.mark.usefixtures("as_root")
FIELDS = {"format": "files", "run": RUN, "state_fingerprint": FINGERPRINT, "world_size": 1}


def test_what_is_saved_is_whole(folder: Path, save: Save) -> None:
    """A save by four ranks that share the digests is found, verified, linked as the latest, and leaves nothing else."""
    path = save(12, ranks=4)
    manifest = load_manifest(path)
    assert [entry.path for entry in manifest.files] == sorted(f"payload/{name}" for name in contents(12))
    assert (manifest.step, manifest.world_size, manifest.loader_state) == (12, 4, {"epoch": 12, "rng": 1 << 100})
    assert verify.verify_checkpoint(path) == []
    assert (lookup.latest_step(folder), lookup.complete_steps(folder)) == (12, [12])
    assert (folder / "latest").readlink() == Path("step_12")
    assert sorted(item.name for item in folder.iterdir()) == ["latest", "step_12"]
    assert sorted(item.name for item in path.iterdir()) == ["manifest.json", "payload"]


def test_ranks_digest_what_they_wrote(folder: Path) -> None:
    """Each rank reads just the files that are said to be its own; together they are all."""
    place = build(folder, 1, contents(1))
    writer = lambda path, ranks: int("process_1" in path)  # noqa: E731
    shares = [publish.digest_share(place, rank, 2, rank_of_file=writer).files for rank in range(2)]
    assert [entry.path for entry in shares[1]] == ["payload/ocdbt.process_1/manifest"]
    assert len(shares[0]) == 4
    publish.publish_checkpoint(folder, place, 1, **{**FIELDS, "world_size": 2})
    assert verify.verify_checkpoint(folder / "step_1") == []


def test_large_file_has_the_digest_of_its_ranges(folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of several ranges, hashed by several threads, has the digest that any other reader gives it."""
    from pitools.checkpoint.store import hashing
    from pitools.store import digest

    for module in (hashing, digest):
        monkeypatch.setattr(module, "RANGE_BYTES", 4096)
    for size in (4095, 4096, 4097, 12288, 50_001):
        path = save(size, {"x": os.urandom(size)})
        assert load_manifest(path).files[0].digest == digest.digest_file(path / "payload" / "x")[1]


@pytest.mark.parametrize("fault", ["uncovered", "rank", "grown", "gone", "torn"])
def test_incomplete_digests_are_refused(folder: Path, save: Save, fault: str) -> None:
    """A file that no rank digested, one that changed since, and a rank without word end the save; nothing is shown."""
    save(1)
    place = build(folder, 2, contents(2))
    if fault == "uncovered":
        (place / "payload" / "late").write_bytes(b"late")
    elif fault == "grown":
        with (place / "payload" / "d" / "0a").open("ab") as file:
            file.write(b"more")
    elif fault == "gone":
        (place / "payload" / "d" / "0a").unlink()
    elif fault == "torn":
        (place / layout.DIGESTS_DIR / "0.json").write_bytes(b'{"schema":"pit.che')
    with pytest.raises(DataError) as caught:
        publish.publish_checkpoint(folder, place, 2, **{**FIELDS, "world_size": 2 if fault == "rank" else 1})
    # The file that is wrong, or the digests of the rank that left none.
    path = {"uncovered": "payload/late", "torn": f"{layout.DIGESTS_DIR}/0.json", "rank": f"{layout.DIGESTS_DIR}/1.json"}
    assert caught.value.where == str(place / path.get(fault, "payload/d/0a"))
    assert sorted(item.name for item in folder.iterdir()) == ["latest", "step_1"]


@pytest.mark.parametrize("kind", ["link", "fifo", "name"])
def test_only_plain_files_are_sealed(folder: Path, kind: str) -> None:
    """A framework that left a link, a FIFO or a name that is no text is told, before anything is shown."""
    place = build(folder, 2, contents(2))
    path = place / "payload" / ("x" if kind != "name" else os.fsdecode(b"\xff"))
    {"link": lambda: path.symlink_to("/etc/passwd"), "fifo": lambda: os.mkfifo(path), "name": path.touch}[kind]()
    with pytest.raises(DataError, match="payload/"):
        publish.digest_share(place, 0, 1)
    with pytest.raises(DataError, match="payload/"):
        publish.publish_checkpoint(folder, place, 2, **FIELDS)
    assert list(folder.iterdir()) == []


def test_the_order_that_survives_power_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are durable before the manifest is written, all names before the rename, and the parent after it."""
    reported: list[str] = []
    sync, rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        reported.append(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), folder))
        sync(descriptor)

    def renamed(old: str | Path, new: str | Path) -> None:
        reported.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    place = build(folder, 3, contents(3), token="t")
    files = {f".step_3.t/payload/{name}" for name in contents(3)}
    assert files <= set(reported)
    del reported[:]
    publish.publish_checkpoint(folder, place, 3, **FIELDS)
    assert reported[0].startswith(".step_3.t/.manifest.json.")
    position = reported.index("rename")
    folders = {".step_3.t", ".step_3.t/payload", ".step_3.t/payload/d", ".step_3.t/payload/ocdbt.process_0/d"}
    assert folders <= set(reported[1:position])
    assert reported[position + 1] == "."


def test_kill_at_every_step_of_a_save() -> None:
    """Wherever a save ends, the folder holds what it held or the new checkpoint as well, and the next save works."""
    observed = set()
    for folder in killed("save"):
        steps = lookup.complete_steps(folder)
        observed.add(tuple(steps))
        assert layout.listed_steps(folder) == steps
        for step in steps:
            assert verify.verify_checkpoint(folder / f"step_{step}") == []
            assert load_manifest(folder / f"step_{step}").step == step
        assert (folder / "latest").exists()
        publish.publish_checkpoint(folder, build(folder, 12, contents(12)), 12, **FIELDS)
        assert lookup.complete_steps(folder) == [12, *steps]
        assert (folder / "latest").readlink() == Path("step_12")
    assert observed == {(6, 3), (9, 6, 3)}


@pytest.mark.parametrize("what", ["prune", "quarantine"])
def test_kill_at_every_step_of_a_removal(what: str) -> None:
    """Wherever a removal ends, a checkpoint is there whole or not there, and what should stay stays."""
    gone, stays = (3, 6) if what == "prune" else (6, 3)
    observed = set()
    for folder in killed(what):
        steps = layout.listed_steps(folder)
        assert stays in steps
        assert lookup.complete_steps(folder) == steps
        assert all(verify.verify_checkpoint(folder / f"step_{step}") == [] for step in steps)
        if what == "quarantine" and gone not in steps:
            (moved,) = folder.glob("quarantine/step_6.*/step_6")
            assert verify.verify_checkpoint(moved) == []
            assert (moved.parent / "reason.json").is_file()
        observed.add(gone in steps)
    assert observed == {True, False}


def test_a_step_that_stands_already(folder: Path, save: Save) -> None:
    """A second save of a step is refused, and the first stays; a damaged one is moved aside for the second."""
    save(4, {"x": b"first"})
    with pytest.raises(ConfigError):
        save(4, {"x": b"second"})
    assert (folder / "step_4" / "payload" / "x").read_bytes() == b"first"
    (folder / "step_4" / "payload" / "x").write_bytes(b"torn off")
    save(4, {"x": b"third"})
    assert (folder / "step_4" / "payload" / "x").read_bytes() == b"third"
    (aside,) = (folder / "quarantine").iterdir()
    assert (aside / "step_4" / "payload" / "x").read_bytes() == b"torn off"
    assert sorted(item.name for item in folder.iterdir()) == ["latest", "quarantine", "step_4"]


def test_something_else_of_that_name(folder: Path, save: Save, tmp_path: Path) -> None:
    """A link or a file in a checkpoint's place is moved aside, and what it points at stays as it is."""
    other = tmp_path / "other"
    other.mkdir(parents=True)
    folder.mkdir()
    (folder / "step_5").symlink_to(other)
    (folder / "step_6").write_bytes(b"x")
    assert lookup.complete_steps(folder) == []
    save(5)
    save(6)
    assert lookup.complete_steps(folder) == [6, 5]
    assert list(other.iterdir()) == []


@pytest.mark.parametrize(("step", "token"), [(-1, "t"), (10**15, "t"), (1, ""), (1, "a/b"), (1, "."), (1, "x" * 65)])
def test_names_that_cannot_be(folder: Path, step: int, token: str) -> None:
    """Absurd steps and tokens make no folder."""
    with pytest.raises(UsageError):
        layout.unpublished_path(folder, step, token)
    assert not folder.exists()


@contextmanager
def disk(tmp_path: Path, size: str) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    assert subprocesses.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], timeout_s=10).code == 0
    try:
        yield place
    finally:
        assert subprocesses.run(["umount", str(place)], timeout_s=10).code == 0


@AS_ROOT
def test_read_only_for_a_while(tmp_path: Path) -> None:
    """A folder that cannot be written to says so, whatever the save was about to do; later the next one works."""
    with disk(tmp_path, "10m") as place:
        folder = place / "checkpoints"
        publish.publish_checkpoint(folder, build(folder, 1, contents(1)), 1, **FIELDS)
        half = build(folder, 2, contents(2))
        assert subprocesses.run(["mount", "-o", "remount,ro", str(place)], timeout_s=10).code == 0
        for attempt in (
            lambda: layout.create_payload_dir(layout.unpublished_path(folder, 3, "t")),
            lambda: publish.digest_share(half, 0, 1),
            lambda: publish.publish_checkpoint(folder, half, 2, **FIELDS),
        ):
            with pytest.raises(ClusterError, match=os.strerror(errno.EROFS)):
                attempt()
        assert lookup.complete_steps(folder) == [1]
        assert subprocesses.run(["mount", "-o", "remount,rw", str(place)], timeout_s=10).code == 0
        publish.publish_checkpoint(folder, build(folder, 3, contents(3)), 3, **FIELDS)
        assert lookup.complete_steps(folder) == [3, 1]


@AS_ROOT
def test_disk_full_in_the_middle(tmp_path: Path) -> None:
    """Without room for the manifest the save says so, shows nothing, and gives the room of what it built back."""
    with disk(tmp_path, "2m") as place:
        folder = place / "checkpoints"
        publish.publish_checkpoint(folder, build(folder, 1, contents(1)), 1, **FIELDS)
        half = build(folder, 2, contents(2))
        with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with pytest.raises(NoSpace, match="no space left"):
            publish.publish_checkpoint(folder, half, 2, **{**FIELDS, "run": "r" * 100_000})
        assert sorted(item.name for item in folder.iterdir()) == ["latest", "step_1"]
        (place / "filler").unlink()
        publish.publish_checkpoint(folder, build(folder, 2, contents(2)), 2, **FIELDS)
        assert lookup.complete_steps(folder) == [2, 1]
