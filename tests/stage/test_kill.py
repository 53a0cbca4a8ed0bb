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

from pitools.stage.run import stage
from pitools.stage.source import load
from pitools.stage.verify import check

BIG = 512 << 20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory, build) -> Path:
    """A dataset that takes long enough to be interrupted: one sparse file."""
    return build(tmp_path_factory.mktemp("big"), {"a": BIG}, "big")


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


def progress(root: Path, older: list[str]) -> int:
    """Files of unfinished copies that are not among the older ones, counted while folders come and go."""
    with contextlib.suppress(OSError):
        return sum(str(file.parent.parent) not in older for file in root.glob(".tmp/*/c/*"))
    return 0


def await_first_bytes(root: Path, process: subprocess.Popen[str]) -> None:
    """Return when the copy is under way."""
    while process.poll() is None:
        if any(file.stat().st_size for file in root.glob(".tmp/*/a")):
            return
        time.sleep(0.002)
    pytest.fail(f"it ended before it could be interrupted: {process.communicate()}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupted_copy_leaves_nothing(
    big: Path, tmp_path: Path, program, residue, number: int, code: int, times: int
):
    """Ctrl-C and scancel end it at once, with the signal's exit code; more of them do not disturb the cleaning."""
    root = tmp_path / "pit"
    process = start(program, "run", big, "--to", root)
    await_first_bytes(root, process)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.001)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    assert os.listdir(root / "objects") == []
    assert residue(root) == []


def test_a_waiting_process_can_be_interrupted(big: Path, tmp_path: Path, program, residue):
    """Ctrl-C for the one that waits does not touch the one that copies."""
    root = tmp_path / "pit"
    first = start(program, "run", big, "--to", root)
    await_first_bytes(root, first)
    second = start(program, "run", big, "--to", root)
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    second.send_signal(signal.SIGINT)
    assert second.wait(30) == 130
    second.communicate()
    assert first.wait(60) == 0, first.communicate()
    first.communicate()
    assert (root / "objects" / big.name / "a").stat().st_size == BIG
    assert residue(root) == []


@pytest.mark.parametrize("trials", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_a_killed_copy_is_never_seen(shards: Path, tmp_path: Path, program, residue, trials: int):
    """kill -9 at any moment: the version is whole or absent, and the next run needs no help."""
    root = tmp_path / "pit"
    final = root / "objects" / shards.name
    rng = random.Random(trials)
    cut = 0
    for trial in range(trials):
        shutil.rmtree(final, ignore_errors=True)
        if trial % 3 == 1:  # killed while it replaces a damaged copy
            final.mkdir(parents=True)
            (final / "c").write_bytes(b"")
        older = residue(root)
        process = start(program, "run", shards, "--to", root)
        reached = rng.randrange(50)  # by progress, not by the clock, which a loaded machine stretches
        while process.poll() is None and progress(root, older) < reached and not (final / "manifest.json").exists():
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.004))
        process.kill()
        process.communicate()
        if (final / "manifest.json").exists():
            *findings, _ = check(final, readers=2)
            assert findings == []
        elif final.exists():
            assert (trial % 3, os.listdir(final)) == (1, ["c"]), "a part of a copy is visible"
        cut += bool(set(residue(root)) - set(older))
    assert cut > trials / 3, "too few trials cut a copy short"
    shutil.rmtree(final, ignore_errors=True)
    assert stage(load(shards), root).state == "staged"
    assert residue(root) == []


def test_a_reader_sees_a_whole_dataset_or_none(shards: Path, tmp_path: Path):
    """At the very moment the folder can be seen, everything is in it."""
    sizes = {entry.path: entry.bytes for entry in load(shards).manifest.files}
    for trial in range(8):
        root = tmp_path / str(trial)
        final = root / "objects" / shards.name
        seen: list[dict[str, int]] = []

        def watch(final: Path = final, seen: list[dict[str, int]] = seen) -> None:
            deadline = time.monotonic() + 30
            while not final.exists() and time.monotonic() < deadline:
                pass
            seen.append({f"c/{entry.name}": entry.stat().st_size for entry in os.scandir(final / "c")})
            assert (final / "manifest.json").is_file()

        reader = threading.Thread(target=watch)
        reader.start()
        stage(load(shards), root)
        reader.join()
        assert seen == [sizes]


def test_eight_at_once_make_one_copy(shards: Path, tmp_path: Path, program, residue):
    """All succeed, one copies, and the source is read once."""
    root = tmp_path / "pit"
    processes = [start(program, "run", shards, "--to", root) for _ in range(8)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, answers
    assert sorted(out.split('"state":"')[1].split('"')[0] for out, _ in answers) == ["present"] * 7 + ["staged"]
    *findings, _ = check(root, readers=2)
    assert findings == []
    assert residue(root) == []
