"""Every check of gcm, NHC and Azure is here or said why not; each of ours fails on bad facts, and passes on good."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from pitools.node.check import coverage as coverage_module
from pitools.node.check.config import load_shipped
from pitools.node.check.coverage import Coverage, coverage, without_lines
from pitools.node.check.evaluate import evaluate
from pitools.node.check.nhc.lines import parse_nhc
from pitools.node.check.nhc.system import CONVERTERS
from pitools.node.check.problems import check_problem, contradiction
from pitools.node.check.rule import Check
from pitools.node.check.values import matches
from pitools.node.gather.collectors import read_facts
from pitools.node.gather.read import Query
from pitools.node.tables import TABLES, KeyType
from pitools.node.types import FactTable, NodeFacts, Row, Value

FOLDER = Path(coverage_module.__file__).parent
NOW, BEFORE = "2026-11-26T12:00:00Z", "2026-11-26T11:55:00Z"
RECENT, OLD = "2026-11-26T11:50:00Z", "2026-11-20T12:00:00Z"
Rows = Row | list[Row]


def values(key: str, *, bad: Value, good: Value, **more: Value) -> tuple[Rows, Rows]:
    return {key: bad, **more}, {key: good, **more}


def two(key: str, *, bad: Value, good: Value) -> tuple[Rows, Rows]:
    """Return rows of two subjects, of which the second has a bad value, or a good one."""
    return [{key: good}, {key: bad}], [{key: good}, {key: good}]


def many(number: int, **row: Value) -> list[Row]:
    return [dict(row) for _ in range(number)]


def events(number: int, at: str = RECENT, **more: Value) -> list[Row]:
    return many(number, **{"at": at, "text": "a line", **more})


def evenly(number: int, **more: Value) -> list[Row]:
    """Return events ten minutes apart."""
    return [row for count in range(number) for row in events(1, f"2026-11-26T11:{10 * count + 10}:00Z", **more)]


def files(key: str, *, bad: Value, good: Value) -> tuple[Rows, Rows]:
    return {"exists": True, key: bad}, {"exists": True, key: good}


BASE = {check["name"] for check in tomllib.loads((FOLDER / "base.toml").read_text())["check"]}
SITE_CHECKS = {
    name: msgspec.convert({"name": "own", **value}, Check)
    for checks in tomllib.loads((FOLDER / "coverage.toml").read_text()).values()
    for name, value in checks.items()
    if "table" in value and isinstance(value, dict)
}
CHECKS = {check.name: check for check in load_shipped().check if check.name in BASE}
MISSING: Rows = []
SHIPPED: dict[str, tuple[Rows, Rows]] = {
    "clock-synchronized": values("clock_is_synchronized", bad=False, good=True),
    "clocksource": values("clocksource", bad="hpet", good="tsc"),
    "zombies": (many(51, state="Z"), many(50, state="Z") + many(9, state="S")),
    "blocked-processes": (many(21, is_blocked=True), many(3, is_blocked=True) + many(30, is_blocked=False)),
    "cpu-throttled": values("throttled", bad=51, good=50),
    "cpu-governor": two("governor", bad="powersave", good="performance"),
    "sensor-alarm": values("has_alarm", bad=True, good=False),
    "dimm-corrected": values("corrected", bad=100, good=8),
    "dimm-uncorrected": values("uncorrected", bad=1, good=0),
    "machine-check-fatal": (events(1, is_fatal=True), events(2, is_fatal=False)),
    "machine-checks": (events(10), events(9) + events(9, OLD)),
    "ipmi-uncorrectable": (events(1, text="Uncorrectable ECC"), events(1, text="Correctable ECC")),
    "pcie-fatal": values("fatal_errors", bad=1, good=0),
    "pcie-nonfatal": values("nonfatal_errors", bad=2, good=1),
    "kernel-hangs": (events(1), events(5, OLD)),
    "filesystem-errors": (events(1, device="sda1"), events(5, OLD, device="sda1")),
    "disk-errors": (evenly(3), events(40)),
    "thermal-events": (evenly(4), events(40)),
    "link-flaps": (events(3, device="ib0"), events(2, device="ib0") + events(2, device="ib1")),
    "nfs-server-silent": (events(1, device="nas"), events(1, device="nas") + events(1, device="nas", state="ok")),
    "nvme-lost": (events(1, device="nvme0"), events(1, OLD, device="nvme0")),
    "disk-lost": (events(1, device="md0"), events(1, device="md0", state="error")),
    "filesystem-lost": (
        events(1, device="sda1"),
        events(1, device="sda1", state="error") + events(1, device="sdb1", part="usb"),
    ),
    "lustre-server-silent": (events(1, device="o1"), events(1, device="o1") + events(1, device="o1", state="ok")),
    "lustre-evicted": (evenly(3, device="o1"), events(9, device="o1")),  # the latter are a burst
    "lustre-bug": (events(1), events(1, state="evicted")),
    "host-out-of-memory": (events(1), events(3, state="job")),
    "nic-lost": (events(1, device="mlx5_0"), events(1, device="mlx5_0", is_fatal=False)),
    "nic-errors": (evenly(3, device="mlx5_0"), events(9, device="mlx5_0")),
    "gpu-lost": (events(1, device="g1"), events(1, device="g1") + events(1, device="g1", state="ok")),
    "gpu-memory-error": (events(1, device="g1"), events(1, OLD, device="g1")),
    "gpu-resets": (evenly(3, device="g1"), events(9, device="g1")),
    "mount-responds": values("responds", bad=False, good=True),
    "network-mount-responds": values("responds", bad=False, good=True),
    "other-mount-responds": values("responds", bad=False, good=True, type="fuse.sshfs"),
    "root-writable": values("is_read_only", bad=True, good=False, type="ext4"),
    "mount-writable": values(
        "is_forced_read_only", bad=True, good=False, type="xfs", target="/scratch", device="/dev/md0"
    ),
    "disk-space": values("used_share", bad=0.96, good=0.94),
    "disk-full": values("root_used_share", bad=1.0, good=0.997, type="ext4"),
    "inodes": values("inodes_used_share", bad=0.96, good=0.1),
    "inodes-full": values("inodes_used_share", bad=1.0, good=0.997),
    "disk-smart": values("smart_passed", bad=False, good=True),
    "disk-state": values("state", bad="dead", good="live"),
    "disk-writable": values("is_read_only", bad=True, good=False),
    "nvme-warning": values("critical_warning", bad=4, good=0),
    "disk-wear": values("wear_share", bad=1.2, good=0.8),
    "disk-media-errors": values("media_errors", bad=1, good=0),
    "disk-temperature": values("temperature_c", bad=90, good=45),
    "raid-degraded": values("state", bad="degraded", good="active"),
    "raid-works": values("state", bad="inactive", good="degraded"),
    "ethernet-crc": values("rx_crc_errors", bad=60, good=5),
    "ethernet-carrier": values("carrier_changes", bad=4, good=2),
    "rdma-port-active": values("state", bad="INIT", good="ACTIVE"),
    "rdma-link-downed": values("link_downed", bad=1, good=0),
    "rdma-link-recovery": values("link_error_recovery", bad=30, good=3),
    "rdma-symbol-errors": values("symbol_errors", bad=20, good=2),
    "rdma-receive-errors": values("rx_errors", bad=4000, good=40),
    "rdma-discards": values("tx_discards", bad=40_000, good=40),
    "rdma-buffer-overruns": values("buffer_overruns", bad=1, good=0),
    "rdma-link-integrity": values("link_integrity_errors", bad=1, good=0),
    "rdma-rnr-retries": values("rnr_nak_retry_errors", bad=1, good=0),
    "rdma-ack-timeouts": values("ack_timeouts", bad=301, good=3),
    "rdma-slow-restarts": values("roce_slow_restarts", bad=3001, good=3),
    "gpu-not-lost": values("is_lost", bad=True, good=False),
    "gpu-needs-reset": values("recovery_action", bad="drain-and-reset", good="none"),
    "gpu-needs-reboot": values("recovery_action", bad="node-reboot", good="none"),
    "gpu-needs-drain": values("recovery_action", bad="drain-p2p", good="drain-and-reset"),
    "gpu-imex-domain": values("recovery_action", bad="recover-imex-domain", good="drain-p2p"),
    "gpu-remap-failed": values("remap_failed", bad=True, good=False),
    "gpu-sram-threshold": values("sram_threshold_exceeded", bad=True, good=False),
    "gpu-remap-pending": values("remapped_rows_pending", bad=True, good=False),
    "gpu-remapped-rows": values("remapped_rows", bad=513, good=3),
    "gpu-retired-pages": values("retired_pages", bad=62, good=9),
    "gpu-retired-pending": values("retired_pages_pending", bad=True, good=False),
    "gpu-ecc-uncorrected": values("ecc_uncorrected", bad=1, good=0),
    "gpu-ecc-corrected": values("ecc_corrected", bad=50_000_001, good=17),
    "gpu-temperature": values("temperature_c", bad=95, good=60),
    "gpu-memory-temperature": values("memory_temperature_c", bad=110, good=80),
    "gpu-slowdown": values("slowdowns", bad="SwPowerCap,HwThermalSlowdown", good="SwPowerCap"),
    "gpu-persistence": values("is_persistent", bad=False, good=True),
    "gpu-vbios-same": two("vbios", bad="95.00", good="96.00"),
    "gpu-nvlinks-same": two("nvlinks", bad=17, good=18),
    "gpu-nvlink-errors": values("nvlink_errors", bad=1000, good=10),
    "gpu-pcie-width-same": two("pcie_width", bad=8, good=16),
    "gpu-pcie-replays": values("pcie_replays", bad=60, good=5),
    "gpu-fabric": values("fabric_state", bad="not-started", good="completed"),
    "slurmd-runs": values("slurmd_is_running", bad=False, good=True),
    "slurm-controllers": values("controllers_up", bad=0, good=1),
}
SITE: dict[str, tuple[Rows, Rows]] = {
    "check ssh certs": values("exit_code", bad=1, good=0),
    "processor frequency": values("mhz", bad=800, good=2400),
    "frequency governor": values("governor", bad="powersave", good="performance"),
    "check memory size": values("memory_bytes", bad=10**12, good=3 * 10**12),
    "check buddyinfo": values("largest_free_block_bytes", bad=65536, good=4194304),
    "hca count": ([{"port": "a"}], [{"port": "a"}, {"port": "b"}, {"port": "vf", "is_virtual": True}]),
    "disk size": values("size_bytes", bad=10**11, good=10**12),
    "mounted directory": ([{"type": "autofs"}], [{"device": "nas:/home"}]),
    "file exists check": values("exists", bad=False, good=True),
    "directory exists check": values("kind", bad="file", good="directory"),
    "running process": ([{"name": "sssd", "state": "Z"}], [{"state": "S"}]),
    "check ssh": values("responds", bad=False, good=True),
    "slurm state": values("node_state", bad="down", good="idle"),
    "slurmctld count": values("controllers_up", bad=1, good=2),
    "service status": values("state", bad="failed", good="active"),
    "package version": values("version", bad="550.90", good="570.86.15"),
    "nvidia smi": (MISSING, [{"index": 0}]),
    "nvidia smi gpu_num": ([{"index": 0}], [{"index": 0}, {"index": 1}]),
    "nvidia smi clock_freq": values("app_sm_clock_mhz", bad=900, good=1980),
    "nvidia smi running_procs": values("processes", bad=1, good=0),
    "nvidia smi mem_usage": values("memory_used_bytes", bad=10**9, good=10**6),
    "amd smi": ([{"index": 0, "vendor": "nvidia"}], [{"index": 0}]),
    "amd smi gpu_num": ([{"index": 0}], [{"index": 0}, {"index": 1}]),
    "amd smi clock_freq": values("sm_clock_mhz", bad=132.0, good=2100.0),
    "amd smi running_procs": values("processes", bad=1, good=0),
    "amd smi mem_usage": values("memory_used_bytes", bad=10**10, good=10**8),
    "check ibstat": values("physical_state", bad="Polling", good="LinkUp"),
    "check ib interfaces": ([{"state": "down"}, {}], [{}, {}]),
    "check iblink": values("rate_gbps", bad=200, good=400),
    "check password status": values("output", bad="svc L 2026-01-01", good="svc P 2026-01-01"),
    "check path access": values("is_writable", bad=False, good=True),
    "check uptime": values("uptime_s", bad=60, good=86400),
    "check module": (MISSING, {"version": "1"}),
    "check dnf repos": values("exit_code", bad=1, good=0),
    "check mountpoint": values("is_mount_point", bad=False, good=True),
    "check pci": values("link_width", bad=8, good=16),
    "check ethlink": values("speed_mbps", bad=1000, good=100_000),
    "check_dmi_data_match": values("value", bad="2.0.0", good="2.0.1"),
    "check_dmi_raw_data_match": values(
        "output", bad="BIOS\n\tVersion: 1.24.4175.34\n", good="BIOS\n\tVersion: 1.24.4175.33\n\tx: y\n"
    ),
    "check_net_socket": values("responds", bad=False, good=True),
    "check_ps_kswapd": values("cpu_s", bad=1_800_001, good=3, name="kswapd0"),
    "check_app_gpu_clocks": values("app_sm_clock_mhz", bad=1300, good=1980),
    "check_hw_topology": values("numa_node", bad=1, good=0),
}
RUNS: Row = {"exit_code": 0, "duration_s": 0.1}
USER: Row = {"uid": 1001, "user": "u", "command": "python train.py", "job_id": "", "is_kernel": False}
IN_A_JOB: Row = {**USER, "job_id": "17"}
PORT: Row = {"port": "mlx5_ib0/1", "state": "ACTIVE", "physical_state": "LinkUp", "rate_gbps": 400.0}
HOME: Row = {"device": "nas0:/home", "type": "nfs", "options": "rw,vers=3,hard"}
LINES: dict[str, tuple[Rows, Rows]] = {
    "check_cmd_output": ({**RUNS, "output": "is running\nis dead"}, {**RUNS, "output": "rpcbind\nit is running"}),
    "check_cmd_status": ({**RUNS, "exit_code": 0}, {**RUNS, "exit_code": 1}),
    "check_cmd_dmesg": ({**RUNS, "output": "a\nMPT BIOS fault\nb"}, {**RUNS, "output": "a\nb"}),
    "check_file_contents": files("text", bad="root:x:0:0:\nsshd:1\ntoor:2\n", good="a\nroot:x:0:0:\nsshd:1\n"),
    "check_file_stat": (
        {"exists": True, "user": "root", "mode": "0644", "age_s": 60},
        {"exists": True, "user": "root", "mode": "0666", "age_s": 60},
    ),
    "check_file_test": (
        {"exists": True, "kind": "directory", "mode": "0777", "is_writable": True},
        {"exists": True, "kind": "directory", "mode": "1777", "is_writable": True},
    ),
    "check_fs_mount": ({**HOME, "options": "rw,vers=30"}, HOME),
    "check_fs_mount_ro": values("options", bad="rw,relatime", good="ro,relatime"),
    "check_fs_mount_rw": ({"type": "ext4", "options": "ro,rwx"}, {"type": "ext4", "options": "rw"}),
    "check_fs_size": values("size_bytes", bad=5 << 30, good=1 << 30),
    "check_fs_free": values("used_share", bad=0.97, good=0.95, size_bytes=1),
    "check_fs_used": values("used_share", bad=0.9701, good=0.97, size_bytes=1),  # 98 %, as df rounds
    "check_fs_inodes": values("inodes", bad=999, good=1000),
    "check_fs_ifree": values("inodes_free", bad=999, good=1000, inodes=5000),
    "check_fs_iused": values("inodes_used_share", bad=0.98, good=0.97, inodes=1),
    "check_hw_cpuinfo": ({"sockets": 2, "cores": 48, "cpus": 96}, {"sockets": 2, "cores": 96, "cpus": 96}),
    "check_hw_physmem": values("memory_bytes", bad=30 << 30, good=(32 << 30) - (1 << 30)),
    "check_hw_swap": values("swap_bytes", bad=1 << 30, good=0),
    "check_hw_physmem_free": values("memory_free_bytes", bad=4 << 30, good=5 << 30),
    "check_hw_swap_free": values("swap_free_bytes", bad=1 << 30, good=3 << 30),
    "check_hw_ib": ({**PORT, "rate_gbps": 200.0}, PORT),
    "check_hw_eth": ([{"interface": "eth0"}], [{"interface": "eth1"}]),
    "check_hw_mcelog": (
        events(10, device="A", is_fatal=False),
        events(9, device="A", is_fatal=False) + events(9, device="B", is_fatal=False),
    ),
    "check_net_ping": values("responds", bad=False, good=True),
    "check_ps_daemon": ({"command": "wulfd", "user": "u"}, {"command": "/sbin/wulfd -x", "user": "root"}),
    "check_ps_blacklist": ({"command": "sshd: u", "user": "u"}, {"command": "/usr/sbin/sshd", "user": "root"}),
    "check_ps_service": (
        {"command": "vi sshd", "user": "root"},
        [{"command": "vi x", "user": "u"}, {"command": "/usr/sbin/sshd -D", "user": "root"}],
    ),
    "check_ps_cpu": (
        {**USER, "cpu_share": 4.0},
        [{**USER, "cpu_share": 0.2}, {"user": "root", "uid": 0, "cpu_share": 9.0}],
    ),
    "check_ps_physmem": values("memory_share", bad=0.5, good=0.1),
    "check_ps_time": (
        {**USER, "command": "/opt/runawayd -f", "cpu_s": 216001},
        [{**USER, "command": "/opt/runawayd -f", "cpu_s": 5}, {**USER, "cpu_s": 10**9}],
    ),
    "check_ps_unauth_users": (USER, [IN_A_JOB, {**USER, "uid": 42, "user": "svc"}]),
    "check_ps_userproc_lineage": (USER, [IN_A_JOB, {**USER, "uid": 65534, "user": "nobody"}]),
    "check_ps_loadavg": values("load_5m", bad=30.0, good=29.99, load_1m=99.0),
    "check_gpu_count": ([{"index": 0}], [{"index": 0}, {"index": 1}]),
    "check_vbios_version": values("vbios", bad="96.00", good="96.00.99.00.01"),
    "check_nvme_count": ([{"device": "nvme0n1"}], [{"device": "nvme0n1"}, {"device": "nvme1n1"}, {"device": "sda"}]),
}


def judge(checks: list[Check], rows: Rows) -> set[str]:
    """Return the states of checks of one table. A row without a value that `where` asks for gets a value that fits."""
    table = checks[0].table
    given = rows if isinstance(rows, list) else [rows]
    filled = tuple({**_filling(checks[0]), "event": number, **row} for number, row in enumerate(given))
    counters = {check.key for check in checks if check.max_rate or check.max_increase is not None}
    zeros = tuple({**row, **dict.fromkeys(counters, 0)} for row in filled)
    for check in checks:  # no verdict on rows that are not meant
        assert not filled or not check.key or any(matches(row, check.where, table) for row in filled), check
    now, before = (
        NodeFacts(
            node="n1",
            boot_id="b1",
            gathered_at=at,
            tables={table: FactTable(table=table, source="test", read_at=at, cost_s=0, rows=facts)},
        )
        for at, facts in ((NOW, filled), (BEFORE, zeros))
    )
    return {finding.state for finding in evaluate(checks, now, before)}


def _filling(check: Check) -> Row:
    first = {key: wanted[0] if isinstance(wanted, tuple) else wanted for key, wanted in check.where.items()}
    is_regex = {key for key, wanted in first.items() if isinstance(wanted, str) and wanted.startswith("re:")}
    return {
        key: wanted.replace("*", "0") if isinstance(wanted, str) else wanted
        for key, wanted in first.items()
        if key not in is_regex
    }


@pytest.mark.parametrize("name", list(CHECKS))
def test_each_shipped_check_fails_and_passes(name: str) -> None:
    """Each shipped check has facts that fail it and facts that pass it."""
    bad, good = SHIPPED[name]
    assert (judge([CHECKS[name]], bad), judge([CHECKS[name]], good)) == ({"failed"}, {"passed"})


@pytest.mark.parametrize("name", list(SITE_CHECKS))
def test_each_check_of_a_site_fails_and_passes(name: str) -> None:
    """So has each check that a site would write for one of another tool; and it is a valid one."""
    check = SITE_CHECKS[name]
    assert check_problem(check) == ""
    bad, good = SITE[name]
    assert (judge([check], bad), judge([check], good)) == ({"failed"}, {"passed"})


@pytest.mark.parametrize("line", [row.ours for row in coverage() if row.way == "nhc.conf"])
def test_each_line_of_nhc_fails_and_passes(line: str) -> None:
    """So have the checks that are made of a line of nhc.conf."""
    (made,) = parse_nhc(f"* || {line}", "n1")
    bad, good = LINES[line.split()[0]]
    assert "failed" in judge(list(made.checks), bad)
    assert judge(list(made.checks), good) == {"passed"}


@pytest.mark.parametrize(
    ("line", "row", "state"),
    [
        ("check_ps_userproc_lineage die", {**USER, "uid": 999, "user": "dbus"}, "passed"),
        ("check_ps_userproc_lineage die", {**USER, "job_id": None}, "unknown"),
        ("check_ps_userproc_lineage -n v,u -n w die", USER, "passed"),
        ("check_ps_userproc_lineage -u 1001 die", USER, "passed"),
        ("check_ps_userproc_lineage -c python die", USER, "passed"),
        ("check_ps_userproc_lineage -n v -u 100 -c pyth die", USER, "failed"),
        ("check_ps_userproc_lineage", USER, "failed"),
        ("check_ps_service -u 999 sleep", {"command": "sleep 9", "uid": 999, "user": "dbus"}, "passed"),
        ("check_ps_service -E reboot sleep", {"command": "sleep 9"}, "failed"),
        ("check_ps_service -E reboot sleep", {"command": "vi"}, "passed"),
        ("check_ps_service -s sleep", {"command": "sleep 9"}, "failed"),
        ("check_ps_service -k sleep", {"command": "sleep 9"}, "failed"),
        ("check_ps_service -S sleep", {"command": "sleep 9"}, "passed"),
        ("check_ps_daemon kthreadd", {"command": "[kthreadd]"}, "passed"),
        ("check_ps_daemon /opt/*/bin/d/", {"command": "/opt/x/bin/d/ -f"}, "passed"),
        ("check_cmd_status /a '[b]'", {"exit_code": 1, "duration_s": 9.0}, "failed"),
        ("check_fs_free /tmp 7%", {"size_bytes": 1, "used_share": 0.93}, "passed"),
        ("check_fs_used /tmp 2k", {"size_bytes": 4096, "used_bytes": 1025}, "failed"),
        ("check_fs_used /tmp 2k", {"size_bytes": 4096, "used_bytes": 1024}, "passed"),
        ("check_hw_mcelog", {"kind": "mce", "is_fatal": True, "at": RECENT}, "passed"),
        (r"check_file_contents /f '/^v1\\.2$/'", {"exists": True, "text": "v1.2"}, "passed"),
    ],
)
def test_lines_of_nhc_are_judged_as_by_nhc(line: str, row: Row, state: str) -> None:
    """Their exceptions and inversions, too: a healthy node is not drained by its own nhc.conf."""
    (made,) = parse_nhc(f"* || {line}", "n1")
    assert judge(list(made.checks), row) == {state}


@pytest.mark.parametrize("line", ["check_fs_size /x 1k", "check_fs_free /x 5G", "check_fs_ifree /x 9"])
def test_no_mount_and_one_without_a_size_pass_as_by_nhc(line: str) -> None:
    """One that is not mounted, or has 0 bytes or 0 inodes, is not judged; one whose size is unknown is unknown."""
    ((check,),) = (made.checks for made in parse_nhc(f"* || {line}", "n1"))
    assert [one.state for one in evaluate([check], _mounts({"target": "/y"}))] == ["passed"]
    for size, state in ((0, "passed"), (None, "unknown")):
        row: Row = {"target": "/x", "size_bytes": size, "free_bytes": size, "inodes": size, "inodes_free": size}
        assert [one.state for one in evaluate([check], _mounts(row))] == [state]


def _mounts(row: Row) -> NodeFacts:
    table = FactTable(table="mounts", source="test", read_at=NOW, cost_s=0, rows=(row,))
    return NodeFacts(node="n1", boot_id="b1", gathered_at=NOW, tables={"mounts": table})


def test_every_check_of_the_others_is_named() -> None:
    """The table has all names: 59 of gcm at 1b7bde9, 46 of NHC at 9c4a38c, Azure's of May 2026; each with its way."""
    rows = coverage()
    assert Counter(row.source for row in rows) == {"gcm": 59, "gcm at 0ab8f35": 9, "nhc": 46, "azure": 20}
    shipped = {check.name for check in load_shipped().check}
    for row in rows:
        assert bool(row.why) == (row.way == "no"), row
        assert row.way != "shipped" or fnmatch.filter(shipped, row.ours), row
        assert row.way != "nhc.conf" or row.ours.split()[0] == row.check, row


