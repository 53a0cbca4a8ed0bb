"""`pit node` as it is typed, on this machine and with a Slurm that is a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pitools.commands import node_bench
from pitools.commands.node import group
from pitools.core.errors import NoSpace
from pitools.core.locks import lock
from pitools.node import spool
from pitools.node.bench import history
from pitools.node.bench import run as bench
from pitools.node.bench.compare import BenchResult
from pitools.node.check.config import load_config
from pitools.node.types import BENCH_CHECK, NodeReport

SCONTROL = """\
#!/bin/sh
case "$*" in
  *topology*) echo "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[01-02]" ;;
  *update*) echo "$*" >> {log}; [ ! -e {folder}/refuse ] || { echo "slurm_update error: Access denied" >&2; exit 1; } ;;
  *n01*) cat {folder}/nodes | head -1 ;;
  *) cat {folder}/nodes ;;
esac
"""
NODE = "NodeName={name} CPUAlloc=0 CPUTot=4 RealMemory=1 State={state} Partitions=train {reason}\n"


class Machine:
    """A node `n01` with one check, and a site `here` whose Slurm has n01 and n02."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config, self.log = folder, folder / "node.toml", folder / "updates"
        for name in ("spool", "state", "sites", "bin"):
            (folder / name).mkdir()
        self.config.write_text(
            f"disable = {json.dumps([check.name for check in load_config().check])}\n"
            f'spool = "{folder}/spool"\nstate = "{folder}/state"\n[control]\nmax_share_hour = 1.0\n'
            f'[[check]]\nname = "scratch"\ntable = "files"\nwhere.path = "{folder}/scratch"\n'
            'key = "exists"\nequals = true\n'
        )
        site = f'name = "here"\n[slurm]\nbin = "{folder}/bin"\n[node]\nconfig = "../node.toml"\n'
        (folder / "sites" / "here.toml").write_text(site)
        (folder / "bin" / "scontrol").write_text(
            SCONTROL.replace("{log}", str(self.log)).replace("{folder}", str(folder))
        )
        (folder / "bin" / "scontrol").chmod(0o755)
        self.set_reasons({})

    def set_reasons(self, reasons: Mapping[str, str]) -> None:
        text = ""
        for name in ("n01", "n02"):
            why = f"Reason={reasons[name]} [root@2026-11-01T00:00:00]" if name in reasons else ""
            text += NODE.format(name=name, state="IDLE+DRAIN" if why else "IDLE", reason=why)
        (self.folder / "nodes").write_text(text)

    def pit(self, *words: str, code: int = 0, **more: str) -> list[dict[str, object]]:
        done = self.run(*words, **more)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def report(self) -> NodeReport | None:
        """Check the node as its HealthCheckProgram does, with this Slurm's scontrol, and return its report."""
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        self.pit("check", "--report", "--config", str(self.config), PATH=path)
        return spool.read_report(self.folder / "spool", "n01")

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PIT_", "SLURM"))}
        env |= {"PIT_SITE_PATH": str(self.folder / "sites"), "PIT_SITE": "here", "SLURMD_NODENAME": "n01", **more}
        argv = [sys.executable, "-m", "pitools", "node", *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_check_prints_what_failed(machine: Machine) -> None:
    """Exit 1 and a line; then exit 0 and none, or with --all what passed."""
    config = ("--config", str(machine.config))
    found = machine.pit("check", *config, code=1)
    assert [(row["check"], row["state"], row["action"], row["node"]) for row in found] == [
        ("scratch", "failed", "drain", "n01")
    ]
    (machine.folder / "scratch").touch()
    assert machine.pit("check", *config) == []
    assert [row["state"] for row in machine.pit("check", *config, "--all")] == ["passed"]
    assert not list((machine.folder / "spool").iterdir())


def test_the_file_of_checks_is_the_option_or_of_the_site(machine: Machine) -> None:
    """For all verbs: with a site's file, a check of this node is not that of the shipped checks alone."""
    assert [row["check"] for row in machine.pit("check", code=1)] == ["scratch"]
    (row,) = machine.pit("show", "--facts", "files")
    assert str(machine.folder) in str(row["values"])
    (machine.folder / "scratch").touch()
    assert machine.pit("check") == []
    context = click.Context(group)
    verbs = {name: group.get_command(context, name) for name in group.list_commands(context)}
    options = {name: {option.name for option in verb.params} for name, verb in verbs.items() if verb}
    assert {name for name, names in options.items() if {"config_path", "site_name"} <= names} == set(verbs)


def test_what_other_tools_check(machine: Machine) -> None:
    """A row for each check of gcm, NHC and Azure; before these, for each line of nhc.conf, as it is for a node."""
    config = ("--config", str(machine.config))
    assert len(rows := machine.pit("show", "--coverage", *config)) == 134
    conf = machine.folder / "nhc.conf"
    conf.write_text("n0[12] || check_fs_free /tmp 5%\n* || check_hw_gm myri0\nn02 || check_hw_eth eth1\n")
    machine.config.write_text(f'{machine.config.read_text()}\n[nhc]\nfile = "{conf}"\n')
    first, second, third, *rest = machine.pit("show", "--coverage", *config)
    assert (first["way"], first["ours"], first["source"]) == ("nhc.conf", "nhc-fs-free-tmp", f"{conf}:1")
    assert (second["way"], second["check"], bool(second["why"])) == ("no", "check_hw_gm myri0", True)
    assert (third["way"], third["why"]) == ("no", "is for other nodes")
    assert rest == rows
    of_other = machine.pit("show", "--coverage", "--node", "n02", *config)
    assert [row["way"] for row in of_other[:3]] == ["nhc.conf", "no", "nhc.conf"]
    conf.chmod(0o666)
    machine.pit("check", *config, code=3)


def test_a_report_drains_the_node(machine: Machine) -> None:
    """What a dry run says, --act does; a refusal of Slurm is exit 4, and the journal goes on."""
    machine.pit("check", "--report", "--config", str(machine.config), code=1)
    (row,) = machine.pit("drain")
    assert (row["node"], row["act"], row["done"]) == ("n01", "drain", False)
    assert machine.run("drain", "--format", "hosts").stdout == "n01\n"
    machine.config.write_text(machine.config.read_text().replace("[control]", "[control]\nact = true"))
    (row,) = machine.pit("drain", "--dry-run")
    assert (row["act"], row["done"], (machine.folder / "spool" / "control").exists()) == ("drain", False, False)
    assert not machine.log.exists()
    (machine.folder / "refuse").touch()
    (row,) = machine.pit("drain", "--act", code=4)
    assert row["done"] is False
    (machine.folder / "refuse").unlink()
    (row,) = machine.pit("drain", "--act")
    assert (row["done"], str(row["incident"]).startswith("n01-20")) == (True, True)
    update = machine.log.read_text().splitlines()[-1]
    machine.set_reasons({"n01": update.partition("Reason=")[2] or update.partition("reason=")[2]})
    assert machine.pit("drain", "--act") == []
    first, second = machine.pit("list")
    assert (first["state"], first["incident"], first["failed"]) == ("idle+drain", row["incident"], 1)
    assert (second["incident"], second["report_age_s"], second["failed"]) == ("", None, None)
    history, incident, finding = machine.pit("show", "n01")
    assert (history["incidents"], incident["phase"], finding["check"]) == (1, "drained", "scratch")
    (machine.folder / "spool" / "n02.json").write_text("{")
    done = machine.run("return", "n[01-02]", "n02")
    assert "n02.json: not a report" in done.stderr
    assert [json.loads(line)["done"] for line in done.stdout.splitlines()] == [False, False]
    assert "scontrol update nodename=n01 state=resume" in done.stderr  # n02 is not ours
    (machine.folder / "scratch").touch()
    reports = []
    for asked in (set(), {"n01"}):
        spool.request_benches(machine.folder / "spool", asked)
        machine.report()
        reports.append((machine.folder / "spool" / "n01.json").read_text())
    assert [BENCH_CHECK in report for report in reports] == [False, True]
    (row,) = machine.pit("return", "n[01]")
    assert row["done"] is True


OURS = "pit node [n01-20261126191236] scratch: m"


@pytest.mark.parametrize(
    ("state", "reason", "age_s", "message"),
    [
        ("IDLE", "", 0, "not drained by pit node"),
        ("IDLE+DRAIN", "for Ada", 0, "not drained by pit node"),
        ("MIXED+DRAIN", OURS, 0, "jobs run there"),
        ("IDLE+DRAIN+COMPLETING", OURS, 0, "jobs run there"),
        ("damaged", None, 0, "scontrol"),
        ("IDLE+DRAIN", OURS, 3700, ""),
    ],
)
def test_no_node_measures_itself_beside_a_job(
    machine: Machine, state: str, reason: str | None, age_s: int, message: str
) -> None:
    """Whatever the controller asked for before a person resumed the node, or before it died."""
    text = NODE.format(name="n01", state=state, reason=f"Reason={reason} [root@2026-11-01T00:00:00]" if reason else "")
    (machine.folder / "nodes").write_text(text if reason is not None else "slurm_load_node error: nothing\n")
    (machine.folder / "scratch").touch()
    spool.request_benches(machine.folder / "spool", {"n01"})
    asked_at = time.time() - age_s
    os.utime(machine.folder / "spool" / "bench-requests" / "n01", (asked_at, asked_at))
    report = machine.report()
    assert report
    assert not history.read_past(machine.folder / "spool", {"n01"})
    found = [(one.state, message in one.message) for one in report.findings if one.check == BENCH_CHECK]
    assert found == ([("unknown", True)] if message else [])


def test_all_users_can_read_reports_and_incidents(machine: Machine) -> None:
    """Under any umask: choices of nodes read them."""
    before = os.umask(0o077)
    try:
        machine.pit("check", "--report", "--config", str(machine.config), code=1)
        machine.pit("drain", "--act")
    finally:
        os.umask(before)
    for name in ("n01.json", "control/journal.jsonl", "control/handled.json"):
        assert (machine.folder / "spool" / name).stat().st_mode & 0o777 == 0o644


def test_a_report_that_no_controller_uses_says_so(machine: Machine) -> None:
    """It is written all the same: a controller of another account may use it."""
    words = ("check", "--report", "--config", str(machine.config))
    assert "no controller" not in machine.run(*words).stderr
    (machine.folder / "spool").chmod(0o777)
    (machine.folder / "spool" / "n01.json").unlink()
    done = machine.run(*words)
    assert (done.returncode, "no controller" in done.stderr) == (1, True)
    assert (machine.folder / "spool" / "n01.json").exists()


def test_facts_and_their_tables(machine: Machine) -> None:
    """A summary, the rows of a table, and the keys that checks may name."""
    config = ("--config", str(machine.config))
    tables = {row["table"]: row for row in machine.pit("show", *config)}
    assert tables["files"]["rows"] == 1
    (row,) = machine.pit("show", "--facts", "files", *config)
    assert row["values"]["exists"] is False  # type: ignore[index]
    table = machine.run("show", "--facts", "files", *config, "--format", "tsv").stdout.splitlines()
    assert [line.split("\t")[0] for line in table] == ["path", str(machine.folder / "scratch")]
    keys = {(row["table"], row["key"]) for row in machine.pit("show", "--tables")}
    assert {("gpus", "ecc_uncorrected"), ("files", "exists")} <= keys


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("check", "--config", "{folder}/none.toml"), 3, "none.toml"),
        (("check", "--node", "../../etc/x"), 2, "no name of a node"),
        (("show", "--facts", "gpu"), 2, "gpus"),
        (("show", "n01", "--tables"), 2, "exclude"),
        (("show", "--node", "n01"), 2, "pit node show n01"),
        (("return", "n77"), 2, "n77"),
        (("show", "n77"), 2, "n77"),
        (("drain", "--site", "local"), 2, "no Slurm"),
        (("watch", "--every", "soon"), 2, "soon"),
        (("watch", "--every", "0s"), 2, "--every"),
        (("dra",), 2, "drain"),
    ],
)
def test_what_is_wrong_is_named(machine: Machine, words: tuple[str, ...], code: int, text: str) -> None:
    """With the exit code of its kind."""
    done = machine.run(*(word.format(folder=machine.folder) for word in words))
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr


