from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.core import subprocesses
from pitools.core.errors import PitError
from pitools.dataset.catalog.retirement import retire_version
from pitools.stage.cache import lease, records
from pitools.stage.cache.evict import KEPT_TEXT, KeptReason, eviction_order
from pitools.stage.cache.inventory import list_sets
from pitools.stage.cache.layout import create_root
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.sync import policy
from pitools.stage.sync.metrics import PREFIX, read_samples
from pitools.stage.sync.sync import EXIT_CODE_ORDER, SyncChange, SyncRun, SyncRunning, sync_lock
from pitools.store import version_state

KEYS = ["schema", "rule", "dataset", "version", "action", "bytes", "copied_bytes", "wall_s", "source", "path", "node"]
OLD_S = 3600


class Site:
    """A source with datasets, a policy for it, and the runs of `pit-stage sync` over it."""

    def __init__(
        self, folder: Path, build: Callable[..., Path], pit_stage: Callable[..., tuple[int, str, str]]
    ) -> None:
        self.data, self.root, self.file = folder / "data", folder / "nvme" / "pit", folder / "stage.toml"
        self.metrics = folder / "stage.prom"
        self._build, self._pit_stage, self._clock = build, pit_stage, time.time() - 1_000_000
        self.rules()

    def rules(self, *more: str) -> None:
        """One rule for each text, over the same source and root unless it says otherwise."""
        texts = []
        for number, text in enumerate(more or ("",)):
            rule = {"name": f'"r{number}"', "from": f'"{self.data}"', "to": f'"{self.root}"'}
            rule |= dict(line.split(" = ", 1) for line in text.splitlines() if line)
            texts.append("[[rules]]\n" + "".join(f"{key} = {value}\n" for key, value in rule.items()))
        self.file.write_text("".join(texts))

    def put(self, name: str, size: int = 1000, *, data: Path | None = None) -> str:
        """A new version, newer than all before it; its name."""
        folder = self._build(data or self.data, {"zarr.json": b"{}", "a/c/0": os.urandom(16) + bytes(size - 16)}, name)
        self._clock += 60
        os.utime(folder / "manifest.json", (self._clock, self._clock))
        return folder.name

    def sync(self, *more: object) -> tuple[int, str, str]:
        return self._pit_stage("sync", "--policy", self.file, *more)

    def changes(self, *more: object) -> list[tuple[str, str]]:
        """Action and version of each record of a run that must succeed."""
        code, out, err = self.sync("--format", "jsonl", *more)
        assert (code, err) == (0, ""), err
        return [(record["action"], record["version"]) for record in map(json.loads, out.splitlines())]

    def staged(self, root: Path | None = None) -> set[str]:
        return {path.name for path in ((root or self.root) / "objects").glob("*")}

    def age(self) -> None:
        """Let the last use of every set be long ago, so that eviction spares none for having been used lately."""
        for path in (self.root / ".leases").iterdir():
            os.utime(path, (time.time() - OLD_S,) * 2)

    def value(self, name: str, **labels: str) -> float | None:
        return read_samples(self.metrics).get((PREFIX + name, (("policy", str(self.file)), *labels.items())))


@pytest.fixture
def site(tmp_path: Path, build: Callable[..., Path], pit_stage: Callable[..., Any]) -> Site:
    """An empty source and root."""
    return Site(tmp_path, build, pit_stage)


def test_the_newest_are_staged_and_the_old_go(site: Site):
    """Two versions of each match are kept; when a third comes it is staged, and then the oldest is evicted."""
    site.rules('pattern = "pick*"\nnewest = 2')
    first, second, other = site.put("pick"), site.put("pick"), site.put("pick2")
    site.put("place")
    assert sorted(site.changes()) == sorted(("staged", version) for version in (first, second, other))
    assert site.changes() == []
    site.age()
    third = site.put("pick")
    assert site.changes() == [("staged", third), ("evicted", first)]
    assert site.staged() == {second, third, other}