def test_frozen_keys() -> None:
    """The keys of the record are as documented; they are only added to."""
    assert Coverage.__struct_fields__ == ("source", "check", "way", "ours", "why")


def test_lines_that_are_not_taken_say_why() -> None:
    """A line of a check that is not made of it is reported with the reason, and what does it instead."""
    for name, row in without_lines().items():
        (line,) = parse_nhc(f"# a comment\n* || {name}", "n1")
        assert (line.line, line.checks, line.is_made) == (2, (), row.way == "shipped")
        assert (row.why or row.ours) in line.note


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("check_net_socket -p tcp -s LISTEN -l '0.0.0.0:22' -d sshd", 'where.endpoint = "tcp://127.0.0.1:22"'),
        ("check_net_socket -! -r 10.0.0.1:6817", 'where.endpoint = "tcp://10.0.0.1:6817"'),
        ("check_net_socket -n 22", "values of its own"),
        ("check_dmi_data_match 'BIOS Information: Vendor: Foo'", 'equals = "Foo", where.key = "bios_vendor"'),
        ("check_dmi_raw_data_match 'Version: 1.2'", 'Version:\\\\ 1\\\\.2.*"'),
        ("check_ps_kswapd 1800 100 log", "max = 1800,"),
        ("check_ps_kswapd many", "values of its own"),
    ],
)
def test_the_check_to_write_has_the_values_of_the_line(line: str, written: str) -> None:
    """Where they are understood; else it is said that they are those of an example."""
    (made,) = parse_nhc(f"* || {line}", "n1")
    assert written in made.note


