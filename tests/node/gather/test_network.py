"""Interfaces and RDMA ports: facts as the fixtures of node_exporter (mlx4, i40iw) and gpud (an H100 node) have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.node.gather import network
from pitools.node.gather.read import Query
from pitools.node.types import Row
from tests.node.gather.conftest import Check, Write

IB = "class/infiniband"


def port(device: str, **files: str) -> dict[str, str]:
    """Return the files of port 1 of an RDMA device; `__` stands for `/`."""
    state = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
    return {f"{IB}/{device}/ports/1/{name.replace('__', '/')}": text for name, text in (state | files).items()}


def test_ports_of_an_h100_node(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """An InfiniBand port with its counters; a RoCE bond for management, with its interface; a virtual function."""
    write_tree(
        tmp_path / "sys",
        port(
            "mlx5_0",
            counters__link_downed="1",
            counters__symbol_error="0",
            counters__port_rcv_errors="17",
            counters__port_rcv_remote_physical_errors="2",
            counters__port_xmit_discards="5",
            counters__excessive_buffer_overrun_errors="3",
            counters__local_link_integrity_errors="4",
            counters__link_error_recovery="6",
            counters__VL15_dropped="7",
            hw_counters__rnr_nak_retry_err="8",
            hw_counters__local_ack_timeout_err="9",
            hw_counters__roce_slow_restart="10",
        )
        | {
            f"{IB}/mlx5_0/fw_ver": "28.41.1000",
            f"{IB}/mlx5_0/board_id": "MT_0000000838",
            f"{IB}/mlx5_0/node_type": "1: CA",
            f"{IB}/mlx5_0/node_guid": "a088:c203:0096:3b4e",
            f"{IB}/mlx5_0/device": "->../../../devices/pci0000:15/0000:18:00.0",
            "devices/pci0000:15/0000:18:00.0/numa_node": "0",
            "devices/pci0000:15/0000:18:00.0/net/ibp24s0/dev_port": "0",
            "devices/pci0000:15/0000:18:00.0/driver": "->../../../bus/pci/drivers/mlx5_core",
        }
        | port("mlx5_bond_0", link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", gid_attrs__ndevs__0="bond0")
        | port("mlx5_9", state="1: DOWN", phys_state="3: Disabled", rate="2.5 Gb/sec (1X SDR)")
        | {f"{IB}/mlx5_9/device/physfn": "->../0000:18:00.0"},
    )
    write_tree(
        tmp_path / "proc",
        {
            "net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
            "bond0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\nibp24s0\t0000000A\t0\t1\t0\t0\t0\t000000FF"
        },
    )
    rows = last_rows("rdma_ports", network.read_rdma_ports(Query(root=tmp_path)))
    one = rows["mlx5_0/1"]
    assert one == {
        "port": "mlx5_0/1",
        "device": "mlx5_0",
        "kind": "infiniband",
        "state": "ACTIVE",
        "physical_state": "LinkUp",
        "rate_gbps": 400.0,
        "firmware": "28.41.1000",
        "board": "MT_0000000838",
        "guid": "a088:c203:0096:3b4e",
        "driver": "mlx5_core",
        "interface": "ibp24s0",
        "has_default_route": False,
        "numa_node": 0,
        "is_virtual": False,
        "link_downed": 1,
        "link_error_recovery": 6,
        "symbol_errors": 0,
        "rx_errors": 17,
        "rx_remote_physical_errors": 2,
        "tx_discards": 5,
        "buffer_overruns": 3,
        "link_integrity_errors": 4,
        "vl15_dropped": 7,
        "rnr_nak_retry_errors": 8,
        "ack_timeouts": 9,
        "roce_slow_restarts": 10,
        "rx_dropped": None,
        "retransmit_timeouts": None,
        "unresponsive_remotes": None,
        "impaired_connections": None,
    }
    bond, virtual = rows["mlx5_bond_0/1"], rows["mlx5_9/1"]
    assert (bond["kind"], bond["interface"], bond["has_default_route"]) == ("roce", "bond0", True)
    assert (virtual["is_virtual"], virtual["state"], virtual["physical_state"]) == (True, "DOWN", "Disabled")
    assert virtual["rate_gbps"] == 2.5


def test_ports_of_other_cards(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """An old iWARP card has no counters; mlx4 has two ports in one function; EFA is known by its driver."""
    write_tree(
        tmp_path / "sys",
        port("i40iw0", counters__link_downed="N/A (no PMA)", rate="10 Gb/sec (4X)")
        | {f"{IB}/i40iw0/node_type": "4: RNIC"}
        | port("mlx4_0", rate="40 Gb/sec (4X QDR)", counters__port_xmit_discards="5")
        | {f"{IB}/mlx4_0/ports/2/state": "4: ACTIVE", f"{IB}/mlx4_0/ports/3/state": "x"}
        | {f"{IB}/mlx4_0/device/net/{name}/dev_port": number for name, number in (("ib1", "1"), ("ib0", "0"))}
        | port("rdmap16s27", link_layer="Unknown", hw_counters__rx_drops="2", hw_counters__retrans_timeout_events="3")
        | {f"{IB}/rdmap16s27/device/driver": "->../../bus/pci/drivers/efa"},
    )
    rows = last_rows("rdma_ports", network.read_rdma_ports(Query(root=tmp_path)))
    assert (rows["i40iw0/1"]["kind"], rows["i40iw0/1"]["link_downed"], rows["i40iw0/1"]["interface"]) == (
        "iwarp",
        None,
        "",
    )
    assert (rows["mlx4_0/1"]["tx_discards"], rows["mlx4_0/1"]["rate_gbps"]) == (5, 40.0)
    assert [rows[f"mlx4_0/{number}"]["interface"] for number in (1, 2, 3)] == ["ib0", "ib1", ""]
    efa = rows["rdmap16s27/1"]
    assert (efa["kind"], efa["rx_dropped"], efa["retransmit_timeouts"], efa["link_downed"]) == ("efa", 2, 3, None)


def test_all_interfaces_are_rows(tmp_path: Path, write_tree: Write, last_rows: Check) -> None:
    """Bridges and virtual functions too, which say so; what a switched-off or unknown interface has not is None."""

    def net(name: str, code: int, **files: str) -> dict[str, str]:
        return {f"class/net/{name}/type": str(code)} | {
            f"class/net/{name}/{key.replace('__', '/')}": text for key, text in files.items()
        }

    write_tree(
        tmp_path / "sys",
        net(
            "eth0",
            1,
            operstate="up",
            carrier="1",
            speed="100000",
            mtu="9000",
            carrier_changes="4",
            statistics__rx_errors="1",
            statistics__tx_errors="2",
            statistics__rx_dropped="3",
            statistics__rx_crc_errors="5",
            device__driver="->../../../bus/pci/drivers/mlx5_core",
        )
        | net("eth0v1", 1, operstate="down", speed="-1", device__physfn="->../0000:18:00.0")
        | net("ib0", 32, operstate="up", carrier="0", device__numa_node="0")
        | net("docker0", 1, operstate="down", carrier="0", speed="4294967295")
        | net("lo", 772, operstate="unknown", carrier="1")
        | {"class/net/bonding_masters": "bond0"},
    )
    zeros = "0" * 32
    write_tree(
        tmp_path / "proc",
        {
            "net/ipv6_route": f"{zeros} 00 {zeros} 00 {zeros} ffffffff 1 0 200200 lo\n"
            f"{zeros} 00 {zeros} 00 fe80 1 1 0 3 ib0"
        },
    )

    rows = last_rows("interfaces", network.read_interfaces(Query(root=tmp_path)))
    assert {name: (row["kind"], row["is_virtual"], row["has_carrier"]) for name, row in rows.items()} == {
        "docker0": ("virtual", True, False),
        "eth0": ("ethernet", False, True),
        "eth0v1": ("ethernet", True, False),
        "ib0": ("infiniband", False, False),
        "lo": ("loopback", True, True),
    }
    assert {name: row["speed_mbps"] for name, row in rows.items() if row["speed_mbps"]} == {"eth0": 100000}
    assert [name for name, row in rows.items() if row["has_default_route"]] == ["ib0"]
    eth0 = rows["eth0"]
    assert (eth0["driver"], eth0["mtu"]) == ("mlx5_core", 9000)
    assert [eth0[key] for key in ("carrier_changes", "rx_errors", "tx_errors", "rx_dropped", "rx_crc_errors")] == [
        4, 1, 2, 3, 5,
    ]  # fmt: skip


def test_this_machine_has_a_loopback(last_rows: Check) -> None:
    """The real /sys."""
    rows = last_rows("interfaces", network.read_interfaces(Query()))
    assert rows["lo"]["kind"] == "loopback"


@pytest.mark.parametrize("read", [network.read_interfaces, network.read_rdma_ports])
def test_a_missing_sys_is_not_an_empty_one(tmp_path: Path, read: Callable[..., Iterator[Row]]) -> None:
    """Where /sys is not mounted the table is unknown."""
    with pytest.raises(OSError):
        list(read(Query(root=tmp_path)))


@settings(max_examples=40)
@given(contents=st.lists(st.binary(max_size=80), min_size=1, max_size=4))
def test_any_bytes_of_sys_are_read(
    tmp_path_factory: pytest.TempPathFactory, write_tree: Write, last_rows: Check, contents: list[bytes]
) -> None:
    """Every file holds anything: rows have values or None."""
    names = [
        *(f"sys/class/net/eth0/{name}" for name in ("type", "speed", "carrier", "operstate", "statistics/rx_errors")),
        *(f"sys/{IB}/mlx5_0/ports/1/{name}" for name in ("state", "rate", "link_layer", "counters/link_downed")),
        f"sys/{IB}/mlx5_0/ports/1/gid_attrs/ndevs/0",
        f"sys/{IB}/mlx5_0/node_type",
        "proc/net/route",
        "proc/net/ipv6_route",
    ]
    files = {name: contents[number % len(contents)] for number, name in enumerate(names)}
    root = write_tree(tmp_path_factory.mktemp("root"), files)
    with contextlib.suppress(OSError):
        last_rows("interfaces", network.read_interfaces(Query(root=root)))
    assert len(last_rows("rdma_ports", network.read_rdma_ports(Query(root=root)))) == 1
