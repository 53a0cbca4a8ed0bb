"""Run one step of an attempt by srun: forward signals, detect hangs, and bound the shutdown after a failure.

When a rank fails, srun ends the others and waits until every node confirms that its ranks have ended. A node that
cannot confirm would delay the job until Slurm declares the node down, minutes later.

    failure detected         by the file first_failure, or by srun's message about a task or a node
    + TERM_GRACE_S           SIGTERM to srun, which makes Slurm kill the rest of the step
    + QUIET_S                record the nodes that do not answer, and kill srun
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from pitools.core import subprocesses, timestamps
from pitools.core.errors import PitError
from pitools.launch import exit_codes
from pitools.launch.job import fencing, job_context
from pitools.launch.job.hang_watch import HangDetector, load_limits
from pitools.launch.job.signals import SignalRecorder
from pitools.launch.job.straggler import StragglerDetector
from pitools.launch.probes import oom, stacks, unreachable_nodes
from pitools.run import attempt_records as records
from pitools.run import run_folder

TERM_GRACE_S, QUIET_S = 3.0, 5.0
_POLL_S, _DETECT_S = 0.1, 0.5
_SRUN_KILLED_MARK = ".srun-killed"
_SCANCEL_TIMEOUT_S = 10.0
# srun's messages about an end that srun did not cause. Its messages while it ends the step itself follow later.
_SRUN_TASK_FAILED = re.compile(rb"srun: error: (\S+: tasks? |Node failure|.*(Socket|Connection) timed out|.*Unable to)")
_SRUN_ABORTED = re.compile(rb"srun: Job step aborted|CANCELLED AT|forcing job termination")


def run_step(argv: list[str], attempt: Path, *, name: str) -> int:
    """Run one step of an attempt to its end; return its exit code, 128 + signal, or HUNG.

    name: "ranks" turns on the hang watch and the straggler watch. Main thread only. Raises ToolMissing, OSError.
    """
    return StepRunner(argv, attempt, watched=name == "ranks").run()


def srun_was_killed(attempt: Path) -> bool:
    """Whether an srun of this attempt had to be killed: processes that it started may still run."""
    return (attempt / _SRUN_KILLED_MARK).exists()


class StepRunner:
    """Run the srun of one step. watched: whether its ranks write step logs, to detect hangs and stragglers."""

    def __init__(self, argv: list[str], attempt: Path, *, watched: bool) -> None:
        self._attempt, self._node_list = attempt, os.environ.get("SLURM_JOB_NODELIST", "")
        run_dir = Path(os.environ.get("PIT_RUN_DIR", attempt.parent.parent))
        limits = load_limits(run_dir / "plan.json") if watched else None
        self._watch = HangDetector(attempt / "steps", limits) if limits else None
        self._stragglers = StragglerDetector(run_dir, attempt) if watched else None
        self._stderr = StderrRelay(attempt / "logs")
        self._hung = self._stop_requested = self._slurmds_probed = False
        self._failed_at = self._term_at = float("inf")
        self._pending_signals: list[int] = []
        self._signals = SignalRecorder(attempt, self._on_signal)
        self._child = subprocesses.start_detached(argv, env=os.environ, log=self._stderr.raw, session=True)
        self._next_detect_at = time.monotonic()
        self._job, self._next_fence_at = fencing.current_job(), self._next_detect_at + fencing.CHECK_EVERY_S

    def run(self) -> int:
        """Wait for the step; return its exit code."""
        shutdown_steps: list[tuple[float, Callable[[], None]]] = [
            (TERM_GRACE_S, self._terminate),
            (TERM_GRACE_S + QUIET_S, self._kill_srun),
        ]
        try:
            while (code := self._child.poll()) is None:
                while self._pending_signals:
                    self._send_signal(self._pending_signals.pop(0))
                self._poll(time.monotonic())
                while shutdown_steps and time.monotonic() > self._failed_at + shutdown_steps[0][0]:
                    shutdown_steps.pop(0)[1]()
                time.sleep(_POLL_S)
        finally:
            subprocesses.kill_sessions(self._child.pid)
            self._stderr.relay()
            self._stderr.close()
            self._signals.close()
        if code and not self._hung and not self._stop_requested:
            self._detect_dead_ranks()
        return exit_codes.HUNG if self._hung else code if code >= 0 else 128 - code

    def _detect_dead_ranks(self) -> None:
        """Search the nodes for a cause that leaves no message: an unreachable slurmd, or the OOM killer."""
        if not self._slurmds_probed:
            unreachable_nodes.probe_slurmds(self._attempt, self._node_list)
        if self._stragglers:  # only in the step of the ranks
            oom.detect_on_nodes(self._attempt, self._stderr.so_far)

    def _poll(self, now: float) -> None:
        if _SRUN_TASK_FAILED.search(self._stderr.relay()) and self._failed_at == float("inf"):
            self._failed_at = now
        if now > self._term_at + _DETECT_S:
            self._forward_term()
        if now < self._next_detect_at:
            return
        self._next_detect_at = now + _DETECT_S
        if self._job and now > self._next_fence_at:
            self._next_fence_at = now + fencing.CHECK_EVERY_S
            self._check_superseded(self._job)
        if self._failed_at == float("inf"):
            if self._has_failed_rank():
                self._failed_at = now
            elif self._watch and (hang := self._watch.poll_if_due()):
                self._on_hang(hang)
            elif self._stragglers:
                with contextlib.suppress(OSError):  # unavailable storage must not end the step
                    self._stragglers.poll()

    def _has_failed_rank(self) -> bool:
        with contextlib.suppress(OSError):  # such as a stale file handle
            return (self._attempt / "first_failure").exists()
        return False

    def _check_superseded(self, job: job_context.JobContext) -> None:
        if (reason := fencing.superseded_by(job)) and self._failed_at == float("inf"):
            self._stderr.write_line(f"pit: error: ending the ranks: {reason}\n")
            self._failed_at = time.monotonic() - TERM_GRACE_S

    def _on_hang(self, hang: records.HangReport) -> None:
        self._hung = True
        with contextlib.suppress(PitError, OSError):  # the exit code reports the hang too
            run_folder.write_record(self._attempt / "hang.json", hang)
        self._stderr.write_line(
            f"pit: error: hang: no step for {hang.stalled_s:.0f} s after step {hang.step}; stack dumps are in stacks/\n"
        )
        stacks.dump_all_nodes(self._attempt, self._node_list)
        self._failed_at = time.monotonic() - TERM_GRACE_S

    def _on_signal(self, number: int) -> None:
        self._stop_requested = self._stop_requested or number in (signal.SIGTERM, signal.SIGINT)
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            # Queued, since one may arrive before srun starts. srun forwards these signals to the ranks.
            self._pending_signals.append(number)
        elif number == signal.SIGTERM:
            self._term_at = time.monotonic()

    def _forward_term(self) -> None:
        """Send the ranks a SIGTERM that only the script got, by scancel: srun would kill them instead of forwarding it.

        When Slurm ends a job, it signals the steps itself, and srun prints a message about that.
        """
        self._term_at = float("inf")
        if not _SRUN_ABORTED.search(self._stderr.so_far) and (job_id := job_context.slurm_job_id(os.environ)):
            try:
                subprocesses.run(["scancel", "--signal=TERM", job_id], timeout_s=_SCANCEL_TIMEOUT_S)
            except PitError as error:
                self._stderr.write_line(f"pit: SIGTERM was not forwarded to the ranks: {error}\n")

    def _send_signal(self, number: int) -> None:
        if self._child.poll() is None:
            self._child.send_signal(number)

    def _terminate(self) -> None:
        self._send_signal(signal.SIGTERM)

    def _kill_srun(self) -> None:
        unreachable, self._slurmds_probed = unreachable_nodes.probe_slurmds(self._attempt, self._node_list), True
        self._stderr.write_line(
            unreachable_nodes.as_log_lines(unreachable) or "pit: error: srun does not end, but all nodes answer\n"
        )
        with contextlib.suppress(OSError):
            (self._attempt / _SRUN_KILLED_MARK).touch()
        subprocesses.kill_sessions(self._child.pid)


class StderrRelay:
    """Copy srun's stderr, each line with its time, to the attempt's `srun.err` and the job's own output."""

    def __init__(self, logs: Path) -> None:
        self.raw = logs / f".srun.{os.getpid()}"
        self.so_far = b""
        self._partial_line = b""
        logs.mkdir(parents=True, exist_ok=True)
        self.raw.touch()
        self._source = self.raw.open("rb")
        self._log = (logs / "srun.err").open("ab", buffering=0)

    def relay(self) -> bytes:
        """Copy new output and return it."""
        new = b""
        with contextlib.suppress(OSError):  # unavailable storage must not end the step: the next call reads on
            new = self._source.read()
        if new:
            *lines, self._partial_line = (self._partial_line + new).split(b"\n")
            self._write(lines)
            self.so_far = (self.so_far + new)[-65536:]
        return new

    def write_line(self, text: str) -> None:
        """Write a line of pitools itself."""
        self._write(text.encode().splitlines())

    def _write(self, lines: list[bytes]) -> None:
        stamp = timestamps.now_rfc3339().encode() + b" "
        text = b"".join(stamp + line + b"\n" for line in lines)
        for write in (self._log.write, lambda text: os.write(2, text)):
            with contextlib.suppress(OSError):  # a full disk or a closed pipe must not end the step
                write(text)

    def close(self) -> None:
        """Write an unfinished last line and close the files."""
        self._write([self._partial_line] if self._partial_line else [])
        self._source.close()
        self._log.close()
        with contextlib.suppress(OSError):  # the file system may have become read-only
            self.raw.unlink(missing_ok=True)
