"""The same run without Slurm: a supervisor process that does what the job script does, on this machine.

It stages, starts the ranks as processes with srun's variables set, ends all when one fails, and writes exit.json.
`start` detaches it, so that `pit launch run` returns at once here too.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from pitools.core import clock, proc
from pitools.launch.plan import Plan
from pitools.run import folder
from pitools.site.model import Site
from pitools.site.template import fill

GRACE_S = 30.0  # between SIGTERM and SIGKILL: Slurm's default KillWait, so that a loop meets the same limits here


def start(run_dir: Path, site: Site) -> folder.JobRef:
    """Start the supervisor of a run in a session of its own."""
    first, last = site.network.ports
    added = {**site.environment, **site.network.env, "PIT_PORTS": f"{first}-{last}"}
    argv = [sys.executable, "-m", "pitools.launch.local", str(run_dir)]
    process = proc.start(argv, env={**os.environ, **added}, log=run_dir / "supervisor.out", session=True)
    # A pid is only a name for a while; with the start time it is this process's for ever.
    started_ms = _started_ms(process.pid)
    return folder.JobRef(
        job_id=f"local-{process.pid}", site=site.name, submitted=clock.now(), pid=process.pid, started_ms=started_ms
    )


def alive(job: folder.JobRef) -> bool:
    """Whether the supervisor runs."""
    return bool(job.pid) and _started_ms(job.pid) == job.started_ms != 0


def cancel(job: folder.JobRef) -> None:
    """End the supervisor and its ranks: SIGTERM, which it passes on."""
    if alive(job):
        os.kill(job.pid, signal.SIGTERM)


def _started_ms(pid: int) -> int:
    """Start of a process, in milliseconds of the epoch; 0 when there is none, or only its zombie."""
    try:
        process = psutil.Process(pid)
        return 0 if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return 0


def supervise(run_dir: Path) -> int:
    """Run one attempt to its end; returns its exit code. Called in the supervisor process."""
    plan = msgspec.json.decode((run_dir / "plan.json").read_bytes(), type=Plan)
    attempt = run_dir / "attempts" / str(len(folder.attempts(run_dir)))
    (attempt / "logs").mkdir(parents=True)
    stopper = _Stopper()
    code = _stage(plan, run_dir, attempt, stopper) or _ranks(plan, run_dir, attempt, stopper)
    state = "COMPLETED" if code == 0 else "CANCELLED" if stopper.number else "TIMEOUT" if stopper.late else "FAILED"
    ended = folder.Attempt(job_id=f"local-{os.getpid()}", exit_code=code, ended=clock.now(), state=state)
    folder.write(attempt / "exit.json", ended)
    return code


class _Stopper:
    """Remembers the first signal that asked this run to end, and passes every one to the ranks."""

    def __init__(self) -> None:
        self.number = 0
        self.late = False
        self.children: list[subprocess.Popen[bytes]] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _frame: object) -> None:
        if number != signal.SIGUSR2:
            self.number = self.number or number
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)


def _stage(plan: Plan, run_dir: Path, attempt: Path, stopper: _Stopper) -> int:
    node = socket.gethostname()
    for data in plan.data:
        receipt = attempt / "nodes" / node / f"{data.name}.json"
        argv = [sys.executable, "-m", "pitools", "stage", "run", data.source]
        argv += ["--to", fill(plan.nvme), "--receipt", str(receipt)]
        child = proc.start(argv, env=os.environ, log=run_dir / "supervisor.out")
        stopper.children = [child]
        if code := child.wait():
            return code if code > 0 else 128 - code
    return 128 + stopper.number if stopper.number else 0


def _ranks(plan: Plan, run_dir: Path, attempt: Path, stopper: _Stopper) -> int:
    """Start every rank, wait, and end the others when one fails; the first bad exit code, or 0."""
    world_size = plan.job.nodes * plan.job.tasks_per_node
    node = socket.gethostname()
    (attempt / "hostfile").write_text(f"{node}\n" * world_size)
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
    for rank in range(world_size):
        argv = [sys.executable, "-u", "-m", "pitools.launch.worker", "plan", str(run_dir / "plan.json")]
        env = {**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        stopper.children.append(proc.start(argv, env=env, log=attempt / "logs" / f"{rank}.out"))
    return _wait(stopper, time.monotonic() + plan.job.time_s)


def _wait(stopper: _Stopper, deadline: float) -> int:
    """The first bad exit code of the ranks, or 0; when one fails, the rest get SIGTERM and GRACE_S."""
    first_bad = 0
    kill_at = float("inf")
    while True:
        codes = [child.poll() for child in stopper.children]
        bad = next((code for code in codes if code), 0)
        stopper.late = stopper.late or (time.monotonic() > deadline and not bad)
        ending = bool(bad or stopper.number or stopper.late)
        if ending and kill_at == float("inf"):
            first_bad = bad if bad > 0 else 128 - bad if bad else 128 + (stopper.number or signal.SIGTERM)
            kill_at = time.monotonic() + GRACE_S
            _send(stopper, signal.SIGTERM)
        if all(code is not None for code in codes):
            return first_bad
        if time.monotonic() > kill_at:
            _send(stopper, signal.SIGKILL)
        time.sleep(0.05)


def _send(stopper: _Stopper, number: int) -> None:
    for child in stopper.children:
        if child.poll() is None:
            child.send_signal(number)


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1])))