def test_what_nobody_is_to_begin_with_is_not_kept(site: Site):
    """A retired version is passed over, and goes where a run brought it; one in quarantine is no version to keep."""
    first, second = site.put("pick"), site.put("pick")
    assert site.changes() == [("staged", second)]
    site.age()
    retire_version(site.data / "pick" / second)
    assert site.changes() == [("staged", first), ("evicted", second)]
    third = site.put("pick")
    version_state.set_quarantine(
        site.data / "pick" / third, version_state.Quarantine(whole_version=True, set_at="", set_by="")
    )
    assert site.changes() == []
    (site.data / f"pick/.catalog/retired/{second}.json").write_text("{")
    code, _, err = site.sync()
    assert (code, first in err, second in err) == (5, False, True)
    assert site.staged() == {first}


def test_a_change_is_a_record_with_frozen_keys(site: Site):
    """The schema is first, and what is said of the set is so."""
    version = site.put("pick", 5000)
    _, out, _ = site.sync("--format", "jsonl")
    record = json.loads(out)
    assert list(record) == KEYS
    assert list(SyncChange.__struct_fields__) == KEYS[1:]
    assert record["schema"] == "pit.stage-sync/1"
    assert (record["rule"], record["dataset"], record["bytes"], record["copied_bytes"]) == ("r0", "pick", 5002, 5002)
    assert record["source"] == str(site.data / "pick" / version)
    assert record["path"] == str(site.root / "objects" / version)
    site.age()
    site.put("pick")
    _, out, _ = site.sync("--format", "jsonl")
    record = json.loads(out.splitlines()[1])
    assert (record["action"], record["dataset"], record["bytes"]) == ("evicted", "pick", 5002)


def test_cron_hears_only_of_changes(site: Site):
    """Without a terminal and a format: one line of a run that did something, and nothing of one that did not."""
    site.put("pick", 5000)
    site.put("place", 5000)
    code, out, err = site.sync()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"pit-stage sync: stage on \S+: 2 staged \(9\.8 KiB\); 2 kept \(9\.8 KiB\) in .*\n", out)
    assert site.sync() == (0, "", "")


def test_a_terminal_shows_a_table(site: Site, program: list[str]):
    """For eyes: a line a change, and then what it came to, also where nothing was to be done."""
    version = site.put("pick")

    def run() -> tuple[list[str], str]:
        ours, theirs = pty.openpty()
        argv = [*program, "sync", "--policy", str(site.file)]
        wide = {**os.environ, "COLUMNS": "400"}
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, text=True, env=wide
        )
        os.close(theirs)
        with open(ours, "rb", buffering=0) as terminal:
            shown = b""
            with contextlib.suppress(OSError):  # EIO: the other end is closed
                while block := terminal.read(4096):
                    shown += block
        assert done.returncode == 0
        return shown.decode().splitlines(), done.stderr

    (head, line), output = run()
    assert head.split() == ["RULE", "ACTION", "DATASET", "VERSION", "BYTES", "COPIED", "BYTES", "PATH"]
    assert line.split()[:4] == ["r0", "staged", "pick", version]
    assert "1 staged" in output
    lines, output = run()
    assert lines == []
    assert "no change; 1 kept" in output


def test_a_dry_run_changes_nothing(site: Site):
    """It says what would be staged and evicted, takes no lock, makes no folder and writes no metrics."""
    first = site.put("pick")
    assert site.changes("--dry-run", "--metrics", site.metrics) == [("stage", first)]
    assert not site.root.exists()
    site.changes()
    site.age()
    second = site.put("pick")
    code, out, err = site.sync("--dry-run")
    assert (code, err) == (0, "")
    assert [json.loads(line)["action"] for line in out.splitlines()] == ["stage", "evict"]
    assert site.staged() == {first}
    assert not site.metrics.exists()
    assert site.changes() == [("staged", second), ("evicted", first)]


def test_what_others_brought_stays(site: Site):
    """A set that was there before a rule wanted it, and one that no rule ever wanted, are not sync's to remove."""
    by_hand, unwanted = site.put("pick"), site.put("other")
    for name, version in (("pick", by_hand), ("other", unwanted)):
        stage_version(load_version(site.data / name / version), site.root)
    site.rules('pattern = "pick"')
    assert site.changes() == []
    site.age()
    new = site.put("pick")
    assert site.changes() == [("staged", new)]
    assert site.staged() == {by_hand, unwanted, new}


