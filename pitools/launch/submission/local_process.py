"""The same run without Slurm: a supervisor process that does what the job script does, on this machine.

It stages, starts the ranks as processes with srun's variables set, ends all when one fails or they stand still, and
goes on to another attempt as the job script does, by the same functions (attempt/). `start` detaches it, so that
`pit launch run` returns at once here too. Each rank has a session of its own: as in Slurm, signals are the rank's to
pass on, but SIGKILL, and the end of the run, meet everything that is left of the session.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError, DataError, PitError, TryLater
from pitools.core.fs import os_error, write_atomic
from pitools.core.locks import open_shared, taken
from pitools.launch import exit_codes
from pitools.launch.job import begin_attempt, end_attempt, hang_watch, job_context, signals, step_runner
from pitools.launch.plan import Plan, load_plan
from pitools.launch.probes import stacks
from pitools.launch.submission import submissions
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.site.template import fill

GRACE_S = 30.0  # between SIGTERM and SIGKILL: Slurm's default KillWait, so that a loop meets the same limits here
LOCK, STARTING = ".supervisor", ".starting"
HANDOVER_S = 10.0
_START_S = 60.0  # an interpreter, and our imports
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def start(run_dir: Path, site: Site) -> run_folder.JobRef:
    """Start the supervisor of a run in a session of its own. TryLater where it has one that does not ask."""
    if is_supervised(run_dir) and not _is_this_process(run_dir):
        raise TryLater("the run has a supervisor", where=str(run_dir), hint="see: pit launch show")
    first, last = site.network.ports
    env = {**os.environ, **site.environment, **site.network.env, "PIT_PORTS": f"{first}-{last}"}
    env.pop("PIT_ATTEMPT_DIR", None)  # of another run's rank, which may start this one
    number = submissions.due(run_dir)
    # The site's interpreter, as in Slurm, also for staging and the ranks.
    argv = [load_plan(run_dir).python, "-m", "pitools.launch.submission.local_process", str(run_dir), str(number)]
    # Whoever is killed from here on leaves word that there may be one, which takes some time to begin.
    write_atomic(run_dir / STARTING, str(number), durable=False)
    # The supervisor inherits these blocked until it can answer: a cancel that comes while it is importing waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        process = subprocesses.start(argv, env=env, log=run_dir / output(number), session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _ref(process.pid, site.name, number)


def output(number: int) -> str:
    """Return the name of the file that a run's k-th supervisor writes to."""
    return f"supervisor.{number}.out" if number else "supervisor.out"


def is_supervised(run_dir: Path) -> bool:
    """Whether a supervisor of the run lives, also one that `job.json` does not name yet. Raises ClusterError."""
    lock = _lock(run_dir)
    if lock is None:
        return True
    os.close(lock)
    starting = run_dir / STARTING
    try:
        number, since_s = starting.read_text(), time.time() - starting.stat().st_mtime
    except FileNotFoundError:
        return False
    with contextlib.suppress(DataError):
        job = run_folder.read(run_dir / "job.json", run_folder.JobRef)
        if job and str(job.number) == number and alive(job) is False:  # it ended before it could take the lock
            return False
    return since_s < _START_S


def _is_this_process(run_dir: Path) -> bool:
    job = run_folder.read(run_dir / "job.json", run_folder.JobRef)
    return job is not None and (job.pid, alive(job)) == (os.getpid(), True)


def _lock(run_dir: Path, wait_s: float = 0.0) -> int | None:
    """A descriptor with the lock that a supervisor has for as long as it lives; None where one has it."""
    path = run_dir / LOCK
    try:
        descriptor = open_shared(path)
    except OSError as error:
        raise os_error(error, path) from error
    if taken(descriptor, path, wait_s=wait_s):
        return descriptor
    os.close(descriptor)
    return None


def _ref(pid: int, site: str, number: int) -> run_folder.JobRef:
    # A pid is only a name for a while; with the start time it is this process's for ever.
    return run_folder.JobRef(
        job_id=f"local-{pid}", site=site, submitted=timestamps.now(), number=number,
        host=socket.gethostname(), pid=pid, start_ticks=_start_ticks(pid),
    )  # fmt: skip


