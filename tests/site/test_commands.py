"""`pit site` and `pit script`, as typed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from pitools import cli
from pitools.site import load, user_scripts

Pit = Callable[..., subprocess.CompletedProcess[str]]


def test_list_is_a_record_a_site(pit: Pit) -> None:
    """One JSON line a site, with its schema; nothing heavy is needed for it."""
    rows = [json.loads(line) for line in pit("site", "list").stdout.splitlines()]
    assert {row["schema"] for row in rows} == {"pit.site/1"}
    assert [row["site"] for row in rows] == load.site_names()


def test_one_bad_file_does_not_hide_the_others(pit: Pit, tmp_path: Path) -> None:
    """The good sites are listed, each bad file is named, and the exit code is theirs."""
    bad = [tmp_path / "bad.toml", tmp_path / "dir.toml", tmp_path / "zzz.toml"]
    bad[0].write_text("name = 3\n")
    bad[1].mkdir()
    bad[2].write_text(f"a = {'[' * 5000}{']' * 5000}")
    done = pit("site", "list", PIT_SITE_PATH=str(tmp_path))
    assert done.returncode == 3
    assert len(done.stdout.splitlines()) == len(load.site_names())
    assert [str(path) in done.stderr for path in bad] == [True] * 3
    assert "Traceback" not in done.stderr


def test_show_tells_the_origin(pit: Pit) -> None:
    """A table for eyes, with the variable that won."""
    stdout = pit("site", "show", "alpha", "--origin", "--format", "table", PIT_PARTITION="dev").stdout
    (line,) = [line for line in stdout.splitlines() if line.startswith("defaults.partition")]
    assert line.split()[1:] == ['"dev"', "env", "PIT_PARTITION"]


def test_a_variable_of_one_site_leaves_the_others_alone(pit: Pit) -> None:
    """Listing and checking need no partition of that name; rendering for such a site names the variable, exit 3."""
    wrong = {"PIT_PARTITION": "train", "PIT_TIER": "urgent", "PIT_ACCOUNT": "lab"}
    assert pit("site", "list", **wrong).returncode == 0
    assert pit("launch", "list", "--site", "local", **wrong).returncode == 0
    assert pit("site", "check", "local", **wrong).returncode == 0
    done = pit("script", "render", "train", "--", "true", **wrong)
    assert done.returncode == 3
    assert "env PIT_PARTITION" in done.stderr


def test_check_goes_on_after_a_broken_file(pit: Pit, tmp_path: Path) -> None:
    """A file that does not load is a finding, and the next site is judged; an unknown site is exit 2."""
    (tmp_path / "bad.toml").write_text("name = 3\n")
    (tmp_path / "file").touch()
    (tmp_path / "odd.toml").write_text(
        f'name = "odd"\nscheduler = "none"\n[paths]\nruns = "{tmp_path}/file/runs"\nnvme = "/x/{{usr}}"\n'
    )
    done = pit("site", "check", "bad", "odd", PIT_SITE_PATH=str(tmp_path))
    assert done.returncode == 1
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["site"], row["key"]) for row in findings] == [
        ("bad", ""),
        ("odd", "paths.runs"),
        ("odd", "paths.nvme"),
    ]
    assert str(tmp_path / "bad.toml") in findings[0]["problem"]
    assert pit("site", "check", "odd", "nono", PIT_SITE_PATH=str(tmp_path)).returncode == 2


def test_check_finds_what_loading_cannot(pit: Pit, tmp_path: Path) -> None:
    """A template that needs a value which does not exist, and no place to stage to: exit 1, a finding each."""
    (tmp_path / "odd.sbatch.j2").write_text("#!/bin/bash\n{{ no_such_value }}\n")
    (tmp_path / "broken.sbatch.j2").write_text("#!/bin/bash\nif\n")
    site = f'name = "odd"\nscheduler = "none"\n[templates]\nodd = "{tmp_path}/odd.sbatch.j2"\n'
    (tmp_path / "odd.toml").write_text(site + f'broken = "{tmp_path}/broken.sbatch.j2"\n')
    done = pit("site", "check", "odd", PIT_SITE_PATH=str(tmp_path))
    assert done.returncode == 1
    findings = {json.loads(line)["key"]: json.loads(line)["problem"] for line in done.stdout.splitlines()}
    assert set(findings) == {"paths.nvme", "templates.odd", "templates.broken"}
    assert "no_such_value" in findings["templates.odd"]
    assert "syntax error" in findings["templates.broken"]


def test_check_live_tries_the_sites_python(pit: Pit, tmp_path: Path) -> None:
    """One that does not have pitools, or is not there, is a finding with its own words; the commands' own is none."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # without what is installed
    bare.chmod(0o755)
    text = 'name = "mine"\nscheduler = "none"\n[paths]\nnvme = "/x"\npython = "{}"\n'
    for python, problem in ((bare, "No module named 'pitools'"), (tmp_path / "none", "none"), (sys.executable, "")):
        (tmp_path / "mine.toml").write_text(text.format(python))
        done = pit("site", "check", "--live", "mine", PIT_SITE_PATH=str(tmp_path))
        record = {json.loads(line)["key"]: json.loads(line)["problem"] for line in done.stdout.splitlines()}
        assert (done.returncode, set(record)) == (bool(problem), {"paths.python"} if problem else set())
        assert problem in record.get("paths.python", "")