def test_what_is_in_use_goes_later(site: Site):
    """Leased, pinned or just used: the set stays, without a word, until a later run may take it."""
    first = site.put("pick")
    site.changes()
    second = site.put("pick")
    assert site.changes() == [("staged", second)]  # the first was used a moment ago
    site.age()
    with lease.leased_set(site.root / "objects" / first, touch=False):
        assert site.sync() == (0, "", "")
    site.age()
    records.set_pinned(site.root, first)
    assert site.sync() == (0, "", "")
    records.set_pinned(site.root, first, pinned=False)
    assert site.changes() == [("evicted", first)]


def test_another_policys_sets_stay(site: Site, tmp_path: Path):
    """Two policies of one root: what either brought goes only when neither wants it."""
    first = site.put("pick")
    site.changes()
    site.age()
    site.file = tmp_path / "other" / "stage.toml"
    site.file.parent.mkdir()
    site.rules("newest = 2")
    assert site.changes() == []
    second = site.put("pick")
    site.file = tmp_path / "stage.toml"
    assert site.changes() == [("staged", second)]
    site.age()
    site.file = tmp_path / "other" / "stage.toml"
    site.rules("newest = 1")
    assert site.changes() == []  # it did not bring the first
    site.file = tmp_path / "stage.toml"
    assert site.changes() == [("evicted", first)]


def test_a_policy_whose_source_is_away_still_wants_its_sets(site: Site, tmp_path: Path):
    """What it wanted last is not given up to another policy because nobody can say what it wants now."""
    mirror, ours, theirs = tmp_path / "mirror", site.file, tmp_path / "other.toml"
    mirror.symlink_to(site.data)
    first = site.put("pick")
    assert site.changes() == [("staged", first)]
    site.file = theirs
    site.rules(f'from = "{mirror}"')
    assert site.changes() == []
    mirror.unlink()
    assert site.sync()[0] == 3
    site.age()
    site.file, second = ours, site.put("pick")
    assert site.changes() == [("staged", second)]
    assert site.staged() == {first, second}


def test_a_renamed_policy_takes_over_its_sets(site: Site):
    """They are evicted as if nothing had happened; those of another rule or source are not, nor while the folder of the
    file is away.
    """
    first = site.put("pick")
    assert site.changes() == [("staged", first)]
    second = site.put("pick")
    site.age()
    old = site.file.parent / "old"
    old.mkdir()
    site.file = site.file.rename(old / "b.toml")
    assert site.changes() == [("staged", second), ("evicted", first)]
    assert len(list((site.root / ".records").glob(".sync.*"))) == 1

    site.file = site.file.rename(old.parent / "c.toml")
    third = site.put("pick")
    site.age()
    old.rename(old.parent / "away")
    assert site.changes() == [("staged", third)]
    (old.parent / "away").rename(old)
    text = site.file.read_text()
    site.file.write_text(text.replace('"r0"', '"another"'))
    assert site.changes() == []
    shutil.copytree(site.data, site.data.with_name("other"))
    site.file.write_text(text.replace(str(site.data), str(site.data.with_name("other"))))
    assert site.changes() == []
    site.file.write_text(text)
    assert site.changes("--dry-run") == [("evict", second)]
    assert site.changes() == [("evicted", second)]


def test_a_policy_split_into_two_files_leaves_each_its_sets(site: Site, tmp_path: Path):
    """The first of them to run takes over the sets of its own rules, and forgets none of the other's."""
    site.rules('pattern = "a"', 'pattern = "b"')
    of_a, of_b = site.put("a"), site.put("b")
    assert site.changes() == [("staged", of_a), ("staged", of_b)]
    site.age()
    newer_a, newer_b = site.put("a"), site.put("b")
    _, first, second = site.file.read_text().split("[[rules]]\n")
    site.file.unlink()
    for name, rule, newer, older in (("a.toml", first, newer_a, of_a), ("b.toml", second, newer_b, of_b)):
        site.file = tmp_path / name
        site.file.write_text(f"[[rules]]\n{rule}")
        assert site.changes() == [("staged", newer), ("evicted", older)]
    assert len(list((site.root / ".records").glob(".sync.*"))) == 2


