"""The checks of the kernel's log: what each Xid or other fault leads to, by which source, and the rules of repeats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError
from pitools.node.check.config import NodeConfig, load_config
from pitools.node.check.evaluate import evaluate
from pitools.node.check.xid_checks import read_xid_table, xid_checks
from pitools.node.gather.kernel_log import event_rows
from pitools.node.types import FactTable, NodeFacts, is_at_least

NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z
GPU = "NVRM: Xid (PCI:0000:b5:00): "
OTHER_GPU = "NVRM: Xid (PCI:0000:b6:00): "
FAULT_31 = "31, pid=1, name=a, channel 0x1. MMU Fault: ENGINE CE0 HUBCLIENT_CE0 faulted @ 0x1000"
TPC = "13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 1, TPC {}, SM 0): Out Of Range"
RECOVERY = "154, GPU recovery action changed from {} to {}"
NONE, RESET, REBOOT = "0x0 (None)", "0x1 (GPU Reset Required)", "0x2 (Node Reboot Required)"
DRAIN_P2P, DRAIN_RESET = "0x3 (Drain P2P)", "0x4 (Drain and Reset)"
NVLINK5 = "149, NETIR_LINK_EVT {}"
HOUR = 3600

Log = list[tuple[int, str]]  # seconds ago, and the line


def failed(log: Log, config: NodeConfig | None = None) -> dict[str, str]:
    """Return the actions by name of the checks that fail of this log."""
    rows = event_rows((NOW_S - ago, line) for ago, line in log)
    at = "2027-01-15T08:00:00.000Z"
    table = FactTable(table="kernel_log", source="", read_at=at, cost_s=0.0, rows=tuple(rows))
    facts = NodeFacts(node="n1", boot_id="b", gathered_at=at, tables={"kernel_log": table})
    checks = [check for check in (config or load_config()).check if check.table == "kernel_log"]
    return {one.check: one.action for one in evaluate(checks, facts) if one.state == "failed"}


CASES: dict[str, tuple[Log, dict[str, str]]] = {
    "off the bus": ([(60, GPU + "79, GPU has fallen off the bus.")], {"xid-79": "reboot"}),
    "off the bus, a day ago": ([(25 * HOUR, GPU + "79, GPU has fallen off the bus.")], {}),
    "off the bus without a number": (
        [(60, "NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.")],
        {"xid-79": "reboot"},
    ),
    "page fault": ([(60, GPU + FAULT_31)], {}),
    "page faults at one time": ([(60, GPU + FAULT_31), (52, GPU + FAULT_31), (40, GPU + FAULT_31)], {}),
    "page faults for ten minutes": ([(600 - second, GPU + FAULT_31) for second in range(0, 600, 4)], {}),
    "uncontained errors for 25 hours": (
        [(25 * HOUR - second, GPU + "95, Uncontained") for second in range(0, 25 * HOUR, 5)],
        {"xid-95": "drain"},
    ),
    "uncontained errors that go on after a reset": (
        [(12, GPU + "95, Uncontained"), (10, GPU + RECOVERY.format(RESET, NONE)), (8, GPU + "95, Uncontained")],
        {"xid-95": "drain"},
    ),
    "page faults of one GPU": ([(9 * HOUR, GPU + FAULT_31), (60, GPU + FAULT_31)], {"xid-31-repeat": "report"}),
    "page faults of several GPUs": (
        [(ago, gpu + FAULT_31) for ago in (9 * HOUR, 60) for gpu in (GPU, OTHER_GPU)],
        {},
    ),
    "page faults, a day apart": ([(25 * HOUR, GPU + FAULT_31), (60, GPU + FAULT_31)], {}),
    "exceptions of one TPC": (
        [(300, GPU + TPC.format(3)), (60, GPU + TPC.format(3))],
        {"xid-13-repeat": "report"},
    ),
    "exceptions of two TPCs": ([(300, GPU + TPC.format(3)), (60, GPU + TPC.format(4))], {}),
    "exceptions without a TPC": (
        [(ago, GPU + "13, pid=1, Graphics Exception: ESR 0x50df30=0x1") for ago in (300, 60)],
        {},
    ),
    "double-bit error": ([(60, GPU + "48, An uncorrectable double bit error (DBE)")], {"xid-48": "drain"}),
    "row remapped": ([(60, GPU + "63, Row remapping event")], {}),
    "row not remapped": ([(60, GPU + "64, Failed to persist row remap table")], {"xid-64": "repair"}),
    "contained error": ([(60, GPU + "94, Contained: SM (0x1)")], {"xid-94": "report"}),
    "uncontained error": ([(60, GPU + "95, Uncontained: LTC TAG")], {"xid-95": "drain"}),
    "uncontained error, GPU reset since": (
        [(60, GPU + "95, Uncontained: LTC TAG"), (30, GPU + RECOVERY.format(RESET, NONE))],
        {},
    ),
    "a reset of a GPU that needs more": (
        [
            (60, GPU + "79, GPU has fallen off the bus."),
            (50, GPU + "64, Failed to persist row remap table"),
            (30, GPU + RECOVERY.format(RESET, NONE)),
        ],
        {"xid-79": "reboot", "xid-64": "repair"},
    ),
    "uncontained error, another GPU reset since": (
        [(60, GPU + "95, Uncontained: LTC TAG"), (30, OTHER_GPU + RECOVERY.format(RESET, NONE))],
        {"xid-95": "drain"},
    ),
    "a fatal Xid five times": (
        [(number * HOUR, GPU + "95, Uncontained") for number in (5, 4, 3, 2, 1)],
        {"xid-95": "drain", "xid-fatal-repeat": "repair"},
    ),
    "a fatal Xid five times in a burst": (
        [(60 + number * 120, GPU + "95, Uncontained") for number in (5, 4, 3, 2, 1)],
        {"xid-95": "drain"},
    ),
    "fatal Xids of two GPUs": (
        [(number * HOUR, gpu + "95, Uncontained") for number in (4, 3, 1) for gpu in (GPU, OTHER_GPU)],
        {"xid-95": "drain"},
    ),
    "NVLink 4": (
        [
            (
                60,
                GPU
                + "74, pid=1, name=a, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
            )
        ],
        {"xid-74": "drain"},
    ),
    "NVLink 4, ignorable": (
        [(60, GPU + "74, pid=1, name=a, NVLink: fatal error detected on link 14(0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)")],
        {"xid-74-ignorable": "report"},
    ),
    "contained error of the frame buffer, as logged": (
        [
            (60, "NVRM: Xid (PCI:0000:19:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU"),
            (60, "NVRM: Xid (PCI:0000:19:00): 63, Row Remapper: New row (0x00000012bac1c3e0) marked for remapping"),
            (60, "NVRM: Xid (PCI:0000:19:00): 94, Contained: SM (0x1). RST: No, D-RST: No"),
        ],
        {"xid-48": "drain", "xid-94": "report"},
    ),
    "NVLink 5, fatal, R575": (
        [(60, GPU + NVLINK5.format("Fatal XC0 i0 Link 08 (0x00400011 0x0 0x0 0x0 0x0 0x0)"))],
        {"xid-149-cable": "drain"},
    ),
    "NVLink 5, fatal, before R575": (
        [(60, GPU + NVLINK5.format("Fatal XC 1 i 2 Link 01 [0x021425c6]"))],
        {"xid-149-peer": "drain"},
    ),
    "NVLink 5, no link": (
        [(60, GPU + "149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x0 0x0 0x0)")],
        {"xid-149": "drain"},
    ),
    "NVLink 5, link down by software": (
        [(60, GPU + NVLINK5.format("Fatal XC0 i0 Link 00 (0x016415c6)"))],
        {"xid-149-software": "drain"},
    ),
    "NVLink 5, link down, ignorable": (
        [(60, GPU + NVLINK5.format("Fatal XC0 i0 Link 00 (0x02600011 0x0 0x0 0x0)"))],
        {"xid-149-ignorable": "report"},
    ),
    "NVLink 5, no such unit": (
        [(60, GPU + NVLINK5.format("Fatal XC 1 i 2 Link 01 [0x0000000a]"))],
        {"xid-149-unknown": "report"},
    ),
    "NVLink 5, cut off": ([(60, GPU + NVLINK5.format("Fatal XC0 i0 Link 08 (0x0045"))], {"xid-149-unknown": "report"}),
    "NVLink 5, not fatal": (
        [(60, GPU + NVLINK5.format("Nonfatal XC0 i0 Link 08 (0x004505c6 0x0 0x0 0x0 0x0 0x0)"))],
        {"xid-nvlink5-nonfatal": "report"},
    ),
    "NVLink 5, not fatal, five times": (
        [
            (number * HOUR, GPU + NVLINK5.format("Nonfatal XC0 i0 Link 08 (0x004505c6 0x0)"))
            for number in (5, 4, 3, 2, 1)
        ],
        {"xid-nvlink5-nonfatal": "report"},
    ),
    "NVLink 5, without a reason, not fatal, five times": (
        [(number * HOUR, GPU + "145, RLW_REMAP Nonfatal XC0 i0 Link 08 (0x4 0x0)") for number in (5, 4, 3, 2, 1)],
        {"xid-nvlink5-nonfatal": "report"},
    ),
    "reset required": ([(60, GPU + RECOVERY.format(NONE, RESET))], {"xid-154-reset": "drain"}),
    "reset required and done": (
        [(90, GPU + RECOVERY.format(NONE, DRAIN_RESET)), (60, GPU + RECOVERY.format(RESET, NONE))],
        {},
    ),
    "reset required again": (
        [(90, GPU + RECOVERY.format(RESET, NONE)), (60, GPU + RECOVERY.format(NONE, RESET))],
        {"xid-154-reset": "drain"},
    ),
    "reset, then reboot required": (
        [(90, GPU + RECOVERY.format(NONE, RESET)), (60, GPU + RECOVERY.format(RESET, REBOOT))],
        {"xid-154-reset": "drain", "xid-154-reboot": "reboot"},
    ),
    "drain of NVLink peers": ([(60, GPU + RECOVERY.format(NONE, DRAIN_P2P))], {"xid-154-drain-p2p": "drain-after-job"}),
    "power smoothing off": ([(60, GPU + "163, PSHC")], {"xid-power-smoothing": "report"}),
    "power smoothing off and on": ([(60, GPU + "163, PSHC"), (50, GPU + "162, PSHC")], {}),
    "an Xid of a newer driver": ([(60, GPU + "999, pid=5, name=a, future")], {"xid-unknown": "report"}),
    "a switch's link": (
        [(60, "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")],
        {"sxid-fatal": "drain"},
    ),
    "a switch for good": (
        [(60, "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 23001, Fatal, Link 12 ingress SRC-VC buffer overflow")],
        {"sxid-fatal": "drain", "sxid-always-fatal": "reboot"},
    ),
    "a switch, sources disagree": (
        [(60, "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error")],
        {"sxid-notable": "report"},
    ),
    "a switch's single bit": (
        [(60, "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24001, Non-fatal, Link 1 sourcetrack ECC")],
        {},
    ),
    "memory, uncorrected": ([(60, "EDAC MC0: 1 UE memory read error on DIMM_A1")], {"machine-check-fatal": "report"}),
    "memory, corrected once": ([(60, "EDAC MC0: 1 CE memory read error on DIMM_A1")], {}),
    "memory, corrected often": (
        [(number * 600, "EDAC MC0: 1 CE memory read error on DIMM_A1") for number in range(15, 0, -1)],
        {"machine-checks": "report"},
    ),
    "NVMe gone": ([(60, "nvme nvme4: Disabling device after reset failure: -19")], {"nvme-lost": "drain"}),
    "NVMe time-out": ([(60, "nvme nvme4: I/O 7 QID 1 timeout, aborting")], {}),
    "NVMe time-outs": (
        [(number * 600, "nvme nvme4: I/O 7 QID 1 timeout, aborting") for number in (3, 2, 1)],
        {"disk-errors": "report"},
    ),
    "disk error": ([(60, "I/O error, dev sda, sector 1 op 0x0:(READ)")], {}),
    "disk errors": (
        [(number * 600, "I/O error, dev sda, sector 1 op 0x0:(READ)") for number in (3, 2, 1)],
        {"disk-errors": "report"},
    ),
    "RAID failed": ([(60, "md/raid1:md1: Disk failure on sda1, disabling device.")], {"disk-lost": "drain"}),
    "read-only": (
        [(60, "EXT4-fs (sda1): Remounting filesystem read-only")],
        {"filesystem-lost": "drain", "filesystem-errors": "report"},
    ),
    "file system error": ([(60, "EXT4-fs error (device sda1): f:1: x")], {"filesystem-errors": "report"}),
    "NFS hangs": ([(60, "nfs: server fs1 not responding, still trying")], {"nfs-server-silent": "report"}),
    "NFS hung": (
        [(60, "nfs: server fs1 not responding, still trying"), (50, "nfs: server fs1 OK")],
        {},
    ),
    "one NFS server of two": (
        [(60, "nfs: server fs1 not responding, still trying"), (50, "nfs: server fs2 OK")],
        {"nfs-server-silent": "report"},
    ),
    "Lustre lost": (
        [(60, "Lustre: a-OST0001-osc-ff: Connection to a-OST0001 (at 10.0.0.1@o2ib) was lost; in progress")],
        {"lustre-server-silent": "report"},
    ),
    "Lustre restored": (
        [
            (60, "Lustre: a-OST0001-osc-ff: Connection to a-OST0001 (at 10.0.0.1@o2ib) was lost; in progress"),
            (50, "Lustre: a-OST0001-osc-ff: Connection restored to 10.0.0.1@o2ib (at 10.0.0.1@o2ib)"),
        ],
        {},
    ),
    "Lustre's bug": ([(60, "LustreError: 1:0:(a.c:1:f()) LBUG")], {"lustre-bug": "reboot"}),
    "oom of a job": ([(60, "Memory cgroup out of memory: Killed process 1 (a)")], {}),
    "oom of the node": ([(60, "Out of memory: Killed process 1 (a)")], {"host-out-of-memory": "report"}),
    "link down and up": (
        [(60, "mlx5_core 0000:17:00.0 ib0: Link down"), (50, "mlx5_core 0000:17:00.0 ib0: Link up")],
        {},
    ),
    "link flaps": (
        [
            (number * 60 + shift, f"mlx5_core 0000:17:00.0 ib0: Link {state}")
            for number in (3, 2, 1)
            for shift, state in ((0, "down"), (-10, "up"))
        ],
        {"link-flaps": "report"},
    ),
    "adapter lost": (
        [(60, "mlx5_core 0000:5c:00.0: poll_health:739: device's health compromised - reached miss count")],
        {"nic-lost": "reboot"},
    ),
    "adapter's errors": (
        [(number * 600, "mlx5_core 0000:65:00.0 eth0: TX timeout detected") for number in (3, 2, 1)],
        {"nic-errors": "report"},
    ),
    "hung task": ([(60, "INFO: task a:1 blocked for more than 120 seconds.")], {"kernel-hangs": "report"}),
    "hot once": ([(60, "CPU0: Package temperature above threshold, cpu clock throttled")], {}),
    "hot": (
        [(number * 600, "CPU0: Package temperature above threshold, cpu clock throttled") for number in (4, 3, 2, 1)],
        {"thermal-events": "report"},
    ),
    "AMD GPU lost": ([(60, "amdgpu 0000:c3:00.0: amdgpu: GPU reset end with ret = -110")], {"gpu-lost": "reboot"}),
    "AMD GPU reset": (
        [
            (60, "amdgpu 0000:c3:00.0: amdgpu: GPU reset begin!"),
            (50, "amdgpu 0000:c3:00.0: amdgpu: GPU reset(1) succeeded!"),
        ],
        {},
    ),
    "AMD GPU's memory": (
        [(60, "amdgpu 0000:01:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block")],
        {"gpu-memory-error": "drain"},
    ),
    "AMD GPU's resets": (
        [(number * HOUR, "amdgpu 0000:c3:00.0: amdgpu: GPU reset begin!") for number in (3, 2, 1)],
        {"gpu-resets": "report"},
    ),
    "Lustre evictions": (
        [
            (number * HOUR, "LustreError: 167-0: a-MDT0000-mdc-ff: This client was evicted by a-MDT0000; in")
            for number in (3, 2, 1)
        ],
        {"lustre-evicted": "report"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_log_leads_to_the_action(name: str) -> None:
    """Each log fails the checks that it should, and no others."""
    log, expected = CASES[name]
    assert failed(log) == expected


# NVIDIA's sheet "Xid 144-150 Decode", by gpud's catalog_generated.go of 2025-10-29: the low bits of each unit before
# driver R575 and since, and the values of the second register that it calls fatal, and those that it does not.
UNITS = """
144 SAW_MVB       021 01 2,10                  1,4,8,20
145 RLW_CTRL      062 03 -                     80000000
145 RLW_REMAP     082 04 40,80                 1,2,4,8,10,20,100,200,80000000
145 RLW_RSPCOL    0a2 05 2                     1,80000000
145 RLW_RXPIPE    0c2 06 -                     1,2,4,8,80000000
145 RLW_SRC_TRACK 0e2 07 1,10,20               2,4,8,80000000
145 RLW_TAGSTATE  102 08 2,20000,100000        1,10000,80000000
146 TLW_CTRL      123 09 4                     1,2,80000000
146 TLW_RX_PIPE0  143 0a 4                     1,2,80000000
146 TLW_TX_PIPE1  163 0d 4                     1,2,80000000
147 TREX          184 0e -                     1,80000000
148 NVLPW_CTRL    005 0f -                     80000000
149 NETIR_INT     006 18 0                     -
149 NETIR_BER_EVENT 226 13 -                   0,1,2,3
149 NETIR_MFDE_EVENT 246 14 1,4,5,7            3
150 MSE_WATCHDOG  000 00 0                     -
"""
RESET_REASONS = {0, 1, 2, 4, 10, *range(15, 19), 21, 22, *range(32, 38), 42, 43}


@pytest.mark.parametrize("form", [0, 1], ids=["before R575", "R575"])
@pytest.mark.parametrize("more", [" 0x0 0x0", " 0x0 0x0 0x0 0x0"], ids=["four registers", "six registers"])
def test_nvlink5_is_judged_as_nvidia_decodes_it(form: int, more: str) -> None:
    """Of each unit, register and reason the GPU that NVIDIA resets is drained, and no other."""
    for code, unit, *bits, fatal, harmless in map(str.split, UNITS.strip().splitlines()):
        for word, values in (("Fatal", fatal), ("Nonfatal", harmless)):
            for value in values.replace("-", "").split(",") if values != "-" else ():
                line = f"{code}, {unit} {word} XC0 i0 Link 03 (0x0408{bits[form]:0>4} 0x{value}{more})"
                expected = {f"xid-{code}": "drain"} if word == "Fatal" else {"xid-nvlink5-nonfatal": "report"}
                assert failed([(60, GPU + line)]) == expected, line
    for reason in range(64):
        register = reason << 20 | (0x1C6, 0x11)[form]
        (action,) = failed([(60, GPU + NVLINK5.format(f"Fatal XC0 i0 Link 03 (0x{register:08x} 0x0{more})"))]).values()
        assert action == ("drain" if reason in RESET_REASONS else "report"), reason


def test_every_check_of_the_log_is_seen_to_fail() -> None:
    """The cases above have a failure of each rule; the checks of a single code are alike, and fail of their line."""
    seen = {check for _, expected in CASES.values() for check in expected}
    checks = {check.name: check for check in load_config().check if check.table == "kernel_log"}
    codes = {name for name in checks if re.fullmatch(r"xid-\d+", name)}
    assert not checks.keys() - codes - seen
    for name in codes:
        line = f"{GPU}{name.removeprefix('xid-')}, UNIT Fatal Link 01"
        assert failed([(60, line)]) == {name: checks[name].action}


def _codes(text: str) -> set[int]:
    codes: set[int] = set()
    for part in text.split():
        first, _, last = part.partition("-")
        codes.update(range(int(first), int(last or first) + 1))
    return codes


@pytest.mark.parametrize(
    ("source", "words", "codes"),
    [
        ("nvidia", ("RESET_GPU",), "46 62 64 95 109 110 119 120 136 140 143 155 156 158"),
        ("nvidia", ("RESTART_BM", "RESTART_VM"), "79 151"),
        ("nvidia", ("IGNORE",), "37 38 43 44 63 66 67 92 93 106 107 121 137 141 152 153 157 160 161"),
        (
            "nvidia",
            ("RESTART_APP",),
            "8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139",
        ),
        ("nvidia", ("WORKFLOW_NVLINK5_ERR",), "144-150"),
        ("gcm", ("WARN",), "13 31 43 45 63 68 92 109"),
        ("azure", ("DRAIN",), "48 56 57 58 62 63 64 65 68 69 73 74 79 80 81 92 119 120"),
        ("aws", ("ISOLATE",), "54 64"),
        ("aws", ("REBOOT",), "74 79 151 168"),
        ("aws", ("RESET",), "48 95 109 110 119 120 136 140 143 155 156 158"),
        ("aws", ("MONITOR",), "13 31 94 126 144-150 162-164"),
        ("aws", ("IGNORE",), "43 63 92 121"),
    ],
)
def test_table_has_what_the_sources_say(source: str, words: tuple[str, ...], codes: str) -> None:
    """The codes of a source's word are those that it publishes."""
    rows = [one for one in read_xid_table().xid if not one.form]
    assert {code for one in rows if getattr(one, source) in words for code in one.codes} == _codes(codes)


