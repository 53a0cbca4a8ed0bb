"""Parse lines of the kernel's log that tell of faults: NVIDIA's Xids and SXids by their parts, others by a table.

A line of another kind, or one that is too damaged to be read, is none. What a line leaves out is unknown.

Users choose words of the kernel's lines: a program's name, at most 15 bytes, begins some (`NAME[PID]: segfault at`),
and names of files stand behind the kernel's own words. So a pattern begins where the message does, with more than 15
bytes that one driver writes, and where the rest has words that a user may choose, these are not searched.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from pitools.core.output import printable

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

    word: str
    kind: str
    state: str
    is_fatal: bool | None
    pattern: str


# Patterns are compiled when a line first has their word: to compile all takes longer than the other imports of a check.
_PCI = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_PARTS = {
    "FS": r"(?:ext[234]-fs|xfs|btrfs)(?: (?:info|warning|error|critical|alert))? "
    r"\((?:device )?(?P<device>[\w./-]+)(?::? state \w+)?\): [\w :,-]*?",
    "AMD": r"amdgpu (?P<device>{PCI}): (?:amdgpu: |\[drm\] |\*ERROR\* )*",
    "MLX": r"mlx5_core (?P<device>{PCI})[: ]",
    "EFA": r"(?:efa|infiniband) (?P<device>{PCI}|rdmap\w+|efa_\w+): (?:the )?",
    "LUSTRE": r"lustre(?:error)?: (?:\d+-\d+: |\d+:\d+:\([^()]*\([^()]*\)\) )?"
    r"(?P<device>[\w-]+-(?:OST|MDT)[0-9a-f]{4}|MGC[\w.@]+)",
    "DIMM": r"E (?:page 0x|(?:[^()\[\]]* )?on (?P<device>[^(]+?)\s*(?:\(|$))",
    "PCI": _PCI,
}

# Kind, state, severity | word | pattern; a line that is indented goes on with the pattern. The first that fits counts.
# Lines that come along with another one for the same event are left out: `oom-kill:`, the register dump of a machine
# check, the sections of a GHES record.
_TABLE = r"""
# Before mce, whose prefix some have.
thermal throttled - | above threshold | (?:mce: )?(?P<device>CPU\d+): \w+ temperature (?:is )?above threshold
thermal critical fatal | critical temperature | (?:thermal )?(?:(?P<device>[\w-]+): )?critical temperature reached
thermal throttled - | high temperature | {MLX}.*port module event.*high temperature
mce - fatal | hardware memory error | mce: uncorrected hardware memory error
mce - fatal | memory failure: | memory failure: \w+: recovery action
mce - - | machine check events logged | (?:mce: )?(?:\[hardware error\]: )?machine check events logged
edac - corrected | edac | EDAC (?P<other>MC\d+): (?:\d+ )?C{DIMM}
edac - fatal | edac | EDAC (?P<other>MC\d+): (?:\d+ )?U{DIMM}
nvme controller-down - | controller is down | nvme (?P<device>nvme\d+): controller is down
nvme removed fatal | nvme | nvme (?P<device>nvme\d+): (?:disabling device after|
    removing after probe|device not ready; aborting)
