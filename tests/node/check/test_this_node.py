"""A node checks itself: its report, its rates, and what its prolog reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from pitools.commands import node_check
from pitools.core import timestamps
from pitools.core.errors import ConfigError, NoSpace, UsageError
from pitools.core.record import decode_json
from pitools.node import report as reporting
from pitools.node import spool
from pitools.node.check import this_node
from pitools.node.check.config import Nhc, NodeConfig, NodeType, load_shipped
from pitools.node.check.evaluate import evaluate
from pitools.node.check.rule import Check
from pitools.node.control.policy import DRAINED
from pitools.node.gather import collectors, kernel_log, slurmd
from pitools.node.gather.child import Collector
from pitools.node.gather.kernel_log import read_kmsg
from pitools.node.report import make_report, write_report
from pitools.node.types import FactTable, Finding, NodeFacts, Row


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    (tmp_path / "spool").mkdir()
    check = Check(name="scratch", table="files", key="exists", where={"path": str(tmp_path / "scratch")}, equals=True)
    return NodeConfig(spool=str(tmp_path / "spool"), state=str(tmp_path / "a" / "state"), check=(check,))


def with_checks(config: NodeConfig, *checks: Check) -> NodeConfig:
    return NodeConfig(spool=config.spool, state=config.state, check=checks, control=config.control)


def test_a_report_says_what_failed_and_then_what_passed(config: NodeConfig, tmp_path: Path) -> None:
    """The file for prologs is there as long as the fault."""
    checked = this_node.check_node(config, "n01")
    assert [(one.check, one.state) for one in checked.findings] == [("scratch", "failed")]
    assert checked.has_failed
    write_report(config, checked)
    report = spool.read_report(tmp_path / "spool", "n01")
    assert report is not None
    assert ([one.check for one in report.findings], report.passed) == (["scratch"], ())
    until_s, why = (tmp_path / "a" / "state" / "n01.refuse").read_text().splitlines()
    assert float(until_s) > 1.7e9
    assert why.startswith("scratch: ")
    (tmp_path / "scratch").touch()
    checked = this_node.check_node(config, "n01")
    assert not checked.has_failed
    write_report(config, checked)
    report = spool.read_report(tmp_path / "spool", "n01")
    assert report is not None
    assert (report.findings, report.passed) == ((), ("scratch",))
    assert not (tmp_path / "a" / "state" / "n01.refuse").exists()


@pytest.mark.parametrize(
    ("change", "code", "refused"),
    [
        ({"level": "warning"}, False, True),
        ({"is_shadow": True}, False, False),
        ({"action": "report"}, True, False),
        ({"action": "drain-after-job"}, True, False),
        ({"action": "reboot"}, True, True),
    ],
)
def test_what_fails_a_check_and_a_prolog(
    config: NodeConfig, change: dict[str, object], code: bool, refused: bool
) -> None:
    """The level decides the exit code, the action whether jobs are kept off; a shadow does neither."""
    fields = {name: getattr(config.check[0], name) for name in Check.__struct_fields__}
    config = with_checks(config, Check(**(fields | change)))
    checked = this_node.check_node(config, "n01")
    write_report(config, checked)
    assert checked.has_failed is code
    assert (Path(config.state) / "n01.refuse").exists() is refused


EVENT = Finding(
    node="n01", check="xid-48", state="failed", level="critical", action="drain", evidence_at="2026-11-01T06:00:00.000Z"
)


@pytest.mark.parametrize(
    ("now", "handled_until", "refused"),
    [
        ("2026-11-01T06:59:00.000Z", "", True),
        ("2026-11-01T07:01:00.000Z", "", False),
        ("2026-11-01T05:50:00.000Z", "", False),
        ("2026-11-01T06:30:00.000Z", "2026-11-01T05:59:00.000Z", True),
        ("2026-11-01T06:30:00.000Z", "2026-11-01T06:10:00.000Z", False),
        ("2026-11-01T06:30:00.000Z", DRAINED, False),
    ],
    ids=["young", "old", "of the future", "resumed before", "resumed since", "drained"],
)
def test_a_prolog_refuses_for_what_the_controller_drains(now: str, handled_until: str, refused: bool) -> None:
    """A line of the log fails its check for a day, but refuses jobs no longer than it may drain the node."""
    facts = NodeFacts(node="n01", boot_id="", gathered_at=now, tables={})
    checked = this_node.NodeCheck(facts, [EVENT], [], handled_until=handled_until)
    assert bool(this_node.refusing(checked)) is refused


def test_a_node_hears_what_was_dealt_with(config: NodeConfig, tmp_path: Path) -> None:
    """With its report, for the checks of jobs; of a file that only the controller can have written."""
    refusal, handled = Path(config.state) / "n01.refuse", tmp_path / "spool" / "control" / "handled.json"
    handled.parent.mkdir()

    def report(text: str) -> bool:
        handled.write_text(text)
        checked = this_node.check_node(config, "n01")
        write_report(config, checked)
        assert bool(this_node.refusing(this_node.check_node(config, "n01", in_job=True))) is refusal.exists()
        return refusal.exists()

    assert report("{}")
    assert not report('{"n01": "9999"}')
    assert report('{"n02": "9999"}')
    for bad in ('["n01"]', '{"n01": 9999}', "", '{"n01": '):
        assert report(bad)
    assert not report('{"n01": "9999"}')
    assert not report('{"n01": ')  # what was read before holds
    assert report("{}")
    handled.chmod(0o666)
    assert report('{"n01": "9999"}')


def test_a_full_disk_keeps_no_refusal_back(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written in the room of other files, and first; and is gone when the node has recovered."""
    folder, room = Path(config.state), [250]
    write = reporting.write_atomic

    def write_if_room(path: Path, data: bytes | str, *, durable: bool) -> None:
        if sum(one.stat().st_size for one in folder.iterdir()) + len(data) > room[0]:
            raise NoSpace("no space left", where=str(path))
        write(path, data, durable=durable)

    monkeypatch.setattr(reporting, "write_atomic", write_if_room)
    refusal = folder / "n01.refuse"

    def report() -> None:
        with pytest.raises(NoSpace):
            write_report(config, this_node.check_node(config, "n01"))

    report()
    (folder / "n01.facts.json").write_bytes(b"x" * room[0])
    refusal.unlink()
    for _ in range(2):
        report()
        assert float(refusal.read_text().splitlines()[0]) > 1.7e9
    Path(str(config.check[0].where["path"])).touch()
    room[0] = 0
    report()
    assert not refusal.exists()


