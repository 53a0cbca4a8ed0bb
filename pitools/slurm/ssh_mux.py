"""One connection a host for all of a user's commands: OpenSSH's own sharing, where the user has not set it up.

The first command leaves a connection open for a minute, behind a socket in a folder that is the user's alone; those
that follow need no handshake. Without it everything works as well, only slower: whatever is not as it should be is
answered by doing without.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pitools.core import subprocesses
from pitools.core.errors import PitError

_PERSIST_S = 60
_SSH_G_TIMEOUT_S = 5.0
_CONNECT_WAIT_S = 2.0  # longer than a login takes; a host that is silent keeps nobody from finding that out
_lock = threading.Lock()
_opening: dict[Path, threading.Event] = {}
# A connection on which nobody answers any more is found dead after 15 s.
_KEEPALIVE = {
    "serveraliveinterval": ("0", "ServerAliveInterval=5"),
    "serveralivecountmax": ("3", "ServerAliveCountMax=3"),
}
# sun_path has room for 107; ssh binds the socket under a name of its own first, 17 longer.
_MAX_SOCKET_PATH = 107 - 17
_PLAIN = re.compile(r"[A-Za-z0-9/._-]+")


class SshConfig(NamedTuple):
    """What ssh would do for a host: its settings, by lower-case name, and a name that stands for all of them."""

    settings: dict[str, str]
    digest: str


def mux_options(host: str) -> list[str]:
    """Options of ssh for a command to this host, before its `--`; [] where the user's own settings say how to share."""
    known = _ssh_config(host, os.environ.get("PATH", ""))
    if known is None:
        return []
    chosen = [option for name, (default, option) in _KEEPALIVE.items() if known.settings.get(name) == default]
    if path := _socket(known):
        chosen += ["ControlMaster=auto", f"ControlPath={path}", f"ControlPersist={_PERSIST_S}"]
    return [word for option in chosen for word in ("-o", option)]


@contextlib.contextmanager
def connect_once(host: str) -> Iterator[None]:
    """Run a command to this host within: of several that begin at once, the first makes the connection for all."""
    known = _ssh_config(host, os.environ.get("PATH", ""))
    path = _socket(known) if known else None
    if path is None or path.exists():
        yield
        return
    with _lock:
        ended = _opening.get(path)
        is_first = ended is None
        if ended is None:
            ended = _opening[path] = threading.Event()
    try:
        until = time.monotonic() + _CONNECT_WAIT_S
        while not is_first and not path.exists() and time.monotonic() < until:
            if ended.wait(0.02):
                break
        yield
    finally:
        if is_first:
            with _lock:
                del _opening[path]
            ended.set()


def drop(host: str) -> None:
    """Let the next command connect anew. What still uses the old connection goes on."""
    known = _ssh_config(host, os.environ.get("PATH", ""))
    if known and (path := _socket(known)):
        with contextlib.suppress(OSError):
            path.unlink()


@lru_cache(maxsize=256)
def _ssh_config(host: str, _path: str) -> SshConfig | None:
    """What `ssh -G` says, which connects to nobody; None where it says nothing. Another PATH is another ssh."""
    try:
        done = subprocesses.run(["ssh", "-G", "--", host], timeout_s=_SSH_G_TIMEOUT_S)
    except PitError:
        return None
    pairs = (line.partition(" ")[::2] for line in done.stdout.splitlines())
    settings = {name.lower(): value for name, value in pairs}
    if done.code or "hostname" not in settings:
        return None
    # Not by host and port alone: with other keys, another user or other known hosts it is not the same connection.
    return SshConfig(settings, hashlib.sha256(done.stdout.encode()).hexdigest()[:16])


def _socket(known: SshConfig) -> Path | None:
    """Where the connection's socket is; None where the user shares connections already, or there is no place for it."""
    if known.settings.get("controlpath") or known.settings.get("controlmaster", "false") != "false":
        return None
    for folder in _folders():
        path = folder / known.digest
        if len(str(path)) <= _MAX_SOCKET_PATH and _PLAIN.fullmatch(str(path)) and is_private(folder):
            return path
    return None


def _folders() -> list[Path]:
    shared = Path(f"/tmp/pitools-{os.geteuid()}")  # noqa: S108 (ours alone, or not used: see is_private)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return [Path(runtime) / "pitools", shared] if runtime.startswith("/") else [shared]


def is_private(folder: Path) -> bool:
    """Whether the folder, made if need be, is a folder and nobody else's: who can reach the socket is us, there."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
