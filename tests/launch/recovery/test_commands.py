"""`pit launch why NODE`, `include` and `tick`, as a person or cron types them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.core import trust
from pitools.core.errors import ClusterError
from pitools.core.locks import lock
from pitools.launch.recovery import tick
from pitools.launch.submission import exclusions
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, Evidence
from pitools.site.load import load_site

Pit = Callable[..., subprocess.CompletedProcess[str]]


def test_why_a_node_and_lift(pit: Pit, tmp_path: Path) -> None:
    """The evidence and the time are shown, lifting takes effect, and a name that is nothing is exit 2."""
    runs = tmp_path / "runs"
    runs.mkdir()
    evidence = Evidence(t="2026-01-01T00:00:00Z", source="slurm-7.out", text="NVRM: Xid 79", kind="gpu", node="alpha03")
    cause = Cause(attempt="0", kind="gpu", confidence="certain", reason="Xid 79 on alpha03", evidence=(evidence,))
    exclusions.exclude_nodes(runs, load_site("alpha"), ["alpha03"], cause, "t-1")
    words = {"PIT_RUNS": str(runs)}
    done = pit("launch", "why", "alpha03", "--site", "alpha", **words)
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["kind"], row["run"], "NVRM: Xid 79" in row["evidence"][0]) == ("gpu", "t-1", True)
    assert "pit launch include alpha03" in done.stderr
    assert "alpha03" in pit("launch", "include", "alpha3", "--site", "alpha", **words).stderr
    assert pit("launch", "include", "alpha03", "--site", "alpha", **words).returncode == 0
    assert pit("launch", "include", "alpha03", "--site", "alpha", **words).returncode == 2
    assert "pit launch include" not in pit("launch", "why", "alpha03", "--site", "alpha", **words).stderr
    assert pit("launch", "why", "alpha04", "--site", "alpha", **words).returncode == 2


def test_tick_has_nothing_to_say(pit: Pit, tmp_path: Path) -> None:
    """Without runs, and while another is at work: exit 0 and no record, so that cron mails no noise from stdout."""
    runs = tmp_path / "runs"
    runs.mkdir()
    done = pit("launch", "tick", "--site", "local", PIT_RUNS=str(runs))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with lock(tick.tick_lock_path(runs), "it"):
        done = pit("launch", "tick", "--site", "local", PIT_RUNS=str(runs))
    assert (done.returncode, done.stdout) == (0, "")
    assert str(runs) in done.stderr


def test_a_tick_tells_what_is_wrong_once(pit: Pit, runs: Any, tmp_path: Path) -> None:
    """A site that is silent: exit 75 each time; cron, which mails stderr, has it when it begins, and begins again."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1" = -G ] && exit 1\necho "Connection refused" >&2\nexit 255\n')
    ssh.chmod(0o755)
    (tmp_path / "s.toml").write_text('name = "s"\n[connection]\nkind = "ssh"\nhost = "s"\n')
    env = {"PIT_RUNS": str(runs.root), "PIT_SITE_PATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run_dir = runs.make()

    def tick() -> tuple[int, bool]:
        done = pit("launch", "tick", "--site", "s", **env)
        return done.returncode, "Connection refused" in done.stderr

    assert [tick(), tick()] == [(75, True), (75, False)]
    run_dir.rename(tmp_path / "away")  # nothing to be asked for
    assert tick() == (0, False)
    (tmp_path / "away").rename(run_dir)
    assert tick() == (75, True)


def test_a_tick_tells_nothing_again_beside_what_is_new(pit: Pit, tmp_path: Path) -> None:
    """One run was damaged before, and another is now: cron mails the second alone, once; the code is the worst's."""
    reported = []
    for name in ("r-1", "r-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("{")
        run_folder.append_event(tmp_path / name, "created", site="local")
        done = pit("launch", "tick", "--site", "local", PIT_RUNS=str(tmp_path))
        assert done.returncode == 5
        reported.append([sum(name in line for line in done.stderr.splitlines()) for name in ("r-1", "r-2")])
    assert reported == [[1, 0], [0, 1]]


@pytest.mark.usefixtures("as_root")
def test_what_a_tick_told_is_its_users_own() -> None:
    """In a folder of runs that users share, none of them silences another's cron, nor makes it mail each time."""
    runs, site, output = Path(tempfile.mkdtemp(dir="/tmp")), load_site("local"), ("squeue: Connection refused",)
    runs.chmod(0o777)
    try:
        os.seteuid(54321)
        tick.record_tick_errors(runs, site, output)
        os.seteuid(os.getuid())
        os.seteuid(54322)
        assert tick.last_tick_errors(runs, site) == ()
        tick.record_tick_errors(runs, site, ("another's",))
        (theirs,) = [path for path in runs.iterdir() if path.stat().st_uid == 54321]
        (own_part,) = [path for path in runs.iterdir() if path != theirs]
        os.seteuid(os.getuid())
        os.seteuid(54321)
        assert tick.last_tick_errors(runs, site) == output
        own_part.rename(theirs)
        assert tick.last_tick_errors(runs, site) == ()
    finally:
        os.seteuid(os.getuid())
        shutil.rmtree(runs)


def test_a_run_of_somebody_else_is_called_that() -> None:
    """Whoever may read a run and not write there is told whose it is, and what they can do."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o555)
        if not os.geteuid():
            os.seteuid(65534)
        with pytest.raises(ClusterError, match="run x is") as caught, lock(folder / ".lock", "run x"):
            pass
        assert (trust.user_name(folder.stat().st_uid) in caught.value.message, "why" in caught.value.hint) == (
            True,
            True,
        )
    finally:
        os.seteuid(os.getuid())
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize(("shared", "mode"), [(0o2775, 0o660), (0o2755, 0o600), (0o2777, 0o660)])
def test_a_lock_is_its_folders_group_s(tmp_path: Path, shared: int, mode: int) -> None:
    """Whatever the umask of whoever came first, also an old one; never everybody's, and never through a link."""
    tmp_path.chmod(shared)
    old_umask = os.umask(0o077)
    try:
        (tmp_path / ".old").touch(0o600)
        for name in (".lock", ".old"):
            with lock(tmp_path / name, "it"):
                file_stat = (tmp_path / name).stat()
            assert (stat.S_IMODE(file_stat.st_mode), file_stat.st_gid) == (mode, tmp_path.stat().st_gid)
    finally:
        os.umask(old_umask)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError), lock(tmp_path / "link", "it"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_pipe_is_no_plan(pit: Pit) -> None:
    """As where the `plan` before it failed: exit 2, and the reason is looked for there."""
    done = pit("launch", "run", "-")
    assert (done.returncode, "plan: empty input" in done.stderr) == (2, True)


def test_a_folder_of_runs_that_is_not_here_is_reported(pit: Pit, tmp_path: Path) -> None:
    """By `tick` as an error, for cron; others say so beside their answer. No command makes the folder."""
    runs = {"PIT_RUNS": str(tmp_path / "mnt" / "runs")}
    assert pit("launch", "tick", **runs).returncode == 4
    for command in (["list"], ["watch"], ["prune", "--where", "age>1d"], ["tick"]):
        done = pit("launch", *command, **runs)
        assert runs["PIT_RUNS"] in done.stderr, command
        assert "mkdir -p" in done.stderr, command
    assert not (tmp_path / "mnt").exists()
    (tmp_path / "mnt" / "runs").mkdir(parents=True)
    done = pit("launch", "tick", **runs)
    assert (done.returncode, done.stderr) == (0, "")
