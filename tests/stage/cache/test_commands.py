from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import click
import pytest

from pitools import cli
from pitools.commands import stage_cache
from pitools.stage import repair, verify
from pitools.stage.cache import records
from pitools.stage.cache.evict import EvictionCandidate, evict_item
from pitools.stage.cache.inventory import disk_usage, matches_sizes, total_bytes
from pitools.stage.cache.layout import journal_path, needed_bytes, partial_path, version_lock
from pitools.stage.cache.lease import leased_set
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.verify import FileFinding

SCHEMAS = {
    "pit.stage-set/1": "dataset version path state files bytes staged source last_used leased locked pinned part",
    "pit.stage-eviction/1": "version path state bytes reason",
    "pit.stage-repair/1": "dataset version path state source reason",
    "pit.stage-finding/1": "dataset version path problem expected got",
    "pit.stage-check/1": "path sets files bytes findings wall_s",
}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Runs one of this module's commands; returns exit code, records, stderr."""
    commands = [stage_cache.list_command, stage_cache.pin, stage_cache.unpin, stage_cache.evict, stage_cache.check]
    group = click.Group("stage", commands={command.name or "": command for command in commands})

    def run(*argv: object) -> tuple[int, list[dict], str]:
        monkeypatch.setattr(sys, "argv", ["pit-stage", *map(str, argv)])
        capsys.readouterr()
        code = cli.run(group, "pit-stage")
        captured = capsys.readouterr()
        actual = [json.loads(line) for line in captured.out.splitlines()]
        for record in actual:
            assert list(record) == ["schema", *SCHEMAS[record["schema"]].split()]
        return code, actual, captured.err

    return run


@pytest.fixture
def finals(root: Path, make_dataset) -> list[Path]:
    """Three staged sets of three datasets, used in this order, long ago."""
    actual = [
        Path(stage_version(load_version(make_dataset({"a": bytes([n]) * 10_000}, f"pick{n}")), root).path)
        for n in range(3)
    ]
    for n, final in enumerate(actual):
        os.utime(root / ".leases" / final.name, (1000 + n, 1000 + n))
    return actual


def test_list_shows_what_keeps_a_set(finals: list[Path], root: Path, cache):
    """Whole, damaged and unfinished sets, where they came from, when they were used, and by what they are held."""
    (finals[1] / "a").unlink()
    records.set_pinned(root, finals[2].name)
    partial_path(root, "f" * 32).mkdir()
    (partial_path(root, "f" * 32) / "x").write_bytes(bytes(5000))
    with leased_set(finals[0], touch=False), version_lock(root, "f" * 32, timeout_s=0):
        code, rows, _ = cache("list", root)
    assert code == 0
    by = {record["version"]: record for record in rows}
    assert [record["state"] for record in rows][-1] == "partial"
    first, second, third = (by[final.name] for final in finals)
    assert (first["state"], first["leased"], first["pinned"], first["locked"]) == ("present", True, False, False)
    assert (first["dataset"], first["bytes"], first["last_used"]) == ("pick0", 10_000, "1970-01-01T00:16:40.000Z")
    assert first["source"].endswith(f"/pick0/{finals[0].name}")
    assert (second["state"], third["pinned"]) == ("damaged", True)
    unfinished = by["f" * 32]
    assert (unfinished["locked"], unfinished["source"], unfinished["files"]) == (True, "", 1)
    assert unfinished["bytes"] >= 5000
    assert cache("list", root / "nowhere") == (0, [], "")
    (root / "empty").mkdir()
    assert cache("list", root / "empty") == (0, [], "")
    assert cache("list", root / "objects")[0] == 2  # somebody's mistake, which silence would hide


@pytest.mark.parametrize("form", ["table", "tsv"])
def test_every_command_has_a_table(finals: list[Path], root: Path, form: str):
    """For eyes: a head line, and the values below it."""
    os.utime(root / ".leases" / finals[0].name, (0, 2**62))  # a clock gone mad is no reason to fail
    code = (
        "import sys; from pitools import cli; from pitools.commands import stage_cache; "
        "sys.exit(cli.run(getattr(stage_cache, sys.argv.pop(1)), 'pit-stage'))"
    )
    for argv in (
        ["list_command", root],
        ["pin", finals[0].name, "--to", root],
        ["evict", finals[1].name, "--to", root, "--dry-run"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, argv), "--format", form], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "version" in done.stdout.splitlines()[0].lower()
        assert any(final.name in done.stdout for final in finals)


