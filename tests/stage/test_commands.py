from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pitools.dataset.catalog.retirement import retire_version
from pitools.stage.cache import lease
from pitools.store import tags

SCHEMAS = {
    "pit.stage-run/1": "dataset version source path state files bytes copied_bytes verified_bytes wall_s node"
    " linked_bytes resumed_bytes peer_bytes",
    "pit.stage-plan/1": "dataset version source root path state files bytes copy_bytes free_bytes fits"
    " arrays steps episodes evict_bytes quota_bytes min_free_bytes",
    "pit.stage-finding/1": "dataset version path problem expected got",
    "pit.stage-check/1": "path sets files bytes findings wall_s",
    "pit.stage-set/1": "dataset version path state files bytes staged source last_used leased locked pinned part",
}


def records(text: str) -> list[dict]:
    """JSON Lines, each with the frozen keys of its schema, the schema first."""
    actual = [json.loads(line) for line in text.splitlines()]
    for record in actual:
        assert list(record) == ["schema", *SCHEMAS[record["schema"]].split()]
    return actual


def test_help_is_light():
    """What a prolog pays for every job: nothing heavy is imported for `--help`."""
    code = (
        "import sys\nsys.argv = ['pit-stage', '--help']\nfrom pitools import cli\n"
        "try:\n    cli.stage()\nexcept SystemExit as e:\n    assert not e.code\n"
        "bad = {'numpy', 'zarr', 'rich', 'jinja2', 'xxhash', 'psutil', 'ClusterShell', 'asyncio', 'concurrent'}\n"
        "sys.exit(str(bad & set(sys.modules)) if bad & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_run_stages_several_and_writes_the_receipt(small: Path, make_dataset, tmp_path: Path, pit_stage):
    """One record a version, in order, on stdout and in the file."""
    dataset = make_dataset({"a": b"1"}, "other")
    receipt = tmp_path / "receipts" / "r.json"
    code, out, err = pit_stage("run", small, dataset.parent, "--to", tmp_path / "pit", "--receipt", receipt)
    assert (code, err) == (0, "")
    assert [(r["dataset"], r["state"]) for r in records(out)] == [("pick", "staged"), ("other", "staged")]
    assert receipt.read_text() == out


def test_each_source_may_have_a_receipt_of_its_own(make_dataset, tmp_path: Path, pit_stage):
    """In the order of the sources; another number of receipts, but for one, is a mistake."""
    sources = [make_dataset({"a": name.encode()}, name) for name in ("one", "two", "three")]
    receipts = [tmp_path / "receipts" / f"{number}.json" for number in range(3)]
    options = [text for receipt in receipts for text in ("--receipt", receipt)]
    assert pit_stage("run", *sources, "--to", tmp_path / "pit", *options)[0] == 0
    assert [json.loads(receipt.read_bytes())["dataset"] for receipt in receipts] == ["one", "two", "three"]
    assert pit_stage("run", *sources, "--to", tmp_path / "pit", *options[:4])[0] == 2


def test_a_version_by_its_tag_and_a_retired_one(make_dataset, tmp_path: Path, pit_stage):
    """What `pit dataset` accepts, `pit-stage` does; a retired version is staged when it is named, and that is said."""
    old, new = make_dataset({"a": b"1"}), make_dataset({"a": b"2"})
    tags.move_tag(old.parent.parent, old.parent.name, "good", old.name)
    retire_version(new, reason="blurred")
    for text, version, said in ((f"{old.parent}@good", old, False), (old.parent, old, False), (new, new, True)):
        for command in ("plan", "run"):
            code, out, err = pit_stage(command, text, "--to", tmp_path / "pit")
            assert (code, records(out)[0]["version"]) == (0, version.name)
            assert ("blurred" in err) == said
    code, out, _ = pit_stage("check", f"{old.parent}@good")
    assert (code, records(out)[-1]["sets"]) == (0, 1)


def test_nothing_is_staged_before_every_source_is_found(small: Path, tmp_path: Path, pit_stage):
    """A typo in the last of several sources costs no copy of the first."""
    assert pit_stage("run", small, small.parent / "nothing", "--to", tmp_path / "pit")[:2] == (2, "")
    assert not (tmp_path / "pit").exists()


def test_several_sources_of_one_run_do_not_evict_each_other(make_dataset, tmp_path: Path, pit_stage, monkeypatch):
    """The first set of a run stays until the run ends, however long ago it was staged."""
    sources = [make_dataset({"a": os.urandom(9 << 20)}, name) for name in ("one", "two")]
    root = tmp_path / "pit"
    monkeypatch.setattr(lease, "last_used", lambda *_: 0.0)
    code, out, _ = pit_stage("run", *sources, "--to", root, "--quota", "25MiB")
    assert (code, [r["dataset"] for r in records(out)]) == (75, ["one"])
    assert os.listdir(root / "objects") == [sources[0].name]


def test_an_eviction_for_room_is_reported(make_dataset, tmp_path: Path, pit_stage):
    """Whoever misses a set finds in the output of `run` which call took its place."""
    first, second = (make_dataset({"a": os.urandom(10 << 20)}, name) for name in ("one", "two"))
    root = tmp_path / "pit"
    _, out, _ = pit_stage("run", first, "--to", root, "--format", "jsonl")
    path = json.loads(out)["path"]
    os.utime(root / ".leases" / Path(path).name, (1000, 1000))
    code, _, err = pit_stage("run", second, "--to", root, "--quota", "20MiB")
    assert (code, path in err, Path(path).exists()) == (0, True, False)


def test_no_receipt_of_what_was_not_staged(small: Path, make_dataset, tmp_path: Path, pit_stage):
    """The first version is staged and said so; the second is not, and no receipt says it was."""
    dataset = make_dataset({"a": b"1"}, "other")
    (dataset / "a").unlink()
    code, out, err = pit_stage("run", small, dataset, "--to", tmp_path / "pit", "--receipt", tmp_path / "r.json")
    assert code == 5
    assert [r["dataset"] for r in records(out)] == ["pick"]
    assert str(dataset / "a") in err
    assert not (tmp_path / "r.json").exists()


def test_one_line_serves_every_node(small: Path, tmp_path: Path, pit_stage, monkeypatch: pytest.MonkeyPatch):
    """`{node}` in --to and --receipt is filled in where the command runs; the record names the same node."""
    monkeypatch.setenv("SLURMD_NODENAME", "n07")
    code, out, _ = pit_stage("run", small, "--to", tmp_path / "{node}", "--receipt", tmp_path / "r/{node}/pick.json")
    assert code == 0
    assert (records(out)[0]["node"], records(out)[0]["path"]) == ("n07", f"{tmp_path}/n07/objects/{small.name}")
    assert (tmp_path / "r/n07/pick.json").exists()
    assert pit_stage("list", tmp_path / "{nod}")[0] == 2
    monkeypatch.delenv("SLURMD_NODENAME")
    assert records(pit_stage("run", small, "--to", tmp_path / "n07")[1])[0]["node"] == socket.gethostname()


def test_plan_into_run(small: Path, tmp_path: Path, pit_stage, monkeypatch: pytest.MonkeyPatch):
    """What `plan` printed is exactly what `run -` does."""
    code, plans, _ = pit_stage("plan", small.parent, "--to", tmp_path / "pit")
    assert code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(plans))
    code, out, _ = pit_stage("run", "-")
    assert code == 0
    assert records(out)[0]["path"] == records(plans)[0]["path"]


