from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import check_versions
from pitools.store import digest, manifest
from pitools.store.digest import RANGE_BYTES
from pitools.store.manifest import FileEntry, Manifest

SLOW = "4MiB"  # a second: seconds are left of a copy that is to be interrupted when a busy machine comes to it


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, build) -> Path:
    """A dataset of many files, to be killed between and within them."""
    return build(tmp_path_factory.mktemp("shards"), {f"c/{i}": os.urandom(1 << 20) for i in range(48)}, "shards")


def start(program: list[str], *argv: object) -> subprocess.Popen[str]:
    """The real program, in a process group of its own."""
    return subprocess.Popen(
        [*program, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def copied(root: Path) -> int:
    """Files of an unfinished copy, counted while folders come and go."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in root.glob(".tmp/*.partial/c/*"))
    return 0


def await_first_bytes(root: Path, process: subprocess.Popen[str]) -> None:
    """Return when the copy is under way, and something of it is written down as done."""
    while process.poll() is None:
        if any(path.read_text().count("\n") > 3 for path in root.glob(".tmp/*.journal")):
            return
        time.sleep(0.002)
    pytest.fail(f"it ended before it could be interrupted: {process.communicate()}")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupted_copy_goes_on_where_it_stopped(
    shards: Path, tmp_path: Path, program, residue, number: int, code: int, times: int
):
    """Ctrl-C and scancel end it at once, with the signal's exit code; what was done is not read again."""
    root = tmp_path / "pit"
    process = start(program, "run", shards, "--to", root, "--bwlimit", SLOW)
    await_first_bytes(root, process)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.001)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    assert os.listdir(root / "objects") == []
    assert sorted(residue(root)) == [str(root / f".tmp/{shards.name}.{end}") for end in ("journal", "partial")]
    stage_result = stage_version(load_version(shards), root)
    assert stage_result.state == "staged"
    assert stage_result.resumed_bytes >= 1 << 20
    assert stage_result.copied_bytes == stage_result.bytes - stage_result.resumed_bytes
    assert residue(root) == []
    *findings, _ = check_versions(root, readers=2)
    assert findings == []


def test_bytes_that_are_done_are_not_read_again(shards: Path, tmp_path: Path, program):
    """After kill -9 the source files that were done may even be gone: nobody looks."""
    root, source = tmp_path / "pit", tmp_path / "source" / shards.name
    shutil.copytree(shards, source)
    process = start(program, "run", source, "--to", root, "--bwlimit", SLOW)
    await_first_bytes(root, process)
    process.kill()
    process.communicate()
    lines = (root / f".tmp/{shards.name}.journal").read_text().splitlines()[1:]
    files = load_version(source).manifest.files
    done = [files[int(line.split()[1])].path for line in lines]
    assert done
    for path in done:
        (source / path).unlink()
    stage_result = stage_version(load_version(source), root)
    assert stage_result.resumed_bytes == len(done) << 20
    *findings, _ = check_versions(root, readers=2)
    assert findings == []


@pytest.mark.parametrize("damage", ["flipped", "short", "other journal", "no journal", "a link"])
def test_a_stale_unfinished_copy_is_not_believed(shards: Path, tmp_path: Path, program, damage: str):
    """What somebody changed after the interruption is copied again, whatever the journal says."""
    root = tmp_path / "pit"
    process = start(program, "run", shards, "--to", root, "--bwlimit", SLOW)
    await_first_bytes(root, process)
    process.kill()
    process.communicate()
    journal = root / f".tmp/{shards.name}.journal"
    partial = root / f".tmp/{shards.name}.partial"
    index = int(journal.read_text().splitlines()[1].split()[1])
    file = partial / load_version(shards).manifest.files[index].path
    if damage == "no journal":
        journal.unlink()
    elif damage == "other journal":
        journal.write_text(journal.read_text().replace(shards.name, "0" * 32))
    elif damage == "a link":
        file.unlink()
        file.symlink_to("/etc/passwd")
    else:
        file.chmod(0o600)
        with file.open("r+b") as opened:
            opened.write(b"x") if damage == "flipped" else opened.truncate(10)
    stage_result = stage_version(load_version(shards), root)
    assert stage_result.state == "staged"
    if damage.endswith("journal"):
        assert stage_result.resumed_bytes == 0
    *findings, _ = check_versions(root, readers=2)
    assert findings == []


def test_a_large_file_goes_on_by_its_ranges(tmp_path: Path, program):
    """Ranges that are on the disk as they were written down are not read from the source again."""
    source, root = tmp_path / "data", tmp_path / "pit"
    (source / "new").mkdir(parents=True)
    (source / "new/a").touch()
    os.truncate(source / "new/a", 3 * RANGE_BYTES + 100)
    size, text = digest.digest_file(source / "new/a")
    entry = FileEntry(path="a", bytes=size, digest=text)
    data = manifest.encode_manifest(Manifest(name="big", episodes=1, steps=1, arrays={}, files=(entry,)))
    (source / "new/manifest.json").write_bytes(data)
    folder = (source / "new").rename(source / manifest.version_of(data))
    process = start(program, "run", folder, "--to", root, "--readers", "1", "--bwlimit", "50MiB")
    journal = root / f".tmp/{folder.name}.journal"
    while process.poll() is None and not (journal.exists() and "\nr 0 0 " in journal.read_text()):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    done = journal.read_text().count("\nr ")
    assert 0 < done < 4
    with (folder / "a").open("r+b") as file:
        file.write(b"x")  # the source is damaged where it was read already: nobody looks there
    record = stage_version(load_version(folder), root)
    assert record.state == "staged"
    *findings, _ = check_versions(root, readers=2)
    assert findings == []


@pytest.mark.usefixtures("interruptible")
def test_a_waiting_process_can_be_interrupted(shards: Path, tmp_path: Path, program, residue):
    """It says who it waits for and how far that is; Ctrl-C for it does not touch the one that copies."""
    root = tmp_path / "pit"
    first = start(program, "run", shards, "--to", root, "--bwlimit", "16MiB")
    await_first_bytes(root, first)
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        second = start(program, "run", shards, "--to", root)
        assert second.stderr is not None
        output = second.stderr.readline()
        assert "waiting" in output
        assert f"pid {first.pid}" in output
        assert "of 48.0 MiB" in output
        second.send_signal(signal.SIGINT)
        assert second.wait(30) == 130
        second.communicate()
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    assert first.wait(60) == 0, first.communicate()
    first.communicate()
    assert len(os.listdir(root / "objects" / shards.name / "c")) == 48
    assert residue(root) == []


@pytest.mark.parametrize("trials", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_killed_copy_is_never_seen(shards: Path, tmp_path: Path, program, residue, trials: int):
    """kill -9 at any moment: the version is whole or absent, and the next run goes on without help."""
    root = tmp_path / "pit"
    final = root / "objects" / shards.name
    rng = random.Random(trials)
    cut = resumed = 0
    for trial in range(trials):
        shutil.rmtree(final, ignore_errors=True)
        if trial % 3 == 1:  # killed while it replaces a damaged copy
            final.mkdir(parents=True)
            (final / "c").write_bytes(b"")
        copied_files = copied(root)
        process = start(program, "run", shards, "--to", root)
        reached = rng.randrange(copied_files, 50)  # by progress, not by the clock, which a loaded machine stretches
        while process.poll() is None and copied(root) < reached and not (final / "manifest.json").exists():
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.004))
        process.kill()
        process.communicate()
        if (final / "manifest.json").exists():
            *findings, _ = check_versions(final, readers=2)
            assert findings == []
        elif final.exists():
            assert (trial % 3, os.listdir(final)) == (1, ["c"]), "a part of a copy is visible"
        cut += bool(residue(root))
        resumed += copied_files > 0
    assert cut > trials / 3, "too few trials cut a copy short"
    assert resumed > trials / 4, "too few trials went on with an interrupted copy"
    shutil.rmtree(final, ignore_errors=True)
    assert stage_version(load_version(shards), root).state == "staged"
    assert residue(root) == []
    *findings, _ = check_versions(final, readers=2)
    assert findings == []