def alive(job: run_folder.JobRef) -> bool | None:
    """Whether the supervisor runs; None where that cannot be known, because it is another host's process."""
    if job.host and job.host != socket.gethostname():
        return None
    return bool(job.pid) and _start_ticks(job.pid) == job.start_ticks != 0


def cancel(job: run_folder.JobRef) -> None:
    """End the supervisor and its ranks: SIGTERM, which it passes on. Raises ClusterError on another host."""
    lives = alive(job)
    if lives is None:
        what = f'this run is a process of host "{job.host}", and this is "{socket.gethostname()}"'
        raise ClusterError(what, where=job.job_id, hint=f"run the same command on {job.host}")
    if lives:
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


def supervise(run_dir: Path, number: int = 0) -> int:
    """Run attempts until one has finished, or another would not help; returns the exit code of the last.

    number: which of the run's supervisors this is. Called in the supervisor process.
    """
    plan = load_plan(run_dir)
    stopper = _Stopper(plan.job.time_s)
    # Closed by nobody but the kernel. The one that started this may be about to end.
    lock = _lock(run_dir, HANDOVER_S)
    if lock is None:
        print("pit: the run has another supervisor", file=sys.stderr)
        return exit_codes.NO_LEAVE
    # Before anything else: whoever started this process may have been killed before it said so.
    run_folder.write(run_dir / "job.json", _ref(os.getpid(), plan.site, number))
    (run_dir / STARTING).unlink(missing_ok=True)
    job = job_context.Job(
        run_dir=run_dir, number=number, job_id=f"local-{os.getpid()}", cluster="", restart=0,
        node_list=socket.gethostname(), nodes=1, task="", mode=job_context.mode(run_dir, os.environ),
    )  # fmt: skip
    ends = timestamps.text(datetime.now(UTC) + timedelta(seconds=plan.job.time_s))
    while True:
        try:
            attempt = begin_attempt.begin(job, ends=ends)
        except begin_attempt.NoBeginning as no:
            print(f"pit: {no}", file=sys.stderr)
            return no.code
        except (PitError, OSError) as error:
            print(f"pit: no attempt: {error}", file=sys.stderr)
            return exit_codes.NOT_BEGUN
        stopper.attempt = attempt
        code = _run(plan, run_dir, attempt, stopper)
        state = "COMPLETED" if code == 0 else "CANCELLED" if stopper.number else "TIMEOUT" if stopper.late else "FAILED"
        job_code = end_attempt.end(job, attempt, code, state=state)
        if job_code is not None:
            return job_code


class _Stopper:
    """Remembers the first signal that asked this run to end; USR2 asks for nothing, and is passed on to the ranks."""

    def __init__(self, time_s: float) -> None:
        self.number = 0
        self.late = False
        self.deadline = time.monotonic() + time_s
        self.attempt: Path | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        for number in _HANDLED:
            signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    def _ask(self, number: int, _frame: object) -> None:
        if self.attempt:
            signals.note(self.attempt, number, self.deadline - time.monotonic())
        if number == signal.SIGUSR2:
            _send(self, number)
        else:
            self.number = self.number or number


def _run(plan: Plan, run_dir: Path, attempt: Path, stopper: _Stopper) -> int:
    """Stage, then run the ranks; returns the exit code. Leaves nothing of their sessions, also where it raises."""
    try:
        return _stage(plan, attempt, stopper) or _ranks(plan, run_dir, attempt, stopper)
    finally:
        subprocesses.kill_sessions(*(child.pid for child in stopper.children))


def _stage(plan: Plan, attempt: Path, stopper: _Stopper) -> int:
    node = socket.gethostname()
    for data in plan.data:
        if stopper.number:
            break
        receipt = attempt / "nodes" / node / f"{data.name}.json"
        argv = [plan.python, "-m", "pitools", "stage", "run", data.source]
        argv += ["--to", fill(plan.nvme), "--receipt", str(receipt)]
        stopper.children = [
            subprocesses.start(argv, env=os.environ, log=attempt / "logs" / f"stage.{node}.out", session=True)
        ]
        if code := _wait(stopper, attempt):
            return code
    return 128 + stopper.number if stopper.number else 0