@pytest.mark.parametrize("kind", ["xfs", "tmpfs", "btrfs"])
def test_what_any_user_can_fill_drains_no_node(kind: str) -> None:
    """A file system that keeps no blocks for root, or the inodes of any, is reported alone."""
    row: Row = {"target": "/", "type": kind, "root_used_share": 1.0, "inodes_used_share": 1.0, "is_read_only": False}
    table = FactTable(table="mounts", source="test", read_at=NOW, cost_s=0, rows=(row,))
    facts = NodeFacts(node="n1", boot_id="b1", gathered_at=NOW, tables={"mounts": table})
    failed = [one for one in evaluate(CHECKS.values(), facts) if one.state == "failed"]
    assert {one.check: one.action for one in failed} == {"inodes": "report", "inodes-full": "report"}


def test_shipped_checks_are_mild() -> None:
    """What drains a node by default is a short list; shipped checks are valid, and do not contradict each other."""
    draining = {check.name for check in CHECKS.values() if check.action != "report"}
    assert draining == {
        *("mount-responds", "root-writable", "mount-writable", "disk-full", "disk-smart", "disk-state", "raid-works"),
        "dimm-uncorrected",
        *("nvme-lost", "disk-lost", "filesystem-lost", "lustre-bug", "nic-lost", "gpu-lost", "gpu-memory-error"),
        *(
            "gpu-not-lost",
            "gpu-needs-reset",
            "gpu-needs-reboot",
            "gpu-needs-drain",
            "gpu-remap-failed",
            "gpu-sram-threshold",
        ),
    }
    shipped = load_shipped().check
    assert contradiction(shipped) == ""
    assert {check_problem(check) for check in shipped} == {""}
    assert len({check.name for check in shipped}) == len(shipped)


