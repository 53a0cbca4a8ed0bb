"""Ranks find their own rank 0, whatever else listens."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from pitools.core.errors import ClusterError, Unreachable
from pitools.launch.diagnosis.patterns import compile_cached, load_table, match_exception
from pitools.launch.rank import rendezvous
from pitools.launch.rank.rendezvous import JobIdentity, RendezvousServer, candidate_ports, find_coordinator

HERE = "127.0.0.1"
PORTS = (21000, 21127)


def job(key: str = "1 0 0", world_size: int = 3, ports: tuple[int, int] = PORTS) -> JobIdentity:
    return JobIdentity(key, secrets.token_hex(16), world_size, ports)


def occupy(which: int, world_size: int) -> tuple[JobIdentity, socket.socket]:
    """A job, and a listener of somebody else on the first guard (0) or framework (1) port that the job would try."""
    for number in range(100):
        own_part = job(key=f"{number} 0 0", world_size=world_size, ports=(21300, 21555))
        try:
            return own_part, socket.create_server((HERE, next(iter(candidate_ports(own_part)))[which]))
        except OSError:
            continue
    raise AssertionError("no free port in a hundred tries")


def test_candidates_are_every_pair_once() -> None:
    """All pairs of the range, the framework's port beside the guard's, and a start that the key decides."""
    pairs = list(candidate_ports(job()))
    assert sorted(pairs) == [(port, port + 1) for port in range(21000, 21128, 2)]
    starts = {next(iter(candidate_ports(job(key=f"{number} 0 0")))) for number in range(50)}
    assert len(starts) > 20


@pytest.mark.parametrize("round_", range(5))
def test_jobs_that_want_the_same_port_stay_apart(round_: int) -> None:
    """Six jobs of one key start at once on one address; every rank gets its own job's coordinator."""
    jobs = [job(key="same") for _ in range(6)]
    guards: dict[str, str] = {}
    answers: list[tuple[str, str]] = []

    def rank(mine: JobIdentity, number: int) -> None:
        if number == 0:
            guard = RendezvousServer(mine, HERE)
            guards[mine.secret] = guard.coordinator
            guard.wait_for_ranks(20)
            opened.append(guard)
        else:
            answers.append((mine.secret, find_coordinator(mine, HERE, number, timeout_s=20)))

    opened: list[RendezvousServer] = []
    with ThreadPoolExecutor(18) as pool:
        order = [(mine, number) for mine in jobs for number in (1, 2, 0)]
        for done in [pool.submit(rank, *each) for each in order]:
            done.result()
    for guard in opened:
        guard.close()
    assert len(set(guards.values())) == 6
    assert len(answers) == 12
    assert all(guards[secret] == coordinator for secret, coordinator in answers)


def test_a_rank_without_the_secret_gets_nothing() -> None:
    """A stranger with the right ports but another secret is not answered, and does not count as a rank."""
    own_part = job(world_size=2)
    guard = RendezvousServer(own_part, HERE)
    with closing(guard):
        with pytest.raises(Unreachable, match="rank 1 "):
            find_coordinator(own_part._replace(secret=secrets.token_hex(16)), HERE, 1, timeout_s=1.5)
        with pytest.raises(Unreachable, match=r"\[1\]"):
            guard.wait_for_ranks(0.1)


