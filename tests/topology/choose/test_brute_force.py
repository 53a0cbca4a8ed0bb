"""A live slurmctld as referee: its topology/tree against our choice, from the same free nodes."""

from __future__ import annotations

import getpass
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pitools.core import hostlist
from pitools.core.errors import PitError
from pitools.slurm.client import Client, Transport
from pitools.topology import discover
from pitools.topology.choose import select_nodes

PODS = {"a": 8, "b": 16, "c": 12}
"""Leaves of 8 nodes in each pod."""

CONF = """\
ClusterName=referee
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/pid
SlurmctldLogFile={folder}/log
PrivateData=cloud
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=600
NodeName=h[000-{last:03d}] CPUs=8 State=CLOUD
PartitionName=train Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP
"""


def topology_conf() -> str:
    """Pods of leaves, the node names dealt out at random."""
    names = [f"h{number:03d}" for number in range(8 * sum(PODS.values()))]
    random.Random(0).shuffle(names)
    lines = []
    for pod, leaves in PODS.items():
        for leaf in range(leaves):
            own_part, names = names[:8], names[8:]
            lines.append(f"SwitchName={pod}{leaf:02d} Nodes={','.join(own_part)}")
        lines.append(f"SwitchName={pod} Switches={pod}[00-{leaves - 1:02d}]")
    return "\n".join([*lines, f"SwitchName=core Switches={','.join(PODS)}"]) + "\n"


@pytest.fixture
def referee(slurm_installed: None, tmp_path: Path) -> Iterator[Client]:
    """A slurmctld whose nodes are only names; without Slurm's packages it is skipped, or fails where it is required."""
    program = shutil.which("slurmctld", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert program
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "state").mkdir()
    (tmp_path / "topology.conf").write_text(topology_conf())
    conf = tmp_path / "slurm.conf"
    last = 8 * sum(PODS.values()) - 1
    conf.write_text(CONF.format(port=port, user=getpass.getuser(), folder=tmp_path, last=last))
    daemon = subprocess.Popen(
        [str(program), "-D", "-f", str(conf)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "SLURM_CONF": str(conf)},
    )
    slurm = Client(Transport(env={"SLURM_CONF": str(conf)}, timeout_s=20))
    try:
        deadline = time.monotonic() + 20
        while not answers(slurm) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield slurm
    finally:
        daemon.terminate()
        daemon.wait(20)


def answers(slurm: Client) -> bool:
    try:
        return bool(slurm.nodes())
    except PitError:
        return False


def taken(slurm: Client, count: int) -> set[str]:
    return set(hostlist.expand(slurm.test_only("#!/bin/sh\ntrue\n", [f"-N{count}"]).node_list))


@pytest.mark.slurm
def test_never_more_leaves_than_slurm_takes(referee: Client) -> None:
    """From the same free nodes, ours need no more leaves than Slurm's, and together fewer."""
    fabric = discover.query_fabric(referee)
    every = {node for leaf in fabric.leaves for node in leaf.nodes}
    leaf_of = {node: leaf.path[-1] for leaf in fabric.leaves for node in leaf.nodes}
    ours, theirs = 0, 0
    busy: set[str] = set()
    for number, share in enumerate((0.3, 0.5, 0.7)):
        more = set(random.Random(number).sample(sorted(every - busy), round(share * len(every)) - len(busy)))
        update = ["scontrol", "update", f"nodename={hostlist.fold(more)}", "state=drain", "reason=test"]
        subprocess.run(update, env={**os.environ, **referee.transport.env}, check=True, timeout=20)
        busy |= more
        free = every - busy
        assert taken(referee, len(free)) == free  # both choose from the same
        for k in (12, 48, 64):
            slurms = len({leaf_of[node] for node in taken(referee, k)})
            best = select_nodes(fabric, free, k, objective="leaf")
            assert best.leaves <= slurms
            ours, theirs = ours + best.leaves, theirs + slurms
    assert ours < theirs
