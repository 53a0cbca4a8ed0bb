"""Faults of each class, injected into a simulated node: its check finds each, and the controller acts, or does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pitools.node.check.config import load_config
from pitools.node.check.rule import Check
from pitools.node.gather import disks, gpus, network, platform, slurmd
from pitools.node.gather.read import Query
from pitools.node.tables import TABLES
from pitools.node.types import Action, Row, is_at_least
from tests.node.gather.fake_nvml import FakeNvml, h100
from tests.node.gather.pci_files import pci
from tests.node.simulated import Cluster, SimulatedNode, read_blocks, replaced

# What a site says of its nodes: how many GPUs, which mounts, links and daemons.
SITE = """
[[check]]
name = "gpu-count"
table = "gpus"
where = { responds = true }
count = 8

[[check]]
name = "home-mounted"
table = "mounts"
where = { target = "/home", type = "nfs4" }
min_count = 1

[[check]]
name = "scratch-responds"
table = "mounts"
where = { target = "/scratch" }
key = "responds"
equals = true

[[check]]
name = "rdma-ports"
table = "rdma_ports"
where = { state = "ACTIVE", is_virtual = false }
count = 8

[[check]]
name = "management-link"
table = "interfaces"
where = { interface = "eno1" }
key = "state"
equals = "up"
action = "drain-after-job"

[[check]]
name = "clock-error"
table = "system"
key = "clock_error_s"
max = 1
"""
Change = Callable[[SimulatedNode, Path], dict[str, list[Row]]]


def last_rows(table: str, rows: Iterable[Row]) -> list[Row]:
    """Return the rows as the runner keeps them: of each subject the last."""
    return list({one.get(TABLES[table].subject): one for one in rows}.values())


def row(table: str, number: int, **values: Any) -> Change:
    """A row with other values."""
    return lambda node, _: {table: replaced(node.tables[table], number, **values)}


def without(table: str, number: int) -> Change:
    """A row that is gone."""
    return lambda node, _: {table: [one for at, one in enumerate(node.tables[table]) if at != number]}


def log(*lines: str) -> Change:
    """Lines of the kernel's log."""

    def change(node: SimulatedNode, _folder: Path) -> dict[str, list[Row]]:
        node.say(node.now, *lines)
        return {}

    return change


def files(table: str, read: Callable[[Query], Iterable[Row]], root: str, **content: str) -> Change:
    """Files of /sys or /proc, as the collector reads them. `__` in a name stands for `/`."""

    def change(_node: SimulatedNode, folder: Path) -> dict[str, list[Row]]:
        for name, text in {"class/uevent": "", **content}.items():
            path = folder / root / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {table: last_rows(table, read(Query(root=folder)))}

    return change


