"""The tables of facts about a node: their keys with units, what identifies a row, and what must be named to be read.

Checks name tables and keys; a name that is not here is an error in their file. Collectors in `gather/` fill the tables.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

KeyType = Literal["text", "number", "boolean"]


class Key(NamedTuple):
    """A key of a table. values: all that a text can be; () where they are not known.

    form, example: a regular expression for all values of a text, and one of these.
    """

    type: KeyType
    meaning: str
    values: tuple[str, ...] = ()
    form: str = "(?s:.*)"
    example: str = ""


class Table(NamedTuple):
    """A table of facts.

    subject: the key that identifies a row among the others of its table; "" for a table of one row. named: the key of
    which a check must name the values that are to be read, as the paths of files; "" if all rows are read.
    """

    keys: dict[str, Key]
    subject: str = ""
    named: str = ""


def _table(subject: str = "", named: str = "", /, **keys: Key) -> Table:
    return Table(keys, subject, named)


def _number(meaning: str) -> Key:
    return Key("number", meaning)


def _boolean(meaning: str) -> Key:
    return Key("boolean", meaning)


def _text(meaning: str, values: str = "", *, form: str = "(?s:.*)", example: str = "") -> Key:
    one_of = tuple(values.split())
    return Key("text", "; ".join(filter(None, (", ".join(one_of), meaning))), one_of, form, example)


_LOWER, _PCI, _NAME = "[^A-Z]*", r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", r"[^*?\[]+"
_COMMAND, _ENDPOINT = "(?s:.{0,1024})", r"tcp://\S+:\d+|ping://\S+"
_PHYSICAL = "LinkUp|Polling|Disabled|Sleep|PortConfigurationTraining|LinkErrorRecovery|Phy Test|<unknown>"
_KINDS = "xid sxid mce edac nvme disk filesystem nfs lustre oom link hang thermal gpu"
_RECOVERY_ACTIONS = "none gpu-reset node-reboot drain-p2p drain-and-reset recover-imex-domain bus-reset system-reboot"
_UNIT_STATES = "active inactive failed activating deactivating reloading maintenance missing"

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
    "system": _table(
        kernel=_text("release, as `uname -r` prints it"),
        os=_text("ID and VERSION_ID of /etc/os-release: `debian 12`"),
        uptime_s=_number("seconds since boot"),
        load_1m=_number("load average of one minute"),
        load_5m=_number("load average of five minutes"),
        load_15m=_number("load average of 15 minutes"),
        cpus=_number("logical CPUs online"),
        cpus_present=_number("logical CPUs that are there, online or not"),
        cores=_number("physical cores online"),
        sockets=_number("processor packages"),
        numa_nodes=_number("NUMA nodes with memory"),
        memory_bytes=_number("total memory"),
        memory_available_bytes=_number("memory that can be had without swapping"),
        memory_free_bytes=_number("MemFree, Buffers and Cached of /proc/meminfo together, as NHC counts"),
        memory_used_share=_number("share of the memory that is not available, 0 to 1"),
        swap_bytes=_number("total swap"),
        swap_free_bytes=_number("free swap"),
        largest_free_block_bytes=_number("largest free block of contiguous memory in any zone of type Normal"),
        clocksource=_text("of the kernel: tsc, kvm-clock, hpet, ...", form=_LOWER, example="tsc"),
        clock_is_synchronized=_boolean("whether the kernel's clock is disciplined by NTP or PTP"),
        clock_error_s=_number("the largest error of the kernel's clock, by the kernel; 16 if it is unknown"),
    ),
    "processes": _table(
        "pid",
        pid=_number("process id"),
        name=_text("name of the program, its first 15 bytes; of a kernel thread all"),
        command=_text("command line; `[name]` if it has none", form=_COMMAND, example="at most 1024 characters"),
        user=_text("owner; the uid where it has no name"),
        uid=_number("owner's uid"),
        state=_text("Z is a zombie, which has ended, D waits for a disk or a server", "R S D Z T t X I P"),
        is_kernel=_boolean("a kernel thread; those of one CPU, as kworker/3:1, are left out"),
        is_blocked=_boolean("in state D for 5 s, without running in between, and not for a child of vfork(2)"),
        age_s=_number("seconds since its start"),
        cpu_s=_number("CPU seconds used"),
        cpu_share=_number("CPU seconds by second of its age: 1 is one CPU"),
        memory_bytes=_number("resident memory"),
        memory_share=_number("resident memory as share of the node's"),
        parent=_text("name of the parent process"),
        job_id=_text("Slurm job that it belongs to, by its cgroup or the step it descends from; empty for none"),
        responds=_boolean("its command line can be read within the time-out"),
    ),
    "mounts": _table(
        "target",
        target=_text("mount point"),
        device=_text("device or server:path"),
        type=_text("file system: ext4, nfs4, lustre, ..."),
        options=_text("mount options, separated by commas"),
        is_read_only=_boolean("mounted read-only"),
        is_forced_read_only=_boolean("mounted to be written; the kernel has made it read-only since, after an error"),
        responds=_boolean("answers within the time-out and without an error; another one has no further values"),
        size_bytes=_number("size"),
        free_bytes=_number("free for ordinary users"),
        used_bytes=_number("used"),
        used_share=_number("used share of the size, 0 to 1, as `df` has it"),
        root_used_share=_number("the same for root, who may also use the blocks that are kept for it"),
        inodes=_number("number of inodes; 0 where they are made as needed"),
        inodes_free=_number("free inodes"),
        inodes_used_share=_number("used share of the inodes, 0 to 1"),
    ),
    "block_devices": _table(
        "device",
        device=_text("name: nvme0n1, sda"),
        model=_text("model"),
        serial=_text("serial number"),
        size_bytes=_number("size"),
        is_rotational=_boolean("a spinning disk"),
        is_read_only=_boolean("refuses writes"),
        state=_text("of the controller: live, running, offline, ...", form=_LOWER, example="live"),
        smart_passed=_boolean("overall health by SMART"),
        temperature_c=_number("temperature, °C"),
        media_errors=_number("unrecovered media errors, or reallocated and pending sectors, in the device's life"),
        wear_share=_number("used share of the rated endurance; above 1 beyond it"),
        spare_share=_number("spare blocks that are left, 0 to 1"),
        critical_warning=_number("NVMe's bit field; 0 is none"),
        power_on_h=_number("hours under power"),
        responds=_boolean("answers within the time-out"),
    ),
    "raid_arrays": _table(
        "device",
        device=_text("name: md0"),
        level=_text("raid0, raid1, ...", form=_LOWER, example="raid1"),
        state=_text("degraded, or else the kernel's: active, inactive, broken, ...", form=_LOWER, example="clean"),
        disks=_number("disks that it should have"),
        disks_active=_number("disks that work"),
    ),
    "interfaces": _table(
        "interface",
        interface=_text("name: eth0, ib0"),
        kind=_text("virtual is without hardware, as a bridge", "ethernet infiniband loopback virtual"),
        state=_text("", "up down unknown dormant testing lowerlayerdown notpresent"),
        has_carrier=_boolean("carrier"),
        speed_mbps=_number("speed in Mbit/s"),
        mtu=_number("MTU in bytes"),
        driver=_text("kernel driver"),
        is_virtual=_boolean("no hardware of its own, as a bridge, or an SR-IOV virtual function"),
        has_default_route=_boolean("a default route goes through it: it may be for management"),
        carrier_changes=_number("changes of the carrier since boot"),
        rx_errors=_number("receive errors since boot"),
        tx_errors=_number("transmit errors since boot"),
        rx_dropped=_number("packets dropped at reception since boot"),
        rx_crc_errors=_number("frames with a wrong check sum since boot"),
    ),
    "rdma_ports": _table(
        "port",
        port=_text("device/port: mlx5_0/1, efa_0/1"),
        device=_text("device: mlx5_0"),
        kind=_text("", "infiniband roce iwarp efa"),
        state=_text("of efa always ACTIVE", "ACTIVE ACTIVE_DEFER ARMED INIT DOWN NOP"),
        physical_state=_text("LinkUp, Polling, Disabled, ...", form=_PHYSICAL, example="LinkUp"),
        rate_gbps=_number("rate in Gbit/s"),
        firmware=_text("firmware version"),
        board=_text("board id"),
        guid=_text("GUID of the device, which no other has"),
        driver=_text("kernel driver"),
        interface=_text("network interface of the port; empty if it has none"),
        has_default_route=_boolean("a default route goes through its interface: it may be for management"),
        numa_node=_number("NUMA node of the device; -1 for none"),
        is_virtual=_boolean("an SR-IOV virtual function"),
        **{key: _number(f"{file}, counted since the device was reset") for key, file in RDMA_COUNTERS.items()},
    ),
    "gpus": _table(
        "index",
        index=_number("index of the driver; after those, GPUs of the PCI bus that it has not"),
        responds=_boolean("the driver reaches it; None if this process may not use it"),
        is_lost=_boolean(
            "NVML says that it is lost or needs a reset, or it fell off the PCI bus; unknown in other cases"
        ),
        error=_text("why it does not respond; empty if it does"),
        uuid=_text("UUID"),
        serial=_text("serial number"),
        pci=_text("PCI address with domain, lower case: 0000:b5:00.0", form=_PCI, example="0000:b5:00.0"),
        model=_text("product name"),
        vendor=_text("", "nvidia amd google"),
        driver=_text("version of the driver"),
        vbios=_text("version of the VBIOS"),
        is_persistent=_boolean("persistence mode"),
        memory_bytes=_number("memory"),
        memory_used_bytes=_number("used memory"),
        processes=_number("compute processes"),
        temperature_c=_number("temperature of the core, °C"),
        memory_temperature_c=_number("temperature of the memory, °C"),
        power_w=_number("power draw, W"),
        power_limit_w=_number("enforced power limit, W"),
        sm_clock_mhz=_number("current SM clock, MHz"),
        max_sm_clock_mhz=_number("highest SM clock, MHz"),
        app_sm_clock_mhz=_number("application clock of the SM, MHz"),
        app_memory_clock_mhz=_number("application clock of the memory, MHz"),
        slowdowns=_text("active clock event reasons that slow it down, separated by commas: HwSlowdown, ..."),
        ecc_corrected=_number("corrected ECC errors since the driver was loaded"),
        ecc_uncorrected=_number("uncorrected ECC errors since the driver was loaded"),
        ecc_uncorrected_total=_number("uncorrected ECC errors in its life"),
        sram_threshold_exceeded=_boolean("uncorrectable SRAM errors beyond the limit for a replacement"),
        retired_pages=_number("retired pages of memory, of older GPUs"),
        retired_pages_pending=_boolean("pages are retired at the next reset"),
        remapped_rows=_number("rows remapped after uncorrectable errors"),
        remapped_rows_pending=_boolean("rows are remapped at the next reset"),
        remap_failed=_boolean("a row could not be remapped, or a page not be retired"),
        pcie_generation=_number("current PCIe generation; lower where the GPU is idle"),
        max_pcie_generation=_number("highest PCIe generation of GPU and slot"),
        pcie_width=_number("current PCIe lanes"),
        max_pcie_width=_number("most PCIe lanes of GPU and slot"),
        pcie_replays=_number("PCIe replays since the reset"),
        nvlinks=_number("active NVLinks"),
        nvlink_errors=_number("sum of the NVLinks' error counters since the driver was loaded"),
        fabric_state=_text("registration with the NVLink fabric", "completed failed in-progress not-started"),
        fabric_problems=_text("degraded-bandwidth, route-recovery, route-unhealthy, access-timeout; empty for none"),
        fabric_domain=_text("clusterUuid/cliqueId of the NVLink domain"),
        recovery_action=_text("NVML's recovery action", _RECOVERY_ACTIONS),
        numa_node=_number("NUMA node; -1 for none"),
        mig_mode=_boolean("MIG is enabled"),
    ),
    "kernel_log": _table(
        "event",
        event=_number("number of its last line among the lines of events"),
        kind=_text("", _KINDS),
        state=_text("by kind; ok or up ends it; an xid's is ignorable or `reason 33`", form=_LOWER, example="down"),
        code=_number("number of an xid or sxid; None for other kinds"),
        device=_text("PCI address with domain, disk, interface, server; empty if the line names none"),
        part=_text("of a GPU or switch: link 14, GPC 1 TPC 3; usb of a disk; empty if the line names none"),
        at=_text("time of the last of these lines, RFC 3339; empty if unknown"),
        began=_text("time of the first of these lines"),
        action=_text("recovery action that an xid 154 carries; empty otherwise"),
        is_fatal=_boolean("the line itself says fatal or uncorrected, or its kind is; None if it says neither"),
        job_pid=_number("process that an xid, an OOM kill or a hang names; None if unknown"),
        count=_number("lines alike, each at most 5 s after the one before, that this row stands for"),
        text=_text("the line without its time, its first 300 characters"),
    ),
    "cpus": _table(
        "cpu",
        cpu=_number("number"),
        governor=_text("of cpufreq", form=_LOWER, example="performance"),
        mhz=_number("current frequency, MHz"),
        max_mhz=_number("highest frequency of the hardware, MHz"),
        limit_mhz=_number("highest frequency that is allowed, MHz"),
        throttled=_number("times that its core was throttled by heat, since boot"),
        package_throttled=_number("times that its package was throttled by heat, since boot"),
    ),
    "dimms": _table(
        "dimm",
        dimm=_text("controller and slot: mc0/dimm3; mc0/unknown has errors of no known slot, if there are any"),
        label=_text("label of the slot"),
        size_bytes=_number("size"),
        corrected=_number("corrected errors since boot"),
        uncorrected=_number("uncorrected errors since boot"),
    ),
    "sensors": _table(
        "sensor",
        sensor=_text("chip and label: nvme-0/Composite"),
        value=_number("°C, V, RPM or W, by kind"),
        kind=_text("", "temperature voltage fan power"),
        critical=_number("highest value that the hardware stands"),
        has_alarm=_boolean("an alarm of the chip is on; that of a voltage that the board does not connect always is"),
    ),
    "pci_devices": _table(
        "pci",
        pci=_text("address", form=_PCI, example="0000:b5:00.0"),
        vendor=_text("vendor id: 0x10de", form="0x[0-9a-f]{4}", example="0x10de"),
        device=_text("device id", form="0x[0-9a-f]{4}", example="0x2330"),
        kind=_text("class id: 0x030200", form="0x[0-9a-f]{6}", example="0x030200"),
        driver=_text("kernel driver; empty if none is bound"),
        responds=_boolean("answers on the bus; one that fell off it does not"),
        link_gts=_number("current link speed, GT/s"),
        max_link_gts=_number("highest link speed, GT/s"),
        link_width=_number("current lanes; None if nothing is connected"),
        max_link_width=_number("most lanes"),
        fatal_errors=_number("fatal AER errors since boot"),
        nonfatal_errors=_number("non-fatal AER errors since boot"),
        corrected_errors=_number("corrected AER errors since boot"),
    ),
    "dmi": _table(
        "key",
        key=_text("name, as `bios_version`, `product_name`"),
        value=_text("text"),
    ),
    "modules": _table(
        "module",
        module=_text("name"),
        version=_text("version, if it has one"),
    ),
    "services": _table(
        "service",
        "service",
        service=_text("systemd unit", form=_NAME, example="sssd.service"),
        state=_text("missing is a unit that systemd has not", _UNIT_STATES),
        substate=_text("running, exited, dead, ..."),
        restarts=_number("automatic restarts since boot"),
    ),
    "files": _table(
        "path",
        "path",
        path=_text("path", form=f"/({_NAME})?", example="/scratch"),
        exists=_boolean("exists; a link's target is meant"),
        kind=_text("", "file directory socket pipe device"),
        mode=_text("permissions in octal: 0755", form="[0-7]{4}", example="0644"),
        user=_text("owner"),
        group=_text("group"),
        size_bytes=_number("size"),
        age_s=_number("seconds since the last change"),
        is_mount_point=_boolean("a mount point"),
        is_writable=_boolean("a file can be written in this directory; None for other kinds"),
        text=_text("its first 64 KiB as text"),
        responds=_boolean("answers within the time-out and without an error; another one has no further values"),
    ),
    "commands": _table(
        "command",
        "command",
        command=_text("command line; no shell; ended after 10 s"),
        exit_code=_number("its exit code; None on time-out"),
        output=_text("stdout, its first 64 KiB; None of a program that is not there, or did not end"),
        error_output=_text("stderr, its first 64 KiB"),
        duration_s=_number("seconds"),
    ),
    "packages": _table(
        "package",
        "package",
        package=_text("name", form=_NAME, example="nvidia-driver"),
        version=_text("installed version; empty if it is not"),
    ),
    "accounts": _table(
        "account",
        "account",
        account=_text("user name", form=_NAME, example="svc"),
        exists=_boolean("known to the system"),
        uid=_number("uid"),
        home=_text("home directory"),
        responds=_boolean("the look-up answers within the time-out"),
    ),
    "endpoints": _table(
        "endpoint",
        "endpoint",
        endpoint=_text("tcp://HOST:PORT, or ping://HOST", form=_ENDPOINT, example="tcp://login1:22"),
        responds=_boolean("accepts a connection, or answers a ping"),
        latency_s=_number("seconds to the answer"),
    ),
    "ipmi_events": _table(
        "event",
        event=_number("number in the system event log of the BMC; the newest 200 are read"),
        at=_text("time by the BMC's clock, taken for UTC; None if that was not set"),
        sensor=_text("sensor"),
        text=_text("what happened: `Failure detected | Asserted`"),
    ),
    "slurm": _table(
        is_node=_boolean("false where the controller has no node of this name, as a login node"),
        slurmd_is_running=_boolean("a slurmd of this node runs, as root or this user, and is not stopped"),
        controllers_up=_number("controllers that answer `scontrol ping`"),
        controllers=_number("configured controllers"),
        node_state=_text("base state for the controller", "allocated down error future idle mixed unknown"),
        node_flags=_text("flags of that state: drain,not_responding", form=_LOWER, example="drain"),
        node_reason=_text("reason of its drain"),
    ),
}
