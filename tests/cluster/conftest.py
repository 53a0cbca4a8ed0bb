"""A real sshd on loopback, and sites that are one running cluster reached through it."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from pitools.slurm.client import Client, Transport

Pit = Callable[..., subprocess.CompletedProcess[str]]

# What login nodes print before they let anyone in, and what start-up files say there: a reader of stderr could take
# it for Slurm's.
BANNER = "*** Authorised use only ***\nerror: all errors are logged\n"
BASHRC = "echo 'module: error: not found' >&2\necho 'Connection refused' >&2\n"
# What a shell on the far side may be full of, and what would bend every command there.
BENT = {
    "SQUEUE_FORMAT": "%j",
    "SQUEUE_STATES": "RUNNING",
    "SINFO_FORMAT": "%P",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_CLUSTERS": "nosuch",
    "SACCT_FORMAT": "jobid",
    "SBATCH_PARTITION": "nosuch",
    "SBATCH_HOLD": "1",
    "SCANCEL_STATE": "SUSPENDED",
    "TZ": "Asia/Tokyo",
    "LC_ALL": "C.UTF-8",
}

SSHD_CONFIG = """\
ListenAddress 127.0.0.1:{far}
ListenAddress 127.0.0.1:{bent}
ListenAddress 127.0.0.1:{bare}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
AuthenticationMethods publickey
PermitRootLogin prohibit-password
# The temporary folder is everybody's.
StrictModes no
Banner {folder}/banner
PermitUserRC no
PidFile none
# Not the developer's own start-up files.
SetEnv HOME={folder}
Match LocalPort {bent}
    SetEnv HOME={folder} {variables}
Match LocalPort {bare}
    SetEnv HOME={folder} PATH={folder}/tools
"""
# One block a host: what tells it from `far` comes first, because ssh takes the first value it meets.
SSH_CONFIG = """\
Host far
    Port {far}
Host bent
    Port {bent}
Host bare
    Port {bare}
Host down
    Port {down}
Host silent
    Port {silent}
Host strange
    Port {far}
    UserKnownHostsFile {folder}/known_hosts_strange
Host kept
    Port {far}
    ControlMaster auto
    ControlPath {folder}/mux
    ControlPersist 60
Host *
    HostName 127.0.0.1
    HostKeyAlias loopback
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
"""
HOSTS = ("far", "bent", "bare", "down", "silent", "strange", "kept")


class Sshd(NamedTuple):
    """A running sshd. path: a PATH whose `ssh` knows HOSTS, and without Slurm. port: of the host `far`."""

    path: str
    port: int


def listener(stack: ExitStack, *, listen: bool) -> int:
    """A port that is taken below the ephemeral range: nobody answers on it, or (`listen`) nobody ever speaks."""
    while True:
        used = stack.enter_context(socket.socket())
        try:
            used.bind(("127.0.0.1", port := random.randrange(10000, 17000)))
        except OSError:
            continue
        if listen:
            used.listen()
        return port


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [listener(stack, listen=False) for _ in range(count)]


def keys(folder: Path) -> None:
    """The host's key and the user's; the known hosts, and those of somebody who knew another host of that name."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    for reference, key in (("known_hosts", "host_key"), ("known_hosts_strange", "user_key")):
        (folder / reference).write_text(f"loopback {(folder / f'{key}.pub').read_text()}")


def link(folder: Path, *names: str) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(str(shutil.which(name)))


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """OpenSSH's own server on three ports of 127.0.0.1, with keys and files of its own, until the session ends."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    ssh = shutil.which("ssh")
    if not server or not ssh:
        pytest.skip("there is no sshd here (Debian: apt-get install openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    keys(folder)
    link(folder / "tools", "sh", "env", "grep")  # a host without Slurm
    link(folder / "bin", "sh", "bash")
    # ssh looks for its files in the home that passwd names, whatever HOME says: -F is the only way around it.
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F {folder}/ssh_config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    (folder / "banner").write_text(BANNER)
    (folder / ".bashrc").write_text(BASHRC)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where a root's sshd locks itself in; boot scripts make it
    with ExitStack() as stack:
        far, bent, bare = free_ports(3)
        ports = {"far": far, "bent": bent, "bare": bare, "folder": folder}
        variables = " ".join(f"{name}={value}" for name, value in BENT.items())
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(**ports, variables=variables))
        ports |= {"down": listener(stack, listen=False), "silent": listener(stack, listen=True)}
        (folder / "ssh_config").write_text(SSH_CONFIG.format(**ports))
        log = stack.enter_context((folder / "log").open("w"))
        process = subprocess.Popen([server, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
        try:
            await_answer([str(folder / "bin" / "ssh"), "far", "true"], folder / "log", process)
            yield Sshd(str(folder / "bin"), far)
        finally:
            process.terminate()
            process.wait(10)


def await_answer(argv: list[str], log: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a login works; fails with the server's own words."""
    deadline = time.monotonic() + 10
    while subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"sshd lets nobody in:\n{log.read_text()}")
        time.sleep(0.1)


@pytest.fixture
def site_folder(clusters: Path, dev_sites: Path, tmp_path: Path) -> Path:
    """Site files named as HOSTS: each is the cluster alpha, reached through that host."""
    folder = tmp_path / "sites"
    folder.mkdir()
    text = (dev_sites / "alpha.toml").read_text()
    for host in HOSTS:
        reach = f'\n[connection]\nkind = "ssh"\nhost = "{host}"\ntimeout_s = {3 if host == "silent" else 20}\n'
        (folder / f"{host}.toml").write_text(text.replace('name = "alpha"', f'name = "{host}"') + reach)
    return folder


@pytest.fixture
def far(pit: Pit, sshd: Sshd, site_folder: Path, tmp_path: Path) -> Pit:
    """Runs a command of ours on a machine that has ssh, and no Slurm."""

    def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        runs = str(tmp_path / "runs")
        return pit(*words, **{"PATH": sshd.path, "PIT_SITE_PATH": str(site_folder), "PIT_RUNS": runs, **more})

    return call


@pytest.fixture
def alpha(clusters: Path) -> Client:
    """The same cluster without ssh, to see what was really done."""
    return Client(Transport(env={"SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}, timeout_s=20))
