"""Two runs side by side, and a run once more: every difference is told, and none is made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.core import timestamps
from pitools.core.errors import ConfigError, DataError
from pitools.launch.plan import load_plan
from pitools.launch.provenance import code_copy, provenance
from pitools.launch.reproduce import compare, facts, rerun
from pitools.run import run_folder, steps
from pitools.site import load
from pitools.store import digest, manifest
from tests.launch.conftest import Git, MakeRun

Pit = Callable[..., subprocess.CompletedProcess[str]]

REQUEST = """
name = "twice"
entry = "loop:main"
time = "5m"
tasks_per_node = 2
args = { rate = 1 }
"""


def told(found: list[facts.Difference]) -> dict[str, tuple[str, str]]:
    return {f"{item.part}:{item.key}": (item.a, item.b) for item in found}


def ended(run_dir: Path, *, loss: float, nodes: str) -> Path:
    """The run with an attempt that ended well."""
    attempt = run_dir / "attempts" / "0"
    log = steps.StepLog(attempt / "steps", 0)
    log.write(step=4, loss=loss, wall_s=1, input_s=0, compute_s=0, comm_s=0, rank_samples=1)
    log.close()
    (attempt / "hostfile").write_text(nodes)
    run_folder.write_record(
        attempt / "exit.json", run_folder.AttemptExit(job_id="1", exit_code=0, ended=timestamps.now_rfc3339())
    )
    return run_dir


def dataset(root: Path, text: bytes) -> Path:
    """A version of a dataset with one file."""
    building = root / "pick" / "new"
    building.mkdir(parents=True)
    (building / "a").write_bytes(text)
    entry = manifest.FileEntry(path="a", bytes=len(text), digest=digest.digest_bytes(text))
    raw = manifest.encode_manifest(manifest.Manifest(name="pick", episodes=1, steps=1, arrays={}, files=(entry,)))
    (building / manifest.MANIFEST_FILE).write_bytes(raw)
    return building.rename(root / "pick" / manifest.version_of(raw))


def test_the_same_twice_differs_in_nothing(work: Path, git: Git, make_run: MakeRun) -> None:
    """Two runs of one workdir and one request: no difference, and no line of patch."""
    a, b = (ended(make_run(name, entry="loop:main"), loss=0.5, nodes="n1\nn2\n") for name in ("r-1", "r-2"))
    assert compare.compare_runs(a, b) == []
    assert list(compare.code_diff(a, b)) == []


def test_every_difference_is_told(
    work: Path, git: Git, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request, code, git, environment, data, site, variables, nodes and outcome: each by its key, with both values."""
    sites, data = tmp_path / "sites", [dataset(tmp_path / "data", text) for text in (b"one", b"two")]
    sites.mkdir()
    (sites / "local.toml").write_text(f'[paths]\nnvme = "{tmp_path}/nvme"\n[environment]\nXLA_FLAGS = "--a"\n')
    monkeypatch.setenv("PIT_SITE_PATH", str(sites))
    (work / "only_a.py").touch()
    a = ended(make_run("r-1", entry="loop:main", args={"rate": 1}, data={"demo": str(data[0])}), loss=0.5, nodes="n1\n")
    (work / "only_a.py").unlink()
    (work / "loop.py").write_text((work / "loop.py").read_text() + "# more\n")
    (work / "binary").write_bytes(b"\xff\0")
    (sites / "local.toml").write_text(f'[paths]\nnvme = "{tmp_path}/nvme"\n[environment]\nXLA_FLAGS = "--b"\n')
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    b = ended(
        make_run("r-2", entry="loop:main", args={"rate": 2, "new": True}, data={"demo": str(data[1])}, time="6m"),
        loss=0.25,
        nodes="n2\n",
    )
    (b / "environment.txt").write_text((b / "environment.txt").read_text().replace("msgspec==", "msgspec==9"))
    differences = told(compare.compare_runs(a, b))
    assert differences["request:args.rate"] == ("1", "2")
    assert differences["request:args.new"] == ("", "true")
    assert differences["request:time"] == ("5m", "6m")
    assert differences["plan:time_s"] == ("300", "360")
    assert differences["code:only_a.py"][1] == ""
    assert differences["code:loop.py"][1].endswith("+1 -0 lines")
    assert differences["git:patch"][0] != differences["git:patch"][1]
    assert differences["environment:msgspec"][1] == f"9{differences['environment:msgspec'][0]}"
    assert differences["data:demo"] == tuple(path.name for path in data)
    assert differences["site:environment.XLA_FLAGS"] == ("--a", "--b")
    assert differences["variables:NCCL_DEBUG"] == ("", "INFO")
    assert differences["nodes:by rank"] == ("n1", "n2")
    assert differences["outcome:loss"] == ("0.5", "0.25")
    assert len(differences) == 14  # and binary
    patch = "".join(compare.code_diff(a, b))
    assert "+# more\n" in patch
    assert "--- a/only_a.py" not in patch  # it is empty: there is no line to show
    assert "a/binary and b/binary differ" in patch


