"""Say what a run that has not logged a step yet waits for: Slurm, staging, its ranks, or the first step."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pitools.core.errors import PitError
from pitools.launch.plan import Plan, load_plan
from pitools.run import run_folder
from pitools.run.run_folder import RunRecord
from pitools.slurm.states import may_never_start


class WaitReason:
    """Return a line each time a run waits for something else."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._last: tuple[str, ...] = ()
        self._plan: Plan | None = None
        with contextlib.suppress(PitError):
            self._plan = load_plan(run_dir)

    def changed_line(self, run: RunRecord) -> str:
        """Return what the run waits for if that has changed since the last call, else ""."""
        key, line = self._waits_for(run)
        if not line or key == self._last:
            return ""
        self._last = key
        return line

    def _waits_for(self, run: RunRecord) -> tuple[tuple[str, ...], str]:
        """Return what identifies the thing waited for, and a line about it; "" where there is nothing to say."""
        if run.state == "PENDING" and run.pending_reason:
            start = f", expected to start {run.expected_start}" if run.expected_start else ""
            start = ": no node can take it as it is requested" if may_never_start(run.pending_reason) else start
            key = ("pending", run.job_id, run.pending_reason)
            return key, f"job {run.job_id} waits in the queue: {run.pending_reason}{start}"
        attempt = run_folder.last_attempt(self._run_dir)
        if run.state != "RUNNING" or attempt is None or self._plan is None:
            return (), ""
        started = len(list((attempt / "ranks").glob("*.json")))
        if started == self._plan.ranks:
            return ("ranks", attempt.name), f"attempt {attempt.name}: all ranks have started ({started})"
        if not any((attempt / name).exists() for name in ("preflight.json", "hostfile")):
            with contextlib.suppress(OSError):  # no preflight
                answered = min((attempt / "preflight.jsonl").read_bytes().count(b"\n"), self._plan.nodes)
                line = f"attempt {attempt.name}: preflight: {answered} of {self._plan.nodes} nodes"
                return ("preflight", attempt.name, str(answered)), line
        copies = len(self._plan.data) * self._plan.nodes
        if not started and len(list((attempt / "nodes").glob("*/*.json"))) < copies:
            names = ", ".join(data.name for data in self._plan.data)
            line = f"attempt {attempt.name}: staging {names} to {self._plan.nodes} nodes"
            return ("staging", attempt.name), line
        return (), ""
