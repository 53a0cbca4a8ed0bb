"""Start, find and end the supervisor process of a run without Slurm.

`start` detaches it, so that `pit launch run` returns at once here too. What it does is `job/local_supervisor.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import open_lock_file, try_lock
from pitools.launch.plan import load_plan
from pitools.launch.submission import submissions
from pitools.run import run_folder
from pitools.site.schema import Site

KILL_GRACE_S = 30.0  # between SIGTERM and SIGKILL: Slurm's default KillWait, so that a loop meets the same limits here
SUPERVISOR_LOCK, STARTING_MARK = ".supervisor", ".starting"
LOCK_HANDOVER_S = 10.0
_START_TIMEOUT_S = 60.0  # an interpreter, and our imports
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def start_supervisor(run_dir: Path, site: Site) -> run_folder.JobRef:
    """Start the supervisor of a run in a session of its own. TryLater where it has one that does not ask."""
    if is_supervised(run_dir) and not _is_this_process(run_dir):
        raise TryLater("the run has a supervisor", where=str(run_dir), hint="see: pit launch show")
    first, last = site.network.ports
    env = {**os.environ, **site.environment, **site.network.env, "PIT_PORTS": f"{first}-{last}"}
    env.pop("PIT_ATTEMPT_DIR", None)  # of another run's rank, which may start this one
    number = submissions.next_number(run_dir)
    # The site's interpreter, as in Slurm, also for staging and the ranks.
    argv = [load_plan(run_dir).python, "-m", "pitools.launch.job.local_supervisor", str(run_dir), str(number)]
    # Whoever is killed from here on leaves word that there may be one, which takes some time to begin.
    write_atomic(run_dir / STARTING_MARK, str(number), durable=False)
    # The supervisor inherits these blocked until it can answer: a cancel that comes while it is importing waits.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        process = subprocesses.start_detached(argv, env=env, log=run_dir / output_name(number), session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return make_job_ref(process.pid, site.name, number)


def output_name(number: int) -> str:
    """Return the name of the file that a run's k-th supervisor writes to."""
    return f"supervisor.{number}.out" if number else "supervisor.out"


def is_supervised(run_dir: Path) -> bool:
    """Whether a supervisor of the run lives, also one that `job.json` does not name yet. Raises ClusterError."""
    lock = try_supervisor_lock(run_dir)
    if lock is None:
        return True
    os.close(lock)
    starting = run_dir / STARTING_MARK
    try:
        number, since_s = starting.read_text(), time.time() - starting.stat().st_mtime
    except FileNotFoundError:
        return False
    with contextlib.suppress(DataError):
        job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
        if job and str(job.number) == number and is_alive(job) is False:  # it ended before it could take the lock
            return False
    return since_s < _START_TIMEOUT_S


def _is_this_process(run_dir: Path) -> bool:
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    return job is not None and (job.pid, is_alive(job)) == (os.getpid(), True)


def try_supervisor_lock(run_dir: Path, wait_s: float = 0.0) -> int | None:
    """Return a descriptor with the lock that a supervisor has for as long as it lives; None where one has it."""
    path = run_dir / SUPERVISOR_LOCK
    try:
        descriptor = open_lock_file(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    if try_lock(descriptor, path, wait_s=wait_s):
        return descriptor
    os.close(descriptor)
    return None


def make_job_ref(pid: int, site: str, number: int) -> run_folder.JobRef:
    """Return the supervisor with this process id as a job of its run."""
    # A pid is only a name for a while; with the start time it is this process's for ever.
    return run_folder.JobRef(
        job_id=f"local-{pid}",
        site=site,
        submitted=timestamps.now_rfc3339(),
        number=number,
        host=socket.gethostname(),
        pid=pid,
        start_ticks=_start_ticks(pid),
    )


def is_alive(job: run_folder.JobRef) -> bool | None:
    """Whether the supervisor runs; None where that cannot be known, because it is another host's process."""
    if job.host and job.host != socket.gethostname():
        return None
    return bool(job.pid) and _start_ticks(job.pid) == job.start_ticks != 0


def terminate_supervisor(job: run_folder.JobRef) -> None:
    """End the supervisor and its ranks: SIGTERM, which it passes on. Raises ClusterError on another host."""
    alive = is_alive(job)
    if alive is None:
        what = f'this run is a process of host "{job.host}", and this is "{socket.gethostname()}"'
        raise ClusterError(what, where=job.job_id, hint=f"run the same command on {job.host}")
    if alive:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.kill(job.pid, signal.SIGTERM)


def _start_ticks(pid: int) -> int:
    """Start of a process, in clock ticks since boot; 0 when there is none, or only its zombie."""
    try:
        # The second field is the program's name, in parentheses, and may hold anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(fields[18])