def test_a_reader_sees_a_whole_dataset_or_none(shards: Path, tmp_path: Path):
    """At the very moment the folder can be seen, everything is in it."""
    sizes = {entry.path: entry.bytes for entry in load_version(shards).manifest.files}
    for trial in range(8):
        root = tmp_path / str(trial)
        final = root / "objects" / shards.name
        observed: list[dict[str, int]] = []

        def watch(final: Path = final, seen: list[dict[str, int]] = observed) -> None:
            deadline = time.monotonic() + 30
            while not final.exists() and time.monotonic() < deadline:
                pass
            seen.append({f"c/{entry.name}": entry.stat().st_size for entry in os.scandir(final / "c")})
            assert (final / "manifest.json").is_file()

        reader = threading.Thread(target=watch)
        reader.start()
        stage_version(load_version(shards), root)
        reader.join()
        assert observed == [sizes]


def test_eight_at_once_make_one_copy(shards: Path, tmp_path: Path, program, residue):
    """All succeed, one copies, and the source is read once."""
    root = tmp_path / "pit"
    processes = [start(program, "run", shards, "--to", root) for _ in range(8)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, answers
    assert sorted(out.split('"state":"')[1].split('"')[0] for out, _ in answers) == ["present"] * 7 + ["staged"]
    *findings, _ = check_versions(root, readers=2)
    assert findings == []
    assert residue(root) == []
