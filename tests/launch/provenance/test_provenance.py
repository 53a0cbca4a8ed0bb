"""What a run keeps of what it was made from, and what it must not keep."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from pitools.core import subprocesses
from pitools.core.errors import ConfigError, DataError
from pitools.launch.plan import load_plan
from pitools.launch.provenance import code_copy, environment, provenance
from pitools.launch.reproduce import facts
from pitools.site import load
from pitools.site.schema import Connection, Container
from tests.launch.conftest import Git, MakeRun

GIT_FIELDS = ("commit", "branch", "dirty", "problem")


def record_of(run_dir: Path) -> provenance.Provenance:
    actual = provenance.read_provenance(run_dir)
    assert actual is not None
    return actual


def test_a_run_keeps_all_of_it(work: Path, git: Git, make_run: MakeRun) -> None:
    """Code, commit, patch, packages, site: each in its file, with its digest in the record; the plan runs the copy."""
    (work / "settings.toml").write_text("rate = 2\n")
    run_dir = make_run(entry="loop:main")
    record = record_of(run_dir)
    assert load_plan(run_dir).request.workdir == f"{run_dir}/code"
    assert (record.workdir, record.files, record.code) == (str(work), 2, code_copy.read_listing(run_dir).digest)
    assert tuple(getattr(record.git, name) for name in GIT_FIELDS) == (git("rev-parse", "HEAD"), "main", True, "")
    assert "+rate = 2" in (run_dir / "dirty.patch").read_text()
    assert "msgspec" in environment.parse_packages((run_dir / "environment.txt").read_text())
    assert json.loads((run_dir / "site.json").read_text())["name"] == "local"
    assert record.warnings == ()
    assert provenance.verify_provenance(run_dir) == record


def test_code_behind_a_link_that_leads_out(work: Path, git: Git, make_run: MakeRun, tmp_path: Path) -> None:
    """It is not in the copy, and may have changed by the time the run begins: that is said, of code alone."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    (tmp_path / "data").mkdir()
    for name, target in (("lib", "lib"), ("data", "data"), ("one.py", "lib/__init__.py")):
        (work / name).symlink_to(tmp_path / target)
    (work / "inner").symlink_to("loop.py")
    warnings = record_of(make_run(entry="loop:main")).warnings
    assert sorted(text.partition(" links to ")[0] for text in warnings) == ["lib", "one.py"]


def test_the_packages_are_those_of_the_runs_interpreter(tmp_path: Path) -> None:
    """Versions, addresses without passwords, and editable installs; the nearer of two versions; nothing is run."""
    place = tmp_path / "packages"
    for name, told in {
        "Near_One-1.0.dist-info": "",
        "near.one-0.9.dist-info": "",
        "old-2.1-py3.11.egg-info": "",
        "vcs-3.dist-info": '{"url":"https://u:pw@git.example.org/x?token=t","vcs_info":{"commit_id":"abc"}}',
        "live-4.dist-info": '{"url":"file:///srv/my%20live","dir_info":{"editable":true}}',
    }.items():
        (place / name).mkdir(parents=True)
        if told:
            (place / name / "direct_url.json").write_text(told)
    (place / "bare.egg-info").mkdir()
    (place / "bare.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: bare\nVersion: 7\n")
    actual, text = environment.capture_environment(sys.executable, load.load_site("local"), {"PYTHONPATH": str(place)})
    lines = {name: f"{name}=={told}" for name, told in environment.parse_packages(text).items()}
    assert lines["near-one"] in ("near-one==1.0", "near-one==0.9")
    assert lines["old"] == "old==2.1"
    assert lines["bare"] == "bare==7"
    assert lines["vcs"] == "vcs==3 @ https://git.example.org/x@abc"
    assert lines["live"] == "live==4 @ file:///srv/my%20live (editable)"
    assert environment.Editable(name="live", path="/srv/my live") in actual.editable
    assert "pw" not in text
    assert "token" not in text


def test_an_environment_that_cannot_be_asked(tmp_path: Path) -> None:
    """No interpreter, one that says nothing, a container, another network: told, and no reason not to run."""
    local = load.load_site("local")
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\necho no >&2; exit 3\n")
    silent.chmod(0o755)
    assert environment.capture_environment("/no/python", local, {})[0].problem.startswith("/no/python: ")
    assert environment.capture_environment(str(silent), local, {})[0].problem == f"{silent}: no"
    away = msgspec.structs.replace(local, connection=Connection(kind="ssh", host="login"))
    assert "at login" in environment.capture_environment("/opt/python", away, {})[0].problem
    boxed = msgspec.structs.replace(local, container=Container(runtime="apptainer", image="x.sif"))
    assert "in a container: x.sif" in environment.capture_environment("python", boxed, {})[0].problem