def test_versions_are_named_by_a_beginning_or_their_dataset(finals: list[Path], root: Path, make_dataset, cache):
    """Whatever means one version will do; what means none or several is said to."""
    name = finals[0].name
    assert [
        record["pinned"] for record in cache("pin", name, finals[1].name[:12], "pick2", "pick2", "--to", root)[1]
    ] == [True] * 3
    assert [record["pinned"] for record in cache("unpin", "pick0", "--to", root)[1]] == [False]
    assert records.read_stage_record(root, finals[1].name).pinned
    stage_version(load_version(make_dataset({"b": b"new"}, "pick0")), root)
    code, rows, err = cache("pin", "pick0", "--to", root)
    assert (code, rows) == (2, [])
    assert "is 2 versions" in err
    code, rows, err = cache("unpin", "pick9", "--to", root)
    assert (code, rows) == (2, [])
    assert "did you mean" in err
    for words in (["", "--to", root], [name[:5], "--to", root], [name, "--to", root / "nowhere"], [name]):
        assert cache("pin", *words)[0] == 2


def test_evict_removes_what_is_named(finals: list[Path], root: Path, cache, residue):
    """However lately it was used; exit 1 where something stays, with the reason."""
    os.utime(root / ".leases" / finals[0].name)
    assert cache("evict", "pick0", "--to", root, "--dry-run")[1][0]["state"] == "evictable"
    code, rows, _ = cache("evict", "pick0", "--to", root)
    assert (code, rows[0]["state"], rows[0]["reason"]) == (0, "evicted", None)
    assert rows[0]["bytes"] >= 10_000
    assert not finals[0].exists()
    records.set_pinned(root, finals[1].name)
    with leased_set(finals[2]):
        code, rows, _ = cache("evict", "pick1", "pick2", "--to", root, "--force")
    assert (code, [record["state"] for record in rows]) == (1, ["kept", "kept"])
    assert [record["reason"] for record in rows] == ["pinned", "leased"]
    assert "pit-stage unpin" in cache("evict", "pick1", "--to", root)[2]
    records.set_pinned(root, finals[1].name, pinned=False)
    records.remove_stage_record(root, finals[1].name)
    code, _, err = cache("evict", "pick1", "--to", root)
    assert (code, "--force" in err) == (1, True)
    assert cache("evict", "pick1", "--to", root, "--force") == (0, [ANY], "")
    assert [path.name for path in (root / "objects").iterdir()] == [finals[2].name]
    assert residue(root) == []


def test_evict_removes_an_unfinished_copy(root: Path, finals: list[Path], cache, residue):
    """By its version, when nobody goes on with it."""
    partial_path(root, "f" * 32).mkdir()
    journal_path(root, "f" * 32).touch()
    with version_lock(root, "f" * 32, timeout_s=0):
        assert cache("evict", "f" * 6, "--to", root)[0] == 1
    assert cache("evict", "f" * 6, "--to", root)[0] == 0
    assert residue(root) == []


def test_evict_makes_room(tmpfs, make_dataset, cache):
    """As many sets as are needed, the one used longest ago first; try later when that is too few, and then none."""
    root = tmpfs("size=64m") / "pit"
    finals = [
        Path(stage_version(load_version(make_dataset({"a": os.urandom(10 << 20)}, f"pick{n}")), root).path)
        for n in range(3)
    ]
    for n, final in enumerate(finals):
        os.utime(root / ".leases" / final.name, (1000 + n, 1000 + n))
    assert cache("evict", "--to", root, "--need", "20MiB") == (0, [], "")
    code, rows, _ = cache("evict", "--to", root, "--need", "50MiB", "--dry-run")
    assert (code, [(r["version"], r["state"]) for r in rows]) == (0, [(f.name, "evictable") for f in finals[:2]])
    for more, expected in (["--dry-run"], 1), ([], 75):
        code, rows, err = cache("evict", "--to", root, "--need", "63GiB", *more)
        assert (code, rows) == (expected, [])
        assert "63.0 GiB needed" in err
    assert all(final.exists() for final in finals)
    code, rows, _ = cache("evict", "--to", root, "--need", "50MiB")
    assert (code, [record["version"] for record in rows]) == (0, [final.name for final in finals[:2]])
    assert [final.exists() for final in finals] == [False, False, True]


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "ROOT"],
        ["v", "--need", "1GiB", "--to", "ROOT"],
        ["--need", "lots", "--to", "ROOT"],
        ["v"],
        ["--need", "1GiB", "--quarantined", "--to", "ROOT"],
        ["--need", "1GiB", "--force", "--to", "ROOT"],
    ],
)
def test_evict_wants_to_know_what(finals: list[Path], root: Path, cache, words: list[str]):
    """Nothing named and no room asked for is not "everything"."""
    code, rows, err = cache("evict", *(text.replace("ROOT", str(root)) for text in words))
    assert (code, rows) == (2, [])
    assert err
    assert all(final.exists() for final in finals)


