"""Scenarios from files and sites, and the command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError
from pitools.place.simulate import scenario

Pit = Callable[..., subprocess.CompletedProcess[str]]

FILE = """
name = "two"
load = 1.5
seed = 4
backfill_depth = 50
extra_leaf = 0.02
tiers = { high = 1 }
tier_shares = { 1 = 0.1 }

[limits]
factors = [1, 3]
steps = ["12h", "1h"]

[failures]
per_gpu_day = 0.001
checkpoint = "30m"

[pools.near]
fabric = "hosts.csv"
gpus_per_node = 4
speed = 2.0
maintenance = [["3d", "3d12h"]]

[pools.far]
gpus = 64
price_per_gpu_hour = 2.5
unreachable = [["1d", "1d1h"]]
"""
HOSTS = "host,leaf\n" + "".join(f"n{n},s{n % 3}\n" for n in range(12))
SWF = "".join(
    f"{n} {n * 50} 0 {100 + n * 7 % 300} {n % 8 + 1} -1 -1 -1 -1 -1 1 1 1 1 1 -1 -1 -1\n" for n in range(1, 200)
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "hosts.csv").write_text(HOSTS)
    (tmp_path / "s.toml").write_text(FILE)
    (tmp_path / "t.swf").write_text(SWF)
    return tmp_path / "s.toml"


def test_every_key_is_read(path: Path) -> None:
    """Durations, windows, fabric and shares arrive as numbers."""
    actual = scenario.read_scenario(path)
    near, far = actual.pools
    assert (actual.load, actual.seed, actual.backfill_depth, actual.extra_leaf) == (1.5, 4, 50, 0.02)
    assert (actual.tiers, actual.tier_shares) == ({"high": 1}, {1: 0.1})
    assert actual.limits.steps_s == (3600.0, 43200.0)
    assert (actual.failures.checkpoint_s, actual.failures.repair_s) == (1800.0, 14400.0)
    assert (near.gpus, near.gpus_per_node, near.speed, near.maintenance_windows) == (
        48,
        4,
        2.0,
        ((259200.0, 302400.0),),
    )
    assert near.fabric is not None
    assert len(near.fabric.leaves) == 3
    assert (far.gpus, far.price, far.unreachable_windows) == (64, 2.5, ((86400.0, 90000.0),))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("backfill_depth = 50", "dept = 50", "dept"),
        ("speed = 2.0", "sped = 2.0", "pools.*sped"),
        ("load = 1.5", "load = 0", "load"),
        ("speed = 2.0", "speed = 0.0", "speed"),
        ("speed = 2.0", "speed = nan", "speed"),
        ("load = 1.5", "load = nan", "load"),
        ("load = 1.5", "load = 1e-300", "load"),
        ("price_per_gpu_hour = 2.5", "price_per_gpu_hour = nan", "price"),
        ("gpus = 64", "gpus = 64\nmax_pending = -1", "max_pending"),
        ("per_gpu_day = 0.001", "per_gpu_day = nan", "failures"),
        ('"30m"', '"soon"', "soon"),
        ('["3d", "3d12h"]', '["3d", "2d"]', "pools.near"),
        ("gpus = 64", "gpus = 0", "gpus"),
        ("[1, 3]", "[3, 1]", "factors"),
        ("1 = 0.1 }", "1 = 1.1 }", "tier_shares"),
        ("1 = 0.1 }", "top = 0.1 }", "top"),
        ("hosts.csv", "host.csv", "host.csv"),
    ],
)
def test_a_wrong_file_names_the_key(path: Path, old: str, new: str, what: str) -> None:
    """Misspelt keys and impossible numbers are errors of the file."""
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=what) as caught:
        scenario.read_scenario(path)
    assert str(path.parent) in str(caught.value)


def test_the_readme_shows_every_key(repo: Path, tmp_path: Path) -> None:
    """The scenario file of the README is one, and all that it leaves out is a name."""
    text = (repo / "pitools/place/simulate/README.md").read_text().split("```toml\n")[1].split("```")[0]
    (tmp_path / "s.toml").write_text(text)
    assert scenario.read_scenario(tmp_path / "s.toml").pools[0].maintenance_windows
    keys = {line.partition(" =")[0] for line in text.splitlines()} | {"limits", "failures", "pools", "name"}
    for table in (scenario.ScenarioFile, scenario.PoolTable, scenario.LimitTable, scenario.FailureTable):
        assert keys.issuperset(table.__struct_fields__)


def test_pools_of_a_site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partition that tells its nodes is a pool by the name that it has live; one that does not is none.

    Nodes are counted only where no partition has GPUs: they are not as much as a GPU.
    """
    (tmp_path / "x.toml").write_text(
        'name = "x"\n[partitions.big]\nnodes = 6\ngpus_per_node = 8\nspeed = 2.0\nprice_per_node_hour = 16.0\n'
        "[partitions.cpu]\nnodes = 3\n[partitions.open]\n[place]\nmax_queued_jobs = 2\n"
    )
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    (tmp_path / "z.toml").write_text('name = "z"\n[partitions.cpu]\nnodes = 3\n')
    with pytest.warns(UserWarning, match="x/cpu, z/cpu: partitions without GPUs"):
        (big,) = scenario.scenario_of_sites(["x", "x", "z"]).pools
    assert (big.pool, big.gpus, big.speed, big.price, big.max_pending) == ("x/big", 48, 2.0, 2.0, 2)
    (cpu,) = scenario.scenario_of_sites(["z"]).pools
    assert (cpu.pool, cpu.gpus) == ("z/cpu", 3)
    (tmp_path / "y.toml").write_text('name = "y"\n')
    with pytest.raises(ConfigError, match="no partition"):
        scenario.scenario_of_sites(["y"])


