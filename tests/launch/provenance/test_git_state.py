"""What git says of a workdir, and what becomes of one that says nothing."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from pitools.launch.provenance import git_state
from tests.launch.conftest import Git


def applied(git: Git, work: Path, patch: Path, commit: str) -> Path:
    """The commit with the patch applied, in a folder of its own."""
    clone = work.parent / "clone"
    git("clone", "-q", str(work), str(clone), at=work.parent)
    git("checkout", "-q", commit, at=clone)
    git("apply", "--binary", str(patch), at=clone)
    return clone


def test_commit_and_patch_give_the_workdir(work: Path, git: Git, tmp_path: Path) -> None:
    """What was changed, removed or untracked, binary files and odd names too, comes back from commit and patch."""
    git("tag", "v1")
    odd = ["new.py", "a\nb", "q\"'", "-rf", "ü", ":(top)x", "sub/deep.bin"]
    (work / "sub").mkdir()
    for name in odd:
        (work / name).write_bytes(b"\0\xff" + os.urandom(50))
    (work / "loop.py").unlink()
    (work / "settings.toml").write_text("rate = 2\n")
    before = git("status", "--porcelain"), (work / ".git" / "index").read_bytes()
    actual = git_state.read_git_state(work, tmp_path / "dirty.patch")
    assert (actual.branch, actual.describe, actual.dirty, actual.problem, actual.left_out) == (
        "main",
        "v1",
        True,
        "",
        (),
    )
    assert actual.commit == git("rev-parse", "HEAD")
    assert stat.S_IMODE((tmp_path / "dirty.patch").stat().st_mode) == 0o600
    assert (git("status", "--porcelain"), (work / ".git" / "index").read_bytes()) == before
    clone = applied(git, work, tmp_path / "dirty.patch", actual.commit)
    for name in [*odd, "settings.toml"]:
        assert (clone / name).read_bytes() == (work / name).read_bytes()
    assert not (clone / "loop.py").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".dirty")) == []


def test_a_clean_repository_has_no_patch(work: Path, git: Git, tmp_path: Path) -> None:
    """Of a commit and nothing else there is only the commit; runs and environments that git sees are none of it."""
    (work / "env").mkdir()
    (work / "env" / "pyvenv.cfg").touch()
    (work / "runs").mkdir()
    (work / "runs" / "log").touch()
    actual = git_state.read_git_state(work, tmp_path / "dirty.patch", without={work / "runs"})
    assert (actual.dirty, actual.patch) == (False, "")
    assert not (tmp_path / "dirty.patch").exists()


def test_large_files_are_named_with_their_digest(work: Path, git: Git, tmp_path: Path) -> None:
    """A large untracked file is read once, named, and not in the patch; the small change beside it is."""
    (work / "weights").touch()
    os.truncate(work / "weights", 256 << 20)
    (work / "settings.toml").write_text("rate = 2\n")
    actual = git_state.read_git_state(work, tmp_path / "dirty.patch")
    (large,) = actual.left_out
    assert (large.path, large.bytes, large.digest[:13]) == ("weights", 256 << 20, "xxh3_128x64m:")
    assert 0 < actual.patch_bytes < 1000


def test_submodules_and_a_first_commit_to_come(work: Path, git: Git, tmp_path: Path) -> None:
    """A submodule's commit is in the patch, and an untracked repository is named; before any commit all is patch."""
    folder = tmp_path / "other"
    folder.mkdir()
    git("init", "-q", "-b", "main", at=folder)
    (folder / "x").touch()
    empty = git_state.read_git_state(folder, tmp_path / "first.patch")
    assert (empty.commit, empty.dirty, empty.left_out) == ("", True, ())
    assert b"b/x" in (tmp_path / "first.patch").read_bytes()
    git("add", "-A", at=folder)
    git("commit", "-q", "-m", "first", at=folder)
    git("submodule", "add", "-q", str(folder), "lib")
    git("clone", "-q", str(folder), "nested")
    actual = git_state.read_git_state(work, tmp_path / "dirty.patch")
    assert b"Subproject commit" in (tmp_path / "dirty.patch").read_bytes()
    assert [item.path for item in actual.left_out] == ["nested/"]


def test_no_repository_and_no_git(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is needed; that it is missing is said."""
    assert git_state.read_git_state(work, tmp_path / "p").problem == "the workdir is in no repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state.read_git_state(work, tmp_path / "p").problem == "git is not installed"


def test_a_git_that_hangs_is_left(work: Path, git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that never answers costs its time-out, and says so."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(git_state, "_TIMEOUT_S", 0.3)
    began = time.monotonic()
    assert git_state.read_git_state(work, tmp_path / "p").problem.startswith("git failed: no answer within")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("slow", "known"),
    [
        ("*--untracked-files=all*", "commit branch describe patch"),
        ("*status*", "commit"),
        ("*' diff '*", "commit branch describe"),
        ("*' add '*", "commit branch describe"),
        ("*describe*", "commit branch patch"),
    ],
)
def test_what_a_slow_git_has_told_is_kept(
    work: Path, git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, known: str
) -> None:
    """Where one command of git times out, the answers of the others are kept, and the problem is set."""
    (work / "new.py").touch()
    (work / "settings.toml").write_text("rate = 2\n")
    (tmp_path / "bin").mkdir()
    script = f'#!/bin/sh\ncase "$*" in {slow}) sleep 60;; *) exec {shutil.which("git")} "$@";; esac\n'
    (tmp_path / "bin" / "git").write_text(script)
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(git_state, "_TIMEOUT_S", 2.0)
    state = git_state.read_git_state(work, tmp_path / "p")
    assert state.problem
    assert [name for name in ("commit", "branch", "describe", "patch") if getattr(state, name)] == known.split()
    assert (tmp_path / "p").exists() == bool(state.patch)


@pytest.mark.usefixtures("as_root")
def test_another_users_repository(work: Path, git: Git, tmp_path: Path) -> None:
    """git refuses one that is not ours, whose settings could run programs; that is said, and nothing is run."""
    git("config", "core.fsmonitor", f"touch {tmp_path}/ran")
    subprocess.run(["chown", "-R", "nobody", str(work)], check=True)
    assert "another user" in git_state.read_git_state(work, tmp_path / "p").problem
    subprocess.run(["chown", "-R", "root", str(work)], check=True)
    assert git_state.read_git_state(work, tmp_path / "p").problem == ""
    assert not (tmp_path / "ran").exists()


def test_inside_a_hook(work: Path, git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by a hook of another repository, whose variables are set, it still asks the workdir's own."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "no" / "index"))
    assert git_state.read_git_state(work, tmp_path / "p").commit


def test_remotes_are_not_told(work: Path, git: Git, tmp_path: Path) -> None:
    """No address of a remote, which may hold a token, is in what is kept."""
    git("remote", "add", "origin", "https://user:t0ken@git.example.org/x")
    (work / "settings.toml").write_text("rate = 2\n")
    actual = git_state.read_git_state(work, tmp_path / "p")
    assert "t0ken" not in repr(actual)
    assert b"t0ken" not in (tmp_path / "p").read_bytes()
    assert shutil.which("git")


@pytest.mark.usefixtures("git")
def test_a_patch_beyond_the_limit_is_reported(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that exceeds the limit is removed, and `problem` contains its limit."""
    (work / "loop.py").write_text("changed = 1\n" * 9)
    monkeypatch.setattr(git_state, "PATCH_MAX_BYTES", 150)
    state = git_state.read_git_state(work, tmp_path / "p")
    assert (state.patch, "150" in state.problem, (tmp_path / "p").exists()) == ("", True, False)
