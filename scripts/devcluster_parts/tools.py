"""The programs of Slurm and MariaDB: where they are, the environment they get, and running one to its end."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from devcluster_parts.config import LOOPBACK, Host
from devcluster_parts.errors import ClusterProblem
from devcluster_parts.stray_processes import SETUP_MARK

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sinfo": "slurm-client",
    "sacctmgr": "slurm-client",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
"""Program to the Debian package that brings it."""


class ProgramOutput(NamedTuple):
    """A program's two streams."""

    out: str
    err: str


def search_path() -> str:
    """The caller's PATH, and the folders of daemons that an ordinary user's PATH lacks."""
    return os.pathsep.join([os.environ.get("PATH", "/usr/bin:/bin"), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def check_tools() -> None:
    """Raise Problem naming every Debian package that is missing."""
    missing = [program for program in PACKAGES if shutil.which(program, path=search_path()) is None]
    if missing:
        packages = sorted({PACKAGES[program] for program in missing})
        raise ClusterProblem(
            f"not installed: {', '.join(missing)}", where="PATH", hint=f"apt-get install {' '.join(packages)}"
        )


def this_host() -> Host:
    """Return this machine as Slurm sees it. Raises ClusterProblem unless its name resolves to 127.0.0.1.

    The daemons and srun bind to the address of the host's name. They accept any connection, so it must be a loopback
    address; and it must be this one, from which their own connections come (srun hangs at 127.0.1.1).
    """
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        address = f"nothing ({error})"
    if address != LOOPBACK:
        what = f"the host's name {name} leads to {address}; Slurm would listen there, trusting anyone, or not work"
        raise ClusterProblem(what, where="/etc/hosts", hint=f"put first into /etc/hosts: {LOOPBACK} {name}")
    return Host(name=name.partition(".")[0], user=_user()[0])


def environment(**more: str) -> dict[str, str]:
    """A daemon's environment: nothing of the caller's but the PATH and the home folder."""
    name, home = _user()
    return {"PATH": search_path(), "HOME": home, "USER": name, "LANG": "C.UTF-8", **more}


def _user() -> tuple[str, str]:
    """This user's name and home; in a container that knows no names their number."""
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        return str(os.geteuid()), "/"
    return user.pw_name, user.pw_dir


def run(argv: Sequence[str], *, root: Path, limit_s: float, stdin: str = "", **env: str) -> ProgramOutput:
    """Run a program to its end and return its output. stdin: text for its stdin.

    Raises ClusterProblem with the output of a failed program; not with `stdin`, for a program that answers each of its
    lines: its exit code is that of one line.
    """
    try:
        done = subprocess.run(
            list(argv),
            env=environment(**{SETUP_MARK: str(root)}, **env),
            cwd="/",
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterProblem(f"no answer within {limit_s:.0f} s", where=" ".join(argv), hint="see the logs") from error
    if done.returncode != 0 and not stdin:
        output = (done.stdout + done.stderr).strip()[-2000:]
        raise ClusterProblem(f"exit {done.returncode}: {output}", where=" ".join(argv))
    return ProgramOutput(out=done.stdout, err=done.stderr)
