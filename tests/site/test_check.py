"""What `pit site check` finds, and what `pit site probe` fills in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Pit = Callable[..., subprocess.CompletedProcess[str]]


def findings(done: subprocess.CompletedProcess[str], code: int) -> list[dict[str, Any]]:
    """What was printed, by a command that ended with this code."""
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def tool(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_what_is_not_as_the_file_says_is_found(pit: Pit, tmp_path: Path) -> None:
    """A marker that is left, an interpreter that is not there, and a slurm.conf of another cluster."""
    (tmp_path / "slurm.conf").write_text("# x\n clustername = Other\nSlurmctldHost=x\n")
    (tmp_path / "odd.toml").write_text(
        f'name = "odd"\n[slurm]\nconf = "{tmp_path}/slurm.conf"\ncluster = "mine"\n[partitions.a]\n'
        '[paths]\n# ?? where\nnvme = "/x"\npython = "/nowhere/python"\n'
    )
    problems = findings(pit("site", "check", "odd", PIT_SITE_PATH=str(tmp_path)), 1)
    assert {row["key"] for row in problems} == {f"{tmp_path}/odd.toml:7", "paths.python", "slurm.cluster"}


@pytest.mark.parametrize(("runs", "keys"), [("gone/runs", ["paths.runs"]), ("gone/{user}/x", []), ("new", [])])
def test_storage_of_runs_that_is_not_here_is_found(pit: Pit, tmp_path: Path, runs: str, keys: list[str]) -> None:
    """By --live; a folder that the first run makes is none."""
    if not keys:
        (tmp_path / "gone").mkdir()
    text = f'name = "odd"\nscheduler = "none"\n[paths]\nnvme = "/x"\nruns = "{tmp_path}/{runs}"\n'
    (tmp_path / "odd.toml").write_text(text)
    problems = findings(pit("site", "check", "odd", "--live", PIT_SITE_PATH=str(tmp_path)), 1 if keys else 0)
    assert [row["key"] for row in problems] == keys


def test_a_fabric_file_that_is_missing_is_found(pit: Pit, tmp_path: Path) -> None:
    """A relative path is in the site file's folder."""
    text = 'name = "odd"\nscheduler = "none"\n[paths]\nnvme = "/x"\n[topology]\nfile = "odd.csv"\n'
    (tmp_path / "odd.toml").write_text(text)
    (row,) = findings(pit("site", "check", "odd", PIT_SITE_PATH=str(tmp_path)), 1)
    assert (row["key"], f"{tmp_path}/odd.csv" in row["problem"]) == ("topology.file", True)
    (tmp_path / "odd.csv").write_text("n1,leaf1\n")
    findings(pit("site", "check", "odd", PIT_SITE_PATH=str(tmp_path)), 0)


def test_a_default_account_that_may_not_be_charged_is_found(pit: Pit, tmp_path: Path) -> None:
    """By its own key, and with the nearest one."""
    text = (
        'name = "odd"\nscheduler = "none"\naccounts = ["robots"]\n[defaults]\naccount = "robot"\n[paths]\nnvme = "/x"\n'
    )
    (tmp_path / "odd.toml").write_text(text)
    rows = findings(pit("site", "check", "odd", PIT_SITE_PATH=str(tmp_path)), 1)
    assert ("defaults.account", True) in [(row["key"], "robots" in row["hint"]) for row in rows]


def test_a_folder_where_runs_could_be_exchanged_is_found(pit: Pit, tmp_path: Path) -> None:
    """Before the first run is refused; a sticky one will do, and one that is still to be made is its parent's."""
    runs = tmp_path / "runs"
    runs.mkdir()
    text = f'name = "odd"\nscheduler = "none"\n[paths]\nnvme = "/x"\nruns = "{runs}/mine"\n'
    (tmp_path / "odd.toml").write_text(text)
    for mode, keys in ((0o777, ["paths.runs"]), (0o1777, []), (0o755, [])):
        runs.chmod(mode)
        problems = findings(pit("site", "check", "odd", PIT_SITE_PATH=str(tmp_path)), 1 if keys else 0)
        assert [row["key"] for row in problems] == keys


def test_a_site_file_of_others_is_found(pit: Pit, tmp_path: Path) -> None:
    """One that everybody can write to, or somebody else's, is a finding, and the next site is judged."""
    for name in ("open", "odd"):
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\nscheduler = "none"\n[paths]\nnvme = "/x"\n')
    (tmp_path / "open.toml").chmod(0o666)
    (row,) = findings(pit("site", "check", "open", "odd", PIT_SITE_PATH=str(tmp_path)), 1)
    assert (row["site"], str(tmp_path / "open.toml") in row["problem"]) == ("open", True)


