"""The tables of facts about a node: their keys with units, what identifies a row, and what must be named to be read.

Checks name tables and keys; a name that is not here is an error in their file. Collectors in `gather/` fill the tables.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Table(NamedTuple):
    """A table of facts.

    subject: the key that identifies a row among the others of its table; "" for a table of one row. keys: by name, what
    a value is. target: the key whose values must be named by a check to be read, as the path of a file; "" if all rows
    are always read.
    """

    keys: dict[str, str]
    subject: str = ""
    target: str = ""


# Keys of rdma_ports by the kernel's file in the folder of a port; hw_counters are of mlx5 and efa.
RDMA_COUNTERS = {
    "link_downed": "counters/link_downed",
    "link_error_recovery": "counters/link_error_recovery",
    "symbol_errors": "counters/symbol_error",
    "rx_errors": "counters/port_rcv_errors",
    "rx_remote_physical_errors": "counters/port_rcv_remote_physical_errors",
    "tx_discards": "counters/port_xmit_discards",
    "buffer_overruns": "counters/excessive_buffer_overrun_errors",
    "link_integrity_errors": "counters/local_link_integrity_errors",
    "vl15_dropped": "counters/VL15_dropped",
    "rnr_nak_retry_errors": "hw_counters/rnr_nak_retry_err",
    "ack_timeouts": "hw_counters/local_ack_timeout_err",
    "roce_slow_restarts": "hw_counters/roce_slow_restart",
    "rx_dropped": "hw_counters/rx_drops",
    "retransmit_timeouts": "hw_counters/retrans_timeout_events",
    "unresponsive_remotes": "hw_counters/unresponsive_remote_events",
    "impaired_connections": "hw_counters/impaired_remote_conn_events",
}

TABLES: dict[str, Table] = {
    "system": Table(
        {
            "kernel": "release, as `uname -r` prints it",
            "os": "ID and VERSION_ID of /etc/os-release: `debian 12`",
            "uptime_s": "seconds since boot",
            "load_1m": "load average of one minute",
            "load_5m": "load average of five minutes",
            "load_15m": "load average of 15 minutes",
            "cpus": "logical CPUs online",
            "cpus_present": "logical CPUs that are there, online or not",
            "cores": "physical cores online",
            "sockets": "processor packages",
            "numa_nodes": "NUMA nodes with memory",
            "memory_bytes": "total memory",
            "memory_available_bytes": "memory that can be had without swapping",
            "memory_used_share": "share of the memory that is not available, 0 to 1",
            "swap_bytes": "total swap",
            "swap_free_bytes": "free swap",
            "largest_free_block_bytes": "largest free block of contiguous memory in any zone of type Normal",
            "clocksource": "of the kernel: tsc, kvm-clock, hpet, ...",
            "clock_is_synchronized": "whether the kernel's clock is disciplined by NTP or PTP",
            "clock_error_s": "the largest error that the kernel's clock may have, by the kernel; 16 if it is unknown",
        }
    ),
    "processes": Table(
        {
            "pid": "process id",
            "name": "name of the program, its first 15 bytes; of a kernel thread all",
            "command": "command line, its first 1024 characters; `[name]` if it has none, as a kernel thread",
            "user": "owner; the uid where it has no name",
            "uid": "owner's uid",
            "state": "R, S, D, Z (zombie), T, I",
            "is_kernel": "a kernel thread; those of one CPU, as kworker/3:1, are left out",
            "is_blocked": "in uninterruptible sleep (D) for 5 s, without running in between",
            "age_s": "seconds since its start",
            "cpu_s": "CPU seconds used",
            "cpu_share": "CPU seconds by second of its age: 1 is one CPU",
            "memory_bytes": "resident memory",
            "memory_share": "resident memory as share of the node's",
            "parent": "name of the parent process",
            "job_id": "Slurm job that it belongs to, by its cgroup or the step it descends from; empty for none",
            "responds": "its command line can be read within the time-out",
        },
        subject="pid",
    ),
    "mounts": Table(
        {
            "target": "mount point",
            "device": "device or server:path",
            "type": "file system: ext4, nfs4, lustre, ...",
            "options": "mount options, separated by commas",
            "is_read_only": "mounted read-only",
            "responds": "answers within the time-out and without an error; another one has no further values",
            "size_bytes": "size",
            "free_bytes": "free for ordinary users",
            "used_bytes": "used",
            "used_share": "used share of the size, 0 to 1, as `df` has it",
            "root_used_share": "the same for root, who may also use the blocks that are kept for it",
            "inodes": "number of inodes; 0 where they are made as needed",
            "inodes_free": "free inodes",
            "inodes_used_share": "used share of the inodes, 0 to 1",
        },
        subject="target",
    ),
    "block_devices": Table(
        {
            "device": "name: nvme0n1, sda",
            "model": "model",
            "serial": "serial number",
            "size_bytes": "size",
            "is_rotational": "a spinning disk",
            "is_read_only": "refuses writes",
            "state": "of the controller: live, running, offline, ...",
            "smart_passed": "overall health by SMART",
            "temperature_c": "temperature, °C",
            "media_errors": "unrecovered media errors, or reallocated and pending sectors, in the device's life",
            "wear_share": "used share of the rated endurance; above 1 beyond it",
            "spare_share": "spare blocks that are left, 0 to 1",
            "critical_warning": "NVMe's bit field; 0 is none",
            "power_on_h": "hours under power",
            "responds": "answers within the time-out",
        },
        subject="device",
    ),
    "raid_arrays": Table(
        {
            "device": "name: md0",
            "level": "raid0, raid1, ...",
            "state": "degraded, or else as the kernel has it: active, clean, inactive, broken, ...",
            "disks": "disks that it should have",
            "disks_active": "disks that work",
        },
        subject="device",
    ),
    "interfaces": Table(
        {
            "interface": "name: eth0, ib0",
            "kind": "ethernet, infiniband, loopback; virtual: without hardware, as a bridge",
            "state": "operstate: up, down, unknown",
            "has_carrier": "carrier",
            "speed_mbps": "speed in Mbit/s",
            "mtu": "MTU in bytes",
            "driver": "kernel driver",
            "addresses": "IP addresses with prefix length, separated by commas",
            "is_virtual": "no hardware of its own, as a bridge, or an SR-IOV virtual function",
            "has_default_route": "a default route goes through it: it may be for management",
            "carrier_changes": "changes of the carrier since boot",
            "rx_errors": "receive errors since boot",
            "tx_errors": "transmit errors since boot",
            "rx_dropped": "packets dropped at reception since boot",
            "rx_crc_errors": "frames with a wrong check sum since boot",
        },
        subject="interface",
    ),
    "rdma_ports": Table(
        {
            "port": "device/port: mlx5_0/1, efa_0/1",
            "device": "device: mlx5_0",
            "kind": "infiniband, roce, iwarp or efa",
            "state": "ACTIVE, INIT, DOWN, ...; of efa always ACTIVE",
            "physical_state": "LinkUp, Polling, Disabled, ...",
            "rate_gbps": "rate in Gbit/s",
            "firmware": "firmware version",
            "board": "board id",
            "guid": "GUID of the device, which no other has",
            "driver": "kernel driver",
            "interface": "network interface of the port; empty if it has none",
            "has_default_route": "a default route goes through its interface: it may be for management",
            "numa_node": "NUMA node of the device; -1 for none",
            "is_virtual": "an SR-IOV virtual function",
            **{key: f"{file}, counted since the device was reset" for key, file in RDMA_COUNTERS.items()},
        },
        subject="port",
    ),
    "gpus": Table(
        {
            "index": "index of the driver; after those, GPUs of the PCI bus that it has not",
            "responds": "the driver reaches it; None if this process may not use it",
            "error": "why it does not respond; empty if it does",
            "uuid": "UUID",
            "serial": "serial number",
            "pci": "PCI address with domain, lower case: 0000:b5:00.0",
            "model": "product name",
            "vendor": "nvidia, amd, google",
            "driver": "version of the driver",
            "vbios": "version of the VBIOS",
            "is_persistent": "persistence mode",
            "memory_bytes": "memory",
            "memory_used_bytes": "used memory",
            "processes": "compute processes",
            "temperature_c": "temperature of the core, °C",
            "memory_temperature_c": "temperature of the memory, °C",
            "power_w": "power draw, W",
            "power_limit_w": "enforced power limit, W",
            "sm_clock_mhz": "current SM clock, MHz",
            "max_sm_clock_mhz": "highest SM clock, MHz",
            "app_sm_clock_mhz": "application clock of the SM, MHz",
            "app_memory_clock_mhz": "application clock of the memory, MHz",
            "slowdowns": "active clock event reasons that slow it down, separated by commas: HwSlowdown, ...",
            "ecc_corrected": "corrected ECC errors since the driver was loaded",
            "ecc_uncorrected": "uncorrected ECC errors since the driver was loaded",
            "ecc_uncorrected_total": "uncorrected ECC errors in its life",
            "sram_threshold_exceeded": "uncorrectable SRAM errors beyond the limit for a replacement",
            "retired_pages": "retired pages of memory, of older GPUs",
            "retired_pages_pending": "pages are retired at the next reset",
            "remapped_rows": "rows remapped after uncorrectable errors",
            "remapped_rows_pending": "rows are remapped at the next reset",
            "remap_failed": "a row could not be remapped, or a page not be retired",
            "pcie_generation": "current PCIe generation; lower where the GPU is idle",
            "max_pcie_generation": "highest PCIe generation of GPU and slot",
            "pcie_width": "current PCIe lanes",
            "max_pcie_width": "most PCIe lanes of GPU and slot",
            "pcie_replays": "PCIe replays since the reset",
            "nvlinks": "active NVLinks",
            "nvlink_errors": "sum of the NVLinks' error counters since the driver was loaded",
            "fabric_state": "registration with the NVLink fabric: completed, failed, in-progress, not-started",
            "fabric_problems": "degraded-bandwidth, route-recovery, route-unhealthy, access-timeout; empty for none",
            "fabric_domain": "clusterUuid/cliqueId of the NVLink domain",
            "recovery_action": "NVML's recovery action: none, gpu-reset, node-reboot, drain-p2p, drain-and-reset, ...",
            "numa_node": "NUMA node; -1 for none",
            "mig_mode": "MIG is enabled",
        },
        subject="index",
    ),
    "kernel_log": Table(
        {
            "event": "number of its last line among the lines of events",
            "kind": "xid, sxid, mce, edac, nvme, disk, filesystem, nfs, lustre, oom, link, hang, thermal, gpu",
            "state": "by kind: timeout, down, ...; ok or up ends it; of an xid ignorable, or a link down's `reason 33`",
            "code": "number of an xid or sxid; None for other kinds",
            "device": "PCI address with domain, disk, interface, server; empty if the line names none",
            "part": "of a GPU or switch: link 14, NETIR_LINK_EVT link 9, GPC 1 TPC 3; empty if the line names none",
            "at": "time of the last of these lines, RFC 3339; empty if unknown",
            "began": "time of the first of these lines",
            "action": "recovery action that an xid 154 carries; empty otherwise",
            "is_fatal": "the line itself says fatal or uncorrected, or its kind is; None if it says neither",
            "job_pid": "process that an xid, an OOM kill or a hang names; None if unknown",
            "count": "lines alike, each at most 5 s after the one before, that this row stands for",
            "text": "the line without its time, its first 300 characters",
        },
        subject="event",
    ),
    "cpus": Table(
        {
            "cpu": "number",
            "governor": "of cpufreq",
            "mhz": "current frequency, MHz",
            "max_mhz": "highest frequency of the hardware, MHz",
            "limit_mhz": "highest frequency that is allowed, MHz",
            "throttled": "times that its core was throttled by heat, since boot",
            "package_throttled": "times that its package was throttled by heat, since boot",
        },
        subject="cpu",
    ),
    "dimms": Table(
        {
            "dimm": "controller and slot: mc0/dimm3; mc0/unknown has errors of no known slot, if there are any",
            "label": "label of the slot",
            "size_bytes": "size",
            "corrected": "corrected errors since boot",
            "uncorrected": "uncorrected errors since boot",
        },
        subject="dimm",
    ),
    "sensors": Table(
        {
            "sensor": "chip and label: nvme-0/Composite",
            "value": "°C, V, RPM or W, by kind",
            "kind": "temperature, voltage, fan or power",
            "critical": "highest value that the hardware stands",
            "has_alarm": "one of the chip's own alarms is on; some boards leave voltages unconnected that always are",
        },
        subject="sensor",
    ),
    "pci_devices": Table(
        {
            "pci": "address",
            "vendor": "vendor id: 0x10de",
            "device": "device id",
            "kind": "class id: 0x030200",
            "driver": "kernel driver; empty if none is bound",
            "responds": "answers on the bus; one that fell off it does not",
            "link_gts": "current link speed, GT/s",
            "max_link_gts": "highest link speed, GT/s",
            "link_width": "current lanes; None if nothing is connected",
            "max_link_width": "most lanes",
            "fatal_errors": "fatal AER errors since boot",
            "nonfatal_errors": "non-fatal AER errors since boot",
            "corrected_errors": "corrected AER errors since boot",
        },
        subject="pci",
    ),
    "dmi": Table({"key": "name, as `bios_version`, `product_name`", "value": "text"}, subject="key"),
    "modules": Table({"module": "name", "version": "version, if it has one"}, subject="module"),
    "services": Table(
        {
            "service": "systemd unit",
            "state": "active, inactive, failed, activating, missing",
            "substate": "running, exited, dead, ...",
            "restarts": "automatic restarts since boot",
        },
        subject="service",
        target="service",
    ),
    "files": Table(
        {
            "path": "path",
            "exists": "exists; a link's target is meant",
            "kind": "file, folder, socket, pipe, device",
            "mode": "permissions in octal: 0755",
            "user": "owner",
            "group": "group",
            "size_bytes": "size",
            "age_s": "seconds since the last change",
            "is_mount_point": "a mount point",
            "is_writable": "a file can be written in this folder; None for other kinds",
            "text": "its first 64 KiB as text",
            "responds": "answers within the time-out and without an error; another one has no further values",
        },
        subject="path",
        target="path",
    ),
    "commands": Table(
        {
            "command": "command line; no shell; ended after 10 s",
            "exit_code": "its exit code; None on time-out",
            "output": "stdout and stderr, their first 64 KiB; None of a program that is not there",
            "duration_s": "seconds",
        },
        subject="command",
        target="command",
    ),
    "packages": Table(
        {"package": "name", "version": "installed version; empty if it is not"}, subject="package", target="package"
    ),
    "accounts": Table(
        {
            "account": "user name",
            "exists": "known to the system",
            "uid": "uid",
            "home": "home folder",
            "responds": "the look-up answers within the time-out",
        },
        subject="account",
        target="account",
    ),
    "endpoints": Table(
        {
            "endpoint": "tcp://HOST:PORT, or ping://HOST",
            "responds": "accepts a connection, or answers a ping",
            "latency_s": "seconds to the answer",
        },
        subject="endpoint",
        target="endpoint",
    ),
    "ipmi_events": Table(
        {
            "event": "number in the system event log of the BMC; the newest 200 are read",
            "at": "time by the BMC's clock, taken for UTC; None if that was not set",
            "sensor": "sensor",
            "text": "what happened: `Failure detected | Asserted`",
        },
        subject="event",
    ),
    "slurm": Table(
        {
            "is_node": "false where the controller has no node of this name, as a login node",
            "slurmd_is_running": "a slurmd of this node runs, as root or this user, and is not stopped",
            "controllers_up": "controllers that answer `scontrol ping`",
            "controllers": "configured controllers",
            "node_state": "base state of this node for the controller: idle, mixed, allocated, down, ...",
            "node_flags": "flags of that state, separated by commas: drain, not_responding, ...",
            "node_reason": "reason of its drain",
        }
    ),
}

KeyType = Literal["text", "number", "boolean"]

_KEYS_BY_TYPE: dict[KeyType, str] = {
    "boolean": "responds exists smart_passed clock_is_synchronized slurmd_is_running sram_threshold_exceeded"
    " retired_pages_pending remapped_rows_pending remap_failed mig_mode",
    "text": "account action addresses at began board clocksource command device dimm dmi.value driver endpoint error"
    " fabric_domain fabric_problems fabric_state firmware governor group guid home interface job_id kernel key kind"
    " label level mode model module name node_flags node_reason node_state options os output package parent part path"
    " pci physical_state port recovery_action sensor serial service slowdowns state substate target text"
    " type user uuid vbios vendor version",
}
_TYPES = {key: name for name, keys in _KEYS_BY_TYPE.items() for key in keys.split()}
_VALUES = {
    "files.kind": "file folder socket pipe device",
    "gpus.fabric_state": "completed failed in-progress not-started",
    "gpus.recovery_action": "none gpu-reset node-reboot drain-p2p drain-and-reset recover-imex-domain bus-reset"
    " system-reboot",
    "gpus.vendor": "nvidia amd google",
    "interfaces.kind": "ethernet infiniband loopback virtual",
    "interfaces.state": "up down unknown dormant testing lowerlayerdown notpresent",
    "kernel_log.kind": "xid sxid mce edac nvme disk filesystem nfs lustre oom link hang thermal gpu",
    "processes.state": "R S D Z T t X I P",
    "rdma_ports.kind": "infiniband roce iwarp efa",
    "rdma_ports.state": "ACTIVE ACTIVE_DEFER ARMED INIT DOWN NOP",
    "sensors.kind": "temperature voltage fan power",
    "slurm.node_state": "allocated down error future idle mixed unknown",
    "services.state": "active inactive failed activating deactivating reloading maintenance missing",
}
_LOWER, _PCI, _NAME = "[^A-Z]*", r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", r"[^*?\[]+"
_FORMATS = {
    "accounts.account": (_NAME, "svc"),
    "block_devices.state": (_LOWER, "live"),
    "cpus.governor": (_LOWER, "performance"),
    "endpoints.endpoint": (r"tcp://\S+:\d+|ping://\S+", "tcp://login1:22"),
    "files.mode": ("[0-7]{4}", "0644"),
    "files.path": (f"/({_NAME})?", "/scratch"),
    "gpus.pci": (_PCI, "0000:b5:00.0"),
    "kernel_log.state": (_LOWER, "down"),
    "packages.package": (_NAME, "nvidia-driver"),
    "pci_devices.device": ("0x[0-9a-f]{4}", "0x2330"),
    "pci_devices.kind": ("0x[0-9a-f]{6}", "0x030200"),
    "pci_devices.pci": (_PCI, "0000:b5:00.0"),
    "pci_devices.vendor": ("0x[0-9a-f]{4}", "0x10de"),
    "processes.command": ("(?s:.{0,1024})", "at most 1024 characters"),
    "raid_arrays.level": (_LOWER, "raid1"),
    "raid_arrays.state": (_LOWER, "clean"),
    "rdma_ports.physical_state": (
        "LinkUp|Polling|Disabled|Sleep|PortConfigurationTraining|LinkErrorRecovery|Phy Test|<unknown>",
        "LinkUp",
    ),
    "services.service": (_NAME, "sssd.service"),
    "slurm.node_flags": (_LOWER, "drain"),
    "system.clocksource": (_LOWER, "tsc"),
}


def key_type(table: str, key: str) -> KeyType:
    """Return the type of a key's values."""
    if key.startswith(("is_", "has_")):
        return "boolean"
    return _TYPES.get(key) or _TYPES.get(f"{table}.{key}", "number")


def key_values(table: str, key: str) -> list[str]:
    """Return all values that a key of text can have; none where they are not known."""
    return _VALUES.get(f"{table}.{key}", "").split()


def key_format(table: str, key: str) -> tuple[str, str]:
    """Return a regular expression for all values that a key of text can have, and one of these."""
    return _FORMATS.get(f"{table}.{key}", ("(?s:.*)", ""))
