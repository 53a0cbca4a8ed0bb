"""Share one ssh connection per host by OpenSSH's ControlMaster, unless the user has configured it.

The first command leaves a connection open for a minute, with its socket in a private folder; later commands need no
handshake. Sharing only saves time: on any problem, commands use connections of their own.
"""

from __future__ import annotations

import contextlib
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
_CONNECT_WAIT_S = 2.0  # longer than a login; commands to a silent host wait no longer
_lock = threading.Lock()
_opening: dict[Path, threading.Event] = {}
# A dead connection is detected after 15 s.
_KEEPALIVE = {
    "serveraliveinterval": ("0", "ServerAliveInterval=5"),
    "serveralivecountmax": ("3", "ServerAliveCountMax=3"),
}
# sun_path holds 107 bytes; ssh first binds the socket under a temporary name, 17 bytes longer.
_MAX_SOCKET_PATH = 107 - 17
_PLAIN = re.compile(r"[A-Za-z0-9/._-]+")


class SshConfig(NamedTuple):
    """ssh's settings for a host, by lower-case name. digest: a hash of all of them, which names the socket."""

    settings: dict[str, str]
    digest: str


def mux_options(host: str) -> list[str]:
    """Return ssh options that share the connection and keep it alive; none that override the user's settings."""
    config = _ssh_config(host, os.environ.get("PATH", ""))
    if config is None:
        return []
    options = [option for name, (default, option) in _KEEPALIVE.items() if config.settings.get(name) == default]
    if path := _socket(config):
        options += ["ControlMaster=auto", f"ControlPath={path}", f"ControlPersist={_PERSIST_S}"]
    return [argument for option in options for argument in ("-o", option)]


@contextlib.contextmanager
def connect_once(host: str) -> Iterator[None]:
    """Let the first of several concurrent commands to a host open the shared connection; the others wait for it."""
    config = _ssh_config(host, os.environ.get("PATH", ""))
    path = _socket(config) if config else None
    if path is None or path.exists():
        yield
        return
    with _lock:
        opening_done = _opening.get(path)
        is_first = opening_done is None
        if opening_done is None:
            opening_done = _opening[path] = threading.Event()
    try:
        deadline_s = time.monotonic() + _CONNECT_WAIT_S
        while not is_first and not path.exists() and time.monotonic() < deadline_s:
            if opening_done.wait(0.02):
                break
        yield
    finally:
        if is_first:
            with _lock:
                del _opening[path]
            opening_done.set()


def drop(host: str) -> None:
    """Let the next command open a new connection. Running commands keep the old one."""
    config = _ssh_config(host, os.environ.get("PATH", ""))
    if config and (path := _socket(config)):
        with contextlib.suppress(OSError):
            path.unlink()


@lru_cache(maxsize=256)
def _ssh_config(host: str, _path: str) -> SshConfig | None:
    """Return the settings of `ssh -G`, which opens no connection, or None. _path: PATH, as part of the cache key."""
    import hashlib  # and with it OpenSSL, 8 ms that a local cluster need not pay

    try:
        done = subprocesses.run(["ssh", "-G", "--", host], timeout_s=_SSH_G_TIMEOUT_S)
    except PitError:
        return None
    pairs = (line.partition(" ")[::2] for line in done.stdout.splitlines())
    settings = {name.lower(): value for name, value in pairs}
    if done.code or "hostname" not in settings:
        return None
    # All settings count, not only host and port: other keys, users or known hosts mean another connection.
    return SshConfig(settings, hashlib.sha256(done.stdout.encode()).hexdigest()[:16])


def _socket(config: SshConfig) -> Path | None:
    """Return the path of the socket; None if the user has configured sharing, or no private folder exists."""
    if config.settings.get("controlpath") or config.settings.get("controlmaster", "false") != "false":
        return None
    for folder in _folders():
        path = folder / config.digest
        if len(str(path)) <= _MAX_SOCKET_PATH and _PLAIN.fullmatch(str(path)) and is_private(folder):
            return path
    return None


def _folders() -> list[Path]:
    shared = Path(f"/tmp/pitools-{os.geteuid()}")  # noqa: S108 (ours alone, or not used: see is_private)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return [Path(runtime) / "pitools", shared] if runtime.startswith("/") else [shared]


def is_private(folder: Path) -> bool:
    """Create the folder if missing, and return whether it is a folder that only this user can access."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