def test_the_command_prints_one_record_a_policy(path: Path, pit: Pit, tmp_path: Path) -> None:
    """Ours and others', the same each time; a table and a picture where asked for."""
    words = ["place", "simulate", str(tmp_path / "t.swf"), "--scenario", str(path), "--policy", "slurm-m"]
    result = pit(*words, "--policy", "ours", "--png", str(tmp_path / "x.png"), "--load", "3")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["schema"] for record in records] == ["pit.simulation-summary/1"] * 2
    assert [record["policy"] for record in records] == ["slurm-m", "ours"]
    assert [(record["jobs"], record["load"], record["seed"]) for record in records] == [(199, 3, 4)] * 2
    assert [(record["backfill_depth"], record["starved"]) for record in records] == [(50, 0)] * 2
    assert (tmp_path / "x.png").exists()
    piped = pit("place", "simulate", "-", *words[3:], "--load", "3", stdin=(tmp_path / "t.swf").read_text())
    assert json.loads(piped.stdout)["mean_jct_s"] == records[0]["mean_jct_s"]
    again = pit(*words, "--load", "3", "--depth", "9", "--window", "first-half", "--format", "table")
    assert "first-half" in again.stdout
    assert "POLICY" in again.stdout


def test_jobs_that_no_mean_counts_are_told(path: Path, pit: Pit, tmp_path: Path) -> None:
    """A pool that is too small for some says for how many."""
    (tmp_path / "small.toml").write_text("[pools.small]\ngpus = 1\ngpus_per_node = 1\n")
    result = pit("place", "simulate", "t.swf", "--scenario", "small.toml", "--policy", "random")
    record = json.loads(result.stdout)
    assert record["unplaced"] > 0
    assert (
        result.stderr == f"pit: random: {record['unplaced']} jobs fit no pool, 0 never started; no mean counts them\n"
    )


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["t.swf", "--policy", "federatoin"], 2, 'did you mean "federation"?'),
        (["t.swf", "--scenario", "s.toml", "--site", "alpha"], 2, "exclude"),
        (["t.swf", "--png", "x.jpg"], 2, ".png"),
        (["t.swf", "--png", "nowhere/x.png"], 2, "mkdir -p nowhere"),
        (["t.swf", "--load", "nan"], 3, "load"),
        (["nothing.swf"], 5, "no such file"),
        (["s.toml"], 5, "unknown trace format"),
        (["t.swf", "--scenario", "hosts.csv"], 3, "not TOML"),
    ],
)
def test_what_cannot_be_replayed_says_why(
    path: Path, pit: Pit, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, what: str
) -> None:
    """Usage, file and trace errors have their own exit codes, and nothing is printed."""
    monkeypatch.chdir(path.parent)
    result = pit("place", "simulate", *words)
    assert (result.returncode, result.stdout) == (code, "")
    assert what in result.stderr
