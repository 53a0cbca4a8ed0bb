"""The process that holds the leases of a job from its prolog to its epilog; the kernel releases them when it ends.

The prolog forks it. It becomes the job's user before it touches a root, whose folders belong to that user, and leases
every set there. The epilog ends it by a signal; without an epilog it ends when the job has no more steps.
    STATE/<cluster>.<node>.<job>    its pid, valid while it holds its flock on the file
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import select
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from pitools.core.errors import ClusterError, DataError, PitError
from pitools.core.fs import from_os_error
from pitools.stage.cache import lease
from pitools.stage.cache.layout import OBJECTS

MAX_SETS = 1000
_SCAN_S, _RESCAN_S = 30.0, 3600.0
_EXIT_TIMEOUT_S = 2.0
_POLL_S = 0.02


class NodeJob(NamedTuple):
    """A job on this node. time_limit_at: Unix time, or infinity if unknown."""

    id: int
    uid: int
    gid: int
    user: str
    node: str
    cluster: str
    time_limit_at: float


def start_holder(state: Path, job: NodeJob, roots: Sequence[Path], *, max_lease_s: float, idle_s: float) -> list[str]:
    """Start the holder of this job, in place of an earlier one; return its warnings once it holds the leases.

    Raises ClusterError when the folder `state` cannot be used.
    """
    stop_holder(state, job)
    lock = _create_state_file(state / _state_name(job))
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    if os.fork() == 0:
        _holder_main(job, roots, lock, write_end, state / _state_name(job), max_lease_s, idle_s)
    os.close(write_end)
    os.close(lock)  # the holder's copy keeps the flock
    with os.fdopen(read_end, encoding="utf-8", errors="replace") as answer:
        return answer.read().splitlines()


def stop_holder(state: Path, job: NodeJob) -> None:
    """End the holder of this job, if there is one, and wait until its leases are free. Raises ClusterError."""
    _prepare_state_dir(state)
    for path in state.iterdir():
        with contextlib.suppress(FileNotFoundError):
            _end_holder(path, kill=path.name == _state_name(job))


def _state_name(job: NodeJob) -> str:
    return f"{job.cluster}.{job.node}.{job.id}"


def _prepare_state_dir(state: Path) -> None:
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = state.lstat()
    except OSError as error:
        raise from_os_error(error, state) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ClusterError("others may write here", where=str(state), hint=f"chmod 700 {state}, owned by root")


def _create_state_file(path: Path) -> int:
    """Create and lock the state file; return its descriptor, read-only as a process of the user inherits it."""
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # removed by another job's prolog before it was locked
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _end_holder(path: Path, *, kill: bool) -> None:
    """Remove the file of a holder that has ended. kill: end it first."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL) if kill else ():
            if _has_ended(descriptor):
                break
            with contextlib.suppress(ValueError, OSError), _pidfd(pid := int(os.pread(descriptor, 20, 0))) as holder:
                if _has_open(pid, descriptor):
                    signal.pidfd_send_signal(holder, number)
            deadline = time.monotonic() + _EXIT_TIMEOUT_S / 2
            while not _has_ended(descriptor) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        # With the lock, and if it is still this file: a new holder may have begun.
        if _has_ended(descriptor) and os.path.samestat(path.stat(), os.fstat(descriptor)):
            path.unlink()
    finally:
        os.close(descriptor)


def _has_open(pid: int, descriptor: int) -> bool:
    """Return whether the process has this file open: the lock may be another prolog's probe, and the pid reused."""
    lock_status = os.fstat(descriptor)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.path.samestat(entry.stat(), lock_status):
                return True
    return False


def _has_ended(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _holder_main(
    job: NodeJob, roots: Sequence[Path], lock: int, warnings: int, path: Path, max_lease_s: float, idle_s: float
) -> NoReturn:
    """Run the holder in the forked process."""
    try:
        os.setsid()  # slurmd kills what is left of a prolog's process group
        path.write_text(str(os.getpid()))
        _close_all_but(lock, warnings)
        _drop_root(job)
        leases: list[int] = []  # held by being open
        for root in roots:
            leases += _lease_all(root, job.id, warnings)
        os.close(warnings)
        if leases:
            wait_for_job_end(job, max_lease_s=max_lease_s, idle_s=idle_s)
    except BaseException as error:  # noqa: BLE001 - the forked copy of the prolog must end here
        with contextlib.suppress(OSError):
            _send_warning(warnings, f"nothing is leased: {error}")
    finally:
        os._exit(0)


def _close_all_but(*keep: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _drop_root(job: NodeJob) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    os.umask(0o077)
    os.chdir("/")
    if os.geteuid() != job.uid:
        os.setgroups(os.getgrouplist(job.user, job.gid))
        os.setresgid(job.gid, job.gid, job.gid)
        os.setresuid(job.uid, job.uid, job.uid)


def _lease_all(root: Path, job_id: int, warnings: int) -> list[int]:
    """Lease every set at the root; return the descriptors that hold the leases."""
    leases: list[int] = []
    for path in _newest_sets(root, warnings):
        try:
            # Not a use: which sets the job will read is not known.
            leases.append(lease.acquire_for_job(path, job_id))
        except DataError:
            continue  # evicted before we had the lease
        except (PitError, OSError) as error:
            _send_warning(warnings, f"not leased: {error}")
            if isinstance(error, ClusterError):
                break  # the root is refused, and the error names it
    return leases


def _newest_sets(root: Path, warnings: int) -> list[Path]:
    try:
        paths = [path for path in (root / OBJECTS).iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []  # nothing was ever staged there
    except OSError as error:
        _send_warning(warnings, f"{root}: {error.strerror}: not leased")
        return []
    if len(paths) > MAX_SETS:
        _send_warning(warnings, f"{root}: {len(paths)} sets; the {MAX_SETS} used last are leased")
        paths.sort(key=lambda path: -lease.last_used(root, path.name))
    return paths[:MAX_SETS]


def _send_warning(warnings: int, text: str) -> None:
    os.write(warnings, f"{text}\n".encode(errors="replace"))


def wait_for_job_end(job: NodeJob, *, max_lease_s: float, idle_s: float) -> None:
    """Return when the job is over: no slurmstepd for `idle_s` or at its time limit; after `max_lease_s` in any case.

    Between steps there is no slurmstepd. While there is one, its pidfd is waited for.
    """
    started_at = last_step = time.monotonic()
    is_proc_hidden = not Path("/proc/1/stat").exists()  # hidepid: other users' processes cannot be seen
    while (remaining := started_at + max_lease_s - time.monotonic()) > 0:
        if step := _find_step(job):
            with contextlib.suppress(ProcessLookupError), _pidfd(step) as descriptor:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(min(remaining, _RESCAN_S) * 1000)
            last_step = time.monotonic()
            continue
        idle_remaining_s = last_step + idle_s - time.monotonic()
        is_past = time.time() > job.time_limit_at
        if is_past or (idle_remaining_s <= 0 and not is_proc_hidden):
            return
        waits = [remaining, _SCAN_S, max(0.1, job.time_limit_at - time.time())]
        time.sleep(min(waits if is_proc_hidden else [*waits, idle_remaining_s]))


def _find_step(job: NodeJob) -> int:
    """Return the pid of a slurmstepd of the job, or 0."""
    title = re.compile(rb"slurmstepd: \[%d[.+]" % job.id)
    for name in os.listdir("/proc"):
        if name.isdigit() and _read_proc(name, "comm") == b"slurmstepd\n" and title.match(_read_proc(name, "cmdline")):
            return int(name)
    return 0


def _read_proc(pid: str, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:  # it has just ended
        return b""
