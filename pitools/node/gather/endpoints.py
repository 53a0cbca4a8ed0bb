"""Try to reach the endpoints that checks name."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from pitools.core import subprocesses
from pitools.core.errors import ToolMissing, Unreachable
from pitools.node.gather.read import Query
from pitools.node.types import Row, Value

_TIMEOUT_S = 2.0


def read_endpoints(query: Query) -> Iterator[Row]:
    """Yield the rows of table `endpoints`. The look-up of a host name may hang."""
    for endpoint in query.names_left():
        yield {"endpoint": endpoint, "responds": False}
        started_s = time.monotonic()
        responds = _try(endpoint)
        latency_s: Value = round(time.monotonic() - started_s, 4) if responds else None
        yield {"endpoint": endpoint, "responds": responds, "latency_s": latency_s}


def _try(endpoint: str) -> bool | None:
    """Return whether an endpoint answers; None if it cannot be tried."""
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname or "", url.port
    except ValueError:
        return None
    if url.scheme == "tcp" and host and port:
        with contextlib.suppress(OSError, UnicodeError), socket.create_connection((host, port), _TIMEOUT_S):
            return True
        return False
    return _ping(host) if url.scheme == "ping" and host else None


def _ping(host: str) -> bool | None:
    """Return whether a host answers an ICMP echo request; None without the program `ping`."""
    argv = ["ping", "-n", "-c", "1", "-W", f"{_TIMEOUT_S:.0f}", "--", host]
    try:
        return subprocesses.run(argv, timeout_s=_TIMEOUT_S + 1).code == 0
    except ToolMissing:
        return None
    except Unreachable:
        return False