def test_a_rate_is_of_the_last_report(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that is not reported moves nothing; a damaged or foreign file of facts is none."""
    counter = [5]

    def read(_query: object) -> list[Row]:
        return [{"port": "mlx5_0/1", "link_downed": counter[0]}]

    monkeypatch.setattr(collectors, "COLLECTORS", (Collector("rdma_ports", "test", read),))
    config = with_checks(config, Check(name="flaps", table="rdma_ports", key="link_downed", max_increase=0))

    def state(*, report: bool) -> str:
        checked = this_node.check_node(config, "n01")
        if report:
            write_report(config, checked)
        return checked.findings[0].state

    assert state(report=True) == "passed"
    counter[0] = 6
    assert [state(report=False), state(report=True), state(report=True)] == ["failed", "failed", "passed"]
    counter[0] = 7
    path = Path(config.state) / "n01.facts.json"
    good = path.read_bytes()
    assert set(decode_json(good, NodeFacts).tables) == {"rdma_ports"}
    for bad in (good[:-20], b"[]", b"\xff"):
        path.write_bytes(bad)
        assert state(report=False) == "passed"
    path.write_bytes(good)
    Path(config.state).chmod(0o777)
    assert state(report=False) == "passed"
    with pytest.raises(ConfigError):  # and nothing is written where others may have put a link
        state(report=True)
    assert path.read_bytes() == good
    Path(config.state).chmod(0o755)
    assert state(report=False) == "failed"


def test_what_failed_and_is_gone_is_unknown_until_it_is_dealt_with(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that hung and is gone passes no check while the node is drained; once a person returned it, it does."""
    rows: list[Row] = [{"target": "/scratch", "responds": False}]
    monkeypatch.setattr(collectors, "COLLECTORS", (Collector("mounts", "test", lambda _query: rows),))
    config = with_checks(config, Check(name="responds", table="mounts", key="responds", equals=True))

    def state(handled_until: str) -> str:
        handled = Path(config.spool) / "control/handled.json"
        handled.parent.mkdir(exist_ok=True)
        handled.write_text(json.dumps({"n01": handled_until}))
        checked = this_node.check_node(config, "n01")
        write_report(config, checked)
        return checked.findings[0].state

    assert state(DRAINED) == "failed"
    rows.clear()
    assert [state(DRAINED), state(DRAINED), state(timestamps.now_rfc3339())] == ["unknown"] * 3
    assert state("") == "passed"


def test_what_is_unknown_is_one_line_of_a_table() -> None:
    """A log that cannot be read hides no failure, which comes first; names of a few checks are enough."""
    checks = load_shipped().check
    system = FactTable(table="system", source="", read_at="", cost_s=0, rows=({"clocksource": "hpet"},))
    facts = NodeFacts(node="n01", boot_id="", gathered_at="", tables={"system": system})
    lines = this_node.summary(this_node.NodeCheck(facts, evaluate(checks, facts), list(checks)))
    assert [line.check for line in lines if line.state == "failed"] == [lines[0].check] == ["clocksource"]
    assert len(lines) == 1 + len({check.table for check in checks})
    (log,) = (line.message for line in lines if line.message.startswith("kernel_log"))
    in_order = sorted(checks, key=lambda check: check.action == "report")
    of_log = [check.name for check in in_order if check.table == "kernel_log"]
    rest = f"{', '.join(of_log[1:4])} and {len(of_log) - 4} more (--all prints them)"
    assert log == f"kernel_log: not read; also unknown: {rest}"


def test_a_preflight_runs_no_program(config: NodeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No shipped check does there, also where the kernel's log cannot be read."""
    log = tmp_path / "run"
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("scontrol", "journalctl", "dmesg", "smartctl", "ipmitool", "systemctl", "dpkg-query", "rpm", "tool"):
        (tools / name).write_text(f"#!/bin/sh\necho {name} >> {log}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(kernel_log, "read_kmsg", lambda _, boot_s: read_kmsg(tmp_path / "kmsg", boot_s))
    command = Check(name="run", table="commands", key="exit_code", where={"command": "tool"}, equals=0)
    slurm = Check(name="slurmd", table="slurm", key="slurmd_is_running", equals=True)
    config = with_checks(config, *config.check, *load_shipped().check, command, slurm)
    tables = {check.table for check in this_node.check_node(config, "n01", in_job=True).checks}
    assert not log.exists()
    assert {"files", "kernel_log", "mounts"} < tables
    this_node.check_node(config, "n01")
    assert {"tool", "journalctl", "scontrol"} < set(log.read_text().split())


def test_only_checks_of_its_type_count(config: NodeConfig) -> None:
    """By the node's name."""
    check = Check(name="big", table="files", key="exists", where={"path": "/nowhere"}, equals=True, types=("gpu",))
    types = {"gpu": NodeType(nodes="g[01-04]")}
    config = NodeConfig(spool=config.spool, state=config.state, types=types, check=(check,))
    assert [len(this_node.check_node(config, name).findings) for name in ("g03", "c03")] == [1, 0]


def test_a_check_that_was_renamed_has_passed_by_both_names(config: NodeConfig, tmp_path: Path) -> None:
    """So an incident that it began under its old name ends."""
    (tmp_path / "scratch").touch()
    fields = {name: getattr(config.check[0], name) for name in Check.__struct_fields__}
    config = with_checks(config, Check(**{**fields, "old_names": ("disk", "tmp")}))
    assert make_report(this_node.check_node(config, "n01")).passed == ("scratch", "disk", "tmp")


def test_lines_of_nhc_are_reported_as_other_checks(config: NodeConfig, tmp_path: Path) -> None:
    """A check of nhc.conf, which is in no file of ours, has its findings and passes, and may compare with the past."""
    (tmp_path / "nhc.conf").write_text(f"n01 || check_file_test -d {tmp_path}\nn02 || check_file_test -d /nowhere")
    config = NodeConfig(spool=config.spool, state=config.state, nhc=Nhc(file=str(tmp_path / "nhc.conf")))
    checked = this_node.check_node(config, "n01")
    write_report(config, checked)
    assert len(make_report(checked).passed) == 2  # it exists, and is a folder
    assert this_node.check_node(config, "n02").has_failed


def test_a_command_tells_of_bad_lines_and_of_names_that_slurm_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, once; a report of a node that is none is not written."""
    monkeypatch.setattr(slurmd, "_ask_controller", lambda node, _env: {"is_node": node == "n01"})
    (tmp_path / "spool").mkdir()
    (tmp_path / "nhc.conf").write_text("* || check_fs_fre / 5%\n{n01 || check_hw_eth lo\n")
    settings = f'spool = "{tmp_path}/spool"\nstate = "{tmp_path}/state"\n[nhc]\nfile = "{tmp_path}/nhc.conf"\n'
    (tmp_path / "node.toml").write_text(settings)
    arguments = ["--config", str(tmp_path / "node.toml"), "--report", "--node", "no"]
    done = CliRunner().invoke(node_check.check, arguments)
    assert done.stderr.count("no check is made of 2: line 1, 2") == 1
    assert isinstance(done.exception, UsageError), done.output
    assert list((tmp_path / "spool").glob("*.json")) == []


def test_what_would_drain_comes_first_of_what_is_unknown() -> None:
    """A check that drains is not hidden behind those that only report."""
    checks = [check for check in load_shipped().check if check.table == "block_devices"]
    checks.sort(key=lambda check: check.action != "report")
    facts = NodeFacts(node="n01", boot_id="", gathered_at="", tables={})
    (line,) = this_node.summary(this_node.NodeCheck(facts, evaluate(checks, facts), checks))
    assert (line.check, line.action) == ("disk-smart", "repair")


def test_serial_numbers_are_by_device() -> None:
    """A GPU by its address, its UUID apart from its serial number; what a device does not say is left out."""
    tables = {
        "gpus": [{"index": 0, "pci": "0000:b5:00.0", "uuid": "GPU-1", "serial": None}],
        "block_devices": [{"device": "nvme0n1", "serial": "S1"}, {"device": "loop0", "serial": None}],
    }
    data = {
        "schema": "pit.node-facts/1",
        "node": "n01",
        "boot_id": "",
        "gathered_at": "",
        "tables": {
            name: {"schema": "pit.fact-table/1", "table": name, "source": "", "read_at": "", "cost_s": 0, "rows": rows}
            for name, rows in tables.items()
        },
    }
    facts = decode_json(json.dumps(data).encode(), NodeFacts)
    report = make_report(this_node.NodeCheck(facts, [], []))
    assert report.hardware == {"gpus 0000:b5:00.0 uuid": "GPU-1", "block_devices nvme0n1 serial": "S1"}


def test_a_node_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As slurmd has it; never a path."""
    monkeypatch.setenv("SLURMD_NODENAME", "n07")
    assert (this_node.node_name(), this_node.node_name("n08")) == ("n07", "n08")
    monkeypatch.delenv("SLURMD_NODENAME")
    assert this_node.node_name() == os.uname().nodename.partition(".")[0]
    for bad in ("../x", "a/b", ".", "a b", "-x"):
        with pytest.raises(UsageError):
            this_node.node_name(bad)


def test_a_report_needs_a_spool(config: NodeConfig) -> None:
    """The key is named."""
    with pytest.raises(ConfigError, match="spool"):
        write_report(NodeConfig(state=config.state), this_node.check_node(config, "n01"))
