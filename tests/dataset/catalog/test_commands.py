from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pitools.store import tags, version_state


def test_tag(pit, lines, publish, tmp_path) -> None:
    """Tags are set, promoted, expected, told and removed; a lost race is 75 and names who won."""
    first, two = (publish(tmp_path / "root", "x", number).name for number in range(2))
    (created,) = lines(pit("dataset", "tag", "root/x", "candidate", first[:6], "--reason", "first"))
    assert (created["schema"], created["version"], created["number"], created["reason"]) == (
        "pit.dataset-tag/1",
        first,
        1,
        "first",
    )
    (created,) = lines(pit("dataset", "tag", "root/x", "prod", "@candidate", "--expect", "none"))
    assert created["version"] == first
    lost = pit("dataset", "tag", "root/x", "prod", two, "--expect", "none")
    assert (lost.returncode, lost.stdout) == (75, "")
    assert f"moved it to {first}" in lost.stderr
    lines(pit("dataset", "tag", "root/x", "prod", two, "--expect", first[:8]))
    reported = {line["tag"]: line["version"] for line in lines(pit("dataset", "tag", "root/x"))}
    assert reported == {"candidate": first, "prod": two}
    (shown,) = lines(pit("dataset", "tag", "root/x", "prod"))
    assert shown["version"] == two
    lines(pit("dataset", "tag", "root/x", "candidate", "--remove"))
    history = [(line["tag"], line["version"]) for line in lines(pit("dataset", "tag", "root/x", "--history"))]
    assert history == [("candidate", first), ("candidate", ""), ("prod", first), ("prod", two)]
    assert [line["version"] for line in lines(pit("dataset", "list", "root", "--where", "tag=prod"))] == [two]
    assert pit("dataset", "tag", "root/y").returncode == 2
    assert pit("dataset", "tag", "root/x", "--remove").returncode == 2
    for words in (["prdo"], ["prdo", "--remove"], ["prdo", "--history"]):
        unknown = pit("dataset", "tag", "root/x", *words)
        assert (unknown.returncode, 'did you mean "prod"?' in unknown.stderr) == (2, True)


@pytest.mark.parametrize("words", [[""], ["--expect", "none"], ["--reason", "good"], ["", "--expect", "none"]])
def test_no_version_for_a_tag(pit, publish, tmp_path, words) -> None:
    """A move without a version, as of an empty variable, is a usage error, never taken for a question."""
    version = publish(tmp_path / "root", "x")
    assert pit("dataset", "tag", "root/x", "prod", version.name).returncode == 0
    assert pit("dataset", "tag", "root/x", "prod", *words).returncode == 2


def test_gc_reads_the_runs_of_every_site(pit, lines, publish, tmp_path) -> None:
    """A version that a run of any site reads stays; if a site's runs are not here, nothing is removed."""
    version = publish(tmp_path / "root", "x", 0)
    lines(pit("dataset", "retire", str(version)))
    sites = tmp_path / "home/.config/pitools/sites"
    for path in sites.iterdir():
        path.unlink()
    for name in ("one", "two"):
        (sites / f"{name}.toml").write_text(f'name = "{name}"\n[paths]\nruns = "{tmp_path}/{name}"\n')
    gc = ("dataset", "gc", "root", "--grace", "0s")
    (tmp_path / "runs").mkdir()  # of site local
    (tmp_path / "one").mkdir()
    done = pit(*gc)
    assert (done.returncode, f"{tmp_path}/two" in done.stderr, version.exists()) == (4, True, True)
    run = tmp_path / "two/bc-1/plan.json"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"data": [{"version": version.name}]}))
    (kept,) = lines(pit(*gc))
    assert (kept["state"], kept["reason"]) == ("kept", "run bc-1")
    assert [line["state"] for line in lines(pit(*gc, "--site", "local", "--site", "one"))] == ["removed"]