def test_check_repairs_from_the_source(finals: list[Path], root: Path, cache, residue):
    """Each damaged set is staged again from where it came from; exit 0 when all are good again."""
    flip(finals[0] / "a")
    (finals[1] / "manifest.json").unlink()
    code, rows, _ = cache("check", root)
    assert (code, [record["schema"] for record in rows].count("pit.stage-finding/1")) == (1, 2)
    code, rows, _ = cache("check", root, "--repair")
    assert code == 0
    repairs = [record for record in rows if record["schema"] == "pit.stage-repair/1"]
    assert [(r["version"], r["state"], r["reason"]) for r in repairs] == [
        (version, "repaired", "") for version in sorted(final.name for final in finals[:2])
    ]
    assert cache("check", root) == (
        0,
        [rows[-1] | {"findings": 0, "wall_s": pytest.approx(0, abs=60), "files": 3, "bytes": 30_000}],
        "",
    )
    assert residue(root) == []
    flip(finals[0] / "a")
    code, rows, _ = cache("check", finals[0], "--repair", "--quota", "1MiB")
    assert (code, [r["state"] for r in rows if r["schema"] == "pit.stage-repair/1"]) == (1, ["failed"])
    assert cache("check", finals[0], "--repair")[0] == 0
    assert cache("check", finals[0])[0] == 0


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_a_partial_copy_is_not_pinned(finals: list[Path], root: Path, cache, command: str):
    """There is no set yet: a wrong argument, as a version is that is not there at all."""
    partial_path(root, "f" * 32).mkdir()
    assert cache(command, "f" * 32, "--to", root)[0] == 2
    assert cache("evict", "f" * 32, "--to", root)[0] == 0


def test_what_a_repair_evicts_is_told(finals: list[Path], root: Path, cache):
    """As what `run` evicts for room: a note on stderr names the set."""
    flip(finals[2] / "a")
    used_bytes = total_bytes(disk_usage(final) for final in finals)
    quota = used_bytes + needed_bytes(load_version(finals[2]).manifest.files) - 1
    code, rows, err = cache("check", finals[2], "--repair", "--quota", f"{quota}B")
    assert (code, rows[1]["state"]) == (0, "repaired")
    assert [line for line in err.splitlines() if str(finals[0]) in line]
    assert [final.exists() for final in finals] == [False, True, True]


def test_a_set_is_read_once_to_be_repaired(finals: list[Path], root: Path, cache, monkeypatch: pytest.MonkeyPatch):
    """What `check` has found damaged is not read again before it is staged."""
    flip(finals[0] / "a")
    read: list[str] = []
    verify_files = verify.verify_files
    monkeypatch.setattr(
        verify, "verify_files", lambda dataset, **how: read.append(dataset.version) or verify_files(dataset, **how)
    )
    assert cache("check", root, "--repair")[0] == 0
    assert sorted(read) == sorted(final.name for final in finals)


def test_check_quarantines_what_cannot_come_back(finals: list[Path], root: Path, cache):
    """A damaged set of unknown source is moved, not removed, and not called repaired; a leased one is left."""
    flip(finals[0] / "a")
    records.remove_stage_record(root, finals[0].name)
    with leased_set(finals[0]):
        code, rows, _ = cache("check", root, "--repair")
        assert (code, rows[1]["state"]) == (1, "failed")
        assert "leased" in rows[1]["reason"]
    code, rows, _ = cache("check", root, "--repair")
    assert (code, rows[1]["state"]) == (1, "quarantined")
    moved = Path(rows[1]["path"])
    assert moved.parent == root / ".quarantine"
    assert (moved / "a").stat().st_size == 10_000
    assert not finals[0].exists()
    assert cache("check", root, "--repair")[0] == 0
    assert [record["state"] for record in cache("list", root)[1]] == ["present", "present", "quarantined"]
    for option, state in (("--dry-run", "evictable"), ("--quarantined", "evicted")):
        code, rows, _ = cache("evict", "--to", root, "--quarantined", option)
        assert (code, [(r["version"], r["state"]) for r in rows]) == (0, [(finals[0].name, state)])
    assert [record["state"] for record in cache("list", root)[1]] == ["present", "present"]
    assert not moved.exists()