def test_a_policy_that_was_removed_keeps_no_set(site: Site, tmp_path: Path):
    """What it selected is evicted by the policy that staged it."""
    version = site.put("pick")
    site.changes()
    first, site.file = site.file, tmp_path / "b.toml"
    site.file.write_text(first.read_text())
    assert site.changes() == []
    site.file.unlink()
    site.file, newer = first, site.put("pick")
    site.age()
    assert site.changes() == [("staged", newer), ("evicted", version)]


def test_what_was_evicted_and_came_back_by_hand_stays(site: Site):
    """What a run brought once is its own until it is gone, and not for ever."""
    first = site.put("pick")
    site.changes()
    site.age()
    second = site.put("pick")
    assert site.changes() == [("staged", second), ("evicted", first)]
    stage_version(load_version(site.data / "pick" / first), site.root)
    site.age()
    assert site.changes() == []
    assert site.staged() == {first, second}


def test_what_cannot_be_evicted_stays_the_policys_own(site: Site):
    """The error is told, and the next run tries again."""
    first = site.put("pick")
    site.changes()
    site.age()
    second = site.put("pick")
    lease = site.root / ".leases" / first
    lease.unlink()
    lease.mkdir()
    code, _, err = site.sync()
    assert (code, str(lease) in err) == (4, True)
    assert site.staged() == {first, second}
    lease.rmdir()
    lease.touch()
    site.age()
    assert site.changes() == [("evicted", first)]


def test_a_cap_holds_whatever_the_count(site: Site):
    """The oldest of what the rule chooses is left out, and goes when it was there."""
    site.rules('newest = 5\ncap = "2500B"')
    first, second = site.put("pick"), site.put("pick")
    assert len(site.changes()) == 2
    site.age()
    third = site.put("pick")
    assert site.changes() == [("staged", third), ("evicted", first)]
    assert site.staged() == {second, third}


def test_a_rule_for_other_nodes_does_nothing_here(site: Site, monkeypatch: pytest.MonkeyPatch):
    """Neither staging nor eviction: a name that changes between cron and a job must not cost data."""
    version = site.put("pick")
    site.rules('nodes = "n[01-02]"')
    monkeypatch.setenv("SLURMD_NODENAME", "n09")
    assert site.sync() == (0, "", "")
    assert not site.root.exists()
    monkeypatch.setenv("SLURMD_NODENAME", "n01")
    assert site.changes() == [("staged", version)]
    site.age()
    monkeypatch.setenv("SLURMD_NODENAME", "n09")
    site.rules('nodes = "n[01-02]"', 'pattern = "other"')
    other = site.put("other")
    assert site.changes() == [("staged", other)]
    assert site.staged() == {version, other}


def test_a_rule_that_is_gone_gives_its_sets_back(site: Site):
    """What it brought is evicted by the next run, as long as another rule names the root."""
    site.rules('pattern = "pick"', 'pattern = "place"')
    pick, place = site.put("pick"), site.put("place")
    assert len(site.changes()) == 2
    site.age()
    site.rules('name = "r1"\npattern = "place"')
    assert site.changes() == [("evicted", pick)]
    assert site.staged() == {place}


def test_one_failure_stops_nothing_else(site: Site):
    """A damaged set, a refused root and an empty source are a line each; the rest is done; the worst code is 5."""
    good, bad = site.put("pick"), site.put("place")
    (site.data / "place" / bad / "a" / "c" / "0").write_bytes(b"!" * 1000)
    site.rules("", 'to = "/proc/pit"', 'from = "/nowhere"', 'pattern = "nothing*"')
    code, out, err = site.sync("--metrics", site.metrics)
    assert code == 5
    assert re.search(r": 1 staged \(.*\), 4 failed; 1 kept", out)
    assert site.staged() == {good}
    lines = err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith('pit-stage sync: error: rule "r') for line in lines)
    assert str(site.data / "place" / bad / "a" / "c" / "0") in lines[0]
    kinds = {kind: site.value("errors_total", kind=kind) for kind in ("policy", "refused", "data", "later")}
    assert kinds == {"policy": 2, "refused": 1, "data": 1, "later": 0}


