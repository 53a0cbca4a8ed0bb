"""Table `system`, from folders that stand for /proc, /sys and /etc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.gather import system
from pitools.node.gather.read import Query

PAGE = os.sysconf("SC_PAGE_SIZE")
PROC = {
    "sys/kernel/osrelease": "5.15.0-1060-nvidia",
    "loadavg": "1.50 2.25 3.00 2/1234 5678",
    "uptime": "86400.25 100.00",
    "meminfo": "MemTotal:  1000000 kB\nMemFree: 7 kB\nMemAvailable:  250000 kB\n"
    "Buffers: 2 kB\nCached: 3 kB\nSwapTotal: 8 kB\nSwapFree: 4 kB",
    "buddyinfo": "Node 0, zone  DMA  9  9  9\nNode 0, zone  Normal  5  1  0\nNode 1, zone  Normal  7  0  0",
}
CPU = "devices/system/cpu"
SYS = {
    f"{CPU}/online": "0-2",
    f"{CPU}/present": "0-3",
    f"{CPU}/cpufreq/policy": "no CPU",
    f"{CPU}/cpu0/topology/physical_package_id": "0",
    f"{CPU}/cpu0/topology/thread_siblings_list": "0,2",
    f"{CPU}/cpu1/topology/physical_package_id": "1",
    f"{CPU}/cpu1/topology/thread_siblings_list": "1",
    f"{CPU}/cpu2/topology/physical_package_id": "0",
    f"{CPU}/cpu2/topology/thread_siblings_list": "0,2",
    f"{CPU}/cpu3/online": "0",
    "devices/system/node/has_memory": "0-1",
    "devices/system/clocksource/clocksource0/current_clocksource": "hpet",
}
FILES = {
    "etc/os-release": 'NAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian',
    **{f"proc/{name}": text for name, text in PROC.items()},
    **{f"sys/{name}": text for name, text in SYS.items()},
}


def test_a_node_with_an_offline_cpu(tmp_path: Path, write_tree, last_rows) -> None:
    """Each value is of its file: 3 of 4 CPUs are online, on 2 cores of 2 sockets; the Normal zones' blocks count."""
    write_tree(tmp_path, FILES)
    row = last_rows("system", system.read_system(Query(root=tmp_path)))[None]
    assert {key: value for key, value in row.items() if not key.startswith("clock_")} == {
        "kernel": "5.15.0-1060-nvidia",
        "os": "debian 12",
        "uptime_s": 86400.25,
        "load_1m": 1.5,
        "load_5m": 2.25,
        "load_15m": 3.0,
        "cpus": 3,
        "cpus_present": 4,
        "cores": 2,
        "sockets": 2,
        "numa_nodes": 2,
        "memory_bytes": 1024000000,
        "memory_available_bytes": 256000000,
        "memory_free_bytes": 12 * 1024,
        "memory_used_share": 0.75,
        "swap_bytes": 8192,
        "swap_free_bytes": 4096,
        "largest_free_block_bytes": 2 * PAGE,
        "clocksource": "hpet",
    }


def test_this_machine(last_rows) -> None:
    """Here, everything that every Linux has is read, and the clock's state too."""
    row = last_rows("system", system.read_system(Query()))[None]
    assert (row["kernel"], row["cpus"]) == (os.uname().release, len(os.sched_getaffinity(0)) or row["cpus"])
    assert isinstance(row["clock_is_synchronized"], bool)
    assert 0 <= row["clock_error_s"] <= 16
    assert 0 < row["memory_used_share"] < 1


def test_without_files_all_is_unknown(tmp_path: Path, last_rows) -> None:
    """A machine that hides /proc and /sys, as some containers, gives no value and no error."""
    row = last_rows("system", system.read_system(Query(root=tmp_path)))[None]
    assert {key for key, value in row.items() if value is not None} <= {"clock_is_synchronized", "clock_error_s"}


@given(data=st.binary(max_size=200), name=st.sampled_from([*FILES]))
def test_any_bytes_make_no_error(tmp_path_factory: pytest.TempPathFactory, write_tree, last_rows, data, name) -> None:
    """Whatever a file holds, the other values are read."""
    root = tmp_path_factory.mktemp("root")
    write_tree(root, {**FILES, name: data})
    row = last_rows("system", system.read_system(Query(root=root)))[None]
    assert name == "proc/sys/kernel/osrelease" or row["kernel"] == "5.15.0-1060-nvidia"


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 1), ("0-3", 4), ("0-2,7,9-10", 6), ("", 0), ("3-", None), ("a", None), (None, None), ("٣", None)],
)
def test_the_kernels_lists(text: str | None, count: int | None) -> None:
    """A list of CPUs or nodes counts its numbers; anything else is unknown."""
    assert system.count_in_list(text) == count
