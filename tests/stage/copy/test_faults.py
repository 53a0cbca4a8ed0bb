from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pitools.stage.cache.layout import purge_trash
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import check_versions

# The system calls by which a set is made, filled, synced and published; each in turn is the last one, or fails.
CHANGING = (
    "mkdir",
    "fallocate",
    "pwrite64",
    "ftruncate",
    "fsync",
    "syncfs",
    "fchmod",
    "chmod",
    "rename",
    "linkat",
    "unlink",
    "unlinkat",
    "rmdir",
    "flock",
    "utimensat",
    "fork",
    "vfork",
    "clone",
)
FAILING = ("mkdir", "fallocate", "pwrite64", "fsync", "syncfs", "rename", "linkat", "utimensat", "chmod")
pytestmark = pytest.mark.skipif(
    not shutil.which("strace") and not os.environ.get("PIT_REQUIRE_SLURM"), reason="strace is not installed"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, build) -> Path:
    """A dataset of small files and of some that are written past the page cache."""
    files = {f"a/c/{i}": os.urandom(2000) for i in range(5)} | {f"b/c/{i}": os.urandom(1 << 20) for i in range(2)}
    return build(tmp_path_factory.mktemp("source"), {"zarr.json": b"{}", **files})


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, source: Path, build) -> dict[str, int]:
    """How often one process of a run makes each call, at most."""
    folder = tmp_path_factory.mktemp("count")
    log = folder / "log"
    done = traced(["-o", log, "-e", f"trace={','.join(CHANGING)}"], source, folder / "pit")
    assert done.returncode == 0, done.stderr
    actual = re.findall(r"^(\d+) +(\w+)\(", log.read_text(), re.MULTILINE)
    most: dict[str, int] = {}
    for (_, call), count in Counter(actual).items():
        most[call] = max(most.get(call, 0), count)
    assert most["rename"] >= 2
    assert most["fsync"] >= 4
    return most


def traced(options: list, source: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """`pit-stage run` under strace."""
    program = [sys.executable, "-c", "from pitools.cli import stage; stage()"]
    return subprocess.run(
        ["strace", "-f", "-qq", *map(str, options), *program, "run", source, "--to", root, "--readers", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def moments(calls: dict[str, int], of: tuple[str, ...], every: int) -> list[tuple[str, int]]:
    """Each call at each time it is made, or every so many of them."""
    return [(call, n) for call in of for n in range(1, calls.get(call, 0) + 1)][::every]


def ahead(
    cases: list[tuple[str, int]], where: Path, how: str, source: Path
) -> Iterator[tuple[str, int, Path, subprocess.CompletedProcess[str]]]:
    """Each run with its fault, at a root of its own, while what the one before left is looked at."""

    def one(number: int) -> subprocess.CompletedProcess[str]:
        call, n = cases[number]
        options = ["-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{how.format(n)}"]
        return traced(options, source, where / str(number))

    with ThreadPoolExecutor(2) as pool:
        for number, done in enumerate(pool.map(one, range(len(cases)))):
            yield *cases[number], where / str(number), done


def is_whole_or_absent(final: Path) -> bool:
    """What a reader finds at a version's place."""
    if not os.path.lexists(final):
        return True
    *findings, _ = check_versions(final, readers=2)
    return findings == []


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", ["nothing", "a damaged copy", "an older version"])
def test_a_kill_at_any_call_leaves_a_whole_set_or_none(
    source: Path, tmp_path: Path, calls, build, residue, before: str, every: int
):
    """kill -9 at each system call in turn: nothing half-made is ever visible, and the next run finishes the work."""
    killed, cases = 0, moments(calls, CHANGING, every)
    for number in range(len(cases)):
        root = tmp_path / str(number)
        if before == "a damaged copy":
            final = root / "objects" / source.name
            final.mkdir(parents=True)
            (final / "a").write_bytes(b"")
        elif before == "an older version":
            shared = (source / "b/c/0").read_bytes()
            stage_version(load_version(build(tmp_path / f"old{number}", {"zarr.json": b"{}", "b/c/0": shared})), root)
    for call, n, root, done in ahead(cases, tmp_path, "signal=KILL:when={}", source):
        final = root / "objects" / source.name
        killed += done.returncode != 0
        if before != "a damaged copy" or not (final / "a").is_file():
            assert is_whole_or_absent(final), (call, n)
        assert stage_version(load_version(source), root).state in ("staged", "present", "repaired"), (call, n)
        assert is_whole_or_absent(final), (call, n)
        purge_trash(root)  # as the next run that copies or evicts does: what was replaced by the one that was killed
        assert residue(root) == [], (call, n)
        shutil.rmtree(root)
    assert killed > 5


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("error", "code"), [("ENOSPC", 75), ("EIO", 4), ("EROFS", 4)])
def test_a_failure_of_any_call_is_told_and_leaves_no_half(
    source: Path, tmp_path: Path, calls, residue, error: str, code: int, every: int
):
    """A disk that is full, broken or read-only from any moment on: the exit code says so, and nothing half-made is
    visible."""
    failed, cases = 0, moments(calls, FAILING, every)
    for call, n, root, done in ahead(cases, tmp_path, f"error={error}:when={{}}+", source):
        final = root / "objects" / source.name
        assert done.returncode in (0, code), (call, n, done.stderr)
        assert "Traceback" not in done.stderr, (call, n)
        assert is_whole_or_absent(final), (call, n)
        if done.returncode:
            failed += 1
            assert str(root) in done.stderr, (call, n, done.stderr)
        assert stage_version(load_version(source), root).state in ("staged", "present", "repaired"), (call, n)
        assert is_whole_or_absent(final), (call, n)
        purge_trash(root)
        assert residue(root) == [], (call, n)
        shutil.rmtree(root)
    assert failed > 3