def nvml(*, is_lost: bool = False, recovery_action: int = 0, **answers: Any) -> Change:
    """Answers of NVML for the third of eight GPUs."""

    def change(_node: SimulatedNode, folder: Path) -> dict[str, list[Row]]:
        healthy = [{**h100(number), **HEALTHY_NVML} for number in range(8)]
        healthy[2] |= answers
        healthy[2]["fields"] = {**HEALTHY_NVML["fields"], 230: recovery_action}
        for number in range(8):
            for name, content in pci(f"0000:{0x10 + number:02x}:00.0", "10DE:2330", "30200", "nvidia").items():
                path = folder / "sys" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        fake = FakeNvml(healthy, {("nvmlDeviceGetHandleByIndex", 2): 15} if is_lost else {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "pynvml", fake)
            return {"gpus": last_rows("gpus", gpus.read_gpus(Query(root=folder)))}

    return change


HEALTHY_NVML: dict[str, Any] = {
    "TotalEccErrors": lambda _kind, _counter: 0,
    "SramEccErrorStatus": lambda _status: 0,
    "RemappedRows": (0, 0, 0, 0),
    "CurrentClocksEventReasons": 0x4,
    "PcieReplayCounter": 0,
    "NvLinkState": lambda _link: 1,
    "RetiredPages": lambda _cause: [],
    "fields": {82: 45, 230: 0, 91: 18, 38: 0, 45: 0, 52: 0, 59: 0},
}
DIMM = "devices__system__edac__mc__mc0__dimm0__dimm_ue_count"
UNSYNCHRONIZED = {"clock_is_synchronized": False, "clock_error_s": 16.0}
SERVER_GONE = {"responds": False, "used_share": None, "inodes_used_share": None}


def disk_files(**content: str) -> Change:
    named = {f"block__nvme0n1__{name}": text for name, text in content.items()}
    return files("block_devices", disks.read_block_devices, "sys", **named)


def raid_files(**content: str) -> Change:
    named = {f"block__md0__md__{name}": text for name, text in content.items()}
    return files("raid_arrays", disks.read_raid_arrays, "sys", **named)


def port_files(**content: str) -> Change:
    named = {f"class__infiniband__mlx5_0__ports__1__{name}": text for name, text in content.items()}
    return files("rdma_ports", network.read_rdma_ports, "sys", **named)


def processes(count: int, **values: Any) -> Change:
    return lambda _node, _: {"processes": [{"pid": number, **values} for number in range(count)]}


class Fault(NamedTuple):
    """A fault, the check that finds it and what it is to lead to."""

    name: str
    change: Change
    check: str
    action: Action


FAULTS = [
    *(Fault(lines[0][:40], log(*lines), *heading.split()) for heading, lines in read_blocks("fault_log.txt")),
    Fault("DIMM", files("dimms", platform.read_dimms, "sys", **{DIMM: "1"}), "dimm-uncorrected", "repair"),
    Fault("dead NVMe", disk_files(device__state="dead"), "disk-state", "drain"),
    Fault("read-only NVMe", disk_files(device__state="live", ro="1"), "disk-writable", "report"),
    Fault("broken RAID", raid_files(array_state="broken", level="raid0"), "raid-works", "drain"),
    Fault("degraded RAID", raid_files(array_state="active", level="raid1", degraded="1"), "raid-degraded", "report"),
    Fault("no subnet manager", port_files(state="2: INIT", phys_state="5: LinkUp"), "rdma-port-active", "report"),
    Fault("port that is down", port_files(state="1: DOWN", phys_state="3: Disabled"), "rdma-ports", "drain"),
    Fault(
        "slurmd stopped",
        files("slurm", slurmd.read_slurm, "proc", **{"1__stat": "1 (systemd) S 0"}),
        "slurmd-runs",
        "report",
    ),
    Fault("GPU lost", nvml(is_lost=True), "gpu-count", "drain"),
    Fault("reset", nvml(recovery_action=1), "gpu-needs-reset", "drain"),
    Fault("reboot", nvml(recovery_action=2), "gpu-needs-reboot", "reboot"),
    Fault("remap failed", nvml(RemappedRows=(0, 9, 0, 1)), "gpu-remap-failed", "repair"),
    Fault("remap pending", nvml(RemappedRows=(0, 1, 1, 0)), "gpu-remap-pending", "report"),
    Fault("SRAM", nvml(SramEccErrorStatus=h100(2)["SramEccErrorStatus"]), "gpu-sram-threshold", "repair"),
    Fault("slowdown", nvml(CurrentClocksEventReasons=64), "gpu-slowdown", "report"),
    Fault("a link less", nvml(NvLinkState=h100(2)["NvLinkState"]), "gpu-nvlinks-same", "report"),
    Fault("narrow slot", nvml(CurrPcieLinkWidth=8), "gpu-pcie-width-same", "report"),
    Fault("hot GPU", nvml(Temperature=97), "gpu-temperature", "report"),
    Fault("clock skew", row("system", 0, **UNSYNCHRONIZED), "clock-synchronized", "report"),
    Fault("clock skew, by the site", row("system", 0, **UNSYNCHRONIZED), "clock-error", "drain"),
    Fault("slow clock source", row("system", 0, clocksource="hpet"), "clocksource", "report"),
    Fault("full disk", row("mounts", 0, used_share=1.0, root_used_share=1.0), "disk-full", "drain"),
    Fault("no inodes", row("mounts", 0, inodes_used_share=1.0), "inodes-full", "report"),
    Fault("disk that went read-only", row("mounts", 0, is_forced_read_only=True), "mount-writable", "drain"),
    Fault("read-only root", row("mounts", 0, is_read_only=True), "root-writable", "drain"),
    Fault("dead root", row("mounts", 0, **SERVER_GONE), "mount-responds", "drain"),
    Fault("hung NFS", row("mounts", 3, **SERVER_GONE), "network-mount-responds", "report"),
    Fault("hung mount, by the site", row("mounts", 4, **SERVER_GONE), "scratch-responds", "drain"),
    Fault("missing mount", without("mounts", 3), "home-mounted", "drain"),
    Fault("SMART", row("block_devices", 0, smart_passed=False), "disk-smart", "repair"),
    Fault("link down", row("interfaces", 0, state="down"), "management-link", "drain-after-job"),
    Fault("flapping link", row("interfaces", 0, carrier_changes=9), "ethernet-carrier", "report"),
    Fault("symbol errors", row("rdma_ports", 3, symbol_errors=400), "rdma-symbol-errors", "report"),
    Fault("lost link", row("rdma_ports", 3, link_downed=1), "rdma-link-downed", "report"),
    Fault("PCI error", row("pci_devices", 3, fatal_errors=1), "pcie-fatal", "report"),
    Fault("throttled CPU", row("cpus", 0, throttled=900), "cpu-throttled", "report"),
    Fault("zombies", processes(60, state="Z", is_blocked=False), "zombies", "report"),
    Fault("stuck processes", processes(30, state="D", is_blocked=True), "blocked-processes", "report"),
]


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, ...]:
    path = tmp_path_factory.mktemp("site") / "node.toml"
    path.write_text(SITE)
    return load_config(path).check


