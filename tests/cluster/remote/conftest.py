"""A site that shares no files and no user with the tests: a real sshd on loopback, a user and a root of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from pitools.core import strict_toml, subprocesses
from pitools.launch import plan as planning
from pitools.launch.request import Request
from pitools.site.schema import Site
from pitools.slurm.client import Client, Transport
from pitools.store import digest, manifest

PATH = os.environ["PATH"]
SSHD_CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {etc}/host_key
AuthorizedKeysFile {etc}/user_key.pub
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
PermitUserRC no
PidFile none
LogLevel VERBOSE
MaxStartups 50
SetEnv PATH="{root}/bin:{path}" HOME="{root}/home"
"""
SSH_CONFIG = """\
Host shared
    ControlMaster auto
    ControlPath {etc}/mine
    ControlPersist 5
Host *
    HostName 127.0.0.1
    Port {port}
    User {user}
    HostKeyAlias loopback
    IdentityFile {etc}/user_key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {etc}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
"""


class FarSide(NamedTuple):
    """The far machine, as far as a test looks behind the curtain.

    root: all that is there, its user's alone. bin: first on its PATH. log: its sshd's. near: a PATH of here with ssh
    and without Slurm. sshd: its process.
    """

    user: str
    root: Path
    log: Path
    near: str
    sshd: psutil.Process

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    def own(self, *paths: Path) -> None:
        for path in paths:
            shutil.chown(path, self.user)

    def logins(self) -> int:
        """How many connections were let in so far."""
        return self.log.read_text().count("Accepted publickey")

    def cut(self) -> int:
        """Kill what serves the connections that are open, as a network that is gone would; how many there were."""
        serving = self.sshd.children()
        for process in serving:
            with contextlib.suppress(psutil.NoSuchProcess):  # of the two that serve one, each ends the other
                for item in [*[c for c in process.children() if c.name().startswith("sshd")], process]:
                    item.send_signal(signal.SIGKILL)
        return len(serving)


def run(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)


