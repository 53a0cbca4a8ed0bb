"""What submits a run on the other side."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.launch.tickets.remote import submission
from pitools.site.schema import Site
from pitools.slurm import errors


@pytest.mark.parametrize(("mode", "code"), [(0o700, 0), (0o755, 0), (0o757, 1), (0o1777, 1)])
def test_a_run_folder_that_others_can_write_is_not_submitted(tmp_path: Path, mode: int, code: int) -> None:
    """Whoever makes the folder of a run before it is sent has no script of theirs run as the user who sends it."""
    run, tools = tmp_path / "run", tmp_path / "bin"
    for folder in (run, tools):
        folder.mkdir()
    (run / "script.sbatch").touch()
    (tools / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tools / "sbatch").chmod(0o755)
    run.chmod(mode)
    words = ["sh", "-c", submission._SUBMIT, "pit", str(run), "token", "9", "<", ">"]
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "" if code else "<7>\n")


@pytest.mark.parametrize(
    ("said", "kind", "looks"),
    [("no_key", errors.SlurmUnreachable, 1), ("lost", errors.OutcomeUnknown, 2)],
)
def test_only_a_login_that_failed_is_certain(
    repo: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type, looks: int
) -> None:
    """Where ssh never came in there is no job; where the connection was lost there may be one, and it is looked for."""
    stderr = (repo / f"tests/replay/openssh-9.2/{said}.txt.err").read_text()
    requested: list[str] = []

    def ask(site: Site, at: str, args: object) -> subprocesses.Completed:
        requested.append(at)
        raise errors.error_for("sh", "login", errors.SSH_FAILED, stderr)

    monkeypatch.setattr(submission, "_call_sbatch_script", ask)
    with pytest.raises(kind):
        submission._run_sbatch_script(Site(name="s"), "t", "/runs/t", ())
    assert len(requested) == looks