nvme no-path fatal | no available path | block (?P<device>nvme\w+): no available path - failing
nvme timeout - | timeout, | nvme (?P<device>nvme\d+): I/O (?:tag )?\d+ .*timeout,
nvme io-error - | (sct | (?P<device>nvme\w+): [\w/ ]+\(0x[0-9a-f]+\) @ LBA \d.*\(sct
disk raid-failed fatal | disk failure on | md/raid\S*: disk failure on (?P<device>[\w-]+)(?:,| detected)
# Also of a disk that was taken out.
disk offline - | rejecting i/o to | (?:sd|scsi) [\d:]+: (?:\[(?P<device>\w+)\] )?(?:tag#\d+ )?
    rejecting I/O to (?:offline|dead) device
disk medium-error - | error | (?:\w+_request: |print_req_error: )?critical (?:medium|
    target) error, dev (?P<device>(?!fd\d|sr\d)[\w-]+),|
    sd [\d:]+: \[(?P<other>sd[a-z]+)\] (?:tag#\d+ )?sense key ?: (?:medium|hardware) error
disk io-error - | beyond end of device | (?s:.{0,16}): attempt to access beyond end of device
disk io-error - | i/o error | (?:\w+_request: |print_req_error: |buffer )?I/O error(?:,|
     on) dev(?:ice)? (?P<device>(?!fd\d|sr\d|loop\d)[\w-]+),
filesystem read-only fatal | read-only | (?:{FS}|btrfs: )remounting filesystem read-only
filesystem read-only fatal | forced readonly | {FS}forced readonly
filesystem shutdown fatal | shut | {FS}(?:filesystem has been shut down|xfs_do_force_shutdown|
    (?:I/O error|corruption of|user initiated)[^=]*shutting down filesystem)
filesystem shutdown fatal | has been suspended | (?:warning: )?pool '(?P<device>[\w.:-]+)' has
     encountered an uncorrectable I/O failure and has been suspended
filesystem error - | -fs error | ext[234]-fs error \(device (?P<device>[^):\s]+)
filesystem error - | btrfs | btrfs:? (?:error|critical) \(device (?P<device>[^):\s]+)
filesystem error - | corrupt | {FS}corrupt
filesystem error - | csum failed | {FS}csum failed
filesystem error - | i/o error | {FS}(?:I/O error while writing|I/O error in|log I/O error)
# Of no device.
filesystem error - | writing superblock | btrfs: I/O error while writing superblock
filesystem error - | journal | aborting journal on device (?P<device>[\w-]+?)-\d+\.
nfs timeout - | not responding | (?:nfs|lockd): server (?P<device>\S+) not responding
nfs ok - | server | (?:nfs|lockd): server (?P<device>\S+) OK$
nfs locks-lost - | lock reclaim failed | (?:nfs: )?nfs4_\w+: lock reclaim failed
lustre lost - | was lost | {LUSTRE}\S*: connection to .* was lost
lustre ok - | connection restored | {LUSTRE}\S*: connection restored
lustre evicted - | evicted by | {LUSTRE}\S*: this client was evicted
lustre bug fatal | lbug | lustreerror: \d+:\d+:\([^()]*\([^()]*\)\) LBUG$
lustre error - | lustreerror: | {LUSTRE}
lustre error - | lustreerror: | lustreerror: (?:\d{2,}-\d|\d+:\d+:\()
lustre error - | lneterror: | lneterror: (?:[0-9a-f]{3}-[0-9a-f]: |\d+:\d+:\()
oom cgroup - | out of memory | memory cgroup out of memory: kill(?:ed)? process (?P<pid>\d+)
oom host - | out of memory | out of memory(?: \([^)]*\))?: kill(?:ed)? process (?P<pid>\d+)
hang hung-task - | blocked for more than | INFO: task (?s:.{0,15}):(?P<pid>\d+) blocked for more than \d+ seconds
hang soft-lockup - | soft lockup | (?:watchdog: )?BUG: soft lockup - (?P<device>CPU#\d+) stuck
    (?s:.*\[.*:(?P<pid>\d+)\])?
hang hard-lockup fatal | hard lockup | (?:(?:NMI )?watchdog: )?watchdog detected hard lockup on (?P<device>cpu \d+)
hang rcu-stall - | detected stall | (?:rcu: )?INFO: \w+ (?:self-)?detected stalls? on cpu
gpu reset-failed fatal | amdgpu | {AMD}GPU (?:reset|recovery).*fail
gpu reset-failed fatal | amdgpu | {AMD}GPU reset end with ret = -
gpu reset - | amdgpu | {AMD}GPU reset begin
gpu ok - | amdgpu | {AMD}GPU reset(?:\(\d+\))? succeeded
gpu init-failed fatal | amdgpu | {AMD}fatal error during GPU init
gpu timeout - | timeout, signaled | (?:\[drm:amdgpu_\w+ \[amdgpu\]\] \*error\* |{AMD})ring \S+ timeout, signaled
gpu memory-error fatal | uncorrectable hardware errors | {AMD}(?:.* )?[1-9]\d* (?:new )?uncorrectable hard
gpu init-failed fatal | rminitadapter failed | NVRM: GPU (?P<device>{PCI}): RmInitAdapter failed
link driver-error fatal | mlx5_core | {MLX}.*(?:cause a leak of a command|
    health compromised|unrecoverable hardware error)
link driver-error - | x timeout | {MLX}.*[RT]X timeout (?:detected|on channel)
link driver-error - | insufficient power | (?:{MLX}.*|mlx5_core: )detected insufficient power on the PCIe slot
link driver-error - | netdev watchdog | [\w-]+ (?:[\w.:-]+ )?(?P<device>[\w.-]+): netdev watchdog: cpu|
    netdev watchdog: (?P<other>[\w.-]+) \(
link driver-error fatal | completion | {EFA}(?:wait for completion \(polling\) timeout|
    device didn't send any completion)
link driver-error fatal | admin queue is closed | {EFA}admin queue is closed
link driver-error - | failed to | {EFA}failed to (?:process|submit) command
link driver-error fatal | device isn't ready | {EFA}device isn't ready
link driver-error fatal | reset indication | {EFA}reset indication didn't turn
link up - | cable plugged | {MLX}.*port module event.*cable plugged
link down - | cable unplugged | {MLX}.*port module event.*cable unplugged
# No line of bonding: a user has bonds of any names in a namespace of its own. A port's driver tells, too.
link - - | link | (?:[\w-]+ {PCI} (?:[\w.-]+: \w+: )?|infiniband |
    (?:e1000e?|igb|ixgbe|i40e): )?(?P<device>[a-z][\w.@-]*):? (?:port:? \d+ )?(?:nic )?link (?:is )?
    (?P<state>down|up|active)(?:$|
    [ ,at-]+\d+ ?[mg]bps(?:$|,? full|,? half|/full|/half|, flow))
"""
_LOGGED_PACKET = r"IN=\S* OUT="  # begins with a text of up to 127 characters, by the rules of a namespace's owner


@lru_cache(maxsize=1)
def _rules() -> tuple[_Rule, ...]:
    """Return the rows of the table."""
    text = _TABLE.replace("\n    ", "")
    for name, part in _PARTS.items():
        text = text.replace(f"{{{name}}}", part)
    rules = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, word, pattern = line.split(" | ", 2)
            kind, state, severity = head.split()
            is_fatal = {"fatal": True, "corrected": False}.get(severity)
            rules.append(_Rule(word, kind, state.strip("-"), is_fatal, pattern))
    return tuple(rules)


_NUMBER = r"(?:\s+GPU-[IC]+:\d+){0,2}\s*\)\s*:\s*(\d{1,6})(?:,(.*)|\s*$)"  # after the MIG instance, if it is of one
_XID = r"(?is)NVRM:\s+Xid\s+\(\s*(?:PCI:)?\s*((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)" + _NUMBER
_SXID = r"(?is)nvidia-nvswitch\d*: SXid \((?:PCI:)?\s*([0-9a-f.:]{7,16})" + _NUMBER
_NAME = r"(?s)\bname=.{0,15}(?=,|$)"  # as a program chose it, a comma included
_FALLEN = (
    r"(?i)NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?(\S+?):?\s(?:NVRM: \(PCI ID: \S+ installed in this system has\s)?"
    r"(?:NVRM:|GPU has) fallen off the bus"
)
_ADDRESS = r"(?i)(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2})(\.[0-7])?"
_PID = r"\bpid='?(\d{1,10})\b"
_LINK = r"(?i)\blink (-?\d{1,3})\b"
_UNIT = r"\b([A-Z][A-Z0-9_]{2,30})\s+(?:Fatal|Non-?fatal)\b"
_REGISTERS = r"(?i)\blink -?\d+\s*[(\[]((?:0x[0-9a-f]{1,8}(?=[,\s)\]])[,\s]*)+)"  # one that is cut off is none
_TPC = r"\bGPC (\d{1,3}), TPC (\d{1,3})\b"
_NOT_FATAL = r"(?i)\bnon-?fatal\b|\b(?:corrected|correctable)\b"
_FATAL = r"(?i)\bfatal\b|\bun(?:corrected|correctable|contained)\b"
_BANK = (
    r"(?i)(?:mce: )?\[Hardware Error\]: CPU (\d+): Machine Check(?: Exception)?: [0-9a-f]+ Bank \d+: ([0-9a-f]{1,16})\b"
)
_AMD_STATUS = r"(?i)(?:mce: )?\[Hardware Error\]: CPU:?\s?(\d+)\b[^\[]*MC\d+_STATUS\[([^\]]*)\]"
_SEVERITY = r"(?i)(?:\{\d+\})?\[Hardware Error\]: event severity: ([\w-]+)"
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
    event = None if re.search(_LOGGED_PACKET, message) else _parse(message, message.lower())
    return event and event._replace(text=printable(message[:_TEXT]).strip())


def _parse(message: str, lower: str) -> Event | None:
    if "xid" in lower:
        event = _parse_xid(message) or _parse_sxid(message)
        if event:
            return event
    if "fallen off the bus" in lower and (found := re.match(_FALLEN, message)):
        return Event("xid", code=79, device=_pci_address(found.group(1)))
    if "hardware error]" in lower or "machine check" in lower:
        event = _parse_machine_check(message)
        if event:
            return event
    for rule in _rules():
        if rule[0] in lower and (found := re.match(rule.pattern, message, re.IGNORECASE)):  # by number: each line
            return _event_of(rule, found)
    return None


def _event_of(rule: _Rule, found: re.Match[str]) -> Event:
    groups = found.groupdict()
    device = groups.get("device") or groups.get("other") or ""
    state = rule.state
    if not state and "state" in groups:
        state = "down" if groups["state"].lower() == "down" else "up"
    if re.fullmatch(_PCI, device, re.IGNORECASE):
        device = device.lower()
    return Event(rule.kind, state, device=device, is_fatal=rule.is_fatal, job_pid=_number(groups.get("pid")))


def _parse_xid(message: str) -> Event | None:
    """Read an Xid by its parts: any may be missing but the number."""
    found = re.match(_XID, message)
    if not found:
        return None
    address, number, rest = found.groups()
    rest = re.sub(_NAME, "", rest or "")
    pid = re.search(_PID, rest)
    code = int(number)
    # The last parentheses: from 0x0 (None) to 0x1 (GPU Reset Required)
    action = re.findall(r"\(([^()]*)\)", rest) if code == 154 else []
    return Event(
        "xid",
        _nvlink_state(code, rest),
        code=code,
        device=_pci_address(address),
        part=_part(rest),
        action=action[-1].strip() if action else "",
        is_fatal=_says_fatal(rest),
        job_pid=_number(pid.group(1)) if pid else None,
    )


def _parse_sxid(message: str) -> Event | None:
    found = re.match(_SXID, message)
    if not found:
        return None
    address, number, rest = found.groups()
    rest = rest or ""
    return Event("sxid", code=int(number), device=_pci_address(address), part=_part(rest), is_fatal=_says_fatal(rest))


def _parse_machine_check(message: str) -> Event | None:
    """Read the lines that say whether an error was corrected: of the CPU's banks, of AMD's decoder, and of GHES."""
    if bank := re.match(_BANK, message):
        return Event("mce", device=f"CPU{bank.group(1)}", is_fatal=bool(int(bank.group(2), 16) & _UNCORRECTED_BIT))
    if status := re.match(_AMD_STATUS, message):
        flags = status.group(2).upper().split("|")
        return Event("mce", device=f"CPU{status.group(1)}", is_fatal="UC" in flags or "UE" in flags)
    if severity := re.match(_SEVERITY, message):
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
