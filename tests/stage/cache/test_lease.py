from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, DataError, TryLater, UsageError
from pitools.stage.cache import evict, records
from pitools.stage.cache import lease as leases
from pitools.stage.cache.evict import EvictionCandidate, KeptReason
from pitools.stage.cache.layout import version_lock
from pitools.stage.cache.lease import acquire, is_leased, last_used, leased_set
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version


@pytest.fixture
def final(small: Path, root: Path) -> Path:
    """A staged set."""
    return Path(stage_version(load_version(small), root).path)


def take(root: Path, final: Path) -> KeptReason | None:
    """Evict it now, if that is allowed at all."""
    return evict.evict_item(root, EvictionCandidate(final.name, final), grace_s=0)


def test_a_leased_set_stays(final: Path, root: Path):
    """While a lease is held nothing takes the set away; afterwards it may go."""
    with leased_set(final) as path:
        assert path == final
        assert is_leased(root, final.name)
        with leased_set(final):  # as many as like
            assert take(root, final) == KeptReason.LEASED
        assert take(root, final) == KeptReason.LEASED
        assert (path / "zarr.json").read_bytes() == b"{}"
    assert not is_leased(root, final.name)
    assert take(root, final) is None
    assert not final.exists()


def test_what_is_gone_cannot_be_leased(final: Path, root: Path, small: Path):
    """A lease is taken of what stands: a set that was evicted before is an error that says what to do."""
    assert take(root, final) is None
    for path in (final, root / "objects/never"):
        with pytest.raises(DataError) as error:
            acquire(path)
        assert "pit-stage run" in error.value.hint
    final.symlink_to(small)
    with pytest.raises(DataError):
        acquire(final)


@pytest.mark.parametrize("place", ["objects", "elsewhere/v", "objects/v/images"])
def test_only_sets_are_leased(root: Path, place: str):
    """A path that `run` did not answer is the caller's mistake."""
    with pytest.raises(UsageError):
        acquire(root / place)


def test_a_link_for_a_lease_file_is_refused(final: Path, root: Path, tmp_path: Path):
    """What stands in the lease file's place is not followed out of the root."""
    (root / ".leases" / final.name).unlink()
    (root / ".leases" / final.name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError):
        acquire(final)
    assert not (tmp_path / "elsewhere").exists()


def test_a_root_that_others_may_write_to_is_not_leased(final: Path, root: Path):
    """Where anybody could exchange the set, a lease would promise nothing."""
    (root / "objects").chmod(0o777)
    with pytest.raises(ClusterError):
        acquire(final)


def test_a_set_from_before_there_were_leases(final: Path, root: Path):
    """Its lease file is made when it is first wanted."""
    (root / ".leases" / final.name).unlink()
    (root / ".leases").rmdir()
    with leased_set(final):
        assert is_leased(root, final.name)


def test_use_is_written_down(final: Path, root: Path):
    """The lease file's time is that of the last lease, at its beginning and at its end."""
    file, before = root / ".leases" / final.name, time.time()
    os.utime(file, (0, 0))
    with leased_set(final, touch=False):
        assert last_used(root, final.name) == 0
    with leased_set(final):
        assert last_used(root, final.name) > before - 1
        os.utime(file, (0, 0))
    assert last_used(root, final.name) > before - 1
    assert last_used(root, "never") == 0


def test_a_kill_ends_a_lease(final: Path, root: Path):
    """The kernel drops it, however the reader dies."""
    ready, send = os.pipe()
    pid = os.fork()
    if not pid:
        acquire(final)
        os.write(send, b"x")
        time.sleep(60)
        os._exit(1)
    os.read(ready, 1)
    assert take(root, final) == KeptReason.LEASED
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert take(root, final) is None


def test_a_forked_loader_keeps_the_lease_to_its_own_end(final: Path, root: Path):
    """Loader processes still read when the parent has left its block."""
    ready, send = os.pipe()
    with leased_set(final):
        pid = os.fork()
        if not pid:
            os.close(send)
            os.read(ready, 1)
            os._exit(0)
    assert take(root, final) == KeptReason.LEASED
    os.close(send)
    os.waitpid(pid, 0)
    assert take(root, final) is None


@pytest.mark.parametrize("inheritable", [False, True])
def test_a_program_inherits_the_lease_where_that_is_asked_for(final: Path, root: Path, inheritable: bool):
    """`hold(inheritable=True)` is for a wrapper that becomes the job."""
    descriptor = acquire(final, inheritable=inheritable)
    assert os.get_inheritable(descriptor) is inheritable
    program = subprocess.Popen(["sleep", "60"], close_fds=False)
    os.close(descriptor)
    try:
        assert is_leased(root, final.name) is inheritable
    finally:
        program.kill()
        program.wait()
    assert not is_leased(root, final.name)


def test_the_flock_of_a_shell_is_a_lease(final: Path, root: Path):
    """`flock --shared ROOT/.leases/VERSION command`, with no Python in the job."""
    argv = ["flock", "--shared", str(root / ".leases" / final.name), "sh", "-c", "echo; read _"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdout.readline()
        assert take(root, final) == KeptReason.LEASED
        shell.stdin.close()
    assert take(root, final) is None


def test_an_evictor_that_hangs_is_not_waited_for_for_ever(final: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    """A lease has a time-out, like all that waits."""
    monkeypatch.setattr(leases, "_LOCK_TIMEOUT_S", 0.1)
    descriptor = os.open(root / ".leases" / final.name, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(TryLater):
        acquire(final)
    os.close(descriptor)


def test_leases_and_evictions_that_race(final: Path, root: Path, small: Path):
    """Whoever got the lease reads a whole set to the end; whoever did not is told that there is none."""
    names = {entry.path for entry in load_version(small).manifest.files}
    stop, wrong, event = threading.Event(), [], [0]

    def read() -> None:
        while not stop.is_set():
            try:
                with leased_set(final):
                    event[0] += 1
                    missing = [name for name in names if not (final / name).exists()]
                    time.sleep(0.0005)
                    missing += [name for name in names if not (final / name).exists()]
                    wrong.extend(missing)
            except DataError:
                pass
            time.sleep(random.uniform(0, 0.01))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    gone = 0
    until = time.monotonic() + 1
    while time.monotonic() < until:
        if take(root, final) is None:
            gone += 1
            (root / "new").mkdir()
            for name in names:
                (root / "new" / name).parent.mkdir(parents=True, exist_ok=True)
                (root / "new" / name).touch()
            with version_lock(root, final.name, timeout_s=5):
                records.write_stage_record(root, final.name, source="/shared/pick", n_bytes=0)
                (root / "new").rename(final)
        time.sleep(0.001)
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert gone > 3
    assert event[0] > 10
