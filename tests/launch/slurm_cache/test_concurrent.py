"""Many processes, one question; whoever dies, and whoever would lie to us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, NoSpace, PitError
from pitools.launch import slurm_cache
from pitools.site.schema import Site
from pitools.site.schema import Slurm as SlurmOf

# As many processes as are asked for, each of which looks once, all at the same moment.
LOOK = """
import os, sys
from pitools.launch import slurm_cache
from pitools.site.schema import Site, Slurm

site = Site(name="x", slurm=Slurm(conf=sys.argv[1]))
wait, start = os.pipe()
for _ in range(int(sys.argv[2])):
    if not os.fork():
        os.close(start)
        os.read(wait, 1)  # ends when all are there
        told = slurm_cache.cached_states(site, sys.argv[3:])
        os.write(1, (" ".join(one.state for one in told.values()) + "\\n").encode())
        os._exit(0)
os.close(start)
for _ in range(int(sys.argv[2])):
    os.wait()
"""
# A squeue that counts its calls and takes its time.
SQUEUE = """#!/bin/sh
echo x >> "$0.calls"
[ -e "$0.hang" ] && sleep 60
sleep 0.3
for last; do :; done
sep=${last#%i}; sep=${sep%%\\%r*}
echo "4${sep}None${sep}N/A${sep}4${sep}RUNNING"
"""


@pytest.fixture
def squeue(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program, first on the PATH."""
    path = home / "bin" / "squeue"
    path.parent.mkdir()
    path.write_text(SQUEUE)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def look(conf: str, count: int, *ids: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOOK, conf, str(count), *ids], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def calls(squeue: Path) -> int:
    path = squeue.with_name("squeue.calls")
    return len(path.read_text().split()) if path.exists() else 0


def test_twenty_at_once_are_one_question(squeue: Path) -> None:
    """All get its answer."""
    assert look("", 20, "4").communicate(timeout=60)[0].split() == ["RUNNING"] * 20
    assert calls(squeue) == 1


def test_who_dies_while_asking_harms_nobody(squeue: Path) -> None:
    """Its lock is free at once, and its question counts."""
    squeue.with_name("squeue.hang").touch()
    killed = look("", 1, "4")
    until = time.monotonic() + 20
    while not calls(squeue):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    squeue.with_name("squeue.hang").unlink()
    assert slurm_cache.require_states(Site(name="x"), ["4"]) == {"4": "RUNNING"}
    assert calls(squeue) == 2
    (path,) = slurm_cache._cache_path(Site(name="x")).parent.glob("*.json")
    assert b'"bucket_calls":3' in path.read_bytes()


def test_who_knows_enough_does_not_wait(squeue: Path) -> None:
    """While another asks a controller that hangs, what was known is told at once."""
    slurm_cache.require_states(Site(name="x"), ["4"])
    slurm_cache.invalidate(Site(name="x"))
    squeue.with_name("squeue.hang").touch()
    other = look("", 1, "4")
    until = time.monotonic() + 20
    while calls(squeue) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    start_time = time.monotonic()
    assert slurm_cache.cached_states(Site(name="x"), ["4"])["4"].state == "RUNNING"
    assert time.monotonic() - start_time < 10
    os.killpg(other.pid, signal.SIGKILL)
    other.communicate()


@pytest.mark.parametrize("harm", ["writable", "link", "file", "another's"])
def test_a_folder_of_somebody_else_is_refused(
    home: Path, squeue: Path, harm: str, request: pytest.FixtureRequest
) -> None:
    """What lies there could say that a job has ended: it is neither read nor written, and nobody is asked."""
    path = home / "cache" / "pitools" / "slurm-cache"
    slurm_cache.require_states(Site(name="x"), ["4"])
    if harm == "writable":
        path.chmod(0o770)
    elif harm == "another's":
        request.getfixturevalue("as_root")
        os.chown(path, 65534, 65534)
    else:
        os.rename(path, home / "moved")
        path.symlink_to(home / "moved") if harm == "link" else path.write_text("")
    with pytest.raises(PitError) as caught:
        slurm_cache.cached_states(Site(name="x"), ["4"])
    assert isinstance(caught.value, ClusterError)
    assert str(path) in caught.value.where
    assert calls(squeue) == 1


def test_files_are_its_owners_alone_and_links_are_not_followed(home: Path, squeue: Path) -> None:
    """Neither read through nor written through."""
    slurm_cache.require_states(Site(name="x"), ["4"])
    path = slurm_cache._cache_path(Site(name="x"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    os.rename(path, home / "lie")
    path.symlink_to(home / "lie")
    text = (home / "lie").read_text()
    assert slurm_cache.require_states(Site(name="x"), ["4"]) == {"4": "RUNNING"}
    assert (home / "lie").read_text() == text
    assert not path.is_symlink()
    assert calls(squeue) == 2


@pytest.mark.usefixtures("as_root")
def test_on_a_full_disk_nobody_is_asked_without_end(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a question costs cannot be written down: it is not asked, and the error says what to do."""
    full = squeue.parent.parent / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(full)], check=True)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(full))
        slurm_cache.require_states(Site(name="x"), ["4"])
        slurm_cache.invalidate(Site(name="x"))
        descriptor = os.open(full / "ballast", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(descriptor, b"x" * 4096):
                pass
        os.close(descriptor)
        with pytest.raises(NoSpace):
            slurm_cache.cached_states(Site(name="x"), ["4"])
        assert calls(squeue) == 1
    finally:
        subprocess.run(["umount", str(full)], check=True)


@pytest.mark.slurm
def test_twenty_at_once_with_a_real_slurm(clusters: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that wait, that ended and that never were: one squeue and one sacct for twenty processes."""
    conf = str(clusters / "alpha" / "slurm.conf")
    bin_folder = home / "bin"
    bin_folder.mkdir()
    for name in ("squeue", "sacct"):
        program = bin_folder / name
        program.write_text(f'#!/bin/sh\necho x >> "$0.calls"\nexec /usr/bin/{name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    slurm = slurm_cache.client(Site(name="x", slurm=SlurmOf(conf=conf)))
    job_id = slurm.submit("#!/bin/sh\ntrue\n", args=["--hold", "--output=/dev/null"]).job_id
    gone = slurm.submit("#!/bin/sh\ntrue\n", args=["--hold", "--output=/dev/null"]).job_id
    try:
        slurm.cancel([gone])
        output = look(conf, 20, job_id, gone, "4294901").communicate(timeout=60)[0]
        assert output == "PENDING CANCELLED UNKNOWN\n" * 20
        assert (calls(bin_folder / "squeue"), len((bin_folder / "sacct.calls").read_text().split())) == (1, 1)
    finally:
        slurm.cancel([job_id])