def test_no_secret_is_kept(work: Path, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the submitter's variables the harmless keep their values, all others are names; a site's can be no secrets."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("WANDB_API_KEY", "MY_PASSWORD", "CUDA_LICENSE_KEY", "PLAIN"):
        monkeypatch.setenv(name, "s3cret")
    for name in ("JAX_PROXY", "NCCL_X"):
        monkeypatch.setenv(name, "https://user:s3cret@example.org")
    sites = tmp_path / "sites"
    sites.mkdir()
    monkeypatch.setenv("PIT_SITE_PATH", str(sites))
    (sites / "local.toml").write_text('[environment]\nHF_TOKEN = "s3cret"\n')
    with pytest.raises(ConfigError):
        make_run()
    (sites / "local.toml").write_text('[environment]\nXLA_FLAGS = "--x"\n')
    run_dir = make_run()
    record = record_of(run_dir)
    assert record.variables["NCCL_DEBUG"] == "INFO"
    assert {"WANDB_API_KEY", "PLAIN", "NCCL_X"} <= set(record.other_variables)
    reported = json.loads((run_dir / "site.json").read_text())["environment"]
    assert reported == {"XLA_FLAGS": "--x"}
    paths = [path for path in run_dir.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert paths == []


def test_what_the_command_reads_from_the_shell(
    work: Path, git: Git, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of variables that its text names are kept and compared, in whatever form; what may be a secret is not."""
    text = "run $RATE ${SIZE:-4} ${#NAMES} $OWN $API_TOKEN"
    for name, value in {"RATE": "0.1", "NAMES": "a b", "OWN": "x", "API_TOKEN": "abc", "OTHER": "1"}.items():
        monkeypatch.setenv(name, value)
    run = make_run(command=text, env={"OWN": "y"})
    retained = record_of(run).variables
    names = {"RATE", "SIZE", "NAMES", "OWN", "API_TOKEN", "OTHER"}
    assert {name: value for name, value in retained.items() if name in names} == {"RATE": "0.1", "NAMES": "a b"}
    monkeypatch.setenv("RATE", "0.2")
    monkeypatch.setenv("SIZE", "8")
    after = make_run("r-2", command=text, env={"OWN": "y"})
    for then in (facts.facts_of_run(after), facts.facts_now(load_plan(run), load.load_site("local"), run)):
        actual = facts.compare_facts(facts.facts_of_run(run), then)
        reported = {(item.key, item.a, item.b) for item in actual if item.part == "variables"}
        assert reported == {("RATE", "0.1", "0.2"), ("SIZE", "", "8")}


def test_what_the_copy_does_not_hold_is_told(work: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A command or an argument that names the live workdir will find what is there then: that is said at once."""
    make_run("r-1", command=f"python {work}/loop.py", env={"CONFIG": f"{work}/settings.toml"})
    stderr = capsys.readouterr().err
    assert f"command names {work}" in stderr
    assert f"env.CONFIG names {work}" in stderr
    make_run("r-2", entry="loop:main", args={"data": {"at": f"{work}"}})
    assert f"args.data.at names {work}" in capsys.readouterr().err


def test_runs_in_the_workdir_are_no_code(work: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where runs are kept in the workdir itself, a run holds none of them, nor itself."""
    (work.parent / "runs").symlink_to(work / "out", target_is_directory=True)
    (work / "out").mkdir()
    first = make_run("r-1")
    second = make_run("r-2")
    for run_dir in (first, second):
        assert [item.path for item in code_copy.read_listing(run_dir).files] == ["loop.py", "settings.toml"]


def test_it_costs_little(work: Path, git: Git, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of 500 more files is recorded with as many programs, in under a second of CPU time more."""
    started, run = [], subprocesses.run
    monkeypatch.setattr(subprocesses, "run", lambda argv, **more: (started.append(argv[0]), run(argv, **more))[1])

    def cost(name: str) -> tuple[list[str], float]:
        """The programs that were started, and the seconds that they and this process worked."""
        started.clear()
        before = sum(os.times()[:4])
        make_run(name)
        return started.copy(), sum(os.times()[:4]) - before

    few, few_s = cost("r-1")
    for number in range(500):
        path = work / f"pkg{number % 20}" / f"m{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" * 200)
    git("add", "-A")
    git("commit", "-q", "-m", "more")
    many, many_s = cost("r-2")
    assert many == few
    assert many_s - few_s < 1  # 0.1 s of a core


def test_a_copy_that_was_changed_is_not_believed(make_run: MakeRun) -> None:
    """A file changed, removed, or another listing: each is named, and nothing is reproduced from it."""
    run_dir = make_run()
    (run_dir / "code" / "added.log").write_text("the program's own")
    provenance.verify_provenance(run_dir)
    (run_dir / "code" / "loop.py").write_text("changed")
    with pytest.raises(DataError, match=r"code/loop\.py"):
        provenance.verify_provenance(run_dir)
    (run_dir / "code" / "loop.py").unlink()
    with pytest.raises(DataError, match=r"code/loop\.py"):
        provenance.verify_provenance(run_dir)
    (run_dir / code_copy.LISTING_FILE).write_text('{"schema":"pit.code/1","files":[]}')
    with pytest.raises(DataError, match=r"code\.json"):
        provenance.verify_provenance(run_dir)
    (run_dir / provenance.PROVENANCE_FILE).unlink()
    with pytest.raises(DataError, match=r"provenance\.json"):
        provenance.verify_provenance(run_dir)
