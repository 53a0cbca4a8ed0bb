"""The same loop as people start it without us: a script with `scontrol requeue`, and a callable of submitit's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from perf.harness.workspace import REPO
from perf.recover.fault_cluster import FaultCluster, attempts, read_json_lines
from perf.recover.trial import InjectedFault, Shape, unix_time

# As a cluster's handbook has it: on failure the job puts itself back; the loop finds its newest checkpoint.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=peer
#SBATCH --account=lab
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --time=30
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir={repo}
#SBATCH --output={run}/%j.out
srun --kill-on-bad-exit=1 --wait=10 {python} -m perf.recover.recover_peers {run} {data} {shape}
code=$?
[ $code = 0 ] || [ "${{SLURM_RESTART_COUNT:-0}}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


def rank(run: str, data: str, steps: int, save_every: int, delay_s: float) -> None:
    """One rank of a job step, in what `pitools.train` and torch read."""

    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    number, size = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
    os.environ.update(
        PIT_RUN_DIR=run,
        PIT_ATTEMPT_DIR=f"{run}/attempts/{restart}",
        PIT_CHECKPOINT_DIR=f"{run}/checkpoints",
        PIT_RANK=number,
        PIT_WORLD_SIZE=size,
        PIT_LOCAL_RANK="0",
        PIT_JOB_SECRET="peer",
        PIT_DATA_DEMO=data,
        RANK=number,
        WORLD_SIZE=size,
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(23000 + (int(os.environ["SLURM_JOB_ID"]) * 31 + int(restart)) % 4000),
    )
    pids = Path(run) / "attempts" / restart / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    (pids / number).write_text(str(os.getpid()))
    from perf.recover import slow_loop

    slow_loop.torch(steps=steps, global_batch_size=16, checkpoint_every=save_every, delay_s=delay_s)


class SubmititCallable:
    """For submitit: begun again it goes on from its newest checkpoint. Its handlers stay submitit's own."""

    def __init__(self, run: str, data: str, shape: Shape) -> None:
        self.args = (run, data, shape.steps, shape.save_every, shape.delay_s)

    def __call__(self) -> None:
        """Train."""
        from pitools.train.preemption import StopSignal

        StopSignal.__enter__ = lambda self: self  # type: ignore[method-assign]
        StopSignal.__exit__ = lambda *_: None  # type: ignore[method-assign]
        rank(*self.args)

    def checkpoint(self) -> Any:
        """What is to be submitted again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class PeerRun:
    """A run of one of the two. kind: "sbatch" or "submitit"."""

    def __init__(self, cluster: FaultCluster, kind: str, name: str, data: Path, shape: Shape) -> None:
        self.cluster, self.shape, self.hits = cluster, shape, list[InjectedFault]()
        self.run_dir = cluster.runs / f"{name}-{time.time_ns()}"
        self.run_dir.mkdir()
        make = self._sbatch if kind == "sbatch" else self._submitit
        self.job = make(data)

    def _sbatch(self, data: Path) -> str:
        import sys

        shape = self.shape
        words = f"{shape.steps} {shape.save_every} {shape.delay_s}"
        output = {"nodes": shape.nodes, "run": self.run_dir, "data": data, "shape": words}
        script = self.run_dir / "script.sbatch"
        script.write_text(SCRIPT.format(**output, python=sys.executable, repo=REPO))
        return self.cluster.run("sbatch", "--parsable", str(script)).strip()

    def _submitit(self, data: Path) -> str:
        import sys

        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); import submitit\n"
            "from perf.recover.recover_peers import Callable\n"
            "from perf.recover.trial import Shape\n"
            "from submitit.slurm.slurm import SlurmExecutor\n"
            "run, data, steps, every, delay, nodes = sys.argv[2:]\n"
            "e = SlurmExecutor(run + '/submitit', max_num_timeout=100)\n"
            "e.update_parameters(nodes=int(nodes), ntasks_per_node=1, time=30, signal_delay_s=30,\n"
            "    setup=['export PYTHONPATH=' + sys.argv[1]], additional_parameters={'account': 'lab'})\n"
            "print(e.submit(Callable(run, data, Shape(int(steps), int(every), float(delay), int(nodes)))).job_id)\n"
        )
        shape = self.shape
        words = [
            str(self.run_dir),
            str(data),
            str(shape.steps),
            str(shape.save_every),
            str(shape.delay_s),
            str(shape.nodes),
        ]
        return self.cluster.run(sys.executable, "-c", code, str(REPO), *words).split()[-1]

    def attempt(self) -> Path:
        """The newest start of the job that has ranks."""
        created = attempts(self.run_dir)
        return created[-1] if created else self.run_dir / "attempts" / "none"

    def step(self) -> int:
        """The last step of the newest start; -1 for none."""
        done = read_json_lines(self.attempt() / "steps" / "0.jsonl")
        return int(done[-1]["step"]) if done else -1

    def wait_until(self, ready: Any, limit_s: float) -> bool:
        """Wait for something; whether it came in time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if ready():
                return True
            time.sleep(0.1)
        return False

    def record_fault(self) -> None:
        """Write down that a fault happens now."""
        self.hits.append(InjectedFault(time.time(), self.attempt().name))

    def rank_pid(self, number: int) -> int:
        """The process of a rank. Raises ProcessLookupError."""
        try:
            pid = int((self.attempt() / "pids" / str(number)).read_text())
            if (
                str(self.run_dir).encode()
                in Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            ):
                return pid
        except (OSError, ValueError):
            pass
        raise ProcessLookupError(number)

    def seconds_to_next_step(self, hit: InjectedFault) -> float | None:
        """Seconds from a fault to the first step of a later start; None where there was none."""
        for path in attempts(self.run_dir):
            if int(path.name) > int(hit.attempt) and (done := read_json_lines(path / "steps" / "0.jsonl")):
                return unix_time(done[0]["t"]) - hit.t
        return None

    def end(self) -> None:
        """Cancel the job, for good."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.cluster.run("scancel", self.job, check=False)
        deadline = time.monotonic() + 60
        while self.cluster.run("squeue", "-h", "-j", self.job, check=False) and time.monotonic() < deadline:
            time.sleep(1)


if __name__ == "__main__":
    import sys

    rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
