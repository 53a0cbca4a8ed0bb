"""psbatch adds what nobody said, and touches nothing else."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError, UsageError
from pitools.site import load, psbatch

Pit = Callable[..., subprocess.CompletedProcess[str]]
ALL = {"partition", "account", "qos", "time"}


@pytest.fixture(autouse=True)
def no_slurm_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_TIMELIMIT"):
        monkeypatch.delenv(name, raising=False)


def added(args: list[str], script: str = "#!/bin/bash\ntrue\n") -> set[str]:
    """Names of the flags that alpha adds to `sbatch ARGS < script`."""
    call = psbatch.prepare_call(load.load_site("alpha"), args, io.StringIO(script))
    extra = call.argv[1 : len(call.argv) - len(args)]
    assert call.argv[len(call.argv) - len(args) :] == args
    return {flag[2:].split("=")[0] for flag in extra}


@pytest.mark.parametrize(
    ("args", "given"),
    [
        ([], set()),
        (["-p", "dev"], {"partition"}),
        (["-pdev", "-t", "5"], {"partition", "time"}),
        (["-Hpdev"], {"partition"}),
        (["--partition=dev", "--qos", "high"], {"partition", "qos"}),
        (["--wait", "-A", "infra"], {"account"}),
        (["-J", "-p", "-N2"], set()),  # the job is called "-p"
        (["--exclusive", "--time=1"], {"time"}),
        (["--part=dev", "--acco", "infra"], {"partition", "account"}),
        (["--hol", "-t5"], {"time"}),
        (["-e", "err", "-o", "out", "-m", "block"], set()),
        (["--time-min=5", "--mem=1"], set()),
    ],
)
def test_what_the_command_line_says_stays(args: list[str], given: set[str]) -> None:
    """Short, joined, bundled and long options all count, as sbatch reads them."""
    assert added(args) == ALL - given


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("#!/bin/bash\n#SBATCH -p dev\n#SBATCH --time 5 # short\ntrue\n", {"partition", "time"}),
        ("#!/bin/bash\n\n# a comment\n#SBATCH --account=infra\n", {"account"}),
        ("#!/bin/bash\ntrue\n#SBATCH -p dev\n", set()),  # after the first command sbatch reads no more
        ("#!/bin/bash\n##SBATCH -p dev\n", set()),
        ('#!/bin/bash\n#SBATCH --comment="-p dev" -qhigh\n', {"qos"}),
        ("#!/bin/bash\n#SBATCH --comment=don't\n#SBATCH --qo=x --part=dev\n", {"qos", "partition"}),
    ],
)
def test_what_the_script_says_stays(script: str, given: set[str]) -> None:
    """A script's own directives are not overridden."""
    assert added([], script) == ALL - given


def test_what_a_variable_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """SBATCH_* stands above the script and below the command line, so it settles its flag."""
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    assert added([]) == ALL - {"time"}


