"""Read what checks name and others know: services, commands, packages, accounts, and endpoints of the network."""

from __future__ import annotations

import contextlib
import pwd
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, ToolMissing, Unreachable
from pitools.node.gather.read import Query, to_int
from pitools.node.types import Row, Value

COMMAND_TIMEOUT_S = 10.0
_ENDPOINT_TIMEOUT_S = 2.0
_OUTPUT_CHARACTERS = 1 << 16
_NOT_FOUND = 127  # the exit code of a shell
_ENV = {"LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}


def read_services(query: Query) -> Iterator[Row]:
    """Yield the rows of table `services`. Raises PitError if systemd does not answer."""
    names = query.names_left()
    if not names:
        return
    keys = "LoadState,ActiveState,SubState,NRestarts"
    done = _run_tool(["systemctl", "show", f"--property={keys}", "--", *names])
    blocks = [block for block in done.stdout.split("\n\n") if block.strip()]  # one a name, in order
    if len(blocks) != len(names):
        problem = f"{len(blocks)} answers for {len(names)} units: {done.stderr.partition(chr(10))[0]}"
        raise ClusterError(problem, where="systemctl show")
    for name, block in zip(names, blocks, strict=True):
        values = dict(line.partition("=")[::2] for line in block.strip().splitlines())
        yield {
            "service": name,
            "state": "missing" if values.get("LoadState") == "not-found" else values.get("ActiveState"),
            "substate": values.get("SubState"),
            "restarts": to_int(values.get("NRestarts")),  # only a service has it
        }


def read_commands(query: Query) -> Iterator[Row]:
    """Yield the rows of table `commands`."""
    for command in query.names_left():
        started_s = time.monotonic()
        code, output, errors = _run_command(command)
        yield {
            "command": command,
            "exit_code": code,
            "output": output and output[:_OUTPUT_CHARACTERS],
            "error_output": errors[:_OUTPUT_CHARACTERS],
            "duration_s": round(time.monotonic() - started_s, 3),
        }


def _run_command(command: str) -> tuple[int | None, str | None, str]:
    try:
        done = subprocesses.run(shlex.split(command) or [""], timeout_s=COMMAND_TIMEOUT_S, env={"LC_ALL": "C"})
    except ToolMissing:
        return _NOT_FOUND, None, ""
    except (Unreachable, ValueError) as error:  # a time-out, or an open quotation mark
        return None, None, str(error)
    return done.code, done.stdout, done.stderr


def read_packages(query: Query) -> Iterator[Row]:
    """Yield the rows of table `packages`. Raises PitError where there is neither dpkg nor rpm."""
    names = query.names_left()
    if not names:
        return
    if shutil.which("dpkg-query"):
        line_format = "${Package}\\t${Version}\\t${db:Status-Status}\\n"
        argv = ["dpkg-query", "--show", f"--showformat={line_format}", "--", *names]
    else:
        argv = ["rpm", "--query", "--queryformat=%{NAME}\\t%{VERSION}-%{RELEASE}\\tinstalled\\n", "--", *names]
    lines = [line.split("\t") for line in _run_tool(argv).stdout.splitlines()]
    versions = {fields[0]: fields[1] for fields in lines if len(fields) == 3 and fields[2] == "installed"}
    for name in names:
        yield {"package": name, "version": versions.get(name, "")}


def _run_tool(argv: list[str]) -> subprocesses.Completed:
    return subprocesses.run(argv, timeout_s=COMMAND_TIMEOUT_S, env=_ENV)


def read_accounts(query: Query) -> Iterator[Row]:
    """Yield the rows of table `accounts`. A directory service that does not answer hangs."""
    for name in query.names_left():
        yield {"account": name, "responds": False}
        try:
            entry = pwd.getpwnam(name)
        except (KeyError, ValueError):
            yield {"account": name, "exists": False, "responds": True}
        else:
            yield {"account": name, "exists": True, "uid": entry.pw_uid, "home": entry.pw_dir, "responds": True}


def read_endpoints(query: Query) -> Iterator[Row]:
    """Yield the rows of table `endpoints`. The look-up of a host name may hang."""
    for endpoint in query.names_left():
        yield {"endpoint": endpoint, "responds": False}
        started_s = time.monotonic()
        responds = _try_endpoint(endpoint)
        latency_s: Value = round(time.monotonic() - started_s, 4) if responds else None
        yield {"endpoint": endpoint, "responds": responds, "latency_s": latency_s}


def _try_endpoint(endpoint: str) -> bool | None:
    """Return whether an endpoint answers; None if it cannot be tried."""
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname or "", url.port
    except ValueError:
        return None
    if url.scheme == "tcp" and host and port:
        with contextlib.suppress(OSError, UnicodeError), socket.create_connection((host, port), _ENDPOINT_TIMEOUT_S):
            return True
        return False
    return _ping(host) if url.scheme == "ping" and host else None


def _ping(host: str) -> bool | None:
    """Return whether a host answers an ICMP echo request; None without the program `ping`."""
    argv = ["ping", "-n", "-c", "1", "-W", f"{_ENDPOINT_TIMEOUT_S:.0f}", "--", host]
    try:
        return subprocesses.run(argv, timeout_s=_ENDPOINT_TIMEOUT_S + 1).code == 0
    except ToolMissing:
        return None
    except Unreachable:
        return False