def inject(cluster: Cluster, change: Callable[[SimulatedNode], dict[str, list[Row]]]) -> dict[str, Action]:
    """Poll, have the fault happen on the first node, and poll again; return the failed checks with their action."""
    cluster.step()
    cluster.tick()
    assert [one.check for one in cluster.findings] == []
    cluster.step(lambda node: change(node) if node.name == "n000" else None)
    cluster.tick()
    assert {one.node for one in cluster.findings} <= {"n000"}
    return {one.check: one.action for one in cluster.findings}


def assert_handled(cluster: Cluster, found: dict[str, Action], check: str, action: Action) -> None:
    assert found.get(check) == action, found
    draining = {name for name, one in found.items() if is_at_least(one, "drain-after-job")}
    (incident,) = cluster.incidents() if draining else (None,)
    assert set(cluster.slurm.reasons) == ({"n000"} if draining else set())
    if action in ("none", "report"):
        assert draining <= {name for name in found if name != check}
    else:
        assert incident is not None
        assert (incident.check, incident.action, incident.phase) == (check, action, "drained")
        assert cluster.slurm.reasons["n000"].partition("] ")[2].startswith(f"{check}: ")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.name}")
def test_fault_is_found_and_handled(
    tmp_path: Path, checks: tuple[Check, ...], tell_time: Callable[[Cluster], None], fault: Fault
) -> None:
    """One node of four has it: its check fails, and it alone is drained, or none."""
    (tmp_path / "spool").mkdir()
    cluster = Cluster(tmp_path / "spool", checks, 4, noise=0)
    tell_time(cluster)
    found = inject(cluster, lambda node: fault.change(node, tmp_path / "root"))
    assert_handled(cluster, found, fault.check, fault.action)
