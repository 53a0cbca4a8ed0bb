"""Faults that are real, of this machine: `pit node check` finds each, and the controller drains the node.

Each in namespaces or processes of its own. What a real Slurm makes of them is in tests/cluster/test_node_health.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.record import decode_json
from pitools.node.check.config import load_config, names_of
from pitools.node.control import tick
from pitools.node.gather.collectors import read_facts
from pitools.node.gather.read import Query
from pitools.node.types import NodeFacts, Row
from tests.node.simulated import Cluster, SimulatedNode
from tests.node.test_injected_faults import assert_handled

BLKIO = Path("/sys/fs/cgroup/blkio")  # cgroup v1
# Each fault: a shell script that sets it up where $1 is "bad", and all but it otherwise; and the check of a site.
PORT = """\
mount -t sysfs sysfs /sys
ip link add pit0 type veth peer name pit1
ip link set pit0 up
if [ "$1" = bad ]; then state=lowerlayerdown; else state=up; ip link set pit1 up; fi
until [ "$(cat /sys/class/net/pit0/operstate)" = $state ]; do sleep 0.05; done
"""
SLOW_DISK = """\
fallocate -l 1M {folder}/image && disk=$(losetup --show -f {folder}/image) && ln -sfn $disk {folder}/disk
cgroup={blkio}/pit-$$ && mkdir $cgroup
trap 'echo $$ > {blkio}/cgroup.procs; rmdir $cgroup; losetup -d $disk' EXIT
[ "$1" = bad ] && echo "$(cat /sys/block/${{disk#/dev/}}/dev) 65536" > $cgroup/blkio.throttle.write_bps_device
echo $$ > $cgroup/cgroup.procs
"""
FULL_DISK = """\
mkdir -p {folder}/full && mount -t tmpfs -o size=64k pit {folder}/full
[ "$1" = bad ] && ! dd if=/dev/zero of={folder}/full/data bs=64k count=2 2> /dev/null
"""
WRITE = "dd if=/dev/zero of={folder}/disk bs=64k count=4 oflag=direct"  # 4 s at 65,536 B/s
REAL = {
    "port down": (PORT, 'table = "interfaces"\nwhere.interface = "pit0"\nkey = "state"\nequals = "up"'),
    "slow disk": (SLOW_DISK, f'table = "commands"\nwhere.command = "{WRITE}"\nkey = "duration_s"\nmax = 3'),
    "full disk": (FULL_DISK, 'table = "mounts"\nwhere.target = "{folder}/full"\nkey = "used_share"\nmax = 0.95'),
}


@pytest.mark.parametrize("name", REAL)
def test_pit_node_check_finds_a_real_fault(tmp_path: Path, as_root: None, name: str) -> None:
    """As a user types it: nothing while the machine is well, exit 1 and a report by which the node is drained."""
    if name == "slow disk" and not (BLKIO / "blkio.throttle.write_bps_device").exists():
        pytest.skip("no cgroup v1 that slows a disk down")
    setup, rule = (text.format(folder=tmp_path, blkio=BLKIO) for text in REAL[name])
    cluster = site_cluster(tmp_path, rule)
    shipped = json.dumps([check.name for check in load_config().check])
    head = f'disable = {shipped}\nspool = "{tmp_path}/spool"\nstate = "{tmp_path}/state"\n'
    (tmp_path / "node.toml").write_text(f'{head}[[check]]\nname = "site"\n{rule}\n')
    script = f'{setup}\n"$2" -m pitools node check --report --node n000 --config {tmp_path}/node.toml'
    for state, code in (("well", 0), ("bad", 1)):
        unshare = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", script, "sh", state]
        done = subprocess.run([*unshare, sys.executable], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, (done.stdout, done.stderr)
    (finding,) = [json.loads(line) for line in done.stdout.splitlines()]
    rows = tick.Controller(cluster.slurm, cluster.config).tick(act=True).rows  # type: ignore[arg-type]
    assert [(row.act, row.node) for row in rows] == [("drain", "n000")]
    assert_handled(cluster, {finding["check"]: finding["action"]}, "site", "drain")


@pytest.fixture(scope="module")
def bad_host(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NodeFacts]:
    """A folder, and the facts of this machine with a full tmpfs, a FUSE mount that hangs and no third mount in it."""
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("only root can mount, where /dev/fuse is")
    folder = tmp_path_factory.mktemp("mounts")
    program = Path(__file__).with_name("gather") / "bad_host.py"
    argv = ["unshare", "--mount", "--propagation", "private", sys.executable, str(program), str(folder), "mounts"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    return folder, decode_json(done.stdout, NodeFacts)


def site_cluster(folder: Path, rule: str) -> Cluster:
    """Return one node with one check of the site's."""
    (folder / "node.toml").write_text(f'[[check]]\nname = "site"\n{rule}\n')
    (folder / "spool").mkdir()
    checks = load_config(folder / "node.toml").check
    return Cluster(folder / "spool", [one for one in checks if one.name == "site"], 1, noise=0)