def test_where_anything_failed_nothing_is_evicted(site: Site):
    """A source that is not mounted, a damaged new version, a newest one over the cap: yesterday's data stays."""
    first = site.put("pick")
    site.changes()
    site.age()
    hidden = site.data.rename(site.data.with_name("hidden"))
    site.data.mkdir()
    code, _, err = site.sync()
    assert (code, "mounted" in err, site.staged()) == (3, True, {first})
    site.data.rmdir()
    hidden.rename(site.data)
    second = site.put("pick")
    damaged = site.data / "pick" / second / "a" / "c" / "0"
    good = damaged.read_bytes()
    damaged.write_bytes(bytes(1000))
    code, _, err = site.sync()
    assert (code, str(damaged) in err, site.staged()) == (5, True, {first})
    damaged.write_bytes(good)
    site.rules('cap = "500B"')
    code, _, err = site.sync()
    assert (code, "over the cap" in err, site.staged()) == (3, True, {first})
    site.rules()
    assert site.changes() == [("staged", second), ("evicted", first)]


def test_no_room_is_to_be_tried_again(site: Site, tmpfs: Callable[[str], Path]):
    """75, one line that names the room, and the set that fits is there."""
    site.root = tmpfs("size=12m") / "pit"
    site.rules('min_free = "1MiB"')
    small, _ = site.put("a", 1000), site.put("b", 20 << 20)
    code, _, err = site.sync("--metrics", site.metrics)
    assert (code, len(err.splitlines()), site.staged()) == (75, 1, {small})
    assert "MiB needed" in err
    assert (site.value("last_exit_code"), site.value("errors_total", kind="later")) == (75, 1)


def test_a_damaged_copy_is_repaired(site: Site):
    """By names and sizes, as `run` believes a copy that stands."""
    version = site.put("pick")
    site.changes()
    (site.root / "objects" / version / "zarr.json").unlink()
    assert site.changes() == [("repaired", version)]


def test_a_shared_root_is_open_to_read_and_lease(site: Site):
    """A service account's cache: folders, sets and lease files may be read by all; unfinished copies may not."""
    site.rules("shared = true")
    version = site.put("pick")
    site.changes()
    modes = {name: (site.root / name).stat().st_mode & 0o777 for name in ("objects", ".leases", ".tmp")}
    assert modes == {"objects": 0o755, ".leases": 0o755, ".tmp": 0o700}
    assert (site.root / "objects" / version / "a" / "c" / "0").stat().st_mode & 0o777 == 0o444
    assert (site.root / ".leases" / version).stat().st_mode & 0o777 == 0o644


def test_a_wrong_policy_is_one_line_and_counted(site: Site):
    """Exit 3, the line, the nearest key; and monitoring sees it, with the last success still told."""
    site.put("pick")
    site.sync("--metrics", site.metrics)
    success = site.value("last_success_timestamp_seconds")
    site.file.write_text(site.file.read_text() + "newst = 2\n")
    code, out, err = site.sync("--metrics", site.metrics)
    assert (code, out) == (3, "")
    assert err == f'pit-stage sync: error: {site.file}:5, rule 1: unknown key "newst"; did you mean "newest"?\n'
    assert site.value("last_exit_code") == 3
    assert site.value("errors_total", kind="policy") == 1
    assert site.value("last_success_timestamp_seconds") == success
    assert site.sync("--metrics", site.metrics, "--timeout", "soon")[0] == 2


