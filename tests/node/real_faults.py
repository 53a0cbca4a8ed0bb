"""Faults that are real, of this machine, each in mount and network namespaces of its own, or of one process.

As a program, for the scripts of FAULTS:
    real_faults.py hang FOLDER COMMAND...   run COMMAND while FOLDER is a mount that answers nothing
    real_faults.py clock STATUS ERROR_US    set the kernel's clock disciplined (0) or not (64), with that largest error
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from pitools.node.check.config import load_config
from tests.node.gather.bad_host import mount_hanging

BLKIO = Path("/sys/fs/cgroup/blkio")  # cgroup v1
DAEMON = f"pit-{os.getpid()}"  # no other test's
_UNDISCIPLINED = 64


class RealFault(NamedTuple):
    """A fault, and which checks find it.

    setup: lines of a shell, which set up the fault where $1 is "bad", and all but it where it is "well". $run: what
    starts the command that is run there. {folder}, {python}, {slurmd}, {daemon}: a folder, this Python, the process id
    of a slurmd, a program's name. rule: of a site's check of the name "site", as TOML, if there is one.
    shipped: the shipped checks that find it, with the action.
    """

    setup: str
    rule: str = ""
    shipped: dict[str, str] = {}

    @property
    def actions(self) -> dict[str, str]:
        """The checks that fail, with their action."""
        return self.shipped | ({"site": "drain"} if self.rule else {})

    @property
    def draining(self) -> str:
        """The check that drains the node."""
        return next(name for name, action in self.actions.items() if action == "drain")


FAULTS = {
    "full disk": RealFault(
        """\
mount --bind /var/tmp /mnt && mount -t tmpfs -o size=64k,mode=755 pit /var
mkdir /var/tmp && mount --move /mnt /var/tmp
[ "$1" = bad ] && dd if=/dev/zero of=/var/data bs=4k 2> /dev/null
""",
        'table = "mounts"\nwhere.target = "/var"\nkey = "root_used_share"\nmax = 0.9999',
        shipped={"disk-space": "report"},
    ),
    "missing mount": RealFault(
        'mkdir -p {folder}/scratch; [ "$1" = bad ] || mount -t tmpfs pit {folder}/scratch',
        'table = "mounts"\nwhere.target = "{folder}/scratch"\nmin_count = 1',
    ),
    "hung mount": RealFault(
        'if [ "$1" = bad ]; then run="{python} {program} hang {folder}/hung"; '
        "else mkdir -p {folder}/hung && mount -t tmpfs pit {folder}/hung; fi",
        'table = "mounts"\nwhere.target = "{folder}/hung"\nkey = "responds"\nequals = true',
    ),
    "dead process": RealFault(
        """\
cp "$(command -v sleep)" {folder}/{daemon}
{folder}/{daemon} 600 & pid=$!
until [ "$(cat /proc/$pid/comm)" = {daemon} ]; do sleep 0.05; done
if [ "$1" = bad ]; then kill -9 $pid; wait $pid 2> /dev/null; else trap 'kill $pid; wait $pid' EXIT; fi
""",
        'table = "processes"\nwhere.name = "{daemon}"\nmin_count = 1',
    ),
    "dead server": RealFault(
        """\
ip link set lo up
{python} -m http.server --bind 127.0.0.1 --directory {folder} 7 > /dev/null 2>&1 & pid=$!
until grep -q ' 0100007F:0007 .* 0A ' /proc/net/tcp; do sleep 0.05; done
if [ "$1" = bad ]; then kill -9 $pid; wait $pid 2> /dev/null; else trap 'kill $pid; wait $pid' EXIT; fi
""",
        'table = "endpoints"\nwhere.endpoint = "tcp://127.0.0.1:7"\nkey = "responds"\nequals = true',
    ),
    "clock skew": RealFault(  # as far as one machine can know: by seconds, or by how much is unknown
        """\
trap '{python} {program} clock 64 16000000' EXIT
if [ "$1" = bad ]; then set -- 64 3000000 "$@"; else set -- 0 1000 "$@"; fi
{python} {program} clock $1 $2; shift 2
""",
        'table = "system"\nkey = "clock_error_s"\nmax = 1',
        shipped={"clock-synchronized": "report"},
    ),
    "slow disk": RealFault(
        """\