@pytest.mark.slurm
def test_check_live_compares_with_the_cluster(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """The shipped sites agree with their clusters; one that lies is found out."""
    assert pit("site", "check", "--live", "alpha", "beta").returncode == 0
    (tmp_path / "alpha.toml").write_text(
        'accounts = ["labs"]\n[defaults]\naccount = "labs"\n[tiers]\nlow = "lowest"\n[partitions.train]\nnodes = 9\n'
    )
    done = pit("site", "check", "--live", "alpha", PIT_SITE_PATH=str(tmp_path), PIT_ACCOUNT="")
    assert done.returncode == 1
    keys = {json.loads(line)["key"] for line in done.stdout.splitlines()}
    assert keys == {"accounts", "tiers.low", "partitions.train.nodes"}


def test_scripts_are_listed_and_rendered(pit: Pit) -> None:
    """The shipped scripts are there, and an unknown one names the nearest."""
    rows = [json.loads(line) for line in pit("script", "list", "--site", "alpha").stdout.splitlines()]
    assert [row["script"] for row in rows] == ["stage", "train"]
    done = pit("script", "render", "trian", "--", "true")
    assert done.returncode == 2
    assert 'did you mean "train"?' in done.stderr


def test_stage_has_no_ranks(pit: Pit) -> None:
    """It needs no command and asks for no GPUs, where train needs the one and asks for all of the other."""
    staged = pit("script", "render", "stage", "--site", "h100-ib", "--data", "d=/x").stdout
    assert "--gres" not in staged
    assert "--ntasks-per-node=1\n" in staged
    assert "--gres=gpu:h100:8" in pit("script", "render", "train", "--site", "h100-ib", "--", "true").stdout
    done = pit("script", "render", "train")
    assert (done.returncode, done.stdout) == (2, "")
    assert "train needs a command" in done.stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u train.py --lr 0.1", "train"),
        ("/opt/venv/bin/python3.11 src/fit+eval.py", "fit-eval"),
        ("torchrun --config=a/b.yaml -m pkg.main", "pkg"),
        ("./run --lr 0.1", "run"),
        ("true --lr 0.1", "train"),
    ],
)
def test_a_job_is_named_after_its_file(command: str, name: str) -> None:
    """The first word that looks like a file names the job; without one, the script does."""
    script = user_scripts.render_for_user(
        load.load_site("alpha"),
        "train",
        command.split(),
        nodes=1,
        tasks_per_node=1,
        gpus_per_node=None,
        time="",
        framework="none",
        data={},
    )
    assert f"#SBATCH --job-name={name}\n" in script


@pytest.mark.parametrize("value", ["a\nb", "a\x1bb"])
def test_render_refuses_control_characters(pit: Pit, value: str) -> None:
    """A newline in a value would be a line of the script."""
    done = pit("script", "render", "train", "--data", f"demo=/x{value}", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "control character" in done.stderr


def test_check_says_what_bash_says(pit: Pit) -> None:
    """A script with an open quote is a no, exit 1, with bash's own words."""
    done = pit("script", "check", "-", stdin="#!/bin/bash\necho 'open\n")
    assert done.returncode == 1
    verdict = json.loads(done.stdout)
    assert (verdict["check"], verdict["ok"]) == ("bash", False)
    assert "unexpected EOF" in verdict["detail"]


def test_the_umbrella_runs_a_stranger_s_noun(pit: Pit, tmp_path: Path) -> None:
    """`pit hello` runs pit-hello from the PATH; a misspelt noun names the nearest."""
    tool = tmp_path / "bin" / "pit-hello"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "hello $*"; exit 7\n')
    tool.chmod(0o755)
    done = pit("hello", "--to", "you", PATH=f"{tool.parent}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (7, "hello --to you\n")
    done = pit("lanch", "run")
    assert done.returncode == 2
    assert 'did you mean "launch"?' in done.stderr


def test_bytes_that_are_no_text_are_told(pit: Pit, tmp_path: Path) -> None:
    """A script in another encoding is exit 4 with a sentence, not a traceback with the exit code of a no."""
    (tmp_path / "x.sh").write_bytes(b"#!/bin/sh\n# caf\xe9 \n")
    done = pit("script", "check", "x.sh")
    assert done.returncode == 4
    assert "not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(21, "Is a directory", "/x"), 4, "where: /x"),
        (ZeroDivisionError("ours"), 70, "Traceback"),
        (SystemExit(143), None, ""),
    ],
)
def test_no_surprise_looks_like_an_answer(
    error: BaseException,
    code: int | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What nobody caught is never exit 1: a sentence for the machine's errors, a traceback for ours."""

    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr("sys.argv", ["pit"])
    if code is None:
        with pytest.raises(SystemExit):
            cli.run(fails, "pit")
    else:
        assert cli.run(fails, "pit") == code
    assert said in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_failure() -> None:
    """`pit … | head` ends with 0: the answer was not no."""
    command = f"{shlex.quote(sys.executable)} -m pitools site list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
