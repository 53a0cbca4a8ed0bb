"""Gather facts in a mount namespace of its own: a full disk, a FUSE mount that hangs, a zombie, a process in D.

Usage, as root: unshare --mount --propagation private python bad_host.py FOLDER TABLE... Prints NodeFacts as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
import time
from pathlib import Path

import msgspec

from pitools.node.gather.collectors import read_facts
from pitools.node.gather.read import Query

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
FUSE_INIT = 26


def mount(source: str, target: Path, kind: str, options: str) -> None:
    target.mkdir(exist_ok=True)
    if LIBC.mount(source.encode(), str(target).encode(), kind.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"cannot mount {kind}")


def mount_hanging(target: Path) -> tuple[int, int]:
    """Mount a FUSE file system whose server answers no request; return its pid, and a pipe with a byte for each."""
    taken, report = os.pipe()
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    mount("nas:/data", target, "fuse", f"fd={fuse},rootmode=40000,user_id=0,group_id=0")
    server = os.fork()
    if server == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        while True:  # ends with the mount: ENODEV
            _, kind, request = struct.unpack_from("=IIQ", os.read(fuse, 1 << 17))
            if kind != FUSE_INIT:
                os.write(report, b".")
            else:
                os.write(fuse, struct.pack("=IiQII56x", 80, 0, request, 7, 31))
    os.close(fuse)  # else a child that hangs would hold its own connection open
    os.close(report)
    return server, taken


def fork(behave: object) -> int:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            behave()  # type: ignore[operator]
        os._exit(0)
    return child


def wait_for_state(pid: int, state: str) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


def main(folder: Path, tables: list[str]) -> None:
    mount("full", folder / "full", "tmpfs", "size=64k")
    with contextlib.suppress(OSError):
        (folder / "full" / "data").write_bytes(bytes(1 << 20))
    server, taken = mount_hanging(folder / "hung")
    zombie = fork(lambda: None)
    wait_for_state(zombie, "Z")
    blocked = fork(lambda: os.statvfs(folder / "hung"))
    os.read(taken, 1)
    os.kill(blocked, signal.SIGKILL)  # not even so
    wait_for_state(blocked, "D")
    try:
        names = {"files": {str(folder / name) for name in ("full", "hung/data", "none")}}
        facts = read_facts(tables, Query(node=f"{zombie}-{blocked}"), names)
    finally:
        os.kill(server, signal.SIGKILL)
        for pid in (server, zombie, blocked):
            os.waitpid(pid, 0)
    sys.stdout.buffer.write(msgspec.json.encode(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