@pytest.mark.usefixtures("as_root")
def test_a_run_of_another_user_is_not_run_as_us(make_run: MakeRun) -> None:
    """Not by root either: it is refused, as whose it is, and a copy is run again by whoever answers for it."""
    run = make_run("r-1", entry="loop:main")
    copy = shutil.copytree(run, run.with_name("r-2"), symlinks=True)
    os.chown(run, 54321, -1)
    with pytest.raises(ConfigError) as caught:
        rerun.plan_rerun(run, load.load_site("local"))
    assert (caught.value.where, f"cp -r {run} " in caught.value.hint) == (str(run), True)
    rerun.plan_rerun(copy, load.load_site("local"))


def test_a_copy_runs_its_own_code(pit: Pit, tmp_path: Path) -> None:
    """Whatever became of the run that it was copied from: a copy leads nowhere into it, and is not continued as it."""
    env = {"PIT_RUNS": str(tmp_path / "runs"), "PIT_SITE_PATH": str(tmp_path)}
    (tmp_path / "other.toml").write_text('name = "other"\nscheduler = "none"\n')
    (tmp_path / "r.toml").write_text('name = "r"\ncommand = "cat said"\ntime = "5m"\n')
    created = []
    for text in ("looked at", "put there since"):
        (tmp_path / "said").write_text(text)
        created.append(Path(json.loads(pit("launch", "run", "r.toml", "--wait", **env).stdout)["run_dir"]))
        (tmp_path / "said").unlink()
    copy = shutil.copytree(created[0], tmp_path / "COPY", symlinks=True)
    shutil.rmtree(created[0] / "code")
    shutil.copytree(created[1] / "code", created[0] / "code")
    for name in ("code.json", "provenance.json"):
        shutil.copy(created[1] / name, created[0])
    again_made = pit("launch", "reproduce", str(copy), "--yes", **env)
    new = Path(json.loads(again_made.stdout.splitlines()[-1])["run_dir"])
    assert pit("launch", "watch", new.name, **env).returncode == 0
    assert (new / "attempts" / "0" / "logs" / "0.out").read_text() == "looked at"
    for verb in (("resume", "--force"), ("move", "--site", "other")):
        refused = pit("launch", verb[0], str(copy), *verb[1:], **env)
        assert (refused.returncode, f"pit launch reproduce {copy}" in refused.stderr) == (3, True), refused.stderr
    assert len(run_folder.attempt_dirs(copy)) == 1


