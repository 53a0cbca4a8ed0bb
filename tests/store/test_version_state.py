from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.store import version_state
from pitools.store.version_state import Quarantine

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def version(tmp_path) -> Path:
    """The folder of a version, as far as it matters here."""
    path = tmp_path / "root" / "reach" / ("a" * 32)
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    return path


def held(version: Path, moment: datetime = NOW) -> list[str]:
    return [reader.purpose for reader in version_state.lease_records(version.parents[1], "reach", version.name, moment)]


def test_lease(version) -> None:
    """A lease is there for the block, says who holds it, and is gone after it, however that ends."""
    with version_state.leased_version(version, 60, "job 1", clock=lambda: NOW):
        (reader,) = version_state.lease_records(version.parents[1], "reach", version.name, NOW)
        assert (reader.pid, reader.host, reader.purpose) == (os.getpid(), os.uname().nodename, "job 1")
        assert reader.until == "2026-11-21T12:01:00.000Z"
        with (
            contextlib.suppress(ZeroDivisionError),
            version_state.leased_version(version, 60, "job 2", clock=lambda: NOW),
        ):
            assert sorted(held(version)) == ["job 1", "job 2"]
            raise ZeroDivisionError
        assert held(version) == ["job 1"]
    assert held(version) == []


def test_lease_ends_by_itself(version) -> None:
    """A lease whose holder was killed lasts until its end and the minutes by which clocks differ, unless renewed."""
    lease = version_state.leased_version(version, 3600, "job", clock=lambda: NOW)
    holder = lease.__enter__()
    end = NOW + timedelta(seconds=3600)
    for moment, expected in ((end + timedelta(minutes=9), ["job"]), (end + timedelta(minutes=11), [])):
        assert held(version, moment) == expected
    holder.extend(7200)
    assert held(version, end + timedelta(minutes=11)) == ["job"]
    folder = version_state.leases_dir(version.parents[1], "reach", version.name)
    version_state.remove_expired_leases(folder, end)
    assert held(version) == ["job"]
    version_state.remove_expired_leases(folder, end + timedelta(days=1))
    assert list(folder.iterdir()) == []
    lease.__exit__(None, None, None)  # late, and no failure


def test_lease_of_a_killed_process(version) -> None:
    """After kill -9 the lease stays for others to see."""
    code = (
        "import os, sys; from pathlib import Path; from pitools.store import version_state\n"
        "with version_state.leased_version(Path(sys.argv[1]), 600, 'victim'): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(version)], check=False).returncode == -9
    assert held(version, version_state.utc_now()) == ["victim"]


def test_lease_of_what_is_not_there(version, tmp_path) -> None:
    """There is no lease on a version that is missing, also where it goes while the lease is written; nor of no time."""
    with (
        pytest.raises(DataError, match="missing"),
        version_state.leased_version(tmp_path / "root/reach/none", 60, "job"),
    ):
        pass
    with pytest.raises(UsageError), version_state.leased_version(version, 0, "job"):
        pass
    write = version_state.write_catalog_record

    def removed(*args, **settings) -> None:
        write(*args, **settings)
        version.rename(tmp_path / "gone")

    with (
        patch("pitools.store.version_state.write_catalog_record", removed),
        pytest.raises(DataError, match="missing"),
        version_state.leased_version(version, 60, "job"),
    ):
        pass
    assert held(version) == []


def test_lease_where_nobody_may_write(version) -> None:
    """A catalog that cannot be written is told, with its path."""
    (version.parent / ".catalog").write_text("a file in its place")
    with pytest.raises(ClusterError) as caught, version_state.leased_version(version, 60, "job"):
        pass
    assert ".catalog" in caught.value.where


def test_relative_paths_mean_the_same(version, monkeypatch) -> None:
    """However the version is given, through a link or from within it, its one catalog is meant."""
    (version.parents[1] / "link").symlink_to(version)
    monkeypatch.chdir(version)
    for path in (Path(), Path("../../link"), version):
        with version_state.leased_version(path, 60, str(path), clock=lambda: NOW):
            assert held(version) == [str(path)]


def test_quarantine(version) -> None:
    """What was put in quarantine is read again as it was, can be put anew, and lifted twice."""
    assert version_state.read_quarantine(version) is None
    record = Quarantine(
        whole_version=False, episodes={3: ("black",), 12: ("NaN", "frozen")}, set_at="2026", set_by="me@here"
    )
    version_state.set_quarantine(version, record)
    assert version_state.read_quarantine(version) == record
    (file,) = (version.parent / ".catalog/quarantine").iterdir()
    retained = json.loads(file.read_text())
    assert (retained["schema"], retained["episodes"]["12"]) == ("pit.quarantine/1", ["NaN", "frozen"])
    version_state.set_quarantine(version, Quarantine(whole_version=True, reasons=("cut short",), set_at="", set_by=""))
    assert version_state.read_quarantine(version).whole_version
    for _ in range(2):
        version_state.set_quarantine(version, None)
        assert version_state.read_quarantine(version) is None


def test_quarantine_of_another_user(version) -> None:
    """Where this user may not change a quarantine, the error names its record, and says what to do about that."""
    with (
        patch("pitools.core.locks.open_lock_file", side_effect=PermissionError(13, "Permission denied")),
        pytest.raises(ClusterError) as caught,
        version_state.quarantine_lock(version),
    ):
        pass
    assert caught.value.where.endswith(f"quarantine/{version.name}.json")
    assert "launch" not in caught.value.hint


@pytest.mark.parametrize("damage", ["{", '{"schema": "pit.other/1"}', '{"schema": "pit.quarantine/1", "whole": 1}'])
def test_damaged_quarantine(version, damage) -> None:
    """A record that cannot be read is no reason to train on what it may keep from that."""
    file = version_state.quarantine_file(version.parents[1], "reach", version.name)
    file.parent.mkdir(parents=True)
    file.write_text(damage)
    with pytest.raises(DataError, match="not a record of a quarantine") as caught:
        version_state.read_quarantine(version)
    assert (caught.value.where, str(version) in caught.value.hint) == (str(file), True)


def test_names_and_refresh(tmp_path) -> None:
    """Hidden files are no entries, a folder that is missing has none, and to refresh one leaves nothing in it."""
    for name in ("b.json", "a.json", ".a.json", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in version_state.list_names(tmp_path, ".json")] == ["a.json", "b.json"]
    assert version_state.list_names(tmp_path / "none") == version_state.list_names(tmp_path / "c.txt") == []
    before = sorted(tmp_path.iterdir())
    assert abs(version_state.file_system_time(tmp_path) - version_state.utc_now()) < timedelta(seconds=5)
    assert version_state.file_system_time(tmp_path / "none") is None
    assert sorted(tmp_path.iterdir()) == before


def test_permissions(version) -> None:
    """Whoever may add versions to a dataset may write to its catalog, whatever the umask of who was first."""
    version.parent.chmod(0o2775)
    old_umask = os.umask(0o077)
    try:
        with version_state.leased_version(version, 60, "job"):
            folders = [path for path in (version.parent / ".catalog").rglob("*") if path.is_dir()]
    finally:
        os.umask(old_umask)
    assert {oct(path.stat().st_mode & 0o7777) for path in (version.parent / ".catalog", *folders)} == {"0o2775"}


def test_author() -> None:
    """Who did something is a user at a host, also where the user has no name."""
    assert version_state.current_user().endswith(f"@{os.uname().nodename}")
    with patch("pwd.getpwuid", side_effect=KeyError):
        assert version_state.current_user().startswith(f"{os.geteuid()}@")