def test_metrics_tell_what_was_done(site: Site):
    """Sets and bytes kept and copied, evictions, and room; and that nothing happened since, but in time."""
    first = site.put("pick", 4000)
    start_time = time.time()
    site.sync("--metrics", site.metrics)
    assert site.value("kept_sets", rule="r0") == 1
    assert site.value("kept_bytes", rule="r0") == site.value("copied_bytes_total") == 4002
    assert start_time <= (site.value("last_start_timestamp_seconds") or 0) + 0.001
    assert site.value("last_success_timestamp_seconds") == site.value("last_end_timestamp_seconds")
    assert (site.value("free_bytes", root=str(site.root)) or 0) > 0
    site.age()
    site.put("pick", 2000)
    site.sync("--metrics", site.metrics)
    assert (site.value("staged_sets_total"), site.value("evicted_sets_total")) == (2, 1)
    assert (site.value("evicted_bytes_total"), site.value("kept_bytes", rule="r0")) == (4002, 2002)
    assert first not in site.staged()
    site.sync("--metrics", site.metrics)
    assert (site.value("staged_sets_total"), site.value("last_exit_code")) == (2, 0)


def test_policies_of_one_name_have_samples_of_their_own(site: Site, tmp_path: Path):
    """Two files of the same name in one file of metrics: neither hides what the other keeps."""
    site.put("pick")
    site.sync("--metrics", site.metrics)
    first, site.file = site.file, tmp_path / "other" / "stage.toml"
    site.file.parent.mkdir()
    site.rules('pattern = "none"')
    site.sync("--metrics", site.metrics)
    assert site.value("kept_sets", rule="r0") == 0
    site.file = first
    assert site.value("kept_sets", rule="r0") == 1


def test_metrics_that_cannot_be_written_are_an_error_of_their_own(site: Site):
    """The data is synced all the same, once and with one line."""
    version = site.put("pick")
    code, _, err = site.sync("--metrics", "/nowhere/stage.prom")
    assert (code, len(err.splitlines()), "/nowhere" in err) == (4, 1, True)
    assert site.staged() == {version}


@pytest.mark.parametrize("name", ["", "stage.txt", "/tmp"])
def test_metrics_that_nobody_would_read_are_refused(site: Site, name: str):
    """The collector takes *.prom alone: an empty variable in a crontab, or another name, would be silence for ever."""
    site.put("pick")
    code, out, err = site.sync("--metrics", name)
    assert (code, out, ".prom" in err) == (2, "", True)
    assert not site.root.exists()


def test_a_second_run_does_nothing(site: Site):
    """Silent and 0 for cron, a word for people; and the metrics go on to say that the first has not ended."""
    site.put("pick")
    site.sync("--metrics", site.metrics)
    data = site.metrics.read_bytes()
    site.put("pick")
    with sync_lock(policy.load_policy(site.file)):
        assert site.sync("--metrics", site.metrics) == (0, "", "")
        code, out, err = site.sync("--format", "jsonl")
        assert (code, out) == (0, "")
        assert f"pid {os.getpid()} of" in err
        with pytest.raises(SyncRunning), sync_lock(policy.load_policy(site.file)):
            pass
    assert site.metrics.read_bytes() == data
    assert len(site.changes()) == 1


def test_another_policy_does_not_wait(site: Site, tmp_path: Path):
    """The lock is the policy's own; versions have theirs."""
    version = site.put("pick")
    with sync_lock(policy.load_policy(site.file)):
        site.file = tmp_path / "other.toml"
        site.rules()
        assert site.changes() == [("staged", version)]


