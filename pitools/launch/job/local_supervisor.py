"""Supervise a run without Slurm: a process that does the work of the job script on this machine.

The supervisor stages the datasets, starts the ranks as processes with srun's variables, ends all ranks when one fails
or they hang, and begins further attempts by the functions of the job script. Each rank has its own session. As in
Slurm, a rank forwards signals to its children itself; SIGKILL and the run's end reach every process of the session.
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
from pitools.launch.job import begin_attempt, end_attempt, hang_watch, job_context, preflight, signals, step_runner
from pitools.launch.plan import Plan, load_plan
from pitools.launch.probes import stacks
from pitools.launch.submission import local_process
from pitools.node.check import this_node
from pitools.run import cancel_request, run_folder
from pitools.site.template import expand_placeholders


def supervise(run_dir: Path, job_number: int = 0, wait_s: float = 0.0) -> int:
    """Run attempts until one succeeds or recovery stops the run; return the exit code of the last.

    job_number: this supervisor's position among the run's. wait_s: for how long to wait before the first attempt, as
    for storage that is unreachable. Called in the supervisor process.
    """
    plan = load_plan(run_dir)
    stopper = _StopRequest(plan.job.time_s + wait_s)
    # Held until this process ends. A supervisor that started this one may still be ending.
    lock = local_process.try_supervisor_lock(run_dir, local_process.LOCK_HANDOVER_S)
    if lock is None:
        print(f"pit: {run_dir}: another supervisor has the run's lock", file=sys.stderr)
        return exit_codes.NOT_GRANTED
    # First: the process that started this one may have been killed before it wrote job.json.
    run_folder.write_record(run_dir / "job.json", local_process.make_job_ref(os.getpid(), plan.site, job_number))
    (run_dir / local_process.STARTING_MARK).unlink(missing_ok=True)
    job = job_context.JobContext(
        run_dir=run_dir,
        job_number=job_number,
        job_id=f"local-{os.getpid()}",
        cluster="",
        restart_count=0,
        node_list=socket.gethostname(),
        nodes=1,
        task="",
        mode=job_context.recovery_mode(run_dir, os.environ),
    )
    wait_until = time.monotonic() + wait_s
    while time.monotonic() < wait_until and not stopper.number:
        time.sleep(0.05)
    time_limit_at = timestamps.to_rfc3339(datetime.now(UTC) + timedelta(seconds=plan.job.time_s))
    while True:
        try:
            attempt = begin_attempt.begin_attempt(job, time_limit_at=time_limit_at)
        except (begin_attempt.AttemptRefused, PitError, OSError) as error:
            return begin_attempt.report_refusal(error)
        stopper.attempt = attempt
        code = _run_attempt(plan, run_dir, attempt, stopper)
        state = _failure_state(run_dir, stopper) if code else "COMPLETED"
        job_code = end_attempt.end_attempt(job, attempt, code, state=state)
        if job_code is not None:
            return job_code


def _failure_state(run_dir: Path, stopper: _StopRequest) -> str:
    """Return the state of a failed attempt in Slurm's terms: PREEMPTED after a signal that no cancel sent."""
    if not stopper.number:
        return "TIMEOUT" if stopper.timed_out else "FAILED"
    with contextlib.suppress(OSError):
        if cancel_request.pending_cancel(run_dir):
            return "CANCELLED"
    return "PREEMPTED"  # such as a reboot of this machine: the run is continued


class _StopRequest:
    """Record the first signal that requests the end of the run. SIGUSR2 is only forwarded to the ranks."""

    def __init__(self, time_s: float) -> None:
        self.number = 0
        self.timed_out = False
        self.deadline = time.monotonic() + time_s
        self.attempt: Path | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        for number in local_process.SUPERVISOR_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, local_process.SUPERVISOR_SIGNALS)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.attempt:
            signals.append_signal(self.attempt, number, self.deadline - time.monotonic())
        if number == signal.SIGUSR2:
            _forward_signal(self, number)
        else:
            self.number = self.number or number


def _run_attempt(plan: Plan, run_dir: Path, attempt: Path, stopper: _StopRequest) -> int:
    """Check this machine, stage, run the ranks; return the exit code. Kill all sessions, also after an error."""
    try:
        return (
            _check_machine(plan, attempt, stopper)
            or _stage_datasets(plan, attempt, stopper)
            or _run_ranks(plan, run_dir, attempt, stopper)
        )
    finally:
        subprocesses.kill_sessions(*(child.pid for child in stopper.children))