def interpreter(user: str, repo: Path) -> str:
    """What to put behind `exec` to get a python with pitools as this user; "" where they cannot have one."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    code = "import msgspec, xxhash, psutil, jinja2, pitools.launch.rank.main"
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        words = ["env", f"PYTHONPATH={packages}:{repo}", "PYTHONDONTWRITEBYTECODE=1", python]
        if run("runuser", "-u", user, "--", *words, "-c", code).returncode == 0:
            return " ".join(words)
    return ""


@pytest.fixture(scope="session")
def stranger(clusters: Path, repo: Path) -> Iterator[tuple[str, str]]:
    """(name, python) of a user without rights, made for these tests, whom alpha lets charge `lab`.

    Where nobody may make users, or theirs cannot read this checkout, it is the user of the tests.
    """
    name, own = f"pitfar{os.getpid()}", f"env PYTHONDONTWRITEBYTECODE=1 {sys.executable}"
    if os.geteuid() or run("useradd", "-M", "-N", "-p", "*", "-d", "/nonexistent", "-s", "/bin/sh", name).returncode:
        yield getpass.getuser(), own
        return
    conf = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
    try:
        python = interpreter(name, repo)
        if not python:
            yield getpass.getuser(), own
            return
        added = run(
            "sacctmgr", "-i", "add", "user", name, "account=lab", "cluster=alpha", "defaultaccount=lab", env=conf
        )
        assert added.returncode == 0, added.stdout + added.stderr
        yield name, python
        run("scancel", f"--user={name}", env=conf)
        deadline = time.monotonic() + 20
        while run("squeue", "-h", f"--user={name}", env=conf).stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.5)
        run("sacctmgr", "-i", "delete", "user", name, env=conf)
    finally:
        run("userdel", "-f", name)


@pytest.fixture(scope="session")
def far_side(stranger: tuple[str, str]) -> Iterator[FarSide]:
    """The far machine, until the session ends."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if not server or not shutil.which("ssh"):
        pytest.skip("there is no sshd here (Debian: apt-get install openssh-server)")
    user, python = stranger
    etc = Path(tempfile.mkdtemp(prefix="pitnear"))
    root = Path(tempfile.mkdtemp(prefix="pit far ", dir="/var/tmp"))
    for name in ("home", "runs", "data", "nvme", "bin"):
        (root / name).mkdir()
    (root / "bin" / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (root / "bin" / "python").chmod(0o755)
    for path in (root, *root.iterdir()):
        shutil.chown(path, user)
    log = etc / "log"
    try:
        process = start(server, etc, root, user, log)
        yield FarSide(user, root, log, str(etc / "bin"), psutil.Process(process.pid))
        process.terminate()
        process.wait(10)
    finally:
        shutil.rmtree(etc)
        shutil.rmtree(root, ignore_errors=True)


def free_port() -> int:
    """A port below the ephemeral range."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := random.randrange(10000, 17000)))
            return port


def start(server: str, etc: Path, root: Path, user: str, log: Path) -> subprocess.Popen[bytes]:
    """An sshd whose files are all in `etc`, and an ssh that knows it."""
    etc.chmod(0o711)  # sshd looks at the key as the user who asks to come in
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(etc / name)], check=True)
    (etc / "known_hosts").write_text(f"loopback {(etc / 'host_key.pub').read_text()}")
    links = etc / "bin"
    links.mkdir()
    for tool in ("sh", "bash", "id"):
        (links / tool).symlink_to(str(shutil.which(tool)))
    (links / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {etc}/ssh_config "$@"\n')
    (links / "ssh").chmod(0o755)
    values = {"etc": etc, "root": root, "port": free_port(), "user": user, "path": "/usr/local/bin:/usr/bin:/bin"}
    (etc / "sshd_config").write_text(SSHD_CONFIG.format(**values))
    (etc / "ssh_config").write_text(SSH_CONFIG.format(**values))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen([server, "-D", "-e", "-f", str(etc / "sshd_config")], stderr=errors)
    deadline = time.monotonic() + 10
    while run(str(links / "ssh"), "far", "true").returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            pytest.fail(f"sshd lets nobody in:\n{log.read_text()}")
        time.sleep(0.1)
    return process


@pytest.fixture
def near(far_side: FarSide, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine: with ssh, without Slurm, and with no connection open."""
    monkeypatch.setenv("PATH", far_side.near)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    runtime = Path(tempfile.mkdtemp(prefix="pitrt", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    yield
    for connection in (runtime / "pitools").glob("*"):
        run(f"{far_side.near}/ssh", "-O", "exit", "-o", f"ControlPath={connection}", "far")
    shutil.rmtree(runtime, ignore_errors=True)  # a connection that ends takes its socket with it


@pytest.fixture
def site(near: None, far_side: FarSide, dev_sites: Path) -> Iterator[Site]:
    """The cluster alpha, as if it were another site's; its PATH has nothing of the test before."""
    keys = strict_toml.read_toml(dev_sites / "alpha.toml")
    root = str(far_side.root)
    keys["name"] = "far"
    keys["connection"] = {"kind": "ssh", "host": "far", "timeout_s": 20.0}
    keys["paths"] = {
        "runs": f"{root}/runs/{{user}}",
        "data": f"{root}/data",
        "nvme": f"{root}/nvme/{{node}}",
        "python": f"{root}/bin/python",
    }
    yield msgspec.convert(keys, Site)
    for path in far_side.bin.glob("sbatch*"):
        path.unlink()


@pytest.fixture
def name() -> str:
    """A run of this test alone."""
    return f"t-{secrets.token_hex(6)}"


@pytest.fixture
def make_plan(site: Site, tmp_path: Path) -> Callable[..., planning.Plan]:
    """A plan for the far site, of a request whose workdir is here."""
    work = tmp_path / "work"
    work.mkdir()

    def make(**asked: object) -> planning.Plan:
        expected = {"name": "t", "time": "3m", "workdir": str(work), **asked}
        if "entry" not in expected:
            expected.setdefault("command", "true")
        return planning.make_plan(msgspec.convert(expected, Request), site, "test")

    return make


@pytest.fixture
def alpha(clusters: Path, far_side: FarSide) -> Iterator[Client]:
    """The same cluster as root of this machine sees it; whatever is left of the stranger's jobs is ended."""
    conf = str(clusters / "alpha" / "slurm.conf")

    def with_slurm(argv: list[str], *, env: dict[str, str], **more: Any) -> subprocesses.Completed:
        return subprocesses.run(argv, env={**env, "PATH": PATH}, **more)

    slurm = Client(Transport(env={"SLURM_CONF": conf}, timeout_s=20), with_slurm)
    yield slurm
    if far_side.user != pwd.getpwuid(os.geteuid()).pw_name:
        left = [job.raw_id for job in slurm.jobs(user=far_side.user)]
        if left:
            slurm.cancel(left)


def dataset(root: Path, sizes: Sequence[int]) -> Path:
    """A version with files of these sizes, that no program wrote before."""
    building = root / "pick" / "new"
    entries = []
    for number, size in enumerate(sizes):
        path = building / "a" / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
        entries.append(manifest.FileEntry(path=f"a/{number}", bytes=size, digest=digest.digest_file(path)[1]))
    raw = manifest.encode_manifest(manifest.Manifest(name="pick", episodes=1, steps=1, arrays={}, files=tuple(entries)))
    (building / manifest.MANIFEST_FILE).write_bytes(raw)
    return building.rename(root / "pick" / manifest.version_of(raw))


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[[Sequence[int]], Path]:
    """Makes a version of files of these sizes, of which the far side knows nothing."""
    return lambda sizes: dataset(tmp_path / "data", sizes)
