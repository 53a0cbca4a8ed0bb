"""Tables `services`, `commands`, `packages`, `accounts` and `endpoints`: what checks name."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import PitError
from pitools.node.gather import named
from pitools.node.gather.read import Query

Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Make shell scripts the only programs that are found."""

    def install(**scripts: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, script in scripts.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return install


SYSTEMCTL = r"""
test "$1 $3 $4 $5 $6" = "show -- gone slurmd sssd" || exit 9
echo "$2" | /bin/grep -q LoadState || exit 9
printf 'LoadState=not-found\nActiveState=inactive\nSubState=dead\n\n'
printf 'NRestarts=3\nLoadState=loaded\nActiveState=active\nSubState=running\n\n'
printf 'NRestarts=a=b\nLoadState=masked\nActiveState=failed\nSubState=failed\n'
exit 0
"""


def test_services_by_one_call(programs: Programs, last_rows) -> None:
    """One systemctl answers for all units, in order; one that there is not is missing."""
    programs(systemctl=SYSTEMCTL)
    rows = last_rows("services", named.read_services(Query({"slurmd", "sssd", "gone"})))
    assert {name: (row["state"], row["substate"], row["restarts"]) for name, row in rows.items()} == {
        "gone": ("missing", "dead", None),
        "slurmd": ("active", "running", 3),
        "sssd": ("failed", "failed", None),
    }


@pytest.mark.parametrize("script", ["echo 'System has not been booted' >&2; exit 1", "echo A=b", "exec /bin/sleep 600"])
def test_services_are_unknown_without_systemd(programs: Programs, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """No answer, an answer for other units, or none in time: the table is unknown, and no service is missing."""
    monkeypatch.setattr(named, "COMMAND_TIMEOUT_S", 0.2 if "sleep" in script else 30)
    programs(systemctl=script)
    with pytest.raises(PitError):
        list(named.read_services(Query({"slurmd", "sssd"})))


def test_nothing_named_starts_nothing(programs: Programs) -> None:
    """Without names there is no call, which would list everything."""
    programs()
    assert list(named.read_services(Query())) == list(named.read_packages(Query())) == []


def test_commands(last_rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code and output of a program with its arguments; no shell; ended at the time-out."""
    monkeypatch.setattr(named, "COMMAND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(named, "_OUTPUT_CHARACTERS", 8)
    commands = {"printf '%s|' 'a b' $HOME", "false", "no-such-program", "sleep 600", "echo 'open", "", "ls /none"}
    rows = last_rows("commands", named.read_commands(Query(commands)))
    assert {command: row["exit_code"] for command, row in rows.items()} == {
        "": 127,
        "echo 'open": None,
        "false": 1,
        "ls /none": 2,
        "no-such-program": 127,
        "printf '%s|' 'a b' $HOME": 0,
        "sleep 600": None,
    }
    assert (rows["printf '%s|' 'a b' $HOME"]["output"], rows["ls /none"]["error_output"]) == ("a b|$HOM", "ls: cann")
    assert rows["ls /none"]["output"] == ""  # apart, as for NHC
    for none in ("no-such-program", "sleep 600"):
        assert rows[none]["output"] is None  # so a check of its output is unknown


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="needs Debian's packages")
def test_packages_of_this_machine(last_rows) -> None:
    """An installed package has its version, another none."""
    rows = last_rows("packages", named.read_packages(Query({"dpkg", "no-such-package", "--version"})))
    assert rows["dpkg"]["version"][0].isdigit()
    assert (rows["no-such-package"]["version"], rows["--version"]["version"]) == ("", "")


RPM = r"""
test "$1 $3 $4 $5" = "--query -- gone kernel" || exit 9
echo 'package gone is not installed'
printf 'kernel\t5.14.0-427.el9\tinstalled\n'
exit 1
"""


def test_packages_of_rpm(programs: Programs, last_rows) -> None:
    """Where dpkg is not, rpm answers; neither is an error."""
    programs(rpm=RPM)
    rows = last_rows("packages", named.read_packages(Query({"kernel", "gone"})))
    assert {name: row["version"] for name, row in rows.items()} == {"gone": "", "kernel": "5.14.0-427.el9"}


def test_a_removed_package_is_not_installed(programs: Programs, last_rows) -> None:
    """dpkg remembers a removed package's version with its configuration files."""
    programs(dpkg_query=r"printf 'ntp\t1:4.2\tconfig-files\n'")
    assert last_rows("packages", named.read_packages(Query({"ntp"})))["ntp"]["version"] == ""


def test_packages_are_unknown_without_a_tool(programs: Programs) -> None:
    """Neither dpkg nor rpm: no package is missing."""
    programs()
    with pytest.raises(PitError):
        list(named.read_packages(Query({"bash"})))


def test_accounts(last_rows) -> None:
    """An account of this machine, one that there is not, and one that hung."""
    name = pwd.getpwuid(os.geteuid()).pw_name
    rows = last_rows("accounts", named.read_accounts(Query({name, "no-such-user", "hung"}, {"hung"})))
    home = pwd.getpwnam(name).pw_dir
    assert rows == {
        name: {"account": name, "exists": True, "uid": os.geteuid(), "home": home, "responds": True},
        "no-such-user": {"account": "no-such-user", "exists": False, "responds": True},
    }


def test_endpoints(last_rows) -> None:
    """A port that listens responds, a closed one and an unknown host do not; what is no endpoint is unknown."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        names = [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (server, closed)]
        closed.close()
        bad = ["tcp://127.0.0.1", "tcp://[::1", "udp://127.0.0.1:1", "127.0.0.1:22", "tcp://h:99999", "ping://", ""]
        asked = {*names, *bad, "tcp://no-such-host.invalid:1", "tcp://hung:1"}
        rows = last_rows("endpoints", named.read_endpoints(Query(asked, {"tcp://hung:1"})))
    assert {name: rows[name]["responds"] for name in names} == {names[0]: True, names[1]: False}
    assert 0 <= rows[names[0]]["latency_s"] <= 2
    assert rows["tcp://no-such-host.invalid:1"]["responds"] is False
    assert {row["responds"] for name, row in rows.items() if name in bad} == {None}
    assert "tcp://hung:1" not in rows


@pytest.mark.parametrize(
    ("script", "responds"),
    [('test "$*" = "-n -c 1 -W 2 -- 127.0.0.1"', True), ("exit 1", False), ("exit 2", False), (None, None)],
)
def test_ping(programs: Programs, last_rows, script: str | None, responds: bool | None) -> None:
    """The exit code of ping counts; without ping the answer is unknown."""
    programs(**({} if script is None else {"ping": script}))
    (row,) = last_rows("endpoints", named.read_endpoints(Query({"ping://127.0.0.1"}))).values()
    assert row["responds"] is responds