def _check_machine(plan: Plan, attempt: Path, stopper: _StopRequest) -> int:
    if plan.preflight == "none" or stopper.number:
        return 0
    began, log = time.monotonic(), attempt / "preflight.jsonl"
    argv = preflight.check_command(plan.python, plan.node_config)
    try:
        stopper.children = [subprocesses.start_detached(argv, env=os.environ, log=log, session=True)]
        _wait_for_ranks(stopper, attempt)
        return preflight.conclude(attempt, [this_node.node_name()], began)
    except (PitError, OSError) as error:  # a broken preflight never stops a run
        print(f"pit: preflight: not completed, the ranks start: {error}", file=sys.stderr)
        return 0


def _stage_datasets(plan: Plan, attempt: Path, stopper: _StopRequest) -> int:
    node = socket.gethostname()
    if plan.data and not stopper.number:
        argv = [plan.python, "-m", "pitools", "stage", "run", "--to", expand_placeholders(plan.nvme)]
        for data in plan.data:
            argv += [data.source, "--receipt", str(attempt / "nodes" / node / f"{data.name}.json")]
        stopper.children = [
            subprocesses.start_detached(argv, env=os.environ, log=attempt / "logs" / f"stage.{node}.out", session=True)
        ]
        if code := _wait_for_ranks(stopper, attempt):
            return code
    return 128 + stopper.number if stopper.number else 0


def _run_ranks(plan: Plan, run_dir: Path, attempt: Path, stopper: _StopRequest) -> int:
    """Start every rank and wait; when one fails, end the others. Return the first non-zero exit code, or 0."""
    world_size = plan.job.nodes * plan.job.tasks_per_node
    node = socket.gethostname()
    write_atomic(attempt / "hostfile", f"{node}\n" * world_size, durable=False)
    shared = {
        **os.environ,
        **plan.request.env,
        "PIT_RUN_DIR": str(run_dir),
        "PIT_ATTEMPT_DIR": str(attempt),
        "PIT_JOB_SECRET": secrets.token_hex(16),
        "PIT_HEAD_NODE": node,
        "PIT_HEAD_ADDRESS": "127.0.0.1",
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
        stopper.children.append(
            subprocesses.start_detached(argv, env=env, log=attempt / "logs" / f"{rank}.out", session=True)
        )
    limits = hang_watch.load_limits(run_dir / "plan.json")
    hang_detector = hang_watch.HangDetector(attempt / "steps", limits) if limits else None
    return _wait_for_ranks(stopper, attempt, warning=plan.job.signal, hang_detector=hang_detector)


def _wait_for_ranks(
    stopper: _StopRequest, attempt: Path, *, warning: str = "", hang_detector: hang_watch.HangDetector | None = None
) -> int:
    """Wait until all children have ended; return their first non-zero exit code, or 0. Kill their sessions.

    When one child fails, the others get SIGTERM, and SIGKILL after a grace time. warning: the signal for the children
    before the deadline, with its lead in seconds, e.g. `USR2@90`; "" for none.
    """
    first_failed_code = 0
    name, _, before_s = warning.partition("@")
    warn_at = stopper.deadline - float(before_s) if warning else float("inf")
    kill_at = float("inf")
    while True:
        polled_codes = [child.poll() for child in stopper.children]
        failed_code = next((code for code in polled_codes if code), 0)
        stopper.timed_out = stopper.timed_out or (time.monotonic() > stopper.deadline and not failed_code)
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            signals.append_signal(attempt, signal.Signals[f"SIG{name}"], stopper.deadline - time.monotonic())
            _forward_signal(stopper, signal.Signals[f"SIG{name}"])
        is_ending = bool(failed_code or stopper.number or stopper.timed_out)
        if is_ending and kill_at == float("inf"):
            if failed_code:
                code = failed_code if failed_code > 0 else 128 - failed_code
                # Read before the other ranks are ended: their failures are consequences.
                first_failed_code = evidence.first_failed_exit_code(attempt, code)
            else:
                first_failed_code = 128 + (stopper.number or signal.SIGTERM)
            kill_at = time.monotonic() + (step_runner.TERM_GRACE_S if failed_code else local_process.KILL_GRACE_S)
            _forward_signal(stopper, signal.SIGTERM)
        if not is_ending and hang_detector and (hang := hang_detector.poll_if_due()):
            with contextlib.suppress(PitError, OSError):  # a full disk: the exit code reports the hang too
                run_folder.write_record(attempt / "hang.json", hang)
                stacks.dump_here(attempt, socket.gethostname())
            first_failed_code, kill_at = exit_codes.HUNG, time.monotonic()
        all_ended = all(code is not None for code in polled_codes)
        if all_ended or time.monotonic() > kill_at:
            subprocesses.kill_sessions(*(child.pid for child in stopper.children))
        if all_ended:
            return first_failed_code
        time.sleep(0.05)


def _forward_signal(stopper: _StopRequest, number: int) -> None:
    for child in stopper.children:
        if child.poll() is None:
            child.send_signal(number)


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