@pytest.mark.parametrize(
    ("action", "codes"),
    [
        ("drain", "46 48 62 74 95 109 110 119 120 136 140 143-150 155 156 158"),
        ("reboot", "79 151 168"),
        ("repair", "54 64"),
    ],
)
def test_a_fatal_code_leads_to_its_action(action: str, codes: str) -> None:
    """A GPU that a reset repairs asks for no reboot, and the other way round; those of one code are all here."""
    rows = [one for one in read_xid_table().xid if not one.form and one.action == action]
    assert {code for one in rows for code in one.codes} == _codes(codes)


def test_table_has_each_code_once() -> None:
    """No code is in two rows but by its form; one that is in none is reported."""
    table = read_xid_table()
    for codes in (
        [(code, one.form) for one in table.xid for code in one.codes],
        [code for one in table.sxid for code in one.codes],
    ):
        assert len(codes) == len(set(codes))
    known = {code for one in table.xid for code in one.codes}
    unknown = [code for code in range(200) if failed([(60, f"{GPU}{code}, x")]).get("xid-unknown") == "report"]
    assert unknown == [code for code in range(200) if code not in known]


def _config(tmp_path: Path, text: str) -> NodeConfig:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return load_config(path)


def test_site_replaces_or_disables_a_check(tmp_path: Path) -> None:
    """A check of the same name in a site's file replaces a shipped one, and `disable` takes one away."""
    text = """
        disable = ["xid-95"]
        [[check]]
        name = "xid-79"
        table = "kernel_log"
        where = { kind = "xid", code = 79 }
        max_count = 0
        action = "repair"
    """
    log = [(60, GPU + "79, GPU has fallen off the bus."), (50, GPU + "95, Uncontained")]
    assert failed(log, _config(tmp_path, text)) == {"xid-79": "repair"}


def test_max_groups_needs_groups(tmp_path: Path) -> None:
    """max_groups without group_by is refused, for it would never hold anything back."""
    check = '[[check]]\nname = "a"\ntable = "kernel_log"\nmax_count = 0\nmax_groups = 1'
    with pytest.raises(ConfigError, match="max_groups needs group_by and max_count"):
        _config(tmp_path, check)


def test_checks_say_who_and_what_next() -> None:
    """Each check of a code names what the sources say and what an operator does; a severe one is critical."""
    for check in xid_checks():
        assert check["hint"]
        assert check["source"]
        assert check.get("level", "critical") == (
            "critical" if is_at_least(check["action"], "drain-after-job") else "warning"
        )
