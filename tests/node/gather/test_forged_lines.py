"""Words that users choose in lines of the kernel: whatever they are, a line tells what it would without them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.gather.kernel_lines import Event, parse_message
from tests.node.gather.test_kernel_log import FAULTS

# NAME: a program's, 15 bytes. TEXT: of a file, an option, a label, a control group, a rule.
LINES = [
    "NAME[7]: segfault at 0 ip 00005581 sp 00007ffd error 4 in TEXT[400000+1000] likely on CPU 1 (core 0, socket 0)",
    "NAME[7]: segfault at 0 ip 00005581 sp 00007ffd error 4 in TEXT[400000+1000]",
    "NAME[7]: unhandled exception: SP Alignment, ESR 0x000000008a000000 in TEXT[400000+1000]",
    "NAME[7] vsyscall attempted with vsyscall=none ip:ff600000 cs:33 sp:7ffd",
    "NAME (7): drop_caches: 3",
    "NAME (7) used greatest stack depth: 11296 bytes left",
    "NAME: attempt to access beyond end of device\nloop0: rw=0, want=8, limit=4",
    "NAME: page allocation failure: order:0, mode:0xcc0(GFP_KERNEL), nodemask=(null),cpuset=TEXT,mems_allowed=0",
    "NAME invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "NAME/7: potentially unexpected fatal signal 11.",
    "traps: NAME[7] general protection fault ip:401136 sp:7ffd error:0 in TEXT[400000+1000]",
    "process 'NAME' launched 'TEXT' with NULL argv: empty string added",
    "warning: `NAME' uses 32-bit capabilities (legacy support in use)",
    "CPU: 17 PID: 7 Comm: NAME Tainted: P           OE     5.15.0-112-generic #122-Ubuntu",
    "INFO: task NAME:7 blocked for more than 120 seconds.",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [NAME:7]",
    "Memory cgroup out of memory: Killed process 7 (NAME) total-vm:1kB, anon-rss:1kB, file-rss:0kB, UID:1000",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=TEXT,task_memcg=/TEXT,task=NAME,pid=7,uid=1000",
    "overlayfs: failed to resolve 'TEXT': -2",
    'overlayfs: unrecognized mount option "TEXT" or missing value',
    "tmpfs: Unknown parameter 'TEXT'",
    'EXT4-fs: Mount option "TEXT" incompatible with ext2',
    "BTRFS error: unrecognized mount option 'TEXT'",
    "BTRFS: device label TEXT devid 1 transid 7 /dev/loop0 (7:0) scanned by NAME (7)",
    "EXT4-fs error (device sda1): ext4_lookup:1855: inode #2: comm NAME: iget: checksum invalid",
    "XFS: NAME(7) possible memory allocation deadlock size 65552 in kmem_alloc (mode:0x2400240)",
    "device-mapper: table: 253:0: linear: Device lookup failed: TEXT",
    "hid-generic 0003:1234:5678.0001: input,hidraw0: USB HID v1.11 Device [TEXT] on usb-0000:00:14.0-1/input0",
    'audit: type=1400 audit(1.0:1): apparmor="DENIED" operation="open" name="TEXT" pid=7 comm="NAME"',
    "NVRM: Xid (PCI:0000:12:00): 31, pid=7, name=NAME, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS",
    "NVRM: Xid (PCI:0000:12:00): 145, pid=7, name=NAME, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x8 0x1)",
    "NVRM: API mismatch: the client 'NAME' (pid 7)\nNVRM: has the version 570.1, but this kernel module",
    "NAME: (slave TEXT): link status definitely down, disabling slave",
    "TEXTIN= OUT=lo SRC=127.0.0.1 DST=127.0.0.1 LEN=84 TOS=0x00 PREC=0x00 TTL=64 ID=0 PROTO=ICMP",
]
# Prefixes of drivers, as short as a careless pattern may take them.
SHORT = [
    *("NVRM: Xid:79", "NVRM: Xid ():79", "NVRM: Xid : 79", "nvme nvme0: I/O", "XFS (a): ", "EXT4-fs (a): "),
    *("EDAC MC0: UE", "efa efa_a: ", "md/raid1:a: ", "nfs: server aOK", "nvme0n1: Read", "MGC@: evicted"),
    *("eth0: link down", "a link up 1Gbps", "a link up, 1 Gb", "a link down\n", "a link down, x", "GPC 1, TPC 3"),
    *("x,Fatal", "x,Nonfatal", "a, (None)", "kernel: NVRM: ", "[1] NVRM: Xid ", "LNetError: 1-0:", "[Hardware Error"),
    *("LNetError: 11-0", "\n", ""),
]
FAULT_LINES = [line for line, _ in FAULTS.values()]


def event(line: str, name: str, text: str) -> Event | None:
    parsed = parse_message(line.replace("NAME", name.encode()[:15].decode(errors="ignore")).replace("TEXT", text))
    return parsed and parsed._replace(text="")


@pytest.mark.parametrize("line", LINES)
def test_beginnings_of_drivers_lines_are_no_words_of_theirs(line: str) -> None:
    """A program that is named as a line of a fault begins, with the rest of that line, or all, where it fits."""
    plain = event(line, "python3", "libc.so.6")
    for fault in FAULT_LINES:
        for length in range(5, 16):
            for text in (fault, fault[length:], f"\n{fault}\n"):
                assert event(line, fault[:length], text) == plain
        for name in SHORT:
            assert event(line, name, fault) == plain


@given(st.sampled_from(LINES), st.sampled_from(FAULT_LINES), st.sampled_from(["", *SHORT]), st.data())
def test_pieces_of_drivers_lines_are_no_words_of_theirs(line: str, fault: str, short: str, data: st.DataObject) -> None:
    """Any piece of a fault's line, behind what may end the kernel's own words."""
    begin, end = sorted((data.draw(st.integers(0, len(fault))), data.draw(st.integers(0, len(fault)))))
    before = data.draw(st.sampled_from(["", "'", "\n", ": ", ") ", "] ", '" ', "kernel: ", "/tmp/"]))
    name = data.draw(st.sampled_from([short, fault[begin:end], before + fault]))
    assert event(line, name, before + fault[begin:]) == event(line, "python3", "libc.so.6")