def test_values_have_the_types_of_their_keys() -> None:
    """What collectors read here, and the facts of this file's cases, are of the types that a check is held to."""
    facts = read_facts(TABLES, Query(), {"files": ["/", "/etc/passwd"]})
    tables = {name: list(table.rows) for name, table in facts.tables.items()}
    lines = {
        row.check: next(parse_nhc(f"* || {row.ours}", "n1")).checks[0] for row in coverage() if row.way == "nhc.conf"
    }
    for cases, checks in ((SHIPPED, CHECKS), (SITE, SITE_CHECKS), (LINES, lines)):
        for name, sides in cases.items():
            for rows in sides:
                tables[checks[name].table] += rows if isinstance(rows, list) else [rows]
    types: dict[KeyType, tuple[type, ...]] = {"text": (str,), "number": (int, float), "boolean": (bool,)}
    for table, rows in tables.items():
        for key, value in (item for row in rows for item in row.items() if item[1] is not None):
            one = TABLES[table].keys[key]
            assert type(value) in types[one.type], (table, key, value)
            assert not one.values or value in ("", *one.values), (table, key, value)
            if isinstance(value, str) and value:
                assert re.fullmatch(one.form, value), (table, key, value)


def test_no_name_is_left_over() -> None:
    """Each case of this file is of a check that exists."""
    assert set(SHIPPED) == set(CHECKS)
    assert set(LINES) == set(CONVERTERS)
    assert set(SITE) == set(SITE_CHECKS)
    assert set(LINES) == {row.check for row in coverage() if row.way == "nhc.conf"}