def test_a_plan_keeps_its_limits(make_dataset, tmp_path: Path, pit_stage, monkeypatch: pytest.MonkeyPatch):
    """`run -` refuses a plan that does not fit before it copies anything, and keeps to the limits of the others."""
    sources = [make_dataset({"a": os.urandom(9 << 20)}, name) for name in ("one", "two")]
    code, plans, _ = pit_stage("plan", *sources, "--to", tmp_path / "pit", "--quota", "25MiB")
    assert (code, [r["fits"] for r in records(plans)]) == (1, [True, False])
    monkeypatch.setattr(sys, "stdin", io.StringIO(plans))
    assert pit_stage("run", "-")[:2] == (75, "")
    assert not (tmp_path / "pit").exists()
    for text in plans.replace("false", "true").splitlines():
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code, _, _ = pit_stage("run", "-", "--quota", "1GiB")
    assert (code, len(os.listdir(tmp_path / "pit/objects"))) == (75, 1)


def test_a_plan_that_does_not_fit_is_a_no(make_dataset, tmpfs, pit_stage):
    """Exit 1 with the records complete; `run` of the same says to try later."""
    folder = make_dataset({"a": os.urandom(4 << 20)})
    disk = tmpfs("size=5m")
    code, out, _ = pit_stage("plan", folder, "--to", disk)
    assert (code, records(out)[0]["fits"]) == (1, False)
    code, out, err = pit_stage("run", folder, "--to", disk)
    assert (code, out) == (75, "")
    assert re.search(r"12\.0 MiB needed, 5\.0 MiB free", err)