def test_a_site_that_is_away_does_not_end_the_check(pit: Pit, tmp_path: Path) -> None:
    """The sites after it are judged, it is named, and the exit code says to try again."""
    tool(tmp_path / "bin" / "ssh", "echo 'ssh: connect to host x: Connection refused' >&2; exit 255")
    away = 'name = "{}"\n[connection]\nkind = "ssh"\nhost = "{}"\n[partitions.a]\n[paths]\nnvme = "/x"\n'
    for name in ("away", "gone"):
        (tmp_path / f"{name}.toml").write_text(away.format(name, name))
    (tmp_path / "odd.toml").write_text('name = "odd"\nscheduler = "none"\n')
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    words = ("site", "check", "--live", "away", "gone", "odd")
    done = pit(*words, PIT_SITE_PATH=str(tmp_path), PATH=path)
    assert [row["site"] for row in findings(done, 75)] == ["odd"]
    assert ["site away" in done.stderr, "site gone" in done.stderr] == [True, True]


def test_commands_that_no_controller_understands_are_told_apart(pit: Pit, tmp_path: Path) -> None:
    """They look like a cluster that is away; the error says that another Slurm's commands may be asking."""
    tool(tmp_path / "bin" / "scontrol", "echo 'slurm_load_ctl_conf error: Insane message length' >&2; exit 1")
    (tmp_path / "two.toml").write_text(
        f'name = "two"\n[slurm]\nbin = "{tmp_path}/bin"\n[partitions.a]\n[paths]\nnvme = "/x"\n'
    )
    done = pit("site", "check", "--live", "two", PIT_SITE_PATH=str(tmp_path))
    assert (done.returncode, "[slurm] bin" in done.stderr) == (75, True)


@pytest.mark.slurm
def test_a_folder_without_commands_is_found(clusters: Path, dev_sites: Path, pit: Pit, tmp_path: Path) -> None:
    """Those of the PATH would answer in their place, and nobody would know."""
    text = (dev_sites / "alpha.toml").read_text().replace('name = "alpha"', 'name = "two"')
    (tmp_path / "two.toml").write_text(text.replace("[slurm]", f'[slurm]\nbin = "{tmp_path}"'))
    problems = findings(pit("site", "check", "--live", "two", PIT_SITE_PATH=str(tmp_path)), 1)
    assert [row["key"] for row in problems] == ["slurm.bin"]


@pytest.mark.slurm
def test_commands_of_another_version_are_found(clusters: Path, dev_sites: Path, pit: Pit, tmp_path: Path) -> None:
    """Its version differs from the controller's; and what answers is not the cluster that the file names."""
    tool(tmp_path / "bin" / "sinfo", "echo slurm 99.05.1")
    text = (dev_sites / "alpha.toml").read_text().replace('name = "alpha"', 'name = "two"')
    text = text.replace('cluster = "alpha"', f'cluster = "gamma"\nbin = "{tmp_path}/bin"')
    (tmp_path / "two.toml").write_text(text)
    problems = findings(pit("site", "check", "--live", "two", PIT_SITE_PATH=str(tmp_path)), 1)
    assert [row["key"] for row in problems] == ["slurm.cluster", "slurm.cluster", "slurm.bin"]  # by its file, and live
    (tmp_path / "r.toml").write_text('name = "r"\ncommand = "true"\ntime = "2m"\n')
    done = pit("launch", "run", "r.toml", "--site", "two", PIT_SITE_PATH=str(tmp_path), PIT_RUNS=str(tmp_path / "runs"))
    assert (done.returncode, '"alpha"' in done.stderr) == (4, True)