def _ranks(plan: Plan, run_dir: Path, attempt: Path, stopper: _Stopper) -> int:
    """Start every rank, wait, and end the others when one fails; the first bad exit code, or 0."""
    world_size = plan.job.nodes * plan.job.tasks_per_node
    node = socket.gethostname()
    write_atomic(attempt / "hostfile", f"{node}\n" * world_size, durable=False)
    shared = {
        **os.environ,
        **plan.request.env,
        "PIT_RUN_DIR": str(run_dir), "PIT_ATTEMPT_DIR": str(attempt), "PIT_NONCE": secrets.token_hex(16),
        "PIT_HEAD": node, "PIT_COORDINATOR": "127.0.0.1",
        "PIT_TASKS_PER_NODE": str(world_size), "PIT_GPUS_PER_NODE": str(plan.job.gpus_per_node),
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(world_size),
        "SLURM_STEP_NODELIST": node, "SLURM_JOB_NODELIST": node, "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": node,
        "SLURM_CPUS_PER_TASK": str(plan.job.cpus_per_task),
    }  # fmt: skip
    stopper.children = []
    for rank in range(world_size):
        argv = [plan.python, "-u", "-m", "pitools.launch.rank.main", "plan", str(run_dir / "plan.json")]
        env = {**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        stopper.children.append(subprocesses.start(argv, env=env, log=attempt / "logs" / f"{rank}.out", session=True))
    limits = hang_watch.limits(run_dir / "plan.json")
    looker = hang_watch.Watch(attempt / "steps", limits) if limits else None
    return _wait(stopper, attempt, warning=plan.job.signal, looker=looker)


def _wait(stopper: _Stopper, attempt: Path, *, warning: str = "", looker: hang_watch.Watch | None = None) -> int:
    """The first bad exit code of the children, or 0; when one fails, the rest get SIGTERM, and SIGKILL after a grace.

    warning: the signal that the children get before the deadline, as `USR2@90`. Returns when all have ended, and
    leaves nothing of their sessions.
    """
    first_bad = 0
    name, _, before_s = warning.partition("@")
    warn_at = stopper.deadline - float(before_s) if warning else float("inf")
    kill_at = float("inf")
    while True:
        ended_with = [child.poll() for child in stopper.children]
        bad = next((code for code in ended_with if code), 0)
        stopper.late = stopper.late or (time.monotonic() > stopper.deadline and not bad)
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            signals.note(attempt, signal.Signals[f"SIG{name}"], stopper.deadline - time.monotonic())
            _send(stopper, signal.Signals[f"SIG{name}"])
        ending = bool(bad or stopper.number or stopper.late)
        if ending and kill_at == float("inf"):
            code = bad if bad >= 0 else 128 - bad
            # Asked for as soon as a failure is seen: ranks that are ended because of it come later.
            first_bad = end_attempt.first(attempt, code) if bad else 128 + (stopper.number or signal.SIGTERM)
            kill_at = time.monotonic() + (step_runner.GRACE_S if bad else GRACE_S)
            _send(stopper, signal.SIGTERM)
        if not ending and looker and (hang := looker.due()):
            with contextlib.suppress(PitError, OSError):  # a full disk: the exit code says it too
                run_folder.write(attempt / "hang.json", hang)
                stacks.here(attempt, socket.gethostname())
            first_bad, kill_at = exit_codes.HUNG, time.monotonic()
        ended = all(code is not None for code in ended_with)
        if ended or time.monotonic() > kill_at:
            subprocesses.kill_sessions(*(child.pid for child in stopper.children))
        if ended:
            return first_bad
        time.sleep(0.05)


def _send(stopper: _Stopper, number: int) -> None:
    for child in stopper.children:
        if child.poll() is None:
            child.send_signal(number)


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), int(sys.argv[2])))
