from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, ConfigError, UsageError
from pitools.stage.fanout.group import Group, find_group

SECRET = "00112233445566778899aabbccddeeff"
STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURMD_NODENAME": "n02",
    "PIT_JOB_SECRET": SECRET,
}
PAIRS = {"PIT_FANOUT_NODES": "a=127.0.0.1, b=127.0.0.1", "PIT_FANOUT_NODE": "b", "PIT_FANOUT_JOB": "x"}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What getaddrinfo knows."""
    reference = {"n01": "10.0.0.1", "n02": "10.0.0.2", "n03": "10.0.0.3"}

    def lookup(name: str, *_: object, **__: object) -> list:
        if name not in reference:
            raise OSError("unknown name")
        return [(2, 1, 6, "", (reference[name], 0))]

    monkeypatch.setattr("socket.getaddrinfo", lookup)
    return reference


def test_a_step_of_slurm_is_a_group(names):
    """Nodes in the list's own order, this one's number, and a key that no other step and restart has."""
    group = find_group(STEP)
    assert (group.names, group.rank) == (("n01", "n02", "n03"), 1)
    assert group.addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    keys = [find_group({**STEP, **more}).key for more in ({}, {"SLURM_STEP_ID": "3"}, {"SLURM_RESTART_COUNT": "1"})]
    assert len(set(keys)) == 3


def test_the_fabrics_own_names_are_used(names):
    """With a suffix the site's fast network is meant, and a node without such a name is an error that says so."""
    names.update({"n01-ib0": "10.9.0.1", "n02-ib0": "10.9.0.2", "n03-ib0": "10.9.0.3"})
    assert find_group(STEP, host_suffix="-ib0").addresses == ("10.9.0.1", "10.9.0.2", "10.9.0.3")
    assert find_group({**STEP, "PIT_HOST_SUFFIX": "-ib0"}).addresses[0] == "10.9.0.1"
    with pytest.raises(ClusterError, match="n01-opa") as error:
        find_group(STEP, host_suffix="-opa")
    assert "host_suffix" in error.value.hint


def test_a_loopback_address_of_its_own_name_is_not_what_others_use(names):
    """A hosts file that gives the host's own name 127.0.1.1 does not hide the server from the others."""
    names["n02"] = "127.0.1.1"
    names["n01"] = names["n03"] = "192.0.2.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        has_network = not probe.connect_ex(("192.0.2.1", 9))
    if has_network:
        assert not find_group(STEP).addresses[1].startswith("127.")
    else:
        with pytest.raises(ClusterError, match=r"192\.0\.2\.1"):
            find_group(STEP)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"PIT_JOB_SECRET": ""}, "no secret"),
        ({"PIT_JOB_SECRET": "short"}, "too short"),
        ({"SLURM_STEP_NODELIST": ""}, "job step"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "6 tasks on 3 nodes"),
        ({"SLURMD_NODENAME": "n09"}, "n09"),
        ({"PIT_PORTS": "80-90"}, "PIT_PORTS"),
        ({"PIT_PORTS": "x"}, "PIT_PORTS"),
        ({"PIT_FANOUT_NODES": "a"}, "PIT_FANOUT_NODES"),
    ],
)
def test_what_cannot_be_a_group_is_refused(names, change: dict[str, str], word: str):
    """A usage error that says what to type, and never shows the secret."""
    with pytest.raises(UsageError) as error:
        find_group({**STEP, **change})
    assert word in str(error.value)
    assert error.value.hint
    assert SECRET not in str(error.value) + error.value.hint


def test_the_hint_for_a_secret_is_a_line_of_shell():
    """What is to be typed works: it makes a secret that is accepted."""
    with pytest.raises(UsageError) as error:
        find_group(PAIRS)
    assert "PIT_JOB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n'); export PIT_JOB_SECRET" in error.value.hint


def test_a_group_is_made_without_slurm():
    """Names and addresses of all nodes, and which of them this is."""
    group = find_group({**PAIRS, "PIT_JOB_SECRET": SECRET, "PIT_PORTS": "30000-30099"})
    assert (group.names, group.rank, group.ports) == (("a", "b"), 1, (30000, 30099))


def test_a_secret_may_be_in_a_private_file(tmp_path: Path):
    """One that others can read, a link, or none, is refused with the command that helps."""
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    env = {**PAIRS, "PIT_FANOUT_SECRET_FILE": str(path)}
    assert find_group(env).proof_key("v") == find_group({**PAIRS, "PIT_JOB_SECRET": SECRET}).proof_key("v")
    path.chmod(0o640)
    with pytest.raises(ConfigError) as error:
        find_group(env)
    assert error.value.hint == f"chmod 600 {path}"
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "missing", "fifo"):
        with pytest.raises(ConfigError):
            find_group({**env, "PIT_FANOUT_SECRET_FILE": str(tmp_path / name)})


def test_ports_are_the_same_on_every_node_and_differ_between_nodes():
    """16 candidates inside the range; two nodes of one host do not walk through the same ones."""
    groups = [Group("ab", ["127.0.0.1"] * 2, me, "1 0 0", (20000, 31999), b"s") for me in (0, 1)]
    series = [[list(group.candidate_ports(node, "v")) for node in (0, 1)] for group in groups]
    assert series[0] == series[1]
    assert set(series[0][0]).isdisjoint(series[0][1])
    assert all(20000 <= port <= 31999 for port in series[0][0])
    assert len(set(series[0][0])) == 16


def test_the_key_is_of_one_job_and_one_version():
    """Another step, version, secret or set of nodes gives another key."""

    def key(names: str = "ab", job: str = "1", secret: bytes = b"s", version: str = "v") -> bytes:
        return Group(names, ["127.0.0.1"] * len(names), 0, job, (20000, 31999), secret).proof_key(version)

    assert len({key(), key("abc"), key(job="2"), key(secret=b"t"), key(version="w")}) == 5
    assert "secret" not in repr(Group("a", ["127.0.0.1"], 0, "1", (1, 2), b"secret")).lower()