def test_checks_that_others_can_write_are_refused(machine: Machine) -> None:
    """They name programs that root runs."""
    machine.config.chmod(0o666)
    assert machine.run("check", "--config", str(machine.config)).returncode == 3


def test_a_second_tick_ends_at_once(machine: Machine) -> None:
    """With exit 0, as for cron; a Slurm that does not answer is 75."""
    (machine.folder / "spool" / "control").mkdir()
    with lock(machine.folder / "spool" / "control" / "lock", "test", is_required=True):
        assert machine.pit("drain", "--act") == []
        assert machine.pit("return", "n01", code=75) == []
    (machine.folder / "bin" / "scontrol").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n"
    )
    assert machine.pit("drain", "--act", code=75) == []


def test_a_watch_prints_an_act_once(machine: Machine) -> None:
    """What does not change, as what a dry run would do, is not repeated."""
    config = str(machine.config)
    machine.pit("check", "--report", "--config", config, code=1)
    env = {**os.environ, "PIT_SITE_PATH": str(machine.folder / "sites"), "PIT_SITE": "here"}
    argv = [sys.executable, "-m", "pitools", "node", "watch", "--every", "1s"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            rows = [json.loads(process.stdout.readline())]
            (machine.folder / "spool").rename(machine.folder / "away")
            while "spool" not in (line := process.stderr.readline()):
                assert line
            (machine.folder / "away").rename(machine.folder / "spool")
            machine.pit("check", "--report", "--config", config, "--node", "n02", code=1)
            rows.append(json.loads(process.stdout.readline()))
        finally:
            process.kill()
    assert [(row["node"], row["act"], row["done"]) for row in rows] == [
        ("n01", "drain", False),
        ("n02", "hold", False),
    ]


def test_results_of_a_bench_are_printed_before_they_are_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full spool costs none of them."""
    monkeypatch.setattr(bench, "measure_nodes", lambda *_, **__: [BenchResult(node="n1", measure="m", value=1.0)])

    def keep(*_: object) -> None:
        raise NoSpace("no space left", where="/spool")

    monkeypatch.setattr(history, "append_results", keep)
    done = CliRunner().invoke(node_bench.bench, ["--config", str(machine.config), "--format", "jsonl"])
    assert done.exit_code == 0
    assert '"measure":"m"' in done.output
    assert "no space left" in done.output
    done = CliRunner().invoke(node_bench.bench, ["--config", str(machine.config), "--bisect"])
    assert "not in a job" in str(done.exception)
