"""The scripts of every shipped site and of the development clusters', held against files that a reviewer reads.

To renew them after a change that is meant: python tests/site/golden.py
"""

from __future__ import annotations

import re
import runpy
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from pitools.run import run_folder
from pitools.run.attempt_records import SUCCEEDED
from pitools.site import load, user_scripts

GOLDEN = runpy.run_path(str(Path(__file__).with_name("golden.py")))
CASES = GOLDEN["CASES"]


@pytest.mark.parametrize(("site", "script"), CASES, ids=[f"{site}-{script}" for site, script in CASES])
def test_scripts_are_as_reviewed(repo: Path, site: str, script: str) -> None:
    """A site's script is the golden file, to the byte."""
    here = str(Path(load.load_site("alpha").slurm.conf).parents[1])
    text = GOLDEN["text"](site, script).replace(here, "/var/tmp/pit-devcluster")
    assert text == (repo / "tests" / "golden" / site / f"{script}.sbatch").read_text()


def test_every_golden_file_is_bash(repo: Path) -> None:
    """`bash -n` accepts each."""
    files = sorted((repo / "tests" / "golden").rglob("*.sbatch"))
    assert len(files) == len(CASES)
    for path in files:
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_a_job_s_own_logs_are_their_owner_s(repo: Path, tmp_path: Path) -> None:
    """Slurm made them under the submitter's umask; stderr has a file of its own where a site gives `--error`."""
    script, _, _ = (repo / "tests" / "golden" / "alpha" / "train.sbatch").read_text().partition("# The run's folder")
    out, err = tmp_path / "out", tmp_path / "err"
    for path in (out, err):
        path.touch()
        path.chmod(0o664)
    with out.open("a") as stdout, err.open("a") as stderr:
        subprocess.run(["bash", "-c", script], stdout=stdout, stderr=stderr, check=True)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (out, err)] == [0o644, 0o644]


@pytest.mark.parametrize(("code", "first_failure", "ended"), [("0", "", 0), ("143", "", 143), ("143", "3 1 n2\n", 3)])
def test_the_script_itself_writes_an_end_that_nothing_else_wrote(
    repo: Path, tmp_path: Path, code: str, first_failure: str, ended: int
) -> None:
    """As the record has it, with the first failure's code, and marked as a success where it is one; again as well."""
    text = (repo / "tests" / "golden" / "alpha" / "train.sbatch").read_text()
    function = text[text.index("record_exit() {") :].partition("\n}\n")[0] + "\n}\n"
    (tmp_path / "first_failure").write_text(first_failure)
    env = {"PATH": "/usr/bin:/bin", "PIT_ATTEMPT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    for _ in range(2):
        argv = ["bash", "-c", f"{function}record_exit {code}"]
        done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"{ended}\n", "")
        record = run_folder.read_record(tmp_path / "exit.json", run_folder.AttemptExit)
        assert record is not None
        assert (record.job_id, record.exit_code) == ("7", ended)
        assert (tmp_path / SUCCEEDED).exists() == (ended == 0)
        (tmp_path / SUCCEEDED).unlink(missing_ok=True)  # as if it was killed before that


@pytest.mark.slurm
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("script", ["train", "stage"])
def test_slurm_takes_the_scripts(clusters: Path, name: str, script: str) -> None:
    """`sbatch --test-only` of the running cluster accepts the script."""
    verdicts = list(user_scripts.check_script(load.load_site(name), GOLDEN["text"](name, script)))
    assert [(verdict.check, verdict.ok) for verdict in verdicts] == [("bash", True), ("sbatch", True)]


def test_one_process_stages_all_datasets_on_a_node() -> None:
    """It leases each until the last one is there: else room for the third is made by evicting the first."""
    site, data = load.load_site("alpha"), {"a b": "/data/a/1f", "c": "/data/c/2f"}
    options = {"nodes": 4, "tasks_per_node": 1, "gpus_per_node": None, "time": "2h", "framework": "jax", "data": data}
    script = user_scripts.render_for_user(site, "stage", [], **options)
    (step,) = re.findall("-m pitools stage run (.*)", script.replace("\\\n", ""))
    words = shlex.split(step)
    assert [word for word in words if word in data.values()] == list(data.values())
    assert [Path(word).stem for word in words if word.endswith(".json")] == list(data)
