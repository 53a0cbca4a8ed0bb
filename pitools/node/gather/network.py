"""Read the network: interfaces, and the ports of RDMA devices (InfiniBand, RoCE, iWARP, EFA)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pitools.node.gather.platform import require_sysfs
from pitools.node.gather.read import Query, list_names, read_int, read_measure, read_text
from pitools.node.tables import RDMA_COUNTERS
from pitools.node.types import Row, Value

_LOOPBACK = 772  # ARPHRD_LOOPBACK
_KINDS = {1: "ethernet", 32: "infiniband", _LOOPBACK: "loopback"}


def default_route_interfaces(proc: Path) -> set[str]:
    """Return the interfaces that a default route goes through, IPv4 or IPv6."""
    v4 = [line.split() for line in (read_text(proc / "net/route") or "").splitlines()]
    v6 = [line.split() for line in (read_text(proc / "net/ipv6_route") or "").splitlines()]
    zero = "0" * 8
    return {fields[0] for fields in v4 if len(fields) > 7 and fields[1] == fields[7] == zero} | {
        fields[9] for fields in v6 if len(fields) > 9 and fields[0] == zero * 4 and fields[1] == "00"
    } - {"lo"}  # the kernel's own route for what no other route has


def read_interfaces(query: Query) -> Iterator[Row]:
    """Yield the rows of table `interfaces`: all of them."""
    default = default_route_interfaces(query.proc)
    for name in sorted(os.listdir(query.sys / "class/net")):
        folder = f"{query.sys}/class/net/{name}"
        code = read_int(f"{folder}/type")
        if code is None:
            continue  # a file, as bonding_masters
        has_device = os.path.lexists(f"{folder}/device")
        state, speed = read_text(f"{folder}/operstate", limit=64), read_int(f"{folder}/speed")
        carrier = read_int(f"{folder}/carrier")  # EINVAL where the interface is switched off
        yield {
            "interface": name,
            "kind": _KINDS.get(code, f"type {code}") if has_device or code == _LOOPBACK else "virtual",
            "state": state,
            "has_carrier": bool(carrier) if carrier is not None else (False if state == "down" else None),
            "speed_mbps": speed if speed and 0 < speed < (1 << 32) - 1 else None,  # -1 where it is unknown
            "mtu": read_int(f"{folder}/mtu"),
            "driver": link_name(f"{folder}/device/driver"),
            "is_virtual": not has_device or os.path.lexists(f"{folder}/device/physfn"),
            "has_default_route": name in default,
            "carrier_changes": read_int(f"{folder}/carrier_changes"),
            "rx_errors": read_int(f"{folder}/statistics/rx_errors"),
            "tx_errors": read_int(f"{folder}/statistics/tx_errors"),
            "rx_dropped": read_int(f"{folder}/statistics/rx_dropped"),
            "rx_crc_errors": read_int(f"{folder}/statistics/rx_crc_errors"),
        }


def link_name(path: str) -> str:
    """Return the last part of what a link of sysfs names, as a driver; "" if there is none."""
    try:
        return Path(path).readlink().name
    except OSError:
        return ""


def read_rdma_ports(query: Query) -> Iterator[Row]:
    """Yield the rows of table `rdma_ports`: all of them, virtual functions too."""
    default = default_route_interfaces(query.proc)
    root = f"{query.sys}/class/infiniband"
    require_sysfs(query.sys)
    for device in list_names(root):
        folder = f"{root}/{device}"
        driver = link_name(f"{folder}/device/driver")
        of_device: dict[str, Value] = {
            "firmware": read_text(f"{folder}/fw_ver", limit=64),
            "board": read_text(f"{folder}/board_id", limit=64),
            "guid": read_text(f"{folder}/node_guid", limit=64),
            "driver": driver,
            "numa_node": read_int(f"{folder}/device/numa_node"),
            "is_virtual": os.path.lexists(f"{folder}/device/physfn"),
        }
        is_iwarp = _label(f"{folder}/node_type") == "RNIC"
        for port in list_names(f"{folder}/ports"):
            path = f"{folder}/ports/{port}"
            layer = read_text(f"{path}/link_layer", limit=64)
            interface = _interface(folder, path, port)
            yield {
                "port": f"{device}/{port}",
                "device": device,
                "kind": "efa" if driver == "efa" else "iwarp" if is_iwarp else _rdma_kind(layer),
                "state": _label(f"{path}/state"),
                "physical_state": _label(f"{path}/phys_state"),
                "rate_gbps": read_measure(f"{path}/rate"),
                "interface": interface,
                "has_default_route": interface in default,
                **of_device,
                **{key: read_int(f"{path}/{file}") for key, file in RDMA_COUNTERS.items()},
            }


def _rdma_kind(layer: str | None) -> str | None:
    return {"InfiniBand": "infiniband", "Ethernet": "roce"}.get(layer, layer.lower()) if layer else None


def _label(path: str) -> str | None:
    """Return the name of a numbered state: `ACTIVE` of `4: ACTIVE`."""
    text = read_text(path, limit=64)
    return text.rpartition(":")[2].strip() or None if text else None


def _interface(device: str, path: str, port: str) -> str:
    """Return the network interface of a port; "" if it has none."""
    if name := read_text(f"{path}/gid_attrs/ndevs/0", limit=64):
        return name
    names = list_names(f"{device}/device/net")
    # The function of a card with two ports, as mlx4's, has both interfaces; ports count from 1, dev_port from 0.
    numbers = {str((read_int(f"{device}/device/net/{name}/dev_port") or 0) + 1): name for name in names}
    return names[0] if len(names) == 1 else numbers.get(port, "")
