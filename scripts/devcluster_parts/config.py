"""The text of slurm.conf, topology.conf and slurmdbd.conf: pure functions of the layout and the host."""

from __future__ import annotations

from dataclasses import dataclass

from devcluster_parts.layout import Cluster, Layout

LOOPBACK = "127.0.0.1"

CPUS_PER_NODE = 4
CLOUD_CPUS = 64
MEMORY_MIB = 16_000


@dataclass(frozen=True, kw_only=True)
class Host:
    """This machine, whose name resolves to LOOPBACK, and the user who starts the daemons."""

    name: str
    user: str


def slurm_conf(layout: Layout, cluster: Cluster, host: Host, cloud_nodes: str = "") -> str:
    """The slurm.conf of one cluster; `cloud_nodes` is the folded list of a controller-only cluster."""
    parts = [
        _identity(cluster, host, layout.settings.requeue_delay_s),
        _files(layout, cluster),
        _timing(),
        _scheduling(),
        _accounting(layout),
        _cloud_nodes(cloud_nodes) if cloud_nodes else _nodes(cluster, host),
        _partitions(),
    ]
    return "\n".join(parts)


def _identity(cluster: Cluster, host: Host, requeue_delay_s: int) -> str:
    # There is no authentication, so every daemon binds to the loopback address alone (No...InAddrAny).
    # A requeued job is held until its old credential has expired.
    return f"""\
# Written by scripts/devcluster; `devcluster up` writes it again.
ClusterName={cluster.name}
SlurmctldHost={host.name}({LOOPBACK})
SlurmctldPort={cluster.controller_port}
SlurmUser={host.user}
SlurmdUser={host.user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire={requeue_delay_s}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
"""


def _files(layout: Layout, cluster: Cluster) -> str:
    return f"""\
StateSaveLocation={cluster.folder}/state
SlurmdSpoolDir={cluster.folder}/spool/%n
SlurmctldPidFile={cluster.folder}/slurmctld.pid
SlurmdPidFile={cluster.folder}/spool/%n.pid
SlurmctldLogFile={layout.logs}/{cluster.name}-slurmctld.log
SlurmdLogFile={layout.logs}/slurmd-%n.log
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
SlurmctldDebug=info
SlurmdDebug=info
"""


def _timing() -> str:
    # Short, so that tests see faults soon; long enough that a busy machine is not taken for a dead node.
    return """\
SlurmdTimeout=15
SlurmctldTimeout=30
MessageTimeout=20
BatchStartTimeout=60
KillWait=5
ReturnToService=2
InactiveLimit=0
JobRequeue=1
"""


def _scheduling() -> str:
    return """\
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
PreemptType=preempt/qos
PreemptMode=REQUEUE
PriorityType=priority/multifactor
PriorityWeightQOS=100000
PriorityWeightAge=1000
"""


def _accounting(layout: Layout) -> str:
    # No node has a GPU; a test of accounting writes them into the rows of jobs.
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={LOOPBACK}
AccountingStoragePort={layout.accounting_port}
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment
AccountingStorageTRES=gres/gpu
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobCompType=jobcomp/none
"""


def _nodes(cluster: Cluster, host: Host) -> str:
    # config_overrides: the CPUs and memory written here count, not those that slurmd reports of the machine.
    lines = ["SlurmdParameters=config_overrides"]
    shape = f"CPUs={CPUS_PER_NODE} Sockets=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory={MEMORY_MIB}"
    lines += [
        f"NodeName={node} NodeHostname={host.name} NodeAddr={LOOPBACK} Port={cluster.node_port(node)} {shape}"
        for node in cluster.nodes
    ]
    return "\n".join(lines) + "\n"


def _cloud_nodes(folded: str) -> str:
    # PrivateData=cloud shows powered-down cloud nodes. Slurm requires the programs, and never runs them here.
    return f"""\
PrivateData=cloud
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=600
ResumeTimeout=600
TreeWidth=65533
NodeName={folded} CPUs={CLOUD_CPUS} Sockets=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=512000 State=CLOUD
"""


def _partitions() -> str:
    return """\
PartitionName=train Nodes=ALL Default=YES MaxTime=7-00:00:00 DefaultTime=1-00:00:00 State=UP
PartitionName=dev Nodes=ALL MaxTime=4:00:00 DefaultTime=1:00:00 State=UP
"""


def topology_conf(cluster: Cluster) -> str:
    """Leaf switches leaf1, leaf2 … under one spine."""
    leaves = [f"SwitchName=leaf{i} Nodes={','.join(leaf)}" for i, leaf in enumerate(cluster.leaves, 1)]
    spine = f"SwitchName=spine Switches={','.join(f'leaf{i}' for i in range(1, len(cluster.leaves) + 1))}"
    return "\n".join([*leaves, spine]) + "\n"


def slurmdbd_conf(layout: Layout, host: Host) -> str:
    """The slurmdbd.conf; Slurm wants it readable by its user alone."""
    return f"""\
# Written by scripts/devcluster; `devcluster up` writes it again.
AuthType=auth/none
DbdHost={host.name}
DbdAddr={LOOPBACK}
DbdPort={layout.accounting_port}
SlurmUser={host.user}
CommunicationParameters=NoInAddrAny
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={host.user}
StorageLoc=slurm_accounting
LogFile={layout.logs}/slurmdbd.log
PidFile={layout.accounting}/slurmdbd.pid
DebugLevel=info
DebugLevelSyslog=quiet
"""