def test_a_killed_run_knows_its_sets_again(site: Site, program: list[str]):
    """kill -9 in the middle: the lock is free, the next run finishes, and what was begun is evicted in its time."""
    site.rules('pattern = "pick"', 'pattern = "large"')
    first, large = site.put("pick"), site.put("large", 200 << 20)
    argv = [*program, "sync", "--policy", str(site.file), "--metrics", str(site.metrics)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 20
    while not (site.root / ".tmp" / f"{large}.partial/a/c/0").exists() and time.monotonic() < until:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert site.staged() == {first}
    started, end = site.value("last_start_timestamp_seconds"), site.value("last_end_timestamp_seconds")
    assert started is not None
    assert end is None
    assert site.changes() == [("staged", large)]
    site.age()
    second = site.put("pick")
    assert site.changes() == [("staged", second), ("evicted", first)]


def test_a_stopped_run_says_so(site: Site, program: list[str]):
    """SIGTERM, as `timeout` sends it: the code is 143, in the metrics too, and nothing half done is visible."""
    site.put("pick", 200 << 20)
    argv = [*program, "sync", "--policy", str(site.file), "--metrics", str(site.metrics)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + 20
    while not list(site.root.glob(".tmp/*.partial/a/c/0")) and time.monotonic() < until:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, b"")
    assert (site.value("last_exit_code"), site.staged()) == (143, set())
    assert site.value("last_success_timestamp_seconds") == 0


@pytest.mark.parametrize("text", ["", "{", '{"schema": "pit.stage-sync-state/1", "versions": 3}', "\xff"])
def test_a_lost_memory_removes_nothing(site: Site, text: str):
    """Where it is not known what runs brought, they brought nothing: sets stay for eviction by age."""
    first = site.put("pick")
    site.changes()
    site.age()
    (state,) = (site.root / ".records").glob(".sync.*.json")
    state.write_text(text, encoding="latin-1")
    second = site.put("pick")
    assert site.changes() == [("staged", second)]
    assert site.staged() == {first, second}


def test_the_worst_code_is_the_one_somebody_must_look_at(site: Site):
    """Data, then policy, then refusals; what may pass by itself comes last."""
    work = SyncRun(policy.load_policy(site.file), on_change=lambda _: None, on_error=lambda *_: None)
    assert work.exit_code() == 0
    for code in reversed(EXIT_CODE_ORDER):
        work.errors.append(type("E", (PitError,), {"exit_code": code})("x"))
        assert work.exit_code() == code


def test_bookkeeping_is_no_set(site: Site):
    """What sync keeps at the root is not listed, and nobody who makes room takes it away."""
    version = site.put("pick")
    site.changes()
    assert [record.version for record in list_sets(site.root)] == [version]
    assert [item.version for item in eviction_order(site.root)] == [version]


@pytest.mark.usefixtures("as_root")
def test_another_users_root_is_refused(site: Site):
    """A service account's policy does not write into a folder that a user put in its way."""
    site.put("pick")
    create_root(site.root)
    for path in [site.root, *site.root.iterdir()]:
        os.chown(path, 65534, 65534)
    code, _, err = site.sync()
    assert (code, "another user" in err, "only that user or root" in err) == (4, True, True)


CRON = "scripts/cron/pit-stage.cron"
FIELD = r"(?:\*|\d+(?:-\d+)?)(?:/\d+)?(?:,(?:\*|\d+(?:-\d+)?)(?:/\d+)?)*"
JOB = re.compile(rf"((?:{FIELD}\s+){{5}})(\S.*)")


def crontab(text: str) -> tuple[dict[str, str], list[str]]:
    """Variables and commands, as cron reads them; fails for what cron would refuse or not mean."""
    variables, commands = {}, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if setting := re.fullmatch(r"([A-Z_]+)=(\S+)", line):
            assert "$" not in setting[2]
            variables[setting[1]] = setting[2]
            continue
        job = JOB.fullmatch(line)
        assert job, line
        for value, (low, high) in zip(job[1].split(), [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)], strict=True):
            step = value.partition("/")[2]
            assert all(low <= int(number) <= high for number in re.findall(r"\d+", value.partition("/")[0]))
            assert not step or 1 <= int(step) <= high
        assert "%" not in job[2]
        assert len(line) < 999
        commands.append(job[2])
    return variables, commands


def test_the_crontab_is_one(repo: Path):
    """By cron's own rules, and by cron's own program where it is installed and can only look."""
    variables, commands = crontab((repo / CRON).read_text())
    assert {"MAILTO", "SHELL", "PATH"} <= variables.keys()
    assert len(commands) == 1
    program = shutil.which("crontab")
    usage = subprocesses.run([program, "--help"], timeout_s=10).stderr if program else ""
    for flag, told in (("-T", "-T"), ("-n", "dry run")):
        if program and told in usage:
            done = subprocesses.run([program, flag, str(repo / CRON)], timeout_s=10)
            assert done.code == 0, done.stderr
            break


