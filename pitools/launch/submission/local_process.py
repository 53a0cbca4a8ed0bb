"""Start, find and end the supervisor process of a run without Slurm.

The process is detached, so `pit launch run` returns immediately, as with Slurm. It runs `job/local_supervisor.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import lock_if_supported, open_lock_file
from pitools.launch.plan import load_plan
from pitools.launch.submission import submissions
from pitools.run import run_folder
from pitools.site.schema import Site

KILL_GRACE_S = 30.0  # between SIGTERM and SIGKILL: Slurm's default KillWait
SUPERVISOR_LOCK, STARTING_MARK = ".supervisor", ".starting"
LOCK_HANDOVER_S = 10.0
_START_TIMEOUT_S = 60.0  # for an interpreter to start and to import pitools
SUPERVISOR_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def start_supervisor(run_dir: Path, site: Site, *, wait_s: float = 0.0) -> run_folder.JobRef:
    """Start the supervisor of a run in a new session. Raises TryLater if another process supervises the run.

    wait_s: for how long it waits before its first attempt. A supervisor may start its own successor. Also raises
    DataError, ClusterError, NoSpace and ToolMissing.
    """
    if is_supervised(run_dir) and not _is_this_process(run_dir):
        raise TryLater("the run already has a supervisor", where=str(run_dir), hint="see: pit launch show")
    first, last = site.network.ports
    env = {**os.environ, **site.environment, **site.network.env, "PIT_PORTS": f"{first}-{last}"}
    env.pop("PIT_ATTEMPT_DIR", None)  # set if a rank of another run starts this run
    job_number = submissions.next_job_number(run_dir)
    # The plan's interpreter, as in Slurm: the supervisor uses it for staging and the ranks too.
    argv = [
        load_plan(run_dir).python,
        "-m",
        "pitools.launch.job.local_supervisor",
        str(run_dir),
        str(job_number),
        str(wait_s),
    ]
    # If this process is killed after this write, the mark shows that a supervisor may be starting.
    write_atomic(run_dir / STARTING_MARK, str(job_number), durable=False)
    # The supervisor inherits these signals blocked until its handlers are set: a cancel during its imports waits.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_SIGNALS)
    try:
        process = subprocesses.start_detached(argv, env=env, log=run_dir / output_name(job_number), session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    job = make_job_ref(process.pid, site.name, job_number)
    # A caller that keeps running, such as a notebook, must reap its child; one that ends does not wait for this thread.
    threading.Thread(target=process.wait, daemon=True).start()
    return job


def start_job(run_dir: Path, site: Site, *, wait_s: float = 0.0) -> run_folder.JobRef:
    """Start a supervisor and record it as the run's newest job. Raises the errors of `start_supervisor`."""
    job = start_supervisor(run_dir, site, wait_s=wait_s)
    run_folder.write_record(run_dir / "job.json", job)
    run_folder.append_event(run_dir, "submitted", job_id=job.job_id)
    return job


def output_name(job_number: int) -> str:
    """Return the name of the log file of a run's k-th supervisor."""
    return f"supervisor.{job_number}.out" if job_number else "supervisor.out"


def is_supervised(run_dir: Path) -> bool:
    """Whether a supervisor of the run lives, also a starting one that `job.json` does not name yet.

    Raises ClusterError or NoSpace if the lock file cannot be opened.
    """
    lock = try_supervisor_lock(run_dir)
    if lock is None:
        return True
    os.close(lock)
    starting = run_dir / STARTING_MARK
    try:
        job_number, since_s = starting.read_text(), time.time() - starting.stat().st_mtime
    except FileNotFoundError:
        return False
    with contextlib.suppress(DataError):
        job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
        if job and str(job.job_number) == job_number and is_alive(job) is False:  # ended before it took the lock
            return False
    return since_s < _START_TIMEOUT_S


def _is_this_process(run_dir: Path) -> bool:
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    return job is not None and (job.pid, is_alive(job)) == (os.getpid(), True)


def try_supervisor_lock(run_dir: Path, timeout_s: float = 0.0) -> int | None:
    """Take the lock that a supervisor holds while it lives; return its descriptor, or None if a supervisor holds it."""
    path = run_dir / SUPERVISOR_LOCK
    try:
        descriptor = open_lock_file(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    if lock_if_supported(descriptor, path, timeout_s=timeout_s):
        return descriptor
    os.close(descriptor)
    return None


def make_job_ref(pid: int, site: str, job_number: int) -> run_folder.JobRef:
    """Return the record of a supervisor with this process id, as a job of its run."""
    # Pids are reused; a pid with a start time is unique.
    return run_folder.JobRef(
        job_id=f"local-{pid}",
        site=site,
        submitted=timestamps.now_rfc3339(),
        job_number=job_number,
        host=socket.gethostname(),
        pid=pid,
        start_ticks=_start_ticks(pid),
    )


def is_alive(job: run_folder.JobRef) -> bool | None:
    """Whether the supervisor runs; None if that is unknown, for a process of another host."""
    if job.host and job.host != socket.gethostname():
        return None
    return bool(job.pid) and _start_ticks(job.pid) == job.start_ticks != 0


def terminate_supervisor(job: run_folder.JobRef) -> None:
    """Send SIGTERM to a supervisor, which forwards it to its ranks. Raises ClusterError for another host's process."""
    alive = is_alive(job)
    if alive is None:
        problem = f'the run is a process of host "{job.host}" (this host: "{socket.gethostname()}")'
        raise ClusterError(problem, where=job.job_id, hint=f"run the same command on {job.host}")
    if alive:
        with contextlib.suppress(ProcessLookupError):  # the process has just ended
            os.kill(job.pid, signal.SIGTERM)


def _start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it does not exist or is a zombie."""
    try:
        # The second field is the program's name in parentheses, which may contain any character.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(fields[18])
