from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading

import pytest

from pitools.core import subprocesses
from tests.stage.fanout.conftest import UNHURRIED


def shards(count: int, size: int) -> dict[str, bytes]:
    return {f"images/c/{number}": os.urandom(size) for number in range(count)}


def at_a_free_one(ports, make):
    """What listens at the next of some ports; where another program of this machine sits already, at the one after."""
    for port in ports:
        with contextlib.suppress(OSError):
            return make(("127.0.0.1", port))
    raise AssertionError("no port is free")


def test_the_source_is_read_once(nodes):
    """Every node ends with the whole set, and together they have read each byte of the source once."""
    files = {**shards(13, 1 << 20), "zarr.json": b"{}", "empty": b"", "odd": os.urandom(300_001)}
    step = nodes(files)
    step.timeouts = UNHURRIED
    step.start(*step.names)
    outcome = step.finish()
    total = sum(map(len, files.values()))
    assert step.origin.served == total
    assert sum(item["source_bytes"] for item in outcome.values()) == total
    assert all(item["source_bytes"] + item["peer_bytes"] == total for item in outcome.values())
    assert all(item["source_bytes"] < 0.4 * total for item in outcome.values())
    assert all(map(step.is_right, step.names))


def test_a_node_that_is_killed_is_routed_around(nodes):
    """kill -9 of one node in the middle: the others end with the whole set, and share out what it did not read."""
    files = shards(16, 1 << 20)
    step = nodes(files, bytes_per_s=10e6)
    step.start(*step.names)
    step.wait_for(lambda: step.origin.served > 6 << 20)
    step.kill("n1")
    step.finish("n0", "n2", "n3")
    assert all(map(step.is_right, ["n0", "n2", "n3"]))
    # What only the dead one had read is read once more, not once by every node.
    assert step.origin.served <= (16 + 4 + 1) << 20


def test_nodes_that_never_start_are_replaced_by_the_others(nodes):
    """Two of six are not there: the rest wait for a bounded time, then read their shares once, without deadlock."""
    files = shards(30, 100_000)
    step = nodes(files, count=6)
    step.timeouts |= {"startup_s": 1.5, "peer_timeout_s": 50.0}
    started = ["n0", "n2", "n3", "n5"]
    step.start(*started)
    step.finish(*started, timeout_s=20)  # far below peer_timeout_s: nobody waited for one that waited for him
    assert all(map(step.is_right, started))
    assert step.origin.served == 30 * 100_000


def test_a_node_that_hangs_is_routed_around(nodes):
    """A node that accepts connections and says no more costs a bounded time."""
    step = nodes(shards(12, 1 << 20), count=3, bytes_per_s=12e6)
    step.start(*step.names)
    step.wait_for(lambda: step.origin.served > 4 << 20)
    step.stop("n1")
    step.finish("n0", "n2")
    assert step.is_right("n0")
    assert step.is_right("n2")
    assert step.origin.served <= (12 + 4 + 1) << 20


def test_a_node_that_lies_is_found_out(nodes):
    """Flipped bits in what a node gives: the file is read again from the source, and that node is asked no more."""
    files = shards(9, 300_000)
    step = nodes(files, count=3)
    step.start("n1", lies=True)
    step.start("n0", "n2")
    outcome = step.finish()
    assert step.is_right("n0")
    assert step.is_right("n2")
    assert outcome["n0"]["distrusted"] == outcome["n2"]["distrusted"] == ["n1"]


def test_a_late_node_is_waited_for_and_then_served(nodes):
    """The others keep their copies available until it is done: the source is not read a second time."""
    files = shards(8, 500_000)
    step = nodes(files, count=3)
    step.timeouts = UNHURRIED
    step.start("n0", "n1")
    step.wait_for(lambda: step.origin.served > 2_000_000)
    step.start("n2")
    outcome = step.finish()
    assert step.origin.served == 8 * 500_000
    assert all(map(step.is_right, step.names))
    assert outcome["n2"]["peer_bytes"] > outcome["n2"]["source_bytes"]


def test_a_node_that_has_the_set_gives_it_at_once(nodes):
    """Nothing of its share is read from the source again."""
    files = shards(9, 200_000)
    step = nodes(files, count=3)
    step.start("n0", "n1", "n2")
    step.finish()
    before = step.origin.served
    os.rename(step.root("n1"), step.root("n1").with_name("gone"))
    step.start("n0", "n1", "n2")
    outcome = step.finish()
    assert step.is_right("n1")
    assert outcome["n1"]["source_bytes"] == step.origin.served - before <= 3 * 200_000


def test_a_node_with_another_secret_gets_nothing(nodes):
    """It is a stranger to the others, and they to it: it reads the source alone, and they go around it."""
    files = shards(6, 200_000)
    step = nodes(files, count=3)
    step.timeouts |= {"startup_s": 1.0, "linger_s": 3.0}
    step.start("n0", "n1")
    step.start("n2", env={"PIT_JOB_SECRET": "0" * 32})
    outcome = step.finish()
    assert outcome["n2"]["peer_bytes"] == 0
    assert step.origin.served == 2 * 6 * 200_000
    assert all(map(step.is_right, step.names))


def test_nodes_need_not_agree_on_the_time(nodes):
    """One whose clocks are months ahead takes part like any other: no time travels between nodes."""
    ahead = ("unshare", "--time", "--monotonic", "10000000", "--boottime", "10000000", "--fork", "--kill-child")
    tried = subprocesses.run([*ahead, "true"], timeout_s=10)
    if tried.code:
        pytest.skip(f"cannot make a time namespace here: {tried.stderr.strip()}")
    files = shards(6, 200_000)
    step = nodes(files, count=3)
    step.timeouts = UNHURRIED
    step.start("n0", "n2")
    step.start("n1", through=ahead)
    outcome = step.finish()
    assert step.origin.served == 6 * 200_000
    assert all(item["peer_bytes"] > 0 for item in outcome.values())
    assert all(map(step.is_right, step.names))


def test_strangers_at_a_nodes_ports_do_not_hide_it(nodes):
    """Other programs sit where a node would have listened, silent or rude; it is found a few ports on."""
    files = shards(6, 200_000)
    step = nodes(files, count=2)
    ports = iter(step.group("n0").candidate_ports(1, step.data.name))
    with contextlib.ExitStack() as exit_stack:
        exit_stack.enter_context(at_a_free_one(ports, socket.create_server))
        rude = at_a_free_one(ports, lambda at: socketserver.ThreadingTCPServer(at, socketserver.BaseRequestHandler))
        exit_stack.enter_context(rude)
        threading.Thread(target=rude.serve_forever, args=(0.01,), daemon=True).start()
        step.start("n0", "n1")
        step.finish()
        rude.shutdown()
    assert step.origin.served == 6 * 200_000


def test_a_hung_node_does_not_hold_the_finished_ones_for_ever(nodes):
    """Lingering ends with its own time."""
    step = nodes(shards(4, 100_000), count=2)
    step.timeouts |= {"linger_s": 2.0, "startup_s": 1.0}
    step.start("n0", "n1")
    step.wait_for(lambda: step.origin.served > 0)
    step.stop("n1")
    step.finish("n0", timeout_s=15)
    assert step.is_right("n0")