def test_the_crontabs_command_runs(site: Site, repo: Path, tmp_path: Path):
    """As cron starts it: its shell, its variables, no terminal; a changed node says one line, the same again none."""
    variables, (command,) = crontab((repo / CRON).read_text())
    version = site.put("pick")
    site.rules('pattern = "pick*"\nnewest = 2\ncap = "500GiB"')
    changed = {"POLICY": str(site.file), "METRICS": str(site.metrics), "SPREAD_S": "0"}
    assert changed.keys() <= variables.keys()
    env = {**variables, **changed, "HOME": str(tmp_path), "LOGNAME": "root"}
    env["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    output = []
    for _ in range(2):
        done = subprocess.run(
            [variables["SHELL"], "-c", command],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        output.append(done.stdout)
    assert "1 staged" in output[0]
    assert output[1] == ""
    assert site.staged() == {version}
    assert site.value("last_exit_code") == 0


def test_the_example_policy_is_one(repo: Path):
    """What the README says to copy is read without a word."""
    (rule,) = policy.load_policy(repo / "scripts" / "cron" / "stage.toml").rules
    assert (rule.name, rule.newest, rule.applies) == ("pick", 2, True)
    assert len((repo / "scripts" / "cron" / "README.md").read_text().splitlines()) <= 80


def test_rules_do_not_push_out_each_others_sets(site: Site):
    """Where not all that is wanted fits, what was first stays, run after run, and the rest is said to lack room."""
    first, second = site.put("a", 3 << 20), site.put("b", 3 << 20)
    site.rules('pattern = "a"\nquota = "13MiB"', 'pattern = "b"\nquota = "13MiB"')
    for _ in range(3):
        code, _, err = site.sync()
        assert (code, err.count("MiB needed"), site.staged()) == (75, 1, {first})
        site.age()
    site.rules('pattern = "b"\nquota = "13MiB"')
    assert ("staged", second) in site.changes()


def test_room_is_made_of_the_policys_own_sets_alone(site: Site, tmp_path: Path):
    """A quota evicts neither what was staged by hand nor what another policy wants; what it evicts is reported."""
    by_hand, of_other = site.put("a", 3 << 20), site.put("b", 3 << 20)
    stage_version(load_version(site.data / "a" / by_hand), site.root)
    site.rules('pattern = "b"')
    assert site.changes() == [("staged", of_other)]
    site.age()
    own = site.put("c", 3 << 20)
    site.file = tmp_path / "other.toml"
    site.rules('pattern = "c"\nquota = "12MiB"')
    code, _, err = site.sync()
    assert (code, KEPT_TEXT[KeptReason.OF_OTHERS] in err) == (75, True)
    assert site.staged() == {by_hand, of_other}
    site.rules('pattern = "c"\nquota = "19MiB"')
    assert site.changes() == [("staged", own)]
    site.age()
    new = site.put("c", 3 << 20)
    code, out, _ = site.sync("--format", "jsonl", "--metrics", site.metrics)
    evicted, staged = map(json.loads, out.splitlines())
    assert (code, staged["action"], staged["version"]) == (0, "staged", new)
    assert [evicted[key] for key in ("action", "version", "dataset", "rule")] == ["evicted", own, "c", "r0"]
    assert evicted["bytes"] >= 3 << 20
    assert site.staged() == {by_hand, of_other, new}
    assert site.value("evicted_sets_total") == 1


def test_a_disk_that_is_not_mounted_gets_no_root(site: Site, tmp_path: Path):
    """The system's disk is not filled in its place: an error, and nothing is created."""
    site.put("pick")
    site.rules(f'disk = "{tmp_path}"')
    assert site.sync("--format", "jsonl")[:2] == (4, "")
    assert not site.root.parent.exists()
    site.rules('disk = "/"')
    assert len(site.changes()) == 1
