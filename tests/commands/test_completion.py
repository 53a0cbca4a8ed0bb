"""What a shell offers after TAB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from pitools.cli import group
from pitools.site import load
from pitools.store import tags
from pitools.store.manifest import version_of

NAMES = [f"{name}-2026010{day}-000000-abc12{day}" for day, name in enumerate("abc")]
Complete = Callable[..., "list[CompletionItem[str]]"]  # no generic class in the lowest click


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs at two sites, a folder that is none, and a site whose file is wrong."""
    monkeypatch.delenv("PIT_RUNS", raising=False)
    for site in load.site_names():  # those that are shipped have runs of others
        (tmp_path / f"{site}.toml").write_text(f'[paths]\nruns = "{tmp_path}/{site}"\n')
    for site, names in (("here", NAMES[:2]), ("there", NAMES[2:])):
        root = tmp_path / site
        (tmp_path / f"{site}.toml").write_text(f'name = "{site}"\nscheduler = "none"\n[paths]\nruns = "{root}"\n')
        for name in names:
            (root / name).mkdir(parents=True)
            (root / name / "plan.json").write_text("{}")
    (tmp_path / "here" / "no-run-20260109-000000-abc123").mkdir()
    (tmp_path / "here" / NAMES[0] / "verdict.json").write_text('{"state":"stopped","kind":"memory"}')
    (tmp_path / "wrong.toml").write_text("name = ")
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def offered(*words: str) -> list[CompletionItem[str]]:
    return ShellComplete(group, {}, "pit", "_PIT_COMPLETE").get_completions(list(words[:-1]), words[-1])


def test_runs_of_all_sites_newest_first(runs: Path) -> None:
    """With how they ended, for each command that takes one; by what is typed of them already."""
    actual = offered("launch", "show", "")
    assert [item.value for item in actual] == NAMES[::-1]
    assert [item.help for item in actual] == ["c: unfinished", "b: unfinished", "a: stopped, memory"]
    takes = ["show", "logs", "why", "cancel", "resume", "watch", "reproduce", "diff", "move"]
    for words in [*(("launch", item) for item in takes), ("checkpoint", "list"), ("checkpoint", "prune")]:
        assert [item.value for item in offered(*words, "b-")] == NAMES[1:2], words
    assert [item.value for item in offered("launch", "diff", NAMES[0], "c")] == NAMES[2:]


def test_not_every_run_there_ever_was(runs: Path) -> None:
    """Fifty at most, the newest."""
    for number in range(60):
        (folder := runs / "here" / f"d-20260201-0000{number:02}-abc123").mkdir()
        (folder / "plan.json").touch()
    actual = [item.value for item in offered("launch", "show", "")]
    assert (len(actual), actual[0], actual[-1]) == (50, "d-20260201-000059-abc123", "d-20260201-000010-abc123")


def test_what_else_is_offered(runs: Path) -> None:
    """Folders where a path is begun, files for a request, names of sites, and commands with their line of help."""
    assert [(item.type, item.value) for item in offered("launch", "show", "./")] == [("dir", "./")]
    assert [item.type for item in offered("launch", "run", "")] == ["file"]
    assert {"here", "there"} <= {item.value for item in offered("launch", "move", "x", "--site", "")}
    assert [(item.value, item.help) for item in offered("launch", "wh")] == [
        ("why", "Explain why each attempt of a run ended, or why jobs exclude a node.")
    ]
    assert [item.value for item in offered("top")] == ["topology"]
    assert offered("launch", "shwo", "a-") is not None, "a wrong word is no traceback in a prompt"
    assert offered("nonsense", "") is not None


def test_a_real_bash(runs: Path) -> None:
    """It asks `pit` as on a prompt, and nothing heavy is imported for the answer."""
    text = """
    eval "$(_PIT_COMPLETE=bash_source pit)"
    COMP_WORDS=(pit launch why b-) COMP_CWORD=3
    PYTHONPROFILEIMPORTTIME=1 _pit_completion pit
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", text], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{NAMES[1]}\n"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pitools.commands.completion" in imported
    assert not imported & {"numpy", "rich", "submitit", "zarr", "obstore", "pitools.launch.monitor.status"}


def test_nodes_with_a_report_and_tables(runs: Path) -> None:
    """Of the spool that the site's file of checks names; none where that is wrong."""
    (runs / "spool").mkdir()
    for name in ("n01", "n02", "x01"):
        (runs / "spool" / f"{name}.json").touch()
    (runs / "node.toml").write_text(f'spool = "{runs}/spool"\n')
    config = ("--config", str(runs / "node.toml"))
    assert [item.value for item in offered("node", "show", *config, "n")] == ["n01", "n02"]
    assert [item.value for item in offered("node", "return", *config, "n01", "x")] == ["x01"]
    assert offered("node", "show", "--config", str(runs / "none.toml"), "n") == []
    assert [item.value for item in offered("node", "show", "--facts", "gp")] == ["gpus"]


def test_datasets_tags_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of a root, and no other folder; tags after @; versions after /; the names of a request's data."""
    monkeypatch.chdir(tmp_path)
    version = version_of(b"{}")
    for name in ("pick", "place"):
        (tmp_path / "root" / name / version).mkdir(parents=True)
        (tmp_path / "root" / name / version / "manifest.json").write_text("{}")
    (tmp_path / "root" / "photos").mkdir()
    tags.move_tag(tmp_path / "root", "pick", "prod", version)
    (tmp_path / "r.toml").write_text('name = "r"\n[data]\ndemo = ""\n[params]\nlr = 1\n')

    def values(*words: str) -> list[str]:
        return [str(item.value) for item in offered(*words)]

    for words in (("dataset", "show"), ("dataset", "check"), ("dataset", "tag"), ("stage", "run")):
        assert values(*words, "root/p") == ["root/pick", "root/place"]
    assert values("dataset", "show", "root/pick@p") == ["root/pick@prod"]
    assert values("dataset", "show", "root/pick/") == [f"root/pick/{version}"]
    assert values("launch", "run", "r.toml", "--data", "d") == ["demo="]
    assert values("launch", "run", "r.toml", "--nodes", "2", "--set", "l") == ["lr="]
    assert values("launch", "run", "r.toml", "--data", "demo=root/pi") == ["demo=root/pick"]
    assert [item.type for item in offered("dataset", "show", "nowhere/")] == ["dir"]
