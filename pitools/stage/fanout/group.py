"""The group of a fan-out: the nodes of this job step, their addresses and ports, this node's rank, the job's secret."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core import hostlist
from pitools.core.errors import ClusterError, ConfigError, UsageError

_MAX_PORTS = 16  # candidate ports of a node: up to 15 of them may be in use by other programs
_MIN_SECRET_BYTES = 16
_EXPORT_COMMAND = "PIT_JOB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n'); export PIT_JOB_SECRET"
_STEP_HINT = "inside the job: srun --ntasks-per-node=1 pit-stage run … --fanout"


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Time-outs in seconds, and the least rate of a peer, `min_bytes_per_s`.

    answer_s: connecting, and each message of the handshake. long_poll_s: how long a server keeps a request for a file
    that is not done. stall_s: of a reply without a byte, or below `min_bytes_per_s`. startup_s: for a node never
    contacted to start. peer_timeout_s: of a node below `min_bytes_per_s` that still reads the requested file. idle_s:
    how long this node may receive nothing while it waits; then the next node of the chain is tried, and after half as
    long again the source; well below the time-out of the copy workers. back_off_s: pause before a failed node is used
    again. linger_s: how long a finished node serves the others.
    """

    answer_s: float = 5.0
    long_poll_s: float = 2.0
    stall_s: float = 10.0
    startup_s: float = 30.0
    peer_timeout_s: float = 30.0
    idle_s: float = 150.0
    back_off_s: float = 60.0
    linger_s: float = 600.0
    # Very low: where 1,000 nodes share one source or uplink, a healthy node is not much faster.
    min_bytes_per_s: int = 64 << 10


class Group:
    """The nodes of one job step. names, addresses: in the same order on all nodes. rank: this node's.

    key: text that differs per job, step and restart. ports: first and last that may be used.
    """

    def __init__(
        self, names: Sequence[str], addresses: Sequence[str], rank: int, key: str, ports: tuple[int, int], secret: bytes
    ) -> None:
        self.names, self.addresses = tuple(names), tuple(addresses)
        self.rank, self.key, self.ports = rank, key, ports
        self._secret = secret  # must not appear in a repr

    def __len__(self) -> int:
        return len(self.names)

    def proof_key(self, version: str) -> bytes:
        """Return the key of the handshake's proofs, for this group and dataset version only."""
        text = "\0".join(["pit-fanout/1", self.key, version, *self.names])
        return hmac.digest(self._secret, text.encode(), "sha256")

    def candidate_ports(self, node: int, version: str) -> Iterator[int]:
        """Yield the ports a node may listen at, in order of preference; at most 16."""
        first, last = self.ports
        count = last - first + 1
        text = "\0".join([self.key, version, str(node)])
        start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % count
        # A stride, so that the port series of nodes on one host seldom overlap.
        stride = 37 if count % 37 else 1
        for step in range(min(_MAX_PORTS, count)):
            yield first + (start + step * stride) % count


def find_group(environ: Mapping[str, str], *, ports: tuple[int, int] = (20000, 31999), host_suffix: str = "") -> Group:
    """Return the group of this process, from srun's variables, or from PIT_FANOUT_NODES without Slurm.

    ports, host_suffix: the site's; PIT_PORTS and PIT_HOST_SUFFIX override them. PIT_FANOUT_NODES: `name=address,…` of
    all nodes; PIT_FANOUT_NODE: this node's name; PIT_FANOUT_JOB: text that other runs on these nodes do not use.

    Raises UsageError, ConfigError, ClusterError, Unreachable (slurmctld does not answer).
    """
    secret = _read_secret(environ)
    if text := environ.get("PIT_PORTS"):
        ports = _parse_ports(text)
    if node_list := environ.get("PIT_FANOUT_NODES"):
        pairs = dict(_parse_node(text) for text in node_list.split(","))
        names, addresses = list(pairs), list(pairs.values())
        name, key = environ.get("PIT_FANOUT_NODE", ""), environ.get("PIT_FANOUT_JOB", "")
    else:
        names, name, key = _step_nodes(environ)
        addresses = _addresses(names, environ.get("PIT_HOST_SUFFIX", host_suffix))
    if name not in names:
        raise UsageError(f'this node, "{name}", is not in the node list: {hostlist.fold(names)}', hint=_STEP_HINT)
    rank = names.index(name)
    addresses[rank] = _own_address(addresses, rank)
    return Group(names, addresses, rank, key, ports, secret)


