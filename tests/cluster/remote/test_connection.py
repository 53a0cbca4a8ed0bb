"""One connection a site, whatever is asked, and nothing that can make a command wait behind it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from pitools.core.errors import Unreachable
from pitools.slurm import ssh_mux
from pitools.slurm.transport import Transport, run_command

pytestmark = pytest.mark.slurm

FAR = Transport(host="far", timeout_s=10)


def ask(reach: Transport = FAR, *words: str) -> str:
    done = run_command(reach, words or ["sh", "-c", "echo $PPID"], env={})
    assert done.code == 0, done.stderr
    return done.stdout


def sockets() -> list[Path]:
    return list((Path(os.environ["XDG_RUNTIME_DIR"]) / "pitools").glob("*"))


def master() -> psutil.Process:
    """The process that holds the one connection."""
    (path,) = sockets()
    (process,) = [
        item for item in psutil.process_iter(["cmdline"]) if str(path) in " ".join(item.info["cmdline"] or ())
    ]
    return process


def test_many_calls_are_one_login(near: None, far_side: Any) -> None:
    """Twenty commands one after the other need one login; the socket's folder is closed to everybody else."""
    login_hosts = far_side.logins()
    for _ in range(20):
        ask()
    assert far_side.logins() - login_hosts == 1
    (path,) = sockets()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_more_at_once_than_a_connection_takes(near: None, far_side: Any) -> None:
    """sshd lets ten sessions share a connection: those beyond get one of their own, and all get their answer."""
    ask()
    with ThreadPoolExecutor(16) as pool:
        output = list(pool.map(lambda number: ask(FAR, "sh", "-c", f"sleep 0.5; echo {number}"), range(16)))
    assert output == [f"{number}\n" for number in range(16)]


def test_commands_that_begin_at_once_are_one_login(near: None, far_side: Any) -> None:
    """Where no connection is open yet, one of them makes it and the others wait for that."""
    login_hosts = far_side.logins()
    with ThreadPoolExecutor(6) as pool:
        output = list(pool.map(lambda number: ask(FAR, "echo", str(number)), range(6)))
    assert output == [f"{number}\n" for number in range(6)]
    assert far_side.logins() - login_hosts == 1


def test_a_connection_that_is_cut_is_made_again(near: None, far_side: Any) -> None:
    """The command in flight fails and says so; the next one connects anew."""
    ask()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_command, FAR, ["sleep", "9.125"], env={})
        while not [item for item in psutil.process_iter(["cmdline"]) if item.info["cmdline"] == ["sleep", "9.125"]]:
            assert not waiting.done()
        far_side.cut()
        assert waiting.result(5).code == 255
    ask()


def test_a_socket_that_nobody_serves_is_no_obstacle(near: None) -> None:
    """What a machine that crashed left behind is replaced."""
    ask()
    (path,) = sockets()
    master().kill()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    ask()
    assert master().is_running()


def test_a_connection_that_hangs_holds_up_one_command(near: None) -> None:
    """Where the process that shares it does not answer, one command times out, and the next one connects anew."""
    ask()
    hung = master()
    hung.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unreachable, match="no answer within"):
            ask(Transport(host="far", timeout_s=1))
        ask()
    finally:
        hung.kill()


def test_the_users_own_sharing_stays(near: None, far_side: Any) -> None:
    """Where the ssh configuration says how connections are shared, ours keeps out of it."""
    assert "ControlMaster=auto" not in ssh_mux.mux_options("shared")
    ask(Transport(host="shared", timeout_s=10))
    assert sockets() == []
    login_hosts = far_side.logins()
    ask(Transport(host="shared", timeout_s=10))
    assert far_side.logins() == login_hosts
    subprocess.run([f"{far_side.near}/ssh", "-O", "exit", "shared"], capture_output=True, check=True)


@pytest.mark.parametrize("wrong", ["readable", "link", "long", "file"])
def test_a_folder_that_is_not_private_is_not_used(
    near: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Sockets lie where nobody else can come, and where their path fits; else everything works without."""
    monkeypatch.setattr(ssh_mux, "_folders", lambda: [folder])
    folder = tmp_path / "pitools"
    if wrong == "readable":
        folder.mkdir(mode=0o755)
    elif wrong == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to("other")
    elif wrong == "file":
        folder.write_text("")
    else:
        folder = tmp_path / ("x" * 90)
    assert not [mux_option for mux_option in ssh_mux.mux_options("far") if mux_option.startswith("ControlPath")]
    ask()