def test_an_impostor_cannot_pose_as_rank_0() -> None:
    """A listener that does not know the secret is passed by, though it stands on the first port and talks our talk."""
    own_part, listener = occupy(0, world_size=2)

    def impostor(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(json.dumps({"challenge": "00"}).encode() + b"\n")
                connection.recv(1024)
                connection.sendall(json.dumps({"proof": "00", "coordinator": "evil:1"}).encode() + b"\n")

    with closing(listener):
        threading.Thread(target=impostor, args=(listener,), daemon=True).start()
        guard = RendezvousServer(own_part, HERE)
        with closing(guard):
            assert guard.port != listener.getsockname()[1]
            assert find_coordinator(own_part, HERE, 1, timeout_s=20) == guard.coordinator


def test_an_address_that_was_changed_on_its_way_is_not_taken() -> None:
    """A listener that passes every message on to the real guard, but answers with its own address, is passed by."""
    own_part, listener = occupy(0, world_size=2)
    guard = RendezvousServer(own_part, HERE)

    def relay() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, socket.create_connection((HERE, guard.port)) as upstream:
                    connection.sendall(upstream.recv(1024))
                    upstream.sendall(connection.recv(1024))
                    answer = json.loads(upstream.recv(1024)) | {"coordinator": "evil:1"}
                    connection.sendall(json.dumps(answer).encode() + b"\n")

    with closing(listener), closing(guard):
        threading.Thread(target=relay, daemon=True).start()
        assert find_coordinator(own_part, HERE, 1, timeout_s=20) == guard.coordinator


def test_a_silent_stranger_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that say nothing, for longer than a rank waits, do not keep ranks out."""
    monkeypatch.setattr(rendezvous, "_ANSWER_TIMEOUT_S", 600.0)
    own_part = job(world_size=2)
    guard = RendezvousServer(own_part, HERE)
    with closing(guard):
        silent = [socket.create_connection((HERE, guard.port)) for _ in range(20)]
        assert find_coordinator(own_part, HERE, 1, timeout_s=20) == guard.coordinator
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("limit_s", [0.0, 1.0], ids=["the answer's own time", "the join's"])
def test_a_dripping_stranger_does_not_hold_a_rank(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends a byte now and then gets no more time than one answer has, and never more than the join."""
    own_part, listener = occupy(0, world_size=2)
    if not limit_s:
        monkeypatch.setattr(rendezvous, "_ANSWER_TIMEOUT_S", 1.0)

    def drip(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.2)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    with closing(listener):
        threading.Thread(target=serve, daemon=True).start()
        if limit_s:
            with pytest.raises(Unreachable):
                find_coordinator(own_part, HERE, 1, timeout_s=limit_s)
        else:
            with closing(RendezvousServer(own_part, HERE)) as guard:
                assert find_coordinator(own_part, HERE, 1, timeout_s=20) == guard.coordinator


def test_a_rank_that_waits_for_rank_0_knocks_gently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a range of 6,000 pairs, without rank 0, fewer than 200 connections are tried in any second, of 64 pairs."""
    tries: list[tuple[float, int]] = []
    connect = socket.create_connection

    def counted(address: tuple[str, int], timeout: float) -> socket.socket:
        tries.append((time.monotonic(), address[1]))
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", counted)
    with pytest.raises(Unreachable):
        find_coordinator(job(ports=(20000, 31999)), "127.0.0.9", 1, timeout_s=2.5)
    assert 4 <= len({port for _, port in tries}) <= 64
    assert max(sum(position <= other < position + 1 for other, _ in tries) for position, _ in tries) < 200


def test_no_port_left_is_told() -> None:
    """When every pair is taken, the error names the range."""
    small = job(ports=(21200, 21203))
    with (
        closing(socket.create_server((HERE, 21200))),
        closing(socket.create_server((HERE, 21203))),
        pytest.raises(ClusterError, match="no free pair"),
    ):
        RendezvousServer(small, HERE)


def test_a_taken_framework_port_rules_out_its_pair() -> None:
    """A program on the second port of the first pair moves the job on."""
    own_part, listener = occupy(1, world_size=1)
    with closing(listener):
        guard = RendezvousServer(own_part, HERE)
        guard.close()
        assert guard.framework_port != listener.getsockname()[1]


def test_a_rendezvous_that_times_out_is_recognised_in_a_log() -> None:
    """The diagnosis has a pattern for the line that a rank prints; as a consequence of another fault, not as one."""
    server = RendezvousServer(JobIdentity("1", secrets.token_hex(16), 2, PORTS), HERE)
    try:
        with pytest.raises(Unreachable) as raised:
            server.wait_for_ranks(0.0)
    finally:
        server.close()
    pattern = next(each for each in load_table().pattern if each.name == "rendezvous-timeout")
    assert compile_cached(pattern.line).search(f"pit: rank 0 on n1: {raised.value}")
    rule = match_exception("Unreachable", raised.value.message, own_raise=False)
    assert rule is not None
    assert (rule.kind, rule.role) == ("network", "cascade")
