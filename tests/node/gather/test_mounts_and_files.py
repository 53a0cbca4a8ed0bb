"""Tables `mounts` and `files`: mountinfo in all its forms, and what a file can be."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.check.config import load_shipped
from pitools.node.check.evaluate import evaluate
from pitools.node.gather import files, mounts
from pitools.node.gather.child import Collector, read_tables
from pitools.node.gather.files import read_files
from pitools.node.gather.mounts import read_mounts
from pitools.node.gather.read import Query

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime shared:13 - proc proc rw
29 1 259:2 / / rw,relatime shared:1 - ext4 /dev/dm-2 ro,errors=remount-ro
43 40 0:33 / /net rw - autofs systemd-1 rw,fd=22,direct
48 45 260:3 / /srv/a\040b\134c rw,noatime - xfs /dev/sda3 rw,noatime
50 27 0:50 / /home rw - nfs4 [fe80::1]:/home rw,vers=4.2,addr=10.0.0.1
51 27 0:51 / /data rw - nfs4 [fe80::1]:/vol:/data rw,vers=4.2
52 27 0:52 / /soft ro - nfs4 [fe80::2]:/soft rw
53 27 0:53 / /lustre rw shared:9 master:2 - lustre 10.0.0.2@o2ib:/fs rw,flock
54 27 0:54 / /old rw - tmpfs hidden rw
55 54 0:55 / /old rw - tmpfs seen rw
56 27 0:53 /sub /lustre/sub rw - lustre 10.0.0.2@o2ib:/fs rw,flock
broken line
57 27 0:57 / /short rw - tmpfs
58 27 0:58 / /error rw - ext4 /dev/sdb1 rw,emergency_ro
59 27 0:59 / /view ro - ext4 /dev/sdb2 rw
60 27 0:60 / /image ro - ext4 /dev/sdb3 ro
""".strip()


@pytest.fixture
def proc(tmp_path: Path, write_tree) -> Path:
    return write_tree(tmp_path / "proc", {"self/mountinfo": MOUNTINFO})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The paths that statvfs is called for; each file system has 1,000 blocks, of which root keeps 100 free."""
    calls: list[bytes] = []

    def statvfs(path: bytes) -> object:
        calls.append(path)
        if path == b"/soft":
            raise OSError(errno.ESTALE, "Stale file handle")
        if path == b"/home":
            raise PermissionError
        counts = {"f_frsize": 4096, "f_blocks": 1000, "f_bfree": 400, "f_bavail": 301, "f_files": 50, "f_ffree": 5}
        return SimpleNamespace(**counts)

    monkeypatch.setattr(mounts.os, "statvfs", statvfs)
    return calls


def test_each_mount_is_a_row(proc: Path, asked: list[bytes], last_rows) -> None:
    """Escaped paths, a file system that went read-only, a stale handle, a hidden mount, and autofs, never asked."""
    rows = last_rows("mounts", read_mounts(Query(root=proc.parent)))
    assert rows["/srv/a b\\c"] == {
        "target": "/srv/a b\\c",
        "device": "/dev/sda3",
        "type": "xfs",
        "options": "rw,noatime",
        "is_read_only": False,
        "is_forced_read_only": False,
        "responds": True,
        "size_bytes": 4096000,
        "free_bytes": 1232896,
        "used_bytes": 2457600,
        "used_share": 0.666,
        "root_used_share": 0.6,
        "inodes": 50,
        "inodes_free": 5,
        "inodes_used_share": 0.9,
    }
    assert {target: row["options"] for target, row in rows.items() if row["is_read_only"]} == {
        "/": "ro,errors=remount-ro,relatime",
        "/soft": "ro",
        "/view": "ro",
        "/image": "ro",
    }
    assert [target for target, row in rows.items() if row["is_forced_read_only"]] == ["/", "/error"]
    assert (rows["/soft"]["responds"], rows["/home"]["responds"]) == (False, None)
    assert (rows["/old"]["device"], asked.count(b"/old"), b"/net" in asked) == ("seen", 1, False)
    assert "/short" not in rows


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR])
def test_whether_a_hidden_mount_responds_is_unknown(
    proc: Path, last_rows, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No path leads to mounts below a folder that a later mount covers, as in a job's own namespace."""

    def statvfs(_: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mounts.os, "statvfs", statvfs)
    rows = last_rows("mounts", read_mounts(Query(root=proc.parent)))
    assert {row.get("responds") for row in rows.values()} == {None}
    assert rows["/lustre"]["responds"] is None


