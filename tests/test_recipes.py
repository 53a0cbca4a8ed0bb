"""The recipes of the READMEs run as they are written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pitools
from pitools.launch.job.hang_watch import HangDetector, HangLimits
from pitools.site.connect import client
from pitools.site.load import load_site


def recipe(repo: Path, name: str, number: int) -> tuple[str, str]:
    """(language, text) of a fenced block."""
    blocks = re.findall(r"```(sh|python)\n(.*?)```", (repo / name).read_text(), re.DOTALL)
    return blocks[number]


def follow(repo: Path, folder: Path, name: str, *numbers: int, **env: str) -> str:
    """Run blocks of a README one after the other in a folder; what they print."""
    output = ""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PIT_RUNS": str(folder / "runs"), "PATH": path, **env}
    for number in numbers:
        language, text = recipe(repo, name, number)
        argv = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        output += done.stdout
    return output


def test_launch_here(repo: Path, tmp_path: Path) -> None:
    """A run on this machine from its start to its end, and a plan through a pipe."""
    lines = follow(repo, tmp_path, "pitools/launch/README.md", 0)
    assert "rank 1 of 2\n" in lines
    records = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    assert [record["state"] for record in records if record["schema"] == "pit.run/1"][-2:] == ["COMPLETED"] * 2
    assert [record["action"] for record in records if record["schema"] == "pit.resume-result/1"] == ["already_ended"]


def test_a_sweep_here(repo: Path, tmp_path: Path) -> None:
    """Six runs, two at a time, and their table."""
    rows = [json.loads(line) for line in follow(repo, tmp_path, "scripts/examples/README.md", 0).splitlines()]
    assert [row["state"] for row in rows] == ["COMPLETED"] * 12
    assert [row["point"]["lr"] for row in rows[6:]] == ["3e-4"] * 3 + ["1e-3"] * 3


def test_a_loop_that_says_its_steps(repo: Path, tmp_path: Path) -> None:
    """The lines that a loop of one's own needs are what the hang watch reads."""
    text = (repo / "pitools/launch/README.md").read_text()
    first, each = re.findall(r"`(log[ .][^`]+)`", text)
    output = (
        "import os; from pathlib import Path; from pitools.run.steps import StepLog; rank = step = 0; loss = s = n = 1"
    )
    env = {**os.environ, "PIT_ATTEMPT_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", f"{output}\n{first}\n{each}"], env=env, check=True, timeout=60)
    assert HangDetector(tmp_path / "steps", HangLimits(min_s=1e-9, first_step_s=0.0)).poll() is not None


def test_a_run_that_stops(repo: Path, tmp_path: Path) -> None:
    """A program's own fault is not tried again, and the run says what it was."""
    lines = follow(repo, tmp_path, "pitools/launch/recovery/README.md", 0)
    assert "ModuleNotFoundError" in lines
    assert len(list(tmp_path.glob("runs/*/attempts/*"))) == 1


def test_what_to_buy(repo: Path, tmp_path: Path) -> None:
    """Classes, synthetic jobs that the simulator reads, what-ifs, and the cheapest that reaches a goal."""
    lines = follow(repo, tmp_path, "pitools/capacity/README.md", 0, 1, 2).splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["team"] for record in records if record["schema"] == "pit.workload-class/1"} == {"robots", "vision"}
    assert [record["jobs"] > 1000 for record in records if record["schema"] == "pit.simulation-summary/1"] == [True]
    answers = [record for record in records if record["schema"] == "pit.capacity-answer/1" and record["group"] == "all"]
    today, more, rented, again, cheapest = answers
    assert [each["what_if"] for each in (today, more, rented)] == ["", "gpus near +16", "rent cloud 16 3.5, limit 2h"]
    assert (today, more["wait_p95_s"] < today["wait_p95_s"]) == (again, True)
    assert (tmp_path / "june/what.png").read_bytes().startswith(b"\x89PNG")
    assert cheapest["what_if"] in ("gpus near +16", "rent cloud 16 3.5")


def test_where_a_runs_time_went(repo: Path, tmp_path: Path) -> None:
    """A pause between two steps is not accounted for; the run's own output says the goodput."""
    (record,) = [json.loads(line) for line in follow(repo, tmp_path, "pitools/ledger/README.md", 0).splitlines()]
    assert record["seconds"]["unaccounted"] >= 1
    assert record["seconds"]["input"] == pytest.approx(0.2)
    assert sum(record["seconds"].values()) == pytest.approx(record["allocated_s"])
    assert "<svg" in (tmp_path / "ledger.svg").read_text()