def test_check_says_why_it_did_not_repair(finals: list[Path], root: Path, cache):
    """The source is gone, or another version by now, or only stray files were found: exit 1, and nothing is lost."""
    source = Path(records.read_stage_record(root, finals[0].name).source)
    flip(finals[0] / "a")
    hidden = source.rename(source.parent / "hidden")
    code, rows, _ = cache("check", root, "--repair")
    assert (code, rows[1]["state"]) == (1, "failed")
    assert str(source) in rows[1]["reason"]
    records.write_stage_record(
        root, finals[0].name, source=records.read_stage_record(root, finals[1].name).source, n_bytes=1
    )
    code, rows, _ = cache("check", root, "--repair")
    assert (code, finals[1].name in rows[1]["reason"]) == (1, True)
    records.write_stage_record(root, finals[0].name, source=str(finals[0]), n_bytes=1)
    code, rows, _ = cache("check", root, "--repair")
    assert (code, "damaged set itself" in rows[1]["reason"]) == (1, True)
    hidden.rename(source)
    records.write_stage_record(root, finals[0].name, source=str(source), n_bytes=1)
    (finals[1] / "stray").touch()
    code, rows, _ = cache("check", root, "--repair")
    repairs = {r["version"]: r for r in rows if r["schema"] == "pit.stage-repair/1"}
    assert (code, repairs[finals[0].name]["state"]) == (1, "repaired")
    assert "does not list" in repairs[finals[1].name]["reason"]
    assert matches_sizes(finals[1], load_version(finals[1]))


def test_only_staged_sets_are_repaired(small: Path, cache):
    """A source is ingested again; guessing what it should have been is no repair."""
    assert cache("check", small, "--repair")[0] == 2
    assert cache("check", small)[0] == 0


def test_a_source_that_is_gone_leaves_the_rest_to_be_repaired(finals: list[Path], root: Path, cache):
    """One set that cannot be repaired does not keep the others from it."""
    for final in finals:
        flip(final / "a")
    shutil.rmtree(records.read_stage_record(root, sorted(finals)[0].name).source)
    code, rows, _ = cache("check", root, "--repair")
    states = [record["state"] for record in rows if record["schema"] == "pit.stage-repair/1"]
    assert (code, states) == (1, ["failed", "repaired", "repaired"])


def test_a_root_that_others_may_write_to_is_refused(finals: list[Path], root: Path, cache):
    """What changes something first looks whose folders these are."""
    (root / ".tmp").chmod(0o777)
    for argv in (["pin", "pick0"], ["evict", "pick0"], ["evict", "--need", "1B"]):
        assert cache(*argv, "--to", root)[0] == 4
    assert cache("check", root, "--repair")[0] == 4


def test_evicting_waits_for_no_lock(finals: list[Path], root: Path, cache):
    """A lease file that another process has for itself is one that is in use: it is reported, not waited for."""
    with (root / ".leases" / finals[0].name).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache("evict", "pick0", "--to", root)[0] == 1


def flip(file: Path) -> None:
    """Change a byte in the middle of a file."""
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(100)
        byte = opened.read(1)[0]
        opened.seek(100)
        opened.write(bytes([byte ^ 4]))


def test_a_set_that_was_evicted_while_it_was_read_is_not_brought_back(finals: list[Path], root: Path):
    """Its files are missing because somebody wanted its room, not because it is damaged."""
    version = finals[0].name
    file_finding = FileFinding(
        dataset="pick0", version=version, path="a", problem="missing", expected="a file", got="missing"
    )
    evict_item(root, EvictionCandidate(version, finals[0]), grace_s=0)
    record = repair.repair_set(root, version, [file_finding])
    assert record.state == "failed"
    assert not finals[0].exists()