def test_what_may_hang_is_announced(proc: Path, asked: list[bytes]) -> None:
    """Before a mount of a disk or server is read, its row says that it does not respond; one in memory is just read."""
    announced = [row["target"] for row in read_mounts(Query(root=proc.parent)) if row.get("responds") is False]
    of_servers = ["/home", "/data", "/soft", "/soft", "/lustre", "/lustre/sub"]
    assert announced == ["/", "/srv/a b\\c", *of_servers, "/error", "/view", "/image"]


def test_a_disk_that_hangs_fails_alone(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mount does not respond, which drains the node; the others are read."""

    def statvfs(path: bytes) -> object:
        if path == b"/srv/a b\\c":
            time.sleep(60)
        raise PermissionError

    monkeypatch.setattr(mounts.os, "statvfs", statvfs)
    facts = read_tables([Collector("mounts", "a test", read_mounts, 0.5)], Query(root=proc.parent))
    checks = [check for check in load_shipped().check if check.name == "mount-responds"]
    found = [(one.subject, one.action) for one in evaluate(checks, facts) if one.state == "failed"]
    assert (found, facts.tables["mounts"].unknown) == ([("/srv/a b\\c", "drain")], "")


def test_mounts_of_a_hung_server_are_not_waited_for(proc: Path, asked: list[bytes], last_rows) -> None:
    """After one mount hung, the others of its server or device do not respond either, and are not asked."""
    rows = last_rows("mounts", read_mounts(Query(hung={"/home", "/lustre"}, root=proc.parent)))
    assert not {"/home", "/lustre"}.intersection(rows)
    assert (rows["/data"]["responds"], rows["/lustre/sub"]["responds"]) == (False, False)
    assert {b"/data", b"/home", b"/lustre", b"/lustre/sub"}.isdisjoint(asked)
    assert b"/soft" in asked


def test_without_mountinfo_mounts_are_unknown(tmp_path: Path) -> None:
    """No list of mounts is an error: no mount would be missing otherwise."""
    with pytest.raises(OSError, match="mountinfo"):
        list(read_mounts(Query(root=tmp_path)))


@given(lines=st.lists(st.binary(max_size=80) | st.sampled_from(MOUNTINFO.encode().splitlines()), max_size=8))
def test_any_bytes_make_no_error(tmp_path_factory: pytest.TempPathFactory, write_tree, last_rows, lines) -> None:
    """Whatever mountinfo holds, it is read."""
    proc = write_tree(tmp_path_factory.mktemp("root") / "proc", {"self/mountinfo": b"\n".join(lines)})
    last_rows("mounts", read_mounts(Query(root=proc.parent)))


def test_files_of_every_kind(tmp_path: Path, last_rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind, permissions, size, text, and whether a folder can be written."""
    (tmp_path / "file").write_bytes(b"a\xff\n" + b"b" * (1 << 17))
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "folder").mkdir(0o750)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nothing")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")  # a path of 108 bytes at most
        names = ("file", "folder", "pipe", "link", "dangling", "socket", "file/x", "none\0")
        rows = last_rows("files", read_files(Query({"/dev/null", *(str(tmp_path / name) for name in names)})))
    found = {str(path).removeprefix(f"{tmp_path}/"): row for path, row in rows.items()}
    assert {name: row.get("kind") for name, row in found.items()} == {
        "file": "file",
        "folder": "directory",
        "pipe": "pipe",
        "link": "file",
        "dangling": None,
        "socket": "socket",
        "file/x": None,
        "none\0": None,
        "/dev/null": "device",
    }
    assert [name for name, row in found.items() if row.get("exists") is False] == ["dangling", "file/x"]
    file = found["file"]
    assert (file["mode"], file["size_bytes"], len(file["text"])) == ("0640", (1 << 17) + 3, 1 << 16)
    assert file["text"].startswith("a\ufffd\nb")
    assert (found["folder"]["mode"], found["folder"]["is_writable"], file["is_writable"]) == ("0750", True, None)
    assert os.listdir(tmp_path / "folder") == []


def test_a_folder_without_unnamed_files(tmp_path: Path, last_rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, which has none, the server's answer to access(2) counts."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(files.os, "open", refuse)
    monkeypatch.setattr(files.os, "access", lambda path, mode: mode == os.W_OK)
    monkeypatch.setattr(files, "mount_points", lambda proc: {str(tmp_path)})
    row = last_rows("files", read_files(Query({str(tmp_path)})))[str(tmp_path)]
    assert (row["is_writable"], row["is_mount_point"]) == (True, True)


def test_a_file_that_hangs_is_announced(tmp_path: Path) -> None:
    """Each path first does not respond; one that hung is not read again."""
    rows = [(row["path"], row["responds"]) for row in read_files(Query({"/", "/hung"}, {"/hung"}))]
    assert rows == [("/", False), ("/", True)]
