"""What stays out of a run's copy of the code: secrets, what git ignores, what .pitignore names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError
from pitools.launch.provenance import code_copy, copy_rules, git_state, provenance, workdir_walk
from tests.launch.conftest import Git, MakeRun

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nZm9v\n"
MARK = "c0ffee-secret-c0ffee"
SECRETS = [
    ".env",
    ".env.local",
    "sub/.ENV",
    ".netrc",
    ".aws/credentials",
    ".ssh/config",
    "id_rsa",
    "sub/id_ed25519",
    ".npmrc",
    ".kube/config",
    ".pypirc",
    ".git-credentials",
    ".config/gcloud/token.db",
    "service-account-x.json",
    "a.p12",
    ".s3cfg",
    ".boto",
    ".dockercfg",
    "sub/.databrickscfg",
    "rclone.conf",
    "kubeconfig",
    ".bash_history",
    ".netrc~",
    "prod.env",
    "conf/secrets.yaml",
    "secrets.toml",
    "secret.env",
    "conf/secret.json",
    "sub/Secrets.txt",
    "mine.secret",
    ".secrets",
    "api_key.txt",
    "passwords.txt",
    "token.txt",
    "hf_token",
    "sub/HF_TOKEN.txt",
    "wandb_key",
    "infra/main.tfstate",
    "infra/main.tfstate.backup",
]


def files(root: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def copied(work: Path, to: Path) -> tuple[code_copy.CodeListing, set[str]]:
    workdir = code_copy.copy_workdir(
        work, to, ignored=git_state.ignored_paths(work), tracked=git_state.tracked_files(work)
    )
    return workdir, {file.path for file in workdir.files if file.kind == "file"}


def test_secrets_stay_out_whatever_asks_for_them(work: Path, git: Git, tmp_path: Path) -> None:
    """Tracked or not, asked for or not: by name, or as a private key of any name; an example of one is none."""
    files(work, dict.fromkeys(SECRETS, MARK) | {"deploy": KEY, "cert.pem": "-----BEGIN CERTIFICATE-----\n"})
    files(work, dict.fromkeys(("tokens.txt", "secrets.py", "cluster.env"), "x"))
    files(work, {".env.example": "TOKEN=\n", ".pitignore": "!.env\n!id_rsa\n!*\n"})
    git("add", "-f", ".env", "id_rsa")
    git("commit", "-q", "-m", "secrets")
    copied_files, names = copied(work, tmp_path / "code")
    assert names == {
        ".env.example",
        ".pitignore",
        "cert.pem",
        "cluster.env",
        "loop.py",
        "secrets.py",
        "settings.toml",
        "tokens.txt",
    }
    assert {"deploy", ".env", "sub/.ENV", ".aws", ".ssh", ".config/gcloud"} <= set(copied_files.secrets)
    sent = {entry.name for entry in workdir_walk.workdir_entries(work)}
    assert {name for name in sent if name.endswith((".env", "id_rsa", "deploy", "credentials"))} == {"code/cluster.env"}


def test_a_patch_holds_no_secret(work: Path, git: Git, make_run: MakeRun) -> None:
    """What git shows as changed or untracked goes into dirty.patch, but for secrets and what .pitignore names."""
    files(work, {".env": "old\n", "mine.txt": "x\n"})
    git("add", ".env")
    git("commit", "-q", "-m", "more")
    files(work, {".env": MARK, ".netrc": MARK, "notes/tokens.txt": MARK, "new.py": "1\n", ".pitignore": "notes/\n"})
    run_dir = make_run()
    patch = (run_dir / "dirty.patch").read_text()
    assert "new.py" in patch
    left_out = {entry.path: entry.digest for entry in provenance.verify_provenance(run_dir).git.left_out}
    assert left_out == {".env": "", ".netrc": "", "notes/tokens.txt": ""}
    result = subprocess.run(["grep", "-rl", MARK, str(run_dir)], capture_output=True, text=True, check=False)
    assert result.stdout == ""


def test_what_only_its_owner_may_read_stays_out(
    work: Path, git: Git, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copy, patch and upload leave it out; not what git tracks, .pitignore asks for, or is there to be executed."""
    names = ("password", "keys/pw.txt", "keys/other.txt", "kept.toml", "tracked.toml", "run.sh")
    files(work, dict.fromkeys(names, MARK) | {".pitignore": "!kept.toml\n"})
    for name in names:
        (work / name).chmod(0o700 if name == "run.sh" else 0o600)
    git("add", "tracked.toml")
    run_dir = make_run()
    listing = code_copy.read_listing(run_dir)
    assert listing.private == ("keys/other.txt", "keys/pw.txt", "password")
    assert {"kept.toml", "tracked.toml", "run.sh"} <= {file.path for file in listing.files}
    assert not {"+++ b/password", "+++ b/keys/pw.txt"} & set((run_dir / "dirty.patch").read_text().splitlines())
    assert "!keys/other.txt" in next(line for line in capsys.readouterr().err.splitlines() if "password" in line)
    assert "code/password" not in {entry.name for entry in workdir_walk.workdir_entries(work)}


