"""The command itself, run in this process as `pit` would."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from pitools.cli import run
from pitools.commands.dataset_check import check
from pitools.core.errors import ClusterError
from pitools.store import version_state
from pitools.store.reader.version_reader import VersionReader


@pytest.fixture
def invoke(monkeypatch, capfd):
    """Runs the command as `pit` does; exit code, records, stderr."""

    def call(*words: str) -> tuple[int, list[dict], str]:
        monkeypatch.setattr("sys.argv", ["pit-dataset-check", *words])
        code = run(check, "pit dataset check")
        out, err = capfd.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return call


def test_clean(invoke, copy) -> None:
    """Nothing is 0, no records, and a line on stderr that says what was read."""
    code, records, err = invoke(str(copy))
    assert (code, records) == (0, [])
    assert f"x {copy.name}: nothing found; read " in err


def test_newest(invoke, copy) -> None:
    """A dataset's folder stands for its newest version."""
    code, _, err = invoke(str(copy.parent))
    assert code == 0
    assert copy.name in err


def test_faults(invoke, make) -> None:
    """Faults are 1, a record each, and can be put in quarantine and released."""
    path = make(lambda demos: demos[3]["actions"].__setitem__(5, float("nan")))
    code, (record,), err = invoke(str(path), "--quarantine")
    assert code == 1
    assert list(record) == [
        "schema",
        "level",
        "check",
        "array",
        "episode",
        "file",
        "step",
        "problem",
        "got",
        "expected",
    ]
    assert (record["schema"], record["episode"], record["step"]) == ("pit.dataset-finding/1", 3, 5)
    assert "1 fault" in err
    assert "in quarantine: 1 episode\n" in err
    code, records, err = invoke(str(path), "--lift-quarantine")
    assert (code, records) == (0, [])
    assert "lifted: 1 episode\n" in err
    assert "nothing is in quarantine" in invoke(str(path), "--lift-quarantine")[2]


def test_faults_of_all(invoke, make) -> None:
    """Faults that are of no one episode put nothing in quarantine, and that is said."""
    path = make(lambda demos: [known["actions"].fill(1) for known in demos])
    code, records, err = invoke(str(path), "--quarantine")
    assert code == 1
    assert {record["check"] for record in records if record["level"] == "fault"} == {"constant"}
    assert "nothing to put in quarantine: no fault is of one episode alone" in err


def test_damage(invoke, copy) -> None:
    """Damage is 5, whatever else there is."""
    (copy / "action/c/0/0").write_bytes(b"")
    code, records, err = invoke(str(copy), "--quarantine", "--deep")
    assert (code, records[0]["level"], records[0]["file"]) == (5, "damage", "action/c/0/0")
    assert "in quarantine: the whole version" in err


def test_not_for_this_user(invoke, copy, monkeypatch) -> None:
    """A file that this user may not read, or that its file system fails to read, says nothing of the data: exit 4 or
    75, and no quarantine."""
    real = os.lstat
    for number, expected in ((errno.EACCES, 4), (errno.EIO, 75)):

        def refuse(path, number=number, **rest):
            if str(path).endswith("action/c/0/0"):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, **rest)

        monkeypatch.setattr(os, "lstat", refuse)
        code, records, err = invoke(str(copy), "--quarantine")
        assert (code, records) == (expected, [])
        assert "action/c/0/0" in err
    monkeypatch.setattr(os, "lstat", real)
    opened = os.open

    def refuse_open(path, *rest, **more):
        if str(path).endswith("action/c/0/0"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse_open)
    assert invoke(str(copy), "--quarantine")[0] == 4
    assert version_state.read_quarantine(copy) is None
    with pytest.raises(ClusterError):
        VersionReader(copy).read("action", 0, 1)
    version_state.set_quarantine(copy, version_state.Quarantine(whole_version=False, set_at="", set_by=""))

    def refuse_record(path, *rest, **more):
        if ".catalog" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse_record)
    with pytest.raises(ClusterError):
        version_state.read_quarantine(copy)


def test_a_reader_that_ends_early(make) -> None:
    """The quarantine is written before the records, which nobody may read to their end."""
    path = make(lambda demos: demos[3]["actions"].__setitem__(5, float("nan")))
    words = [sys.executable, "-m", "pitools", "dataset", "check", str(path), "--quarantine", "--format", "jsonl"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        process.stdout.close()
    quarantine = version_state.read_quarantine(path)
    assert quarantine
    assert list(quarantine.episodes) == [3]


def test_a_part_is_called_one(invoke, pit, copy, tmp_path) -> None:
    """What was staged of some arrays or episodes says so, also where it is shown."""
    assert pit("stage", "run", str(copy), "--to", str(tmp_path / "node"), "--arrays", "action").returncode == 0
    (part,) = (tmp_path / "node/objects").iterdir()
    assert f"a part of version {copy.name}" in invoke(str(part))[2]
    assert f"a part of version {copy.name}" in pit("dataset", "show", str(part)).stderr


def test_warnings(invoke, make, tmp_path) -> None:
    """Warnings alone are 0; a file of bounds can make them more."""
    path = make(lambda demos: demos[3].pop("language"))
    code, (record,), _ = invoke(str(path))
    assert (code, record["level"]) == (0, "warning")
    (tmp_path / "bounds.toml").write_text('levels = {instruction = "fault"}')
    assert invoke(str(path), "--thresholds", str(tmp_path / "bounds.toml"))[0] == 1
    (tmp_path / "bounds.toml").write_text('levels = {insrtuction = "fault"}')
    code, _, err = invoke(str(path), "--thresholds", str(tmp_path / "bounds.toml"))
    assert code == 3
    assert 'did you mean "instruction"?' in err


def test_release_stands_alone(invoke, copy) -> None:
    """To release and to quarantine at once is a usage error."""
    assert invoke(str(copy), "--lift-quarantine", "--quarantine")[0] == 2


def test_help() -> None:
    """The help says what the exit codes are."""
    shown: Result = CliRunner().invoke(check, ["--help"])
    assert "1 faults, 5 damage" in shown.output