def test_check_and_list(small: Path, tmp_path: Path, pit_stage):
    """Exit 0 without findings, 1 with; the summary comes last."""
    root = tmp_path / "pit"
    pit_stage("run", small, "--to", root)
    code, out, _ = pit_stage("check", root)
    assert (code, [r["schema"] for r in records(out)]) == (0, ["pit.stage-check/1"])
    (root / "objects" / small.name / "zarr.json").unlink()
    code, out, _ = pit_stage("check", root)
    assert (code, [r["schema"] for r in records(out)]) == (1, ["pit.stage-finding/1", "pit.stage-check/1"])
    code, out, _ = pit_stage("list", root)
    assert (code, records(out)[0]["state"]) == (0, "damaged")


@pytest.mark.parametrize("form", ["table", "tsv"])
def test_every_command_has_a_table(small: Path, tmp_path: Path, pit_stage, form: str):
    """For eyes: a head line, and the values below it."""
    root = tmp_path / "pit"
    for argv in (["plan", small, "--to", root], ["run", small, "--to", root], ["list", root]):
        code, out, _ = pit_stage(*argv, "--format", form)
        assert code == 0
        assert small.name in out.splitlines()[1]
    (root / "objects" / small.name / "zarr.json").unlink()
    code, out, _ = pit_stage("check", root, "--format", form)
    assert code == 1
    assert "zarr.json" in out


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["run", "SMALL"], 2),
        (["run", "-", "--to", "ROOT"], 2),
        (["run", "-", "SMALL"], 2),
        (["run", "/nowhere/at/all", "--to", "ROOT"], 2),
        (["run", "SMALL", "--to", "ROOT", "--timeout", "soon"], 2),
        (["run", "SMALL", "--to", "ROOT", "--readers", "0"], 2),
        (["run", "SMALL", "--to", "/proc/nope"], 4),
        (["run", "SMALL", "--to", "ROOT", "--receipt", "/proc/nope/r.json"], 4),
        (["run", "SMALL", "--to", "ROOT", "--receipt", "/proc/self/r.json"], 4),
        (["run", "SMALL/actions", "--to", "ROOT"], 5),
        (["check", "/nowhere/at/all"], 2),
        (["list", "SMALL/zarr.json"], 2),
        (["check", "/" + "x" * 300], 4),
        (["list", "/" + "x" * 300], 4),
        (["plan", "/" + "x" * 300, "--to", "ROOT"], 4),
        (["plan", "SMALL", "--to", "/" + "x" * 300], 4),
    ],
)
def test_exit_codes(small: Path, tmp_path: Path, pit_stage, argv: list[str], code: int):
    """Each class of mistake has its own code, and one line that says what was wrong."""
    argv = [argument.replace("SMALL", str(small)).replace("ROOT", str(tmp_path / "pit")) for argument in argv]
    actual, out, err = pit_stage(*argv)
    assert (actual, out) == (code, "")
    assert err


def test_the_recipes_of_the_readme_work(repo: Path, small: Path, tmp_path: Path):
    """Every shell block of the README runs, in order, as it is printed."""
    text = (repo / "pitools/stage/README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    assert len(text.splitlines()) <= 80
    env = {**os.environ, "DATA": str(small.parent.parent), "NVME": str(tmp_path / "nvme")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert f"objects/{small.name}" in done.stdout