def test_where_a_step_goes(repo: Path, tmp_path: Path) -> None:
    """A profile of one's own and a run's trace are split into parts; numbers are compared."""
    lines = follow(repo, tmp_path, "pitools/perf/README.md", 0, 1, 2, 3).splitlines()
    assert [line.split()[:2] for line in lines[:6]] == [["RANK", "STEP"], *(["0", str(step)] for step in range(2, 7))]
    assert "<svg" in (tmp_path / "profile.html").read_text()
    assert [line.split()[0] for line in lines[6:9]] == ["VERDICT", "regression", "slower"]
    assert json.loads(lines[-1])["verdict"] == "input"


@pytest.mark.slurm
def test_launch_from_python(clusters: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callables go out as one array, and a request as a run."""
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "hello.toml").write_text('name = "hello"\ncommand = "true"\ntime = "2m"\n')
    follow(repo, tmp_path, "pitools/launch/README.md", 1)
    (powers,) = (tmp_path / "runs").glob("powers-*")
    names = sorted(path.name for path in (powers / "submitit").glob("*_submitted.pkl"))
    job_id = names[0].split("_")[0]
    (run,) = [run for run in pitools.runs(site="alpha") if run.plan.name == "hello"]
    assert names == [f"{job_id}_0_submitted.pkl", f"{job_id}_1_submitted.pkl"]
    assert run.plan.nodes == 2
    client(load_site("alpha")).cancel([job_id])
    run.cancel()


@pytest.mark.slurm
def test_topology(clusters: Path, repo: Path, tmp_path: Path) -> None:
    """Orders of a list, of a pipe, and of an allocation that is then run by it."""
    conf = str(clusters / "alpha" / "slurm.conf")
    lines = follow(repo, tmp_path, "pitools/topology/README.md", 0, 1, 2, SLURM_CONF=conf).splitlines()
    assert lines[1].split() == ["0", "alpha01", "leaf1"]
    assert [line.split("\t")[1] for line in lines[10:13]] == ["alpha02", "alpha04", "alpha01"]
    ranks = [line.split() for line in lines[-8:]]
    assert [rank for rank, _ in ranks] == [str(number) for number in range(8)]
    hosts = (tmp_path / "hosts").read_text().split()
    assert [node for _, node in ranks] == hosts


@pytest.mark.slurm
def test_topology_of_a_choice(clusters: Path, repo: Path, tmp_path: Path) -> None:
    """Nodes of one leaf, a CSV as a picture and as Slurm's file, and ranks for torchrun, MPI and JAX."""
    lines = follow(repo, tmp_path, "pitools/topology/README.md", 3, 4).splitlines()
    assert lines[0] in ("alpha02,alpha04", "alpha03,alpha05")
    assert "tree: 3 nodes, 3 leaves, 2 pods" in lines[1]
    assert "SwitchName=P2/S1 Nodes=n3" in (tmp_path / "topology.conf").read_text()
    assert (tmp_path / "ranks").read_text().startswith("alpha01 --node-rank=0 --nnodes=4 ")
    assert len((tmp_path / "rf").read_text().splitlines()) == 32
    assert '"shape":[4,2,4]' in (tmp_path / "mesh.json").read_text()


@pytest.mark.slurm
def test_limits(clusters: Path, repo: Path, tmp_path: Path) -> None:
    """What keeps a job of eight hours from a partition of four."""
    conf = str(clusters / "alpha" / "slurm.conf")
    lines = follow(repo, tmp_path, "pitools/limits/README.md", 0, SLURM_CONF=conf).splitlines()
    assert lines == ["pends PartitionTimeLimit time limit 08:00:00 (at most 04:00:00)"]


@pytest.mark.slurm
def test_tenancy(clusters: Path, repo: Path, tmp_path: Path) -> None:
    """The policy of a site asks for no change; a team comes, is checked and shown, and goes; a month's report."""
    conf = str(clusters / "alpha" / "slurm.conf")
    env = {"SLURM_CONF": conf, "XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "240"}
    env["TMPDIR"] = str(tmp_path)
    page = "pitools/tenancy/README.md"
    assert follow(repo, tmp_path, page, 0, **env) == ""
    lines = follow(repo, tmp_path, page, 1, **env).splitlines()
    plan = "add team vision: shares 7, tiers normal,scavenger, default_tier normal, grp_tres_mins gres/gpu=60000"
    assert any(plan in line for line in lines)
    found = [json.loads(line) for line in lines if line.startswith('{"schema":"pit.tenancy-finding/1"')]
    assert {(one["kind"], one["object"]) for one in found} >= {("ineffective", "PriorityWeightFairShare")}
    assert not [one for one in found if one["kind"] == "drift"]
    assert any(line.split()[:6] == ["alpha", "vision", "normal", "dev", "may-run", "cpu"] for line in lines)
    lines = follow(repo, tmp_path, page, 2, **env).splitlines()
    teams = {line.split()[2] for line in lines[1:]}
    assert {"lab", "infra"} <= teams
    assert "vision" not in teams
    (report,) = tmp_path.glob("*/chargeback.csv")
    assert report.read_text().startswith("since,until,team,share,use,jobs,")
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".toml", ".jsonl", ".csv")]