def test_retire_and_gc(pit, lines, publish, tmp_path) -> None:
    """A version is retired by name, shown as such, kept by the site's runs, taken back, and removed in the end."""
    root = tmp_path / "root"
    first, two = (publish(root, "x", number) for number in range(2))
    assert pit("dataset", "retire", "root/x").returncode == 2
    (output,) = lines(pit("dataset", "retire", f"root/x/{first.name[:7]}", "--reason", "bad labels"))
    assert (output["version"], output["reason"]) == (first.name, "bad labels")
    states = {line["version"]: line["state"] for line in lines(pit("dataset", "list", "root"))}
    assert states == {first.name: "retired", two.name: "live"}
    refused = pit("dataset", "tag", "root/x", "prod", first.name)
    assert refused.returncode == 2
    assert "--undo" in refused.stderr
    (retained,) = lines(pit("dataset", "gc", "root", "--no-site-runs"))
    assert (retained["state"], "grace" in retained["reason"]) == ("kept", True)
    run = tmp_path / "jobs/bc-1/plan.json"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"data": [{"version": first.name}]}))
    (tmp_path / "more").mkdir()
    site_runs = {"PIT_RUNS": str(tmp_path / "jobs")}
    for further in ([], ["--runs", "more"]):  # --runs adds to the site's
        (retained,) = lines(pit("dataset", "gc", "root", "--grace", "0s", *further, **site_runs))
        assert retained["reason"] == "run bc-1"
    for wrong in (["root", "--grace", "7"], ["root/x"], ["root"]):
        refused = pit("dataset", "gc", *wrong, PIT_RUNS=str(tmp_path / "not/mounted"))
        assert refused.returncode == (2 if wrong != ["root"] else 4), refused.stderr
    assert "--grace 7d" in pit("dataset", "retire", str(first), "--grace", "7").stderr
    missing = {"XDG_CONFIG_HOME": str(tmp_path / "none")}  # no site but local
    done = pit("dataset", "gc", "root", "--grace", "0s", "--dry-run", **missing)
    assert "--no-site-runs" in done.stderr
    (planned,) = lines(done)
    assert planned["state"] == "would-remove"
    assert lines(pit("dataset", "retire", "--undo", str(first))) == []
    assert lines(pit("dataset", "gc", "root", "--grace", "0s", "--no-site-runs")) == []
    lines(pit("dataset", "retire", str(first)))
    assert pit("dataset", "gc", "root", "--grace", "0s", **missing).returncode == 2  # no folder of runs is known
    assert first.exists()
    (gone,) = lines(pit("dataset", "gc", "root", "--grace", "0s", "--no-site-runs"))
    assert (gone["schema"], gone["state"], gone["freed_bytes"]) == (
        "pit.dataset-gc/1",
        "removed",
        planned["freed_bytes"],
    )
    assert not first.exists()
    assert pit("dataset", "retire", "--undo", str(first)).returncode == 2


def test_where(pit, lines, publish, tmp_path) -> None:
    """`list` searches, and names the nearest key when it does not know one."""
    for number in range(3):
        publish(tmp_path / "root", "x", number, episodes=10 * (number + 1), instructions={"pick": 1})
    actual = lines(pit("dataset", "list", "root", "--where", "episodes>=20", "--where", "instruction~PICK"))
    assert [line["episodes"] for line in actual] == [20, 30]
    assert actual[0]["path"] == f"root/x/{actual[0]['version']}"
    assert "expected a root" in pit("dataset", "list", "root/x").stderr
    assert lines(pit("dataset", "list", "root", "--where", f"version={actual[0]['version'][:8]}")) == actual[:1]
    for number in (0, 1):
        (tmp_path / f"root/x/broken-{number}").mkdir()
        (tmp_path / f"root/x/broken-{number}/manifest.json").write_text("{")
    damaged = pit("dataset", "list", "root")
    assert (damaged.returncode, len(damaged.stdout.splitlines())) == (5, 3)
    assert all(f"broken-{number}/manifest.json" in damaged.stderr for number in (0, 1))
    shutil.rmtree(tmp_path / "root/x/broken-0")
    shutil.rmtree(tmp_path / "root/x/broken-1")
    wrong = pit("dataset", "list", "root", "--where", "epsodes>=20")
    assert wrong.returncode == 2
    assert 'did you mean "episodes"?' in wrong.stderr
    table = pit("dataset", "list", "root", "--format", "table").stdout.splitlines()
    assert table[0].split()[:4] == ["NAME", "VERSION", "TAGS", "STATE"]
    assert len(table) == 4