fallocate -l 1M {folder}/image && disk=$(losetup --show -f {folder}/image) && ln -sfn $disk {folder}/disk
cgroup={blkio}/pit-$$ && mkdir $cgroup
trap 'echo $$ > {blkio}/cgroup.procs; rmdir $cgroup; losetup -d $disk' EXIT
[ "$1" = bad ] && echo "$(cat /sys/block/${{disk#/dev/}}/dev) 65536" > $cgroup/blkio.throttle.write_bps_device
echo $$ > $cgroup/cgroup.procs
""",  # 4 s at 65,536 B/s
        'table = "commands"\nwhere.command = "dd if=/dev/zero of={folder}/disk bs=64k count=4 oflag=direct"\n'
        'key = "duration_s"\nmax = 3',
    ),
    "port down": RealFault(
        """\
mount -t sysfs sysfs /sys
ip link add pit0 type veth peer name pit1
ip link set pit0 up
if [ "$1" = bad ]; then state=lowerlayerdown; else state=up; ip link set pit1 up; fi
until [ "$(cat /sys/class/net/pit0/operstate)" = $state ]; do sleep 0.05; done
""",
        'table = "interfaces"\nwhere.interface = "pit0"\nkey = "state"\nequals = "up"',
    ),
    "stopped slurmd": RealFault(
        'if [ "$1" = bad ]; then kill -STOP {slurmd}; state=T; else kill -CONT {slurmd}; state=S; fi\n'
        'until grep -q "^State:.$state" /proc/{slurmd}/status; do sleep 0.05; done',
        'table = "slurm"\nkey = "slurmd_is_running"\nequals = true',
        shipped={"slurmd-runs": "report"},
    ),
}


def why_not_here(name: str) -> str:
    """Return why this machine cannot have a fault; "" if it can."""
    if name == "slow disk" and not (BLKIO / "blkio.throttle.write_bps_device").exists():
        return "no cgroup v1 that slows a disk down"
    if name == "hung mount" and not os.access("/dev/fuse", os.W_OK):
        return "no /dev/fuse"
    if name == "clock skew" and not _adjtimex(0) & _UNDISCIPLINED:
        return "this machine's clock is disciplined, or cannot be read"
    return ""


def write_config(fault: RealFault, folder: Path, head: str) -> Path:
    """Write a site's file with the checks that find a fault and no other. head: more lines of its."""
    unused = [check.name for check in load_config().check if check.name not in fault.shipped]
    rule = f'[[check]]\nname = "site"\n{fault.rule.format(folder=folder, daemon=DAEMON)}\n' if fault.rule else ""
    path = folder / "node.toml"
    path.write_text(f"disable = {json.dumps(unused)}\n{head}\n{rule}")
    return path


def with_fault(fault: RealFault, state: str, folder: Path, slurmd: int, *command: str) -> list[str]:
    """Return how a command is run where the fault is ("bad"), or all but it ("well")."""
    words = {"folder": folder, "python": sys.executable, "program": __file__, "blkio": BLKIO, "slurmd": slurmd}
    words["daemon"] = DAEMON
    script = f'{fault.setup.format(**words)}\nshift\n$run "$@"'
    unshare = ("unshare", "--mount", "--net", "--propagation", "private")
    return [*unshare, "env", "run=", "sh", "-c", script, "sh", state, *command]


def _adjtimex(modes: int, status: int = 0, error_us: int = 0) -> int:
    """Call adjtimex(2), 0x1C to set status and errors; return the kernel's status, 0 if it cannot be read."""
    timex = ctypes.create_string_buffer(256)
    struct.pack_into("@Illlli", timex, 0, modes, 0, 0, error_us, error_us, status)
    return 0 if ctypes.CDLL(None).adjtimex(timex) < 0 else int(struct.unpack_from("@Illlli", timex)[5])


def main(verb: str, *words: str) -> None:
    if verb == "clock":
        _adjtimex(0x1C, int(words[0]), int(words[1]))  # ADJ_MAXERROR | ADJ_ESTERROR | ADJ_STATUS
    else:
        _, asked = mount_hanging(Path(words[0]))
        os.set_inheritable(asked, True)  # the server ends when nobody can read there
        os.execvp(words[1], words[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