@pytest.mark.parametrize(
    "rule",
    [
        'where = {{ target = "{folder}/hung" }}\nkey = "responds"\nequals = true',
        'where = {{ target = "{folder}/none" }}\nmin_count = 1',
    ],
    ids=["hung mount", "missing mount"],
)
def test_real_mounts(
    tmp_path: Path, bad_host: tuple[Path, NodeFacts], tell_time: Callable[[Cluster], None], rule: str
) -> None:
    """Gathered from this machine, found, and drained."""
    folder, facts = bad_host
    cluster = site_cluster(tmp_path, f'table = "mounts"\n{rule.format(folder=folder)}')
    tell_time(cluster)
    cluster.step(lambda _: {"mounts": list(facts.tables["mounts"].rows)})
    cluster.tick()
    assert_handled(cluster, {one.check: one.action for one in cluster.findings}, "site", "drain")


@pytest.mark.parametrize("table", ["processes", "endpoints"])
def test_real_daemon_and_port(tmp_path: Path, tell_time: Callable[[Cluster], None], table: str) -> None:
    """A daemon, and a port, of this machine that a check demands: nothing while it is there, then a drain."""
    program = tmp_path / "pit-daemon"
    shutil.copy(shutil.which("sleep") or "", program)
    daemon = subprocess.Popen([program, "600"])
    server = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    rules = {
        "processes": f'where = {{ name = "{program.name}" }}\nmin_count = 1',
        "endpoints": f'where = {{ endpoint = "{endpoint}" }}\nkey = "responds"\nequals = true',
    }
    cluster = site_cluster(tmp_path, f'table = "{table}"\n{rules[table]}')
    names = names_of(list(cluster.checks))

    def gather(_node: SimulatedNode) -> dict[str, list[Row]]:
        return {table: list(read_facts((table,), Query(), names).tables[table].rows)}

    tell_time(cluster)
    try:
        cluster.step(gather)
        cluster.tick()
        assert cluster.findings == []
    finally:
        daemon.kill()
        daemon.wait()
        server.close()
    cluster.step(gather)
    cluster.tick()
    assert_handled(cluster, {one.check: one.action for one in cluster.findings}, "site", "drain")


def test_a_stopped_slurmd_does_not_run(tmp_path: Path, tell_time: Callable[[Cluster], None]) -> None:
    """A program of that name: found while it runs, not found while SIGSTOP holds it."""
    shutil.copy(shutil.which("sleep") or "", tmp_path / "slurmd")
    daemon = subprocess.Popen([tmp_path / "slurmd", "600"])
    cluster = site_cluster(tmp_path, 'table = "slurm"\nkey = "slurmd_is_running"\nequals = true')
    tell_time(cluster)
    try:
        for number in (signal.SIGCONT, signal.SIGSTOP):
            daemon.send_signal(number)
            if number == signal.SIGSTOP:
                os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)
            facts = read_facts(("slurm",), Query(node="n000"))
            assert facts.tables["slurm"].rows[0]["slurmd_is_running"] is (number == signal.SIGCONT)
            cluster.step(lambda _, rows=facts.tables["slurm"].rows: {"slurm": list(rows)})
    finally:
        daemon.kill()
        daemon.wait()
    cluster.tick()
    assert_handled(cluster, {one.check: one.action for one in cluster.findings}, "site", "drain")


def set_clock(status: int, error_us: int) -> None:
    """Tell the kernel that its clock is disciplined, or not (64), and the largest error that it may have."""
    timex = ctypes.create_string_buffer(256)
    struct.pack_into("@Illlli", timex, 0, 0x1C, 0, 0, error_us, error_us, status)  # ADJ_MAXERROR | ESTERROR | STATUS
    assert ctypes.CDLL(None).adjtimex(timex) >= 0


def test_a_clock_that_may_be_wrong_by_seconds(
    tmp_path: Path, as_root: None, tell_time: Callable[[Cluster], None]
) -> None:
    """By adjtimex(2), for an instant, where no daemon disciplines the clock: nothing at 1 ms, a drain at 3 s."""
    (system,) = read_facts(("system",), Query()).tables["system"].rows
    if system["clock_is_synchronized"] is not False:
        pytest.skip("this machine's clock is disciplined, or cannot be read")
    cluster = site_cluster(tmp_path, 'table = "system"\nkey = "clock_error_s"\nmax = 1')
    tell_time(cluster)
    try:
        for error_us, count in ((1000, 0), (3_000_000, 1)):
            set_clock(0, error_us)
            rows = list(read_facts(("system",), Query()).tables["system"].rows)
            cluster.step(lambda _, rows=rows: {"system": rows})
            assert len(cluster.findings) == count
    finally:
        set_clock(64, 16_000_000)
    cluster.tick()
    assert_handled(cluster, {one.check: one.action for one in cluster.findings}, "site", "drain")
