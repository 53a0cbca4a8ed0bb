"""Whose a run's folder is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, DataError
from pitools.run import run_folder

STRANGER = 54321  # a uid and gid of nobody


@pytest.mark.parametrize(("access", "mode"), [("owner", 0o700), ("group", 0o750)])
def test_a_run_is_made_where_nobody_can_exchange_it(tmp_path: Path, access: str, mode: int) -> None:
    """In a folder that is open to everybody only where that is sticky; nothing is left where it is refused."""
    run_folder.make_run_dir(tmp_path / "a", access)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError):
        run_folder.make_run_dir(tmp_path / "b", access)
    with pytest.raises(ConfigError):
        run_folder.require_own_run(tmp_path / "a", group_above=access == "group")
    tmp_path.chmod(0o1777)
    run_folder.make_run_dir(tmp_path / "c", access)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


@pytest.mark.usefixtures("as_root")
def test_a_group_s_folder_of_runs_is_taken_where_the_site_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project's folder, of another member of a group of ours; else the error says how to say so."""
    os.chown(tmp_path, STRANGER, STRANGER)
    tmp_path.chmod(0o2770)
    monkeypatch.setattr(os, "getgroups", lambda: [STRANGER])
    with pytest.raises(ConfigError) as caught:
        run_folder.make_run_dir(tmp_path / "a", "owner")
    assert 'runs_access = "group"' in caught.value.hint
    run_folder.make_run_dir(tmp_path / "a", "group")


@pytest.mark.parametrize("name", ["plan.json", "script.sbatch", "code", "submitit", "jobs"])
def test_what_decides_in_a_run_is_its_owner_s(tmp_path: Path, name: str) -> None:
    """Each file and folder of a run by which something is started."""
    (tmp_path / name).mkdir()
    run_folder.require_own_run(tmp_path)
    (tmp_path / name).chmod(0o777)
    with pytest.raises(ConfigError):
        run_folder.require_own_run(tmp_path)


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("plan", [b"{", None])
def test_a_stranger_s_request_is_not_suggested(tmp_path: Path, plan: bytes | None) -> None:
    """Of a damaged run of another user there is no command to run what they wrote; of one's own there is."""
    run = tmp_path / "a"
    run.mkdir()
    (run / "request.toml").touch()
    if plan:
        (run / "plan.json").write_bytes(plan)
    for uid, has_command in ((0, True), (STRANGER, False)):
        os.chown(run, uid, uid)
        with pytest.raises(DataError) as caught:
            run_folder.read_record(run_folder.find_run(tmp_path, "a") / "plan.json", run_folder.JobRef)
        assert ("pit launch run" in caught.value.hint) == has_command == (f"{STRANGER}'s" not in caught.value.hint)