def _step_nodes(environ: Mapping[str, str]) -> tuple[list[str], str, str]:
    """Return the names of the step's nodes, this node's name, and a key unique to the step."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes or "SLURM_STEP_ID" not in environ:
        raise UsageError("--fanout: not in a job step", hint=_STEP_HINT)
    if environ.get("SLURM_STEP_NUM_TASKS") != environ.get("SLURM_STEP_NUM_NODES"):
        message = (
            f"--fanout: {environ.get('SLURM_STEP_NUM_TASKS')} tasks on {environ.get('SLURM_STEP_NUM_NODES')} nodes"
        )
        raise UsageError(message, hint="run one task per node: srun --ntasks-per-node=1 pit-stage run … --fanout")
    # In the node list's order, which is the same on all nodes for any task distribution.
    names = hostlist.expand(nodes)
    key = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    return names, environ.get("SLURMD_NODENAME", ""), " ".join(key)


def _addresses(names: Sequence[str], suffix: str) -> list[str]:
    """Return each node's address: of its name and the site's suffix, else of its name, else as Slurm has it."""
    if suffix:
        return [_resolve(name + suffix) for name in names]
    addresses: list[str] = []
    for name in names:
        if not (address := _lookup_address(name)):
            break  # stop at the first failure: without DNS each lookup waits for its time-out
        addresses.append(address)
    else:
        return addresses
    from pitools.slurm.client import Client

    slurm_addresses = {node.node: node.address for node in Client().nodes(hostlist.fold(names))}
    return [_resolve(slurm_addresses.get(name, name)) for name in names]


def _resolve(name: str) -> str:
    if not (address := _lookup_address(name)):
        hint = "see DNS or /etc/hosts of this node; export PIT_HOST_SUFFIX=.SUFFIX, in a site file network.host_suffix"
        raise ClusterError(f'the name "{name}" has no address here', where=socket.gethostname(), hint=hint)
    return address


def _lookup_address(name: str) -> str:
    """Return the first address of a name; "" when it has none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _own_address(addresses: Sequence[str], rank: int) -> str:
    """Return this node's address as other nodes see it: many hosts files map a host's own name to a loopback
    address.
    """
    other_addresses = [
        address for index, address in enumerate(addresses) if index != rank and not _is_loopback(address)
    ]
    if not other_addresses or not _is_loopback(addresses[rank]):
        return addresses[rank]
    family = socket.AF_INET6 if ":" in other_addresses[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other_addresses[0], 9))  # sends nothing: the kernel only selects the route
        except OSError as error:
            raise ClusterError(
                f"no route to {other_addresses[0]}: {error.strerror}", where=socket.gethostname()
            ) from error
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _read_secret(environ: Mapping[str, str]) -> bytes:
    if path := environ.get("PIT_FANOUT_SECRET_FILE"):
        secret = _read_private_file(Path(path))
    else:
        secret = environ.get("PIT_JOB_SECRET", "").encode()
    if not secret:
        raise UsageError("--fanout: the job has no secret", hint=f"in the job's script, before srun: {_EXPORT_COMMAND}")
    if len(secret) < _MIN_SECRET_BYTES:
        raise UsageError(f"--fanout: a secret of {len(secret)} characters is too short", hint=_EXPORT_COMMAND)
    return secret


def _read_private_file(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
                message = f"not a private file (owner {status.st_uid}, mode {status.st_mode & 0o7777:o})"
                raise ConfigError(message, where=str(path), hint=f"chmod 600 {path}")
            return file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret: {error.strerror}", where=str(path)) from error


def _parse_ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) <= 65535):
        raise UsageError(f'PIT_PORTS: not a range of ports: "{text}"', hint="expected FIRST-LAST, such as 20000-31999")
    return int(first), int(last)


def _parse_node(text: str) -> tuple[str, str]:
    name, _, address = text.strip().partition("=")
    if not name or not address:
        raise UsageError(f'PIT_FANOUT_NODES: not NAME=ADDRESS: "{text}"', hint="expected name=address,name=address,…")
    return name, _resolve(address)