def test_show(pit, lines, robomimic, tmp_path) -> None:
    """`show` takes a name, a tag or the beginning of a version; arrays, episodes, and one of them."""
    from pitools.dataset.ingest.ingest import ingest

    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    tags.move_tag(tmp_path / "root", "x", "prod", version.version)
    path = Path(version.path)
    version_state.set_quarantine(
        path, version_state.Quarantine(whole_version=False, episodes={1: ("black frames",)}, set_at="", set_by="")
    )
    for name in ("root/x", "root/x@prod", f"root/x/{version.version[:6]}", str(path)):
        done = pit("dataset", "show", name)
        shown = {line["array"]: line for line in lines(done)}
        assert shown["action"]["shape"] == [7, 7]
        assert "tag prod, 1 episode in quarantine" in done.stderr
    first, second = lines(pit("dataset", "show", "root/x", "--episodes"))
    assert (first["name"], first["start"], first["steps"], first["recording"]) == ("demo_0", 0, 3, "reach.hdf5")
    assert (second["instruction"], second["start"], second["quarantined"]) == ("reach 1", 3, ["black frames"])
    assert lines(pit("dataset", "show", "root/x", "--episode", "1")) == [second]
    assert pit("dataset", "show", "root/x", "--episode", "2").returncode == 2
    assert pit("dataset", "show", "root/x", "--png", "a.png").returncode == 2
    assert pit("dataset", "show", "root/x", "--episode", "1", "--png", "a.png").returncode == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_statistics_are_shown(pit, lines, robomimic, tmp_path) -> None:
    """Where a manifest has statistics, `show` has the least and the largest value of each array."""
    from pitools.dataset.ingest.ingest import ingest

    ingest([robomimic(30, 40)], root=tmp_path / "root", name="x")
    shown = {line["array"]: line for line in lines(pit("dataset", "show", "root/x"))}
    assert shown["action"]["minimum"] < -1 < 1 < shown["action"]["maximum"]
    assert len(shown["action"]["statistics"]["mean"]) == 7
    assert shown["episode_offsets"]["minimum"] is None


def test_diff(pit, lines, robomimic, tmp_path) -> None:
    """`diff` is silent and 0 for one version, and tells arrays, episodes, options and files of two that differ."""
    from pitools.dataset.ingest.ingest import ingest

    root = tmp_path / "root"
    version = ingest([robomimic(3, 4)], root=root, name="x")
    assert [line["change"] for line in lines(pit("dataset", "diff", version.path, version.path))] == ["shared"]
    two = ingest([robomimic(3, 4), robomimic(5, name="more.hdf5", seed=1)], root=root, name="x", skip_arrays=["reward"])
    actual = lines(pit("dataset", "diff", version.path, two.path), 1)
    assert {line["schema"] for line in actual} == {"pit.dataset-diff/1"}
    reported = {(line["kind"], line["subject"]): line for line in actual}
    assert reported["array", "reward"]["change"] == "removed"
    assert reported["episode", "more.hdf5: demo_0"]["change"] == "added"
    assert ("episode", "reach.hdf5: demo_0") not in reported
    assert reported["recording", "more.hdf5"]["change"] == "added"
    assert (reported["option", "skip_arrays"]["before"], reported["option", "skip_arrays"]["after"]) == (
        "[]",
        '["reward"]',
    )
    assert reported["statistics", "action"]["shift"] > 0
    assert sum(line["bytes"] for line in actual if line["kind"] == "files" and line["change"] != "removed") == two.bytes
    three = ingest([robomimic(3, 4, seed=5)], root=root, name="x")
    actual = lines(pit("dataset", "diff", version.path, three.path), 1)
    assert {line["subject"] for line in actual if line["kind"] == "episode"} == {
        "reach.hdf5: demo_0",
        "reach.hdf5: demo_1",
    }
    assert {line["change"] for line in actual if line["kind"] == "episode"} == {"changed"}


@pytest.mark.parametrize("words", [["list"], ["show"], ["tag"], ["retire"], ["gc"], ["diff"], ["rebuild"]], ids=str)
def test_help(pit, words) -> None:
    """Each command has help, which says how it is used."""
    done = pit("dataset", *words, "--help")
    assert done.returncode == 0
    assert f"Usage: pit dataset {words[0]}" in done.stdout


def test_what_is_typed_most_is_light(publish, tmp_path) -> None:
    """`list`, `tag` and `gc` import no heavy library: their time is the start of Python."""
    publish(tmp_path / "root", "x")
    for words in (["list", "root"], ["tag", "root/x"], ["gc", "root", "--no-site-runs"]):
        code = (
            "import sys; from pitools import cli; code = cli.run(cli.group, 'pit'); "
            "heavy = {'numpy', 'zarr', 'h5py', 'rich', 'jinja2', 'submitit'} & sys.modules.keys(); "
            "sys.exit(code or ', '.join(heavy) or 0)"
        )
        argv = [sys.executable, "-c", code, "dataset", *words]
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_group(pit) -> None:
    """The group lists its commands in full, names the nearest one, and imports only what is used."""
    from pitools.commands.dataset import COMMANDS

    help_text = pit("dataset", "--help").stdout
    assert all(f"  {name} " in help_text for name in COMMANDS)
    assert "..." not in help_text.partition("Commands:")[2]
    wrong = pit("dataset", "lst")
    assert (wrong.returncode, 'did you mean "list"?' in wrong.stderr) == (2, True)
    code = (
        "import sys; from pitools import cli; cli.run(cli.group, 'pit'); "
        "sys.exit(', '.join(name for name in sys.modules if name.startswith('pitools.commands.dataset_')) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "dataset", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
