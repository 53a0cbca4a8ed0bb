"""Parse lines of the kernel's log that tell of faults: NVIDIA's Xids and SXids by their parts, others by a table.

A line of another kind, or one that is too damaged to be read, is none. What a line leaves out is unknown.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LONGEST = 1024  # characters of a line that are read: the most that the kernel logs in one
_TEXT = 300  # characters of a line that are kept


class Event(NamedTuple):
    """A fault that a line tells of: keys as in the table `kernel_log`."""

    kind: str
    state: str = ""
    code: int | None = None
    device: str = ""
    part: str = ""
    action: str = ""
    is_fatal: bool | None = None
    job_pid: int | None = None
    text: str = ""


class _Rule(NamedTuple):
    """A form of lines. word: in each of them, lower case. pattern: whatever the case; may have the groups device, other
    (a device, too), pid and state.
    """

    kind: str
    state: str
    word: str
    pattern: str
    is_fatal: bool | None = None


def _fatal(kind: str, state: str, word: str, pattern: str) -> _Rule:
    return _Rule(kind, state, word, pattern, is_fatal=True)


# Patterns are compiled when a line first has their word: to compile all takes longer than the other imports of a check.
_PCI = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_FS = r"(?:ext[234]-fs|xfs|btrfs\b[^(]*)[^(]{0,40}\((?:device )?(?P<device>[^):\s]+)[^)]*\)"
_EFA = rf"\b(?:efa|infiniband) (?P<device>{_PCI}|rdmap\w+|efa_\w+):.*"
_LUSTRE = r"(?P<device>[\w-]+-(?:OST|MDT)[0-9a-f]{4}|MGC[\w.@]+)"
_DIMM = r"(?:[^(]* on (?P<device>[^(]+?)\s*(?:\(|$))?"

# The first that fits counts. Lines that come along with another one for the same event are left out: `oom-kill:`, the
# register dump of a machine check, the sections of a GHES record.
_RULES = (
    # Before mce, whose prefix some have.
    _Rule("thermal", "throttled", "above threshold", r"(?P<device>CPU\d+): \w+ temperature (?:is )?above threshold"),
    _fatal("thermal", "critical", "critical temperature", r"(?:(?P<device>[\w-]+): )?critical temperature reached"),
    _Rule("thermal", "throttled", "high temperature", rf"(?:(?P<device>{_PCI}).*)?port module event.*high temperature"),
    _fatal("mce", "", "hardware memory error", r"mce: uncorrected hardware memory error"),
    _fatal("mce", "", "memory failure:", r"memory failure: \w+: recovery action"),
    _Rule("mce", "", "machine check events logged", r"machine check events logged"),
    _Rule("edac", "", "edac", rf"EDAC (?P<other>MC\d+): (?:\d+ )?CE\b{_DIMM}", is_fatal=False),
    _fatal("edac", "", "edac", rf"EDAC (?P<other>MC\d+): (?:\d+ )?UE\b{_DIMM}"),
    _Rule("nvme", "controller-down", "controller is down", r"(?P<device>nvme\d+): controller is down"),
    _fatal(
        "nvme",
        "removed",
        "nvme",
        r"(?P<device>nvme\d+): (?:disabling device after|removing after probe|device not ready; aborting)",
    ),
    _fatal("nvme", "no-path", "no available path", r"block (?P<device>nvme\w+): no available path"),
    _Rule("nvme", "timeout", "timeout,", r"(?P<device>nvme\d+): I/O .*timeout,"),
    _Rule("nvme", "io-error", "(sct", r"(?P<device>nvme\w+): .*@ LBA .*\(sct"),
    _fatal("disk", "raid-failed", "disk failure on", r"md/raid.*disk failure on (?P<device>[\w-]+)(?:,| detected)"),
    _fatal(
        "disk",
        "offline",
        "rejecting i/o to",
        r"^(?!.*\bsr \d)(?:.*\[(?P<device>\w+)\])?.*rejecting I/O to (?:offline|dead) device",
    ),
    _Rule(
        "disk",
        "medium-error",
        "error",
        r"critical (?:medium|target) error, dev (?P<device>(?!fd\d|sr\d)[\w-]+)"
        r"|\[(?P<other>sd[a-z]+)\].*sense key ?: (?:medium|hardware) error",
    ),
    _Rule("disk", "io-error", "beyond end of device", r"attempt to access beyond end of device"),
    _Rule("disk", "io-error", "i/o error", r"I/O error(?:,| on) dev(?:ice)? (?P<device>(?!fd\d|sr\d|loop\d)[\w-]+)"),
    _fatal("filesystem", "read-only", "read-only", rf"(?:{_FS}.*)?remounting filesystem read-only"),
    _fatal("filesystem", "read-only", "forced readonly", rf"{_FS}.*forced readonly"),
    _fatal(
        "filesystem",
        "shutdown",
        "shut",
        rf"{_FS}.*(?:filesystem has been shut down|shutting down filesystem|xfs_do_force_shutdown)",
    ),
    _Rule(
        "filesystem", "shutdown", "has been suspended", r"pool '(?P<device>[^']+)'.*has been suspended", is_fatal=True
    ),
    _Rule("filesystem", "error", "-fs error", r"ext[234]-fs error \(device (?P<device>[^):\s]+)"),
    _Rule("filesystem", "error", "btrfs", r"btrfs:? (?:error|critical)[^(]*\(device (?P<device>[^):\s]+)"),
    _Rule("filesystem", "error", "corrupt", rf"{_FS}.*corrupt"),
    _Rule("filesystem", "error", "csum failed", rf"{_FS}.*csum failed"),
    _Rule("filesystem", "error", "i/o error", rf"{_FS}.*(?:I/O error while writing|I/O error in|log I/O error)"),
    _Rule("filesystem", "error", "writing superblock", r"I/O error while writing superblock"),  # without a device
    _Rule("filesystem", "error", "journal", r"aborting journal on device (?P<device>[\w-]+?)-\d+\."),
    _Rule("nfs", "timeout", "not responding", r"(?:nfs|lockd): server (?P<device>\S+) not responding"),
    _Rule("nfs", "ok", "server", r"(?:nfs|lockd): server (?P<device>\S+) OK\b"),
    _Rule("nfs", "locks-lost", "lock reclaim failed", r"lock reclaim failed"),
    _Rule("lustre", "lost", "was lost", rf"lustre(?:error)?: .*?{_LUSTRE}.*connection to .* was lost"),
    _Rule("lustre", "ok", "connection restored", rf"lustre: .*?{_LUSTRE}.*connection restored"),
    _Rule("lustre", "evicted", "evicted by", rf"lustre(?:error)?:? .*?{_LUSTRE}.*client was evicted"),
    _fatal("lustre", "bug", "lbug", r"lustreerror: .*LBUG"),
    _Rule("lustre", "error", "lustreerror:", rf"lustreerror: (?:.*?{_LUSTRE})?"),
    _Rule("lustre", "error", "lneterror:", r"lneterror: "),
    _Rule("oom", "cgroup", "out of memory", r"memory cgroup out of memory: kill(?:ed)? process (?P<pid>\d+)"),
    _Rule("oom", "host", "out of memory", r"out of memory(?: \([^)]*\))?: kill(?:ed)? process (?P<pid>\d+)"),
    _Rule("hang", "hung-task", "blocked for more than", r"task .+:(?P<pid>\d+) blocked for more than \d+ seconds"),
    _Rule(
        "hang", "soft-lockup", "soft lockup", r"BUG: soft lockup - (?P<device>CPU#\d+) stuck(?:.*\[.*:(?P<pid>\d+)\])?"
    ),
    _fatal("hang", "hard-lockup", "hard lockup", r"watchdog detected hard lockup on (?P<device>cpu \d+)"),
    _Rule("hang", "rcu-stall", "detected stall", r"detected stalls? on cpu"),
    _fatal("gpu", "reset-failed", "amdgpu", rf"(?P<device>{_PCI}).*GPU (?:reset|recovery).*fail"),
    _fatal("gpu", "reset-failed", "amdgpu", rf"(?P<device>{_PCI}).*GPU reset end with ret = -"),
    _Rule("gpu", "reset", "amdgpu", rf"(?P<device>{_PCI}).*GPU reset begin"),
    _Rule("gpu", "ok", "amdgpu", rf"(?P<device>{_PCI}).*GPU reset(?:\(\d+\))? succeeded"),
    _fatal("gpu", "init-failed", "amdgpu", rf"(?P<device>{_PCI}).*fatal error during GPU init"),
    _Rule("gpu", "timeout", "timeout, signaled", rf"(?:(?P<device>{_PCI}).*)?ring \S+ timeout, signaled"),
    _fatal(
        "gpu",
        "memory-error",
        "uncorrectable hardware errors",
        rf"(?P<device>{_PCI}).* [1-9]\d* (?:new )?uncorrectable hardware errors",
    ),
    _fatal("gpu", "init-failed", "rminitadapter failed", rf"NVRM: GPU (?P<device>{_PCI}).*RmInitAdapter failed"),
    _fatal(
        "link",
        "driver-error",
        "mlx5_core",
        rf"(?P<device>{_PCI}).*(?:cause a leak of a command|health compromised|unrecoverable hardware error)",
    ),
    _Rule("link", "driver-error", "x timeout", rf"mlx5_core (?P<device>{_PCI}).*[RT]X timeout (?:detected|on channel)"),
    _Rule(
        "link", "driver-error", "insufficient power", rf"(?:(?P<device>{_PCI}).*)?insufficient power on the PCIe slot"
    ),
    _Rule(
        "link",
        "driver-error",
        "netdev watchdog",
        r"(?:(?P<device>[\w.-]+): netdev watchdog: cpu|netdev watchdog: (?P<other>[\w.-]+) )",
    ),
    _fatal(
        "link",
        "driver-error",
        "completion",
        rf"{_EFA}(?:wait for completion \(polling\) timeout|didn't send any completion)",
    ),
    _fatal("link", "driver-error", "admin queue is closed", rf"{_EFA}admin queue is closed"),
    _Rule("link", "driver-error", "failed to", rf"{_EFA}failed to (?:process|submit) command"),
    _fatal("link", "driver-error", "device isn't ready", rf"{_EFA}device isn't ready"),
    _fatal("link", "driver-error", "reset indication", rf"{_EFA}reset indication didn't turn"),
    _Rule("link", "up", "cable plugged", rf"(?P<device>{_PCI}).*port module event.*cable plugged"),
    _Rule("link", "down", "cable unplugged", rf"(?P<device>{_PCI}).*port module event.*cable unplugged"),
    _Rule(
        "link",
        "",
        "link",
        r"\b(?P<device>[a-z][\w.@-]*)\)?:? (?:port:? \d+ )?(?:nic )?link (?:is )?(?:status )?(?:definitely )?"
        r"(?P<state>down|up|active)\b(?! for)",
    ),
)
_FORMS = tuple((rule.word, rule) for rule in _RULES)  # plain, as each line of the log is compared with all words
_NO_LINK = r"(?i)\bsata\b|pciehp|\bata\d|nvlink|displayport"

_XID = r"(?is)NVRM:\s+Xid\b\s*(?:\(\s*(?:PCI:)?\s*([^()\s]*)\s*\))?\s*:\s*(\d{1,6})\b(.*)"
_FALLEN = r"(?i)\bGPU (?:at )?(?:PCI:)?((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)\b"
_SXID = r"(?is)SXid \((?:PCI:)?\s*([^()\s]*)\s*\)\s*:\s*(\d{1,6})\b(.*)"
_ADDRESS = r"(?i)(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2})(\.[0-7])?"
_PID = r"\bpid='?(\d{1,10})\b"
_LINK = r"(?i)\blink (-?\d{1,3})\b"
_UNIT = r"\b([A-Z][A-Z0-9_]{2,30})\s+(?:Fatal|Non-?fatal)\b"
_REGISTERS = r"(?i)\blink -?\d+\s*[(\[]((?:0x[0-9a-f]{1,8}(?=[,\s)\]])[,\s]*)+)"  # one that is cut off is none
_TPC = r"\bGPC (\d{1,3}), TPC (\d{1,3})\b"
_NOT_FATAL = r"(?i)\bnon-?fatal\b|\b(?:corrected|correctable)\b"
_FATAL = r"(?i)\bfatal\b|\bun(?:corrected|correctable|contained)\b"
_BANK = r"(?i)CPU (\d+): Machine Check(?: Exception)?: [0-9a-f]+ Bank \d+: ([0-9a-f]{1,16})\b"
_AMD_STATUS = r"(?i)CPU:?\s?(\d+)\b.*MC\d+_STATUS\[([^\]]*)\]"
_SEVERITY = r"event severity: ([\w-]+)"
_UNCORRECTED_BIT = 1 << 61  # UC of IA32_MCi_STATUS
# Registers of an Xid 74 by NVIDIA's WORKFLOW_NVLINK_ERR: only the first, third, fourth and fifth count. These bits "can
# be safely ignored", or are corrected errors beyond a threshold: "continue operation".
_IGNORABLE = {0: 1 << 0 | 1 << 23 | 1 << 30, 2: 0, 3: 0, 4: 1 << 20 | 1 << 23 | 1 << 26 | 1 << 29}
# NVIDIA's Xid catalog, "Xid 144-150 Decode": the first register of an Xid 149 has the unit in its low bits, otherwise
# before driver R575 (ten bits) than since (seven); where that is a link that went down, bits 20 to 25 say why. Of all
# other units the line's own Fatal or Nonfatal says what the registers do.
_LINK_DOWN_UNITS = ("NETIR_LINK_EVT", "NETIR_LINK_DOWN")
_LINK_DOWN_CODES = ((0x3FF, 0x1C6), (0x7F, 0x11))


def parse_message(message: str) -> Event | None:
    """Return the fault that a message tells of; None for all others. The message is without its time."""
    message = message[:_LONGEST]
    event = _parse(message, message.lower())
    return event and event._replace(text=_printable(message))


def _parse(message: str, lower: str) -> Event | None:
    if "xid" in lower:
        event = _parse_sxid(message) if "sxid" in lower else _parse_xid(message)
        if event:
            return event
    if "nvrm" in lower and "fallen off the bus" in lower:
        found = re.search(_FALLEN, message)
        return Event("xid", code=79, device=_pci_address(found.group(1)) if found else "")
    if "hardware error]" in lower or "machine check" in lower:
        event = _parse_machine_check(message)
        if event:
            return event
    for word, rule in _FORMS:
        if word in lower and (found := re.search(rule.pattern, message, re.IGNORECASE)):
            return _event_of(rule, found, message)
    return None


def _event_of(rule: _Rule, found: re.Match[str], message: str) -> Event | None:
    groups = found.groupdict()
    device = groups.get("device") or groups.get("other") or ""
    state = rule.state
    if not state and "state" in groups:
        state = "down" if groups["state"].lower() == "down" else "up"
        if re.search(_NO_LINK, message):
            return None
    if re.fullmatch(_PCI, device, re.IGNORECASE):
        device = device.lower()
    return Event(rule.kind, state, device=device, is_fatal=rule.is_fatal, job_pid=_number(groups.get("pid")))


def _parse_xid(message: str) -> Event | None:
    """Read an Xid by its parts: any may be missing but the number."""
    found = re.search(_XID, message)
    if not found:
        return None
    address, number, rest = found.groups()
    rest = re.sub(r"\bname=[^,]*", "", rest)  # a program chooses its name
    pid = re.search(_PID, rest)
    code = int(number)
    # The last parentheses: from 0x0 (None) to 0x1 (GPU Reset Required)
    action = re.findall(r"\(([^()]*)\)", rest) if code == 154 else []
    return Event(
        "xid",
        _nvlink_state(code, rest),
        code=code,
        device=_pci_address(address or ""),
        part=_part(rest),
        action=action[-1].strip() if action else "",
        is_fatal=_says_fatal(rest),
        job_pid=_number(pid.group(1)) if pid else None,
    )


def _parse_sxid(message: str) -> Event | None:
    found = re.search(_SXID, message)
    if not found:
        return None
    address, number, rest = found.groups()
    return Event("sxid", code=int(number), device=_pci_address(address), part=_part(rest), is_fatal=_says_fatal(rest))


def _parse_machine_check(message: str) -> Event | None:
    """Read the lines that say whether an error was corrected: of the CPU's banks, of AMD's decoder, and of GHES."""
    if bank := re.search(_BANK, message):
        return Event("mce", device=f"CPU{bank.group(1)}", is_fatal=bool(int(bank.group(2), 16) & _UNCORRECTED_BIT))
    if status := re.search(_AMD_STATUS, message):
        flags = status.group(2).upper().split("|")
        return Event("mce", device=f"CPU{status.group(1)}", is_fatal="UC" in flags or "UE" in flags)
    if severity := re.search(_SEVERITY, message):
        return Event("mce", severity.group(1), is_fatal=severity.group(1) in ("fatal", "recoverable", "uncorrected"))
    return None


def _pci_address(text: str) -> str:
    """Return an address as `0000:b5:00.0`, as the table `gpus` has it; "" if it is none."""
    found = re.fullmatch(_ADDRESS, text)
    if not found:
        return ""
    domain, rest, function = found.groups()
    return f"{(domain or '0000')[-4:]}:{rest}{function or '.0'}".lower()


def _part(text: str) -> str:
    """Return the part of a GPU or switch that the text names: `link 14`, `NETIR_LINK_EVT link 9`, `GPC 1 TPC 3`."""
    if tpc := re.search(_TPC, text):
        return f"GPC {tpc.group(1)} TPC {tpc.group(2)}"
    unit, link = re.search(_UNIT, text), re.search(_LINK, text)
    names = [unit.group(1)] if unit else []
    if link and int(link.group(1)) >= 0:
        names.append(f"link {int(link.group(1))}")
    return " ".join(names)


def _nvlink_state(code: int, text: str) -> str:
    """Return what the registers of an NVLink's Xid say beyond its text: `ignorable`, or the reason of a link down."""
    found = re.search(_REGISTERS, text)
    registers = [int(value, 16) for value in found.group(1).replace(",", " ").split()] if found else []
    if code == 74 and len(registers) == 7:
        matter = any(registers[number] & ~mask for number, mask in _IGNORABLE.items())
        return "ignorable" if not matter and any(registers[number] for number in _IGNORABLE) else ""
    unit = re.search(_UNIT, text)
    if code == 149 and unit and unit.group(1) in _LINK_DOWN_UNITS:
        if registers and any(registers[0] & mask == bits for mask, bits in _LINK_DOWN_CODES):
            return f"reason {registers[0] >> 20 & 0x3F}"
        return "reason unknown"
    return ""


def _says_fatal(text: str) -> bool | None:
    if re.search(_NOT_FATAL, text):
        return False
    return True if re.search(_FATAL, text) else None


def _number(text: str | None) -> int | None:
    return int(text) if text and len(text) <= 10 else None


def _printable(text: str) -> str:
    """Return a line without control characters: programs choose their names, which are in it."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:_TEXT]).strip()