@pytest.mark.slurm
def test_probe_fills_in_a_site_that_works(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """What probe prints loads, agrees with the cluster, and knows its partitions, tiers and accounts."""
    conf = clusters / "beta" / "slurm.conf"
    text = pit("site", "probe", "mine", "--conf", str(conf)).stdout
    (tmp_path / "mine.toml").write_text(text)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if "??" in line]
    assert marked[0] > 1  # the sentence that explains the marks is no finding
    problems = findings(pit("site", "check", "--live", "mine", PIT_SITE_PATH=str(tmp_path)), 1)
    assert [row["key"] for row in problems] == [f"{tmp_path}/mine.toml:{number}" for number in marked]
    (tmp_path / "mine.toml").write_text(text.replace("??", ""))
    assert findings(pit("site", "check", "--live", "mine", PIT_SITE_PATH=str(tmp_path)), 0) == []
    site = tomllib.loads(text)
    assert site["slurm"]["cluster"] == "beta"
    assert "bin" not in site["slurm"]
    assert site["defaults"]["account"] == "lab"
    assert site["partitions"]["train"]["nodes"] == 8
    assert list(site["tiers"]) == ["low", "normal", "high"]
    assert "lab" in site["accounts"]
    assert site["defaults"]["partition"] == "train"
    # KillWait of beta's slurm.conf, where no partition or QOS gives more.
    assert site["recovery"] == {"grace_s": 5, "submit_from": "node", "chain": "fresh"}
    assert "after 10 s (cred_expire)" in text


@pytest.mark.slurm
@pytest.mark.parametrize("first", ["", "echo 'slurm_load_ctl_conf error: Insane message length' >&2; exit 1"])
def test_probe_finds_the_commands_that_are_answered(clusters: Path, pit: Pit, tmp_path: Path, first: str) -> None:
    """Where the PATH has none, or another Slurm's, those that the login shell finds; the site works by them."""
    real = str(Path(str(shutil.which("scontrol"))).parent)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "env", "grep", "tail", "id"):
        (tools / name).symlink_to(str(shutil.which(name)))
    if first:
        tool(tools / "scontrol", first)
    (tmp_path / "home" / ".profile").write_text(f"PATH={real}:$PATH\n")
    env = {"PATH": str(tools), "SHELL": "/bin/sh", "PIT_SITE_PATH": str(tmp_path)}
    text = pit("site", "probe", "mine", "--conf", str(clusters / "beta" / "slurm.conf"), **env).stdout
    assert tomllib.loads(text)["slurm"]["bin"] == real
    (tmp_path / "mine.toml").write_text(text.replace("??", ""))
    assert findings(pit("site", "check", "--live", "mine", **env), 0) == []


@pytest.mark.slurm
def test_a_job_uses_the_site_s_commands(clusters: Path, dev_sites: Path, pit: Pit, tmp_path: Path) -> None:
    """Submitting, asking and starting the ranks: none of them is looked for on the PATH alone."""
    for name in ("sbatch", "scontrol", "squeue", "srun"):
        tool(tmp_path / "bin" / name, f'echo {name} >> {tmp_path}/called; exec {shutil.which(name)} "$@"')
    text = (dev_sites / "alpha.toml").read_text().replace('cluster = "alpha"', f'bin = "{tmp_path}/bin"')
    (tmp_path / "alpha.toml").write_text(text)
    (tmp_path / "r.toml").write_text('name = "r"\ncommand = "true"\ntime = "2m"\n')
    env = {"PIT_SITE_PATH": str(tmp_path), "PIT_RUNS": str(tmp_path / "runs")}
    done = pit("launch", "run", "r.toml", "--site", "alpha", "--wait", **env)
    assert done.returncode == 0, done.stderr
    assert {"sbatch", "scontrol", "srun"} <= set((tmp_path / "called").read_text().split())


@pytest.mark.slurm
def test_no_command_submits_to_another_cluster(clusters: Path, dev_sites: Path, pit: Pit, tmp_path: Path) -> None:
    """A run, and a script that is sent to chosen nodes: exit 4, and the other cluster gets no job."""
    text = (dev_sites / "alpha.toml").read_text().replace('cluster = "alpha"', 'cluster = "gamma"')
    (tmp_path / "alpha.toml").write_text(text)
    (tmp_path / "r.toml").write_text('name = "r"\ncommand = "true"\ntime = "2m"\n')
    (tmp_path / "job.sh").write_text("#!/bin/sh\n#SBATCH --time=1 --account=lab\ntrue\n")
    env = {"PIT_SITE_PATH": str(tmp_path), "PIT_RUNS": str(tmp_path / "runs")}
    for words in (("launch", "run", "r.toml"), ("topology", "run", "job.sh", "--nodes", "1")):
        done = pit(*words, "--site", "alpha", **env)
        assert (done.returncode, '"gamma"' in done.stderr) == (4, True), done.stderr
    assert list((tmp_path / "runs").glob("*")) == []
