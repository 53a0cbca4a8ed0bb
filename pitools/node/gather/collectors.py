"""All collectors of this node's facts, in the order in which they are read: what may take long comes last."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pitools.node.gather import (
    disks,
    files,
    gpus,
    kernel_log,
    mounts,
    named,
    network,
    platform,
    processes,
    slurmd,
    system,
)
from pitools.node.gather.child import Collector, read_tables
from pitools.node.gather.read import Query
from pitools.node.types import NodeFacts

COLLECTORS: tuple[Collector, ...] = (
    Collector("system", "/proc, /sys", system.read_system),
    Collector("cpus", "/sys/devices/system/cpu", platform.read_cpus),
    Collector("dimms", "/sys/devices/system/edac", platform.read_dimms),
    Collector("pci_devices", "/sys/bus/pci", platform.read_pci_devices),
    Collector("dmi", "/sys/class/dmi", platform.read_dmi),
    Collector("modules", "/proc/modules", platform.read_modules),
    Collector("interfaces", "/sys/class/net", network.read_interfaces),
    Collector("rdma_ports", "/sys/class/infiniband", network.read_rdma_ports),
    Collector("sensors", "/sys/class/hwmon", platform.read_sensors),
    Collector("gpus", "NVML, amdgpu, /dev/accel*, /dev/vfio", gpus.read_gpus, gpus.GPU_TIMEOUT_S),
    Collector("kernel_log", "/dev/kmsg or journalctl -k", kernel_log.read_kernel_log, 2 * kernel_log.COMMAND_TIMEOUT_S),
    Collector("mounts", "/proc/self/mountinfo, statvfs(2)", mounts.read_mounts),
    Collector("raid_arrays", "/sys/block", disks.read_raid_arrays),
    Collector("block_devices", "/sys/block, smartctl", disks.read_block_devices, 2 * disks.SMART_TIMEOUT_S),
    Collector("files", "stat(2)", files.read_files),
    Collector("accounts", "getpwnam(3)", named.read_accounts),
    Collector("packages", "dpkg-query or rpm", named.read_packages, 2 * named.COMMAND_TIMEOUT_S),
    Collector("services", "systemctl show", named.read_services, 2 * named.COMMAND_TIMEOUT_S),
    Collector("endpoints", "connect(2), ping", named.read_endpoints),
    Collector("slurm", "/proc, scontrol", slurmd.read_slurm, slurmd.SLURM_TIMEOUT_S),
    Collector("ipmi_events", "ipmitool", platform.read_ipmi_events, 2 * platform.IPMI_TIMEOUT_S),
    Collector("processes", "/proc", processes.read_processes),
    Collector("commands", "the command", named.read_commands, 2 * named.COMMAND_TIMEOUT_S),
)


def read_facts(
    tables: Collection[str], query: Query, names: Mapping[str, Collection[str]] = {}, *, timeout_s: float = 50.0
) -> NodeFacts:
    """Return the facts of these tables alone; arguments as in `read_tables`."""
    chosen = [collector for collector in COLLECTORS if collector.table in tables]
    return read_tables(chosen, query, names, timeout_s=timeout_s)
