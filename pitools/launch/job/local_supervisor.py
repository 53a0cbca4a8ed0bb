"""The supervisor of a run without Slurm: a process that does what the job script does, on this machine.

It stages, starts the ranks as processes with srun's variables set, ends all when one fails or they stand still, and
goes on to another attempt as the job script does, by the same functions. Each rank has a session of its own: as in
Slurm, signals are the rank's to pass on, but SIGKILL, and the end of the run, meet everything that is left of the
session.
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
from pitools.core.errors import PitError
from pitools.core.fs import write_atomic
from pitools.launch import exit_codes
from pitools.launch.diagnosis import evidence
from pitools.launch.job import begin_attempt, end_attempt, hang_watch, job_context, signals, step_runner
from pitools.launch.plan import Plan, load_plan
from pitools.launch.probes import stacks
from pitools.launch.submission import local_process
from pitools.run import run_folder
from pitools.site.template import fill


def supervise(run_dir: Path, number: int = 0) -> int:
    """Run attempts until one has finished, or another would not help; returns the exit code of the last.

    number: which of the run's supervisors this is. Called in the supervisor process.
    """
    plan = load_plan(run_dir)
    stopper = _Stopper(plan.job.time_s)
    # Closed by nobody but the kernel. The one that started this may be about to end.
    lock = local_process.try_supervisor_lock(run_dir, local_process.HANDOVER_S)
    if lock is None:
        print("pit: the run has another supervisor", file=sys.stderr)
        return exit_codes.NO_LEAVE
    # Before anything else: whoever started this process may have been killed before it said so.
    run_folder.write(run_dir / "job.json", local_process.make_job_ref(os.getpid(), plan.site, number))
    (run_dir / local_process.STARTING).unlink(missing_ok=True)
    job = job_context.Job(
        run_dir=run_dir,
        number=number,
        job_id=f"local-{os.getpid()}",
        cluster="",
        restart=0,
        node_list=socket.gethostname(),
        nodes=1,
        task="",
        mode=job_context.mode(run_dir, os.environ),
    )
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
        for number in local_process.HANDLED_SIGNALS:
            signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, local_process.HANDLED_SIGNALS)

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
        "PIT_RUN_DIR": str(run_dir),
        "PIT_ATTEMPT_DIR": str(attempt),
        "PIT_NONCE": secrets.token_hex(16),
        "PIT_HEAD": node,
        "PIT_COORDINATOR": "127.0.0.1",
        "PIT_TASKS_PER_NODE": str(world_size),
        "PIT_GPUS_PER_NODE": str(plan.job.gpus_per_node),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(world_size),
        "SLURM_STEP_NODELIST": node,
        "SLURM_JOB_NODELIST": node,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": node,
        "SLURM_CPUS_PER_TASK": str(plan.job.cpus_per_task),
    }
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
            first_bad = evidence.first(attempt, code) if bad else 128 + (stopper.number or signal.SIGTERM)
            kill_at = time.monotonic() + (step_runner.GRACE_S if bad else local_process.GRACE_S)
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