def test_under_a_closed_umask_no_file_is_private(work: Path, tmp_path: Path) -> None:
    """Where most files of a folder and of the workdir are their owner's alone, that says nothing of one of them."""
    files(work, {"a.py": "x", "data/b.csv": "x", "data/c.csv": "x", "data/d.csv": "x"})
    for path in (*work.glob("*.*"), work / "data/c.csv", work / "data/d.csv"):
        path.chmod(0o600)
    assert copied(work, tmp_path / "code")[1] == {
        "a.py",
        "data/b.csv",
        "data/c.csv",
        "data/d.csv",
        "loop.py",
        "settings.toml",
    }


def test_what_git_ignores_stays_out_unless_asked_for(work: Path, git: Git, tmp_path: Path) -> None:
    """By git's own rules, nested ones and tracked files too; .pitignore brings back with `!` and leaves out more."""
    files(work, {".gitignore": "build/\n*.log\n", "sub/.gitignore": "gen.py\n", ".git/info/exclude": "local.txt\n"})
    names = [
        "build/x",
        "a.log",
        "kept.log",
        "sub/gen.py",
        "sub/a.py",
        "local.txt",
        "big.bin",
        "tracked.log",
        "wanted.log",
    ]
    files(work, dict.fromkeys(names, "x"))
    git("add", "-f", "tracked.log")
    files(work, {".pitignore": "*.bin\n!wanted.log\n!build/\n"})
    copied_files, actual = copied(work, tmp_path / "code")
    assert actual == {
        ".gitignore",
        ".pitignore",
        "build/x",
        "loop.py",
        "settings.toml",
        "sub/.gitignore",
        "sub/a.py",
        "tracked.log",
        "wanted.log",
    }
    assert copied_files.ignored == ("a.log", "big.bin", "kept.log", "local.txt", "sub/gen.py")


def test_an_ignored_environment_is_still_linked(work: Path, git: Git, tmp_path: Path) -> None:
    """An environment or dataset of the workdir is needed by what runs, and is linked to as before."""
    files(work, {".gitignore": ".venv/\n", ".venv/pyvenv.cfg": "x"})
    copied_files, _ = copied(work, tmp_path / "code")
    assert [item.path for item in copied_files.linked] == [".venv"]


def test_without_git_its_rules_still_hold(work: Path, tmp_path: Path) -> None:
    """A folder that is no repository: .gitignore at its top is read, and .pitignore after it."""
    files(work, {".gitignore": "*.log\n", ".pitignore": "!b.log\n", "a.log": "x", "b.log": "x"})
    assert git_state.ignored_paths(work) is None
    assert copied(work, tmp_path / "code")[1] == {".gitignore", ".pitignore", "b.log", "loop.py", "settings.toml"}


def test_rules_that_cannot_be_read_are_an_error(work: Path) -> None:
    """A .pitignore that is a link is not followed, and a copy without its rules is not made."""
    (work / ".pitignore").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError):
        copy_rules.CopyRules(work, ())


def test_it_is_said_in_one_line(work: Path, git: Git, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever launches sees what is missing, what could be imported first, and how to have it."""
    files(work, {".gitignore": "*.log\n_version.py\n", "a.log": "x", "_version.py": "x", ".env": MARK})
    make_run()
    lines = [line for line in capsys.readouterr().err.splitlines() if ".env" in line]
    assert len(lines) == 1
    assert "!_version.py" in lines[0]
    assert MARK not in lines[0]


@pytest.mark.parametrize("umask", [0o002, 0o077])
@pytest.mark.parametrize("access", ["owner", "group"])
def test_who_may_read_and_write_a_run(
    work: Path, pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, umask: int, access: str
) -> None:
    """A run's folder is its owner's alone, or its group may read it where the site says so; nobody else writes."""
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o777)
    sites = tmp_path / "sites"
    files(
        tmp_path,
        {
            "sites/here.toml": 'name = "here"\nscheduler = "none"\n'
            f'[paths]\nruns = "{tmp_path}/runs"\nruns_access = "{access}"\n',
            "r.toml": f'name = "t"\ncommand = "true"\ntime = "5m"\nworkdir = "{work}"\n',
        },
    )
    sites.chmod(0o755)
    (sites / "here.toml").chmod(0o644)
    done = pit(
        "launch", "run", str(tmp_path / "r.toml"), "--site", "here", "--wait", PIT_SITE_PATH=str(sites), umask=umask
    )
    assert done.returncode == 0, done.stderr
    (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if not path.name.startswith("."))
    assert run_dir.stat().st_mode & 0o777 == {"owner": 0o700, "group": 0o750}[access]
    executed = [run_dir / "code", run_dir / "plan.json", *(run_dir / "code").rglob("*")]
    assert [path for path in executed if path.stat().st_mode & 0o022] == []
