"""Read a run's folder once, for `status`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core.errors import DataError
from pitools.core.record import decode_json
from pitools.launch.diagnosis import evidence
from pitools.launch.plan import Plan, load_plan
from pitools.launch.recovery import apply_decision
from pitools.launch.submission import submissions
from pitools.run import cancel_request, run_folder, steps
from pitools.run.attempt_records import Cause, Decision, Verdict

_TAIL_BYTES = 4096  # a step's line has a few hundred bytes


class RunSnapshot(NamedTuple):
    """The records in a run's folder at one moment.

    attempt, exit: the newest attempt's name and end. damaged: the problem of its unreadable exit.json, else "": the
    attempt has then ended, and only Slurm has the exit code. created: when the folder was created; if that is not
    recorded, when the newest job was submitted.
    """

    run_dir: Path
    plan: Plan
    job: run_folder.JobRef | None
    attempt: str
    attempts: int
    steps: int
    exit: run_folder.AttemptExit | None
    cause: Cause | None
    decision: Decision | None
    verdict: Verdict | None
    cancel: cancel_request.CancelRequest | None
    damaged: str
    created: str
    loss: float | None

    @classmethod
    def read(cls, run_dir: Path) -> RunSnapshot:
        """Read the records in `run_dir`. Raises DataError for a folder that is not a run."""
        attempt_dirs = run_folder.attempt_dirs(run_dir)
        attempt_dir = attempt_dirs[-1] if attempt_dirs else run_dir / "attempts"
        step = last_step(attempt_dir)
        exit_record, damaged = None, ""
        try:
            exit_record = run_folder.read_record(attempt_dir / "exit.json", run_folder.AttemptExit)
        except DataError as error:
            is_empty = not (attempt_dir / "exit.json").stat().st_size
            problem = "empty, as a full disk leaves a file" if is_empty else error.message
            damaged = f"attempts/{attempt_dir.name}/exit.json is {problem}"
        job, first = _newest_job(run_dir), run_folder.first_event(run_dir)
        return cls(
            run_dir,
            load_plan(run_dir),
            job,
            attempt_dirs[-1].name if attempt_dirs else "",
            len(attempt_dirs),
            step.step + 1 if step else evidence.saved_steps(run_dir),
            exit_record,
            run_folder.read_or_none(attempt_dir / "cause.json", Cause),
            run_folder.read_or_none(attempt_dir / "decision.json", Decision),
            apply_decision.read_verdict(run_dir),
            cancel_request.last_cancel(run_dir),
            damaged,
            first.t if first and first.event == "created" else job.submitted if job else "",
            step.loss if step else None,
        )

    @property
    def job_id(self) -> str:
        """The id of the newest job, "" without one."""
        return self.job.job_id if self.job else ""

    @property
    def continues(self) -> bool:
        """Whether the last attempt's decision is to continue the run."""
        return bool(self.decision and self.decision.action in ("retry", "resubmit", "defer"))


def _newest_job(run_dir: Path) -> run_folder.JobRef | None:
    """Return the run's newest job; from `<run>/jobs` if `<run>/job.json` cannot be read. Raises DataError."""
    try:
        return run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    except DataError:
        return submissions.latest_job(run_dir)


def last_step(attempt: Path) -> steps.Step | None:
    """Return the last step in rank 0's step log, or None."""
    try:
        with (attempt / "steps" / "0.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return decode_json(lines[-1], steps.Step) if lines else None
    except (OSError, msgspec.DecodeError):
        return None
