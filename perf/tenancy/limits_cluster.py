"""A slurmctld for `bench_limits`, with GPUs and without slurmds, on the accounting of the development clusters."""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perf.tenancy.limits_data import USERS, Job, Policy

CLUSTER = "limits"
NODES_EACH = 6  # of a partition: enough that only limits hold a job
_ACTIVE_S = 20.0
# Jobs start on nodes that never answer, so they run until they are cancelled, and no process is started.
_CONF = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldSyslogDebug=quiet
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PriorityType=priority/multifactor
PriorityCalcPeriod=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
{enforce}
AccountingStorageTRES=gres/gpu
EnforcePartLimits={part_limits}
JobCompType=jobcomp/none
GresTypes=gpu
PrivateData=cloud
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=60000
ResumeTimeout=60000
TreeWidth=65533
NodeName=c[001-{nodes:03d}] CPUs=64 Sockets=2 CoresPerSocket=32 RealMemory=512000 Gres=gpu:8 State=CLOUD
"""


class LimitsCluster:
    """A running slurmctld. partitions: names; each has nodes of its own."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self.conf = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf), "COLUMNS": "1000"}
        self.partitions = [f"p{number:02d}" for number in range(partitions)]

    def run(self, *argv: str, stdin: str = "") -> str:
        """Run a Slurm command and return its output, whatever its exit code."""
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, env=self.env, check=False)
        return done.stdout + done.stderr

    def apply(self, policies: Sequence[Policy]) -> None:
        """Create the QOS, accounts and users of policies, and set their partitions. Raises RuntimeError."""
        # In two processes: sacctmgr reads the names of the QOS once, at its start.
        for lines in ([line for p in policies for line in p.qos], [line for p in policies for line in p.accounts]):
            output = self.run("sacctmgr", "-i", "-Q", stdin="\n".join(lines) + "\n")
            if "rror" in output or "roblem" in output:
                raise RuntimeError(output)
        for policy in policies:
            for setting in policy.settings:  # one by one: another's refusal must not undo it
                self.run("scontrol", "update", f"partition={policy.partition}", setting)

    def submit(self, job: Job) -> tuple[str, str]:
        """Submit a job as its user; return its id and sbatch's stderr."""
        done = subprocess.run(
            ["sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *job.flags(), "--wrap=sleep 9999"],
            user=pwd.getpwnam(job.user).pw_uid,
            capture_output=True,
            text=True,
            env=self.env,
            check=False,
        )
        return done.stdout.strip(), done.stderr.strip()

    def outcomes(self) -> dict[str, list[tuple[str, str]]]:
        """Return array or job id → state and reason of each task in the queue."""
        found: dict[str, list[tuple[str, str]]] = {}
        for line in self.run("squeue", "-h", "-a", "-r", "-o", "%F|%T|%r").splitlines():
            job_id, state, reason = line.split("|", 2)
            found.setdefault(job_id, []).append((state, reason))
        return found


@contextmanager
def limits_cluster(
    folder: Path, accounting_port: str, partitions: int, enforce: str, part_limits: str
) -> Iterator[LimitsCluster]:
    """Start a slurmctld with its cluster in accounting; end it and remove its accounts and QOS at the end."""
    folder.chmod(0o755)  # users submit, too
    (folder / "state").mkdir()
    (folder / "gres.conf").touch()
    cluster = LimitsCluster(folder, partitions)
    text = _CONF.format(
        cluster=CLUSTER,
        host=socket.gethostname(),
        port=_free_port(),
        slurmd_port=_free_port(),
        user=pwd.getpwuid(os.geteuid()).pw_name,
        folder=folder,
        accounting_port=accounting_port,
        enforce=f"AccountingStorageEnforce={enforce}" if enforce else "",
        part_limits=part_limits,
        nodes=NODES_EACH * partitions,
    )
    for number, name in enumerate(cluster.partitions):
        first = number * NODES_EACH + 1
        nodes = f"c[{first:03d}-{first + NODES_EACH - 1:03d}]"
        text += f"PartitionName={name} Nodes={nodes} MaxTime=7-00:00:00 DefaultTime=1:00:00 State=UP\n"
    cluster.conf.write_text(text)
    cluster.run("sacctmgr", "-i", "-Q", "add", "cluster", CLUSTER)
    log = (folder / "start.log").open("w")
    process = subprocess.Popen(["slurmctld", "-D", "-f", str(cluster.conf)], stdout=log, stderr=log)
    try:
        _wait_until_up(cluster, process)
        yield cluster
    finally:
        names = _names(cluster)
        for user in USERS:
            cluster.run("scancel", f"--user={user}")
        time.sleep(5)  # sacctmgr removes no account with running jobs
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
        _remove(cluster, names)


def _wait_until_up(cluster: LimitsCluster, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _ACTIVE_S
    while "is UP" not in cluster.run("scontrol", "ping"):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"slurmctld does not start: see {cluster.conf.parent}/slurmctld.log")
        time.sleep(0.2)


def _names(cluster: LimitsCluster) -> tuple[list[str], list[str]]:
    """Return this cluster's accounts, and its policies' QOS."""
    accounts = cluster.run("sacctmgr", "-n", "-P", "show", "assoc", f"cluster={CLUSTER}", "format=account").split()
    qos = cluster.run("sacctmgr", "-n", "-P", "show", "qos", "format=name").split()
    return sorted({*accounts} - {"root"}), [name for name in qos if re.fullmatch(r"lim\d+q[abp]", name)]


def _remove(cluster: LimitsCluster, names: tuple[Iterable[str], Iterable[str]]) -> None:
    # The cluster first: accounts with jobs that have not ended in accounting are not removed.
    cluster.run("sacctmgr", "-i", "-Q", "delete", "cluster", CLUSTER)
    for kind, listed in zip(("account", "qos"), names, strict=True):
        cluster.run("sacctmgr", "-i", "-Q", "delete", kind, f"name={','.join(listed)}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
