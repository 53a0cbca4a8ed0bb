"""A step of an attempt: started, heard, watched, and gone within a bound once it has failed.

srun ends the other ranks when one fails, and then waits for all nodes to say that theirs are gone; a node that cannot
say so would keep the rest of the job waiting until Slurm itself gives that node up, minutes later.

    a failure is seen        first_failure, or srun's own message about a task or a node
    GRACE_S later            SIGTERM to srun, at which it has Slurm kill what is left of the step
    SILENT_S after that      who does not answer is written down, and srun is killed
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
from pitools.launch.job.hang_watch import Watch, limits
from pitools.launch.job.signals import Ears
from pitools.launch.job.straggler import Stragglers
from pitools.launch.probes import oom, stacks, unreachable_nodes
from pitools.run import attempt_records as records
from pitools.run import run_folder

GRACE_S, SILENT_S = 3.0, 5.0
_POLL_S, _LOOK_S = 0.1, 0.5
_GAVE_UP = ".srun-killed"
_ASK_S = 10.0
# srun's words for an end that it did not ask for. What it says while it ends a step itself comes later.
_FAILED = re.compile(rb"srun: error: (\S+: tasks? |Node failure|.*(Socket|Connection) timed out|.*Unable to)")
_SLURM_ENDS = re.compile(rb"srun: Job step aborted|CANCELLED AT|forcing job termination")


def step(argv: list[str], attempt: Path, *, name: str) -> int:
    """Run one step of an attempt to its end; returns its exit code, 128 + signal, or HUNG.

    name: "ranks" for the step whose step logs are watched. Main thread only. Raises ToolMissing, OSError.
    """
    return _Step(argv, attempt, watched=name == "ranks").run()


def gave_up(attempt: Path) -> bool:
    """Whether an srun of this attempt had to be killed: what it started may live."""
    return (attempt / _GAVE_UP).exists()


class _Step:
    def __init__(self, argv: list[str], attempt: Path, *, watched: bool) -> None:
        self._attempt, self._node_list = attempt, os.environ.get("SLURM_JOB_NODELIST", "")
        run_dir = Path(os.environ.get("PIT_RUN_DIR", attempt.parent.parent))
        allowed = limits(run_dir / "plan.json") if watched else None
        self._watch = Watch(attempt / "steps", allowed) if allowed else None
        self._stragglers = Stragglers(run_dir, attempt) if watched else None
        self._said = _Said(attempt / "logs")
        self._hung = self._ending = self._looked = False
        self._failed_at = self._term_at = float("inf")
        self._to_pass_on: list[int] = []
        self._ears = Ears(attempt, self._told)
        self._child = subprocesses.start(argv, env=os.environ, log=self._said.raw, session=True)
        self._look_at = time.monotonic()
        self._job, self._fence_at = fencing.of_this_job(), self._look_at + fencing.EVERY_S

    def run(self) -> int:
        ends: list[tuple[float, Callable[[], None]]] = [(GRACE_S, self._end), (GRACE_S + SILENT_S, self._give_up)]
        try:
            while (code := self._child.poll()) is None:
                while self._to_pass_on:
                    self._send(self._to_pass_on.pop(0))
                self._look(time.monotonic())
                while ends and time.monotonic() > self._failed_at + ends[0][0]:
                    ends.pop(0)[1]()
                time.sleep(_POLL_S)
        finally:
            self._said.relay()
            self._said.close()
            self._ears.close()
            subprocesses.kill_sessions(self._child.pid)
        if code and not self._hung and not self._ending:
            self._look_around()
        return exit_codes.HUNG if self._hung else code if code >= 0 else 128 - code

    def _look_around(self) -> None:
        """What ended the ranks may have left no word but what its node, or its absence, says."""
        if not self._looked:
            unreachable_nodes.look(self._attempt, self._node_list)
        if self._stragglers:  # the step of the ranks
            oom.look(self._attempt, self._said.so_far)

    def _look(self, now: float) -> None:
        if _FAILED.search(self._said.relay()) and self._failed_at == float("inf"):
            self._failed_at = now
        if now > self._term_at + _LOOK_S:
            self._pass_on_term()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if self._job and now > self._fence_at:
            self._fence_at = now + fencing.EVERY_S
            self._ask_leave(self._job)
        if self._failed_at == float("inf"):
            if (self._attempt / "first_failure").exists():
                self._failed_at = now
            elif self._watch and (hang := self._watch.due()):
                self._on_hang(hang)
            elif self._stragglers:
                with contextlib.suppress(OSError):  # storage that is away
                    self._stragglers.look()

    def _ask_leave(self, job: job_context.Job) -> None:
        if (why := fencing.overtaken(job)) and self._failed_at == float("inf"):
            self._said.add(f"pit: error: these ranks are ended: {why}\n")
            self._failed_at = time.monotonic() - GRACE_S

    def _on_hang(self, hang: records.Hang) -> None:
        self._hung = True
        with contextlib.suppress(PitError, OSError):  # the exit code says it too
            run_folder.write(self._attempt / "hang.json", hang)
        self._said.add(
            f"pit: error: no step for {hang.silent_s:.0f} s after step {hang.step}; stacks/ has the stacks\n"
        )
        stacks.everywhere(self._attempt, self._node_list)
        self._failed_at = time.monotonic() - GRACE_S

    def _told(self, number: int) -> None:
        self._ending = self._ending or number in (signal.SIGTERM, signal.SIGINT)
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            # srun passes these on to the ranks. Later, as one may come before there is an srun.
            self._to_pass_on.append(number)
        elif number == signal.SIGTERM:
            self._term_at = time.monotonic()

    def _pass_on_term(self) -> None:
        """Tell the ranks of a SIGTERM that was for the script alone; srun itself would kill them at it.

        When Slurm ends a job, its steps have been told already, and srun says so.
        """
        self._term_at = float("inf")
        if not _SLURM_ENDS.search(self._said.so_far) and (job_id := os.environ.get("SLURM_JOB_ID")):
            try:
                subprocesses.run(["scancel", "--signal=TERM", job_id], timeout_s=_ASK_S)
            except PitError as error:
                self._said.add(f"pit: the ranks were not told to end: {error}\n")

    def _send(self, number: int) -> None:
        if self._child.poll() is None:
            self._child.send_signal(number)

    def _end(self) -> None:
        self._send(signal.SIGTERM)

    def _give_up(self) -> None:
        found, self._looked = unreachable_nodes.look(self._attempt, self._node_list), True
        self._said.add(unreachable_nodes.text(found) or "pit: error: srun does not end, and all nodes answer\n")
        with contextlib.suppress(OSError):
            (self._attempt / _GAVE_UP).touch()
        subprocesses.kill_sessions(self._child.pid)


class _Said:
    """What srun says, each line with its time, in the attempt's `srun.err` and in the job's own output."""

    def __init__(self, logs: Path) -> None:
        self.raw = logs / f".srun.{os.getpid()}"
        self.so_far = b""
        self._half = b""
        logs.mkdir(parents=True, exist_ok=True)
        self.raw.touch()
        self._from = self.raw.open("rb")
        self._into = (logs / "srun.err").open("ab", buffering=0)

    def relay(self) -> bytes:
        """Pass on what is new; returns it."""
        new = self._from.read()
        if new:
            *lines, self._half = (self._half + new).split(b"\n")
            self._write(lines)
            self.so_far = (self.so_far + new)[-65536:]
        return new

    def add(self, text: str) -> None:
        """Say something of our own."""
        self._write(text.encode().splitlines())

    def _write(self, lines: list[bytes]) -> None:
        stamp = timestamps.now().encode() + b" "
        text = b"".join(stamp + line + b"\n" for line in lines)
        for write in (self._into.write, lambda text: os.write(2, text)):
            with contextlib.suppress(OSError):  # a full disk, a reader that has gone: the step matters more
                write(text)

    def close(self) -> None:
        """The last of it."""
        self._write([self._half] if self._half else [])
        self._from.close()
        self._into.close()
        with contextlib.suppress(OSError):  # read-only by now
            self.raw.unlink(missing_ok=True)