@pytest.mark.slurm
def test_place(clusters: Path, repo: Path, tmp_path: Path) -> None:
    """A request runs at the best place, and three more from a queue that both sites serve."""
    queue = {name: str(tmp_path / name) for name in ("PIT_QUEUE", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    lines = follow(repo, tmp_path, "pitools/place/README.md", 0, 1, **queue).splitlines()
    assert lines[0].split()[:3] == ["RANK", "SITE", "PARTITION"]
    assert {tuple(line.split()[1:3]) for line in lines[1:5]} == {
        (site, partition) for site in ("alpha", "beta") for partition in ("train", "dev")
    }
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert [record.get("state") for record in records] == ["COMPLETED", "done", "done", "done"]
    assert [line.split()[1] for line in lines[-3:]] == ["done"] * 3


@pytest.mark.slurm
def test_metrics(clusters: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both clusters in a textfile after two cycles, and over HTTP with a password; and the table."""
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PIT_SITES", "alpha beta")
    lines = follow(repo, tmp_path, "pitools/monitor/README.md", 0, 1, 2).splitlines()
    assert {
        f'pit_collector_success{{cluster="{site}",collector="{name}"}} 1.0'
        for site in ("alpha", "beta")
        for name in ("jobs", "nodes")
    } <= set(lines)
    assert any(line.startswith('pit_nodes{cluster="beta",state="idle"}') for line in lines)
    assert lines[-1].endswith("series at most")


@pytest.mark.slurm
def test_node_health(clusters: Path, repo: Path, tmp_path: Path) -> None:
    """A missing folder is found, reported, and would drain its node; nothing is drained."""
    lines = follow(repo, tmp_path, "pitools/node/README.md", 0, 1, 2).splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert {("scratch", "failed"), ("scratch", None)} <= {(one.get("check"), one.get("state")) for one in records}
    (act,) = [record for record in records if record["schema"] == "pit.node-act/1"]
    assert (act["node"], act["act"], act["done"]) == ("alpha01", "drain", False)
    (history,) = [record for record in records if record["schema"] == "pit.node-history/1"]
    assert (history["incidents"], bool(history["checked_at"])) == (0, True)
    assert any(line.startswith("files\texists\t") for line in lines)


def test_readmes_name_files_that_exist(repo: Path) -> None:
    """Each Python file that a page below pitools/ names is in the repository, or is the reader's own."""
    files = {path.name for folder in ("pitools", "scripts", "tests", "perf") for path in (repo / folder).rglob("*.py")}
    pages = {path: path.read_text() for path in (repo / "pitools").rglob("README.md")}
    named = {
        (str(path), name) for path, text in pages.items() for name in re.findall(r"(?<![\w*}])[a-z]\w*\.py\b", text)
    }
    readers_own = {"train.py", "my_loop.py"}
    assert not {(path, name) for path, name in named if name not in files | readers_own}


def test_examples_pair_an_observation_with_the_action_that_follows_it(repo: Path) -> None:
    """Each window of the frameworks' examples begins with the present step, which recorders give its action."""
    windows = {
        (path.name, name): (int(before), int(after))
        for path in (repo / "scripts" / "examples" / "frameworks").glob("*.py")
        for name, before, after in re.findall(
            r'"(obs/\w+|action)": \((\d+), (\w+)\)', path.read_text().replace("CHUNK", "9")
        )
    }
    assert {name for _, name in windows} >= {"obs/robot0_proprio", "action"}
    assert len({path for path, _ in windows}) == 3
    assert not {key: span for key, span in windows.items() if span[0] != 0 or span[1] < 1}


def test_readmes_are_short(repo: Path) -> None:
    """At most 80 lines each."""
    lengths = {str(path): len(path.read_text().splitlines()) for path in (repo / "pitools").rglob("README.md")}
    assert not [path for path, length in lengths.items() if length > 80]