@pytest.mark.usefixtures("as_root")
def test_links_of_a_copy_to_what_others_can_change_are_shown(work: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """What the code links to outside is no part of a copy: whose it is, is a difference to be asked about."""
    for name, user in (("mine", 0), ("theirs", 54321)):
        (tmp_path / name).touch()
        os.chown(tmp_path / name, user, -1)
        (work / name).symlink_to(tmp_path / name)
    run = make_run("r-1", entry="loop:main")
    copy = shutil.copytree(run, run.with_name("r-2"), symlinks=True)
    assert rerun.plan_rerun(run, load.load_site("local"))[1] == []
    assert [(item.part, item.key) for item in rerun.plan_rerun(copy, load.load_site("local"))[1]] == [
        ("code", "theirs")
    ]
    shutil.rmtree(run)
    assert [(item.part, item.key) for item in rerun.plan_rerun(copy, load.load_site("local"))[1]] == [
        ("code", "theirs")
    ]


@pytest.mark.usefixtures("as_root")
def test_a_link_of_another_user_s_does_not_make_a_copy_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    """It leads to the copy now, and elsewhere by the time that the script follows it; one's own may lead there."""
    run, link = make_run("r-1", entry="loop:main"), tmp_path / "link"
    link.symlink_to(run)
    plan = load_plan(run)
    led = msgspec.structs.replace(plan, request=msgspec.structs.replace(plan.request, workdir=f"{link}/code"))
    provenance.require_no_copy(run, led)
    os.lchown(link, 54321, -1)
    with pytest.raises(ConfigError, match="belongs to user 54321"):
        provenance.require_no_copy(run, led)


def test_a_run_that_kept_nothing(make_run: MakeRun) -> None:
    """A run of an older version is compared by what it has; it cannot be run again, and says why."""
    a, b = make_run("r-1"), make_run("r-2")
    (b / "provenance.json").unlink()
    differences = told(compare.compare_runs(a, b))
    assert differences["environment:"] == ("", "not recorded")
    with pytest.raises(DataError, match=r"provenance\.json"):
        rerun.plan_rerun(b, load.load_site("local"))


def test_data_that_is_gone_or_changed(
    work: Path, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose data is not what it was is not run again."""
    sites, one = tmp_path / "sites", dataset(tmp_path / "data", b"one")
    sites.mkdir()
    (sites / "local.toml").write_text(f'[paths]\nnvme = "{tmp_path}/nvme"\n')
    monkeypatch.setenv("PIT_SITE_PATH", str(sites))
    run_dir, site = make_run(data={"demo": str(one)}), load.load_site("local")
    planned, _ = rerun.plan_rerun(run_dir, site)
    assert planned.data[0].version == one.name
    held = manifest.load_manifest(one)[0]
    (one / manifest.MANIFEST_FILE).write_bytes(manifest.encode_manifest(msgspec.structs.replace(held, steps=2)))
    with pytest.raises(DataError, match=rf"expected {one.name}"):
        rerun.plan_rerun(run_dir, site)
    one.rename(one.with_name("moved"))
    with pytest.raises(DataError, match=r'dataset "demo" .*no manifest'):
        rerun.plan_rerun(run_dir, site)


def test_a_repetition_has_the_first_ones_code(work: Path, git: Git, make_run: MakeRun) -> None:
    """Though the workdir is another by now, and the program wrote into its copy: same files, same commit and patch."""
    (work / "settings.toml").write_text("rate = 2\n")
    (work / "data").symlink_to("/nowhere/data")
    first = make_run("r-1", entry="loop:main")
    (first / "code" / "output.log").write_text("of the program")
    (work / "loop.py").unlink()
    second = make_run("r-2", entry="loop:main", workdir=str(first / "code"))
    assert code_copy.read_listing(second) == code_copy.read_listing(first)
    assert (second / "code" / "loop.py").read_text() == (first / "code" / "loop.py").read_text()
    assert (second / "dirty.patch").read_bytes() == (first / "dirty.patch").read_bytes()
    assert not (second / "code" / "output.log").exists()
    assert told(compare.compare_runs(first, second)) == {}
    (first / "code" / "loop.py").write_text("changed")
    with pytest.raises(DataError, match=r"code/loop\.py"):
        make_run("r-3", entry="loop:main", workdir=str(first / "code"))


def test_by_hand(pit: Pit, tmp_path: Path) -> None:
    """run, reproduce, diff: what differs is shown, asked about, and the new run is the old one's code."""
    (tmp_path / "loop.py").write_text("def main(rate):\n    print('rate', rate, __file__)\n")
    (tmp_path / "r.toml").write_text(REQUEST)
    env = {"PIT_RUNS": str(tmp_path / "runs"), "PIT_SITE_PATH": str(tmp_path / "sites")}
    first = json.loads(pit("launch", "run", "r.toml", "--wait", **env).stdout)["run_id"]
    (tmp_path / "loop.py").write_text("raise SystemExit('the live code ran')\n")
    clean = pit("launch", "reproduce", first, "--dry-run", **env)
    assert (clean.returncode, clean.stdout) == (0, ""), clean.stderr
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "local.toml").write_text('[environment]\nNCCL_DEBUG = "INFO"\n')
    result = pit("launch", "reproduce", first, **env)
    assert result.returncode == 2
    assert json.loads(result.stdout)["key"] == "environment.NCCL_DEBUG"
    assert "add --yes" in result.stderr
    assert pit("launch", "reproduce", first, "--dry-run", **env).returncode == 1
    created = pit("launch", "reproduce", first, "--yes", **env)
    assert created.returncode == 0, created.stderr
    second = json.loads(created.stdout.splitlines()[-1])
    same = pit("launch", "diff", first, second["new_run_id"], "--patch", **env)
    assert (same.returncode, same.stdout) == (0, "")
    differ = pit("launch", "diff", first, second["new_run_id"], **env)
    assert differ.returncode == 1
    assert '"key":"environment.NCCL_DEBUG"' in differ.stdout