def test_every_variable_of_sbatch_settles_its_option(
    write_site: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the site's extra flags, and one of a group for the whole group."""
    write_site("x", 'name = "x"\n[dialect]\nmemory = "all"\nextra = ["--reservation=ours", "--constraint=ib"]\n')
    site = load.load_site("x")
    flags = {"--reservation=ours", "--constraint=ib", "--mem=0"}
    assert flags <= set(psbatch.missing_defaults(site, set()))
    for name in ("RESERVATION", "CONSTRAINT", "MEM_PER_CPU"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    assert not flags & set(psbatch.missing_defaults(site, set()))


def test_arguments_of_the_script_are_not_options(tmp_path: Path) -> None:
    """What follows the script belongs to the script."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    assert added([str(script), "-p", "dev", "--qos=x"]) == ALL


def test_a_missing_script_or_slurm_is_told(tmp_path: Path) -> None:
    """No script, no such file, no Slurm: usage errors that say what to do."""
    with pytest.raises(UsageError, match="no script"):
        psbatch.prepare_call(load.load_site("alpha"), ["-p", "dev"], None)
    with pytest.raises(UsageError, match="cannot read script"):
        psbatch.prepare_call(load.load_site("alpha"), [str(tmp_path / "none.sh")], None)
    with pytest.raises(UsageError, match='"local" has no Slurm'):
        psbatch.prepare_call(load.load_site("local"), ["job.sh"], None)


def test_the_site_s_own_sbatch_is_called(write_site: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Where the site names the folder of Slurm's commands."""
    (tmp_path / "bin").mkdir()
    write_site("x", f'name = "x"\n[slurm]\nbin = "{tmp_path}/bin"\n')
    assert psbatch.prepare_call(load.load_site("x"), ["--wrap=true"], None).argv[0] == f"{tmp_path}/bin/sbatch"


def test_over_ssh_the_script_travels_on_stdin(write_site: Callable[[str, str], Path]) -> None:
    """The remote command is one quoted word, and the script's text is sent."""
    write_site("far", 'name = "far"\n[connection]\nkind = "ssh"\nhost = "login.far"\n[defaults]\ntime = "2h"\n')
    call = psbatch.prepare_call(load.load_site("far"), ["--comment=it's"], io.StringIO("#!/bin/bash\n"))
    assert (call.argv[0], call.argv[-2]) == ("ssh", "login.far")
    assert shlex.split(call.argv[-1])[-3:] == ["sbatch", "--time=02:00:00", "--comment=it's"]
    assert call.stdin == "#!/bin/bash\n"
    # --dry-run leaves out what clears the far side's variables, and can be pasted.
    assert [shlex.split(text) for text in shlex.split(call.command_text)] == [
        ["ssh"],
        ["login.far"],
        ["sbatch", "--time=02:00:00", "--comment=it's"],
    ]


def test_a_script_need_not_be_utf_8() -> None:
    """Bytes of another encoding on stdin are no error of ours."""
    argv = [str(Path(sys.executable).with_name("psbatch")), "--site", "alpha", "--dry-run"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(argv, input=b"#!/bin/sh\n# caf\xe9\n", env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_short_option_is_no_beginning_of_a_long_one(write_site: Callable[[str, str], Path]) -> None:
    """-e names a file and -m a distribution, so a site's --exclusive and --mem are added all the same."""
    write_site("x", 'name = "x"\n[dialect]\nexclusive = true\nmemory = "all"\nextra = ["--gpus-per-node=8"]\n')
    call = psbatch.prepare_call(
        load.load_site("x"), ["-e", "err", "-m", "block", "--gpus=4"], io.StringIO("#!/bin/bash\n")
    )
    assert {"--exclusive", "--mem=0", "--gpus-per-node=8"} <= set(call.argv)
    call = psbatch.prepare_call(load.load_site("x"), ["--overs", "--mem-per-c=1"], io.StringIO("#!/bin/bash\n"))
    assert not {"--exclusive", "--mem=0"} & set(call.argv)


def test_a_variable_counts_only_where_nobody_else_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """PIT_PARTITION that the site has not is refused, unless the command line gives a partition."""
    monkeypatch.setenv("PIT_PARTITION", "elsewhere")
    assert added(["-p", "dev"]) == ALL - {"partition"}
    with pytest.raises(ConfigError, match="elsewhere"):
        added([])


def test_a_closed_stdin_is_no_script() -> None:
    """`<&-` is told as having no script, and does no harm where there is one."""
    psb = str(Path(sys.executable).with_name("psbatch"))
    argv = ["sh", "-c", 'exec "$@" <&-', "sh", psb, "--site", "alpha", "--dry-run"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, "no script" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert subprocess.run([*argv, "--wrap=true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slurm
def test_real_jobs_get_what_was_added(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """A script on stdin and one in a file run on alpha with its account; --dry-run only prints."""
    script = "#!/bin/bash\n#SBATCH --output=/dev/null\ntrue $1\n"
    (tmp_path / "job.sh").write_text(script)
    shown = pit("psbatch", "--site", "alpha", "--dry-run", "--parsable", "job.sh", "x y")
    assert "--account=lab" in shown.stdout
    assert shown.stdout.rstrip().endswith("--parsable job.sh 'x y'")
    for args, stdin in ((["--parsable", "job.sh", "x y"], ""), (["--parsable"], script)):
        done = pit("psbatch", "--site", "alpha", *args, stdin=stdin)
        assert done.returncode == 0, done.stderr
        job = subprocess.run(
            ["scontrol", "-o", "show", "job", done.stdout.strip()],
            env={"SLURM_CONF": str(clusters / "alpha" / "slurm.conf"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert " Account=lab " in job.stdout
        assert "TimeLimit=01:00:00" in job.stdout