def test_each_recovery_action_is_of_one_check() -> None:
    """The driver's own word decides, and fails one check: the mildest of two would be hidden by the other."""
    checks = [check for check in CHECKS.values() if check.key == "recovery_action"]
    of_action = {
        value: [check.action for check in checks if judge([check], {"recovery_action": value}) == {"failed"}]
        for value in TABLES["gpus"].keys["recovery_action"].values
    }
    assert of_action == {
        "none": [],
        **{one: ["drain"] for one in ("gpu-reset", "bus-reset", "drain-and-reset")},
        **{one: ["reboot"] for one in ("node-reboot", "system-reboot")},
        "drain-p2p": ["drain-after-job"],
        "recover-imex-domain": ["report"],
    }


@pytest.mark.parametrize(
    "name",
    [check.name for check in CHECKS.values() if check.table == "kernel_log" and check.action not in ("none", "report")],
)
def test_what_the_log_says_of_the_day_before_drains(name: str) -> None:
    """A node that was off, or held back by a limit, for hours is still found; and none for what is older."""
    bad = [{**row, "at": "2026-11-25T13:00:00Z"} for row in SHIPPED[name][0] if isinstance(row, dict)]
    assert judge([CHECKS[name]], bad) == {"failed"}
    if CHECKS[name].max_age:
        assert judge([CHECKS[name]], [{**row, "at": OLD} for row in bad]) == {"passed"}
